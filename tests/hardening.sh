#!/usr/bin/env bash
# What readelf says of a release build's programs and plug-ins, and of what is installed of it: hardening.sh BUILD_FOLDER
set -euo pipefail
build="$1"
root="$(mktemp -d)"
trap 'rm -rf "$root"' EXIT
failures=0
expect() {  # expect WHAT COMMAND…
  local what="$1"; shift
  if "$@" >/dev/null 2>&1; then echo "ok: $what"; else echo "FAILED: $what"; failures=$((failures + 1)); fi
}
has() { grep -qE -- "$2" <<<"$1"; }
lacks() { ! has "$@"; }
run_paths() { readelf -dW "$1" | sed -n 's/.*R\(UN\)\{0,1\}PATH).*\[\(.*\)\]/\2/p'; }

cmake --install "$build" --prefix "$root" --component programs >/dev/null
plugins=()
for file in "$build"/bin/latentd_*.so; do plugins+=("$(basename "$file")"); done
expect "there are plug-ins: ${plugins[*]}" test -f "$build/bin/latentd_sentencepiece.so"

shown() { local file="${1/#$root/installed}"; echo "${file/#$build/built}"; }
check_form() {  # check_form NAME FILE
  local tags segments
  tags="$(readelf -dW "$2")"
  segments="$(readelf -lW "$2")"
  expect "$1 is position independent" has "$(readelf -hW "$2")" "Type: +DYN"
  expect "$1 binds at start" has "$tags" "\(FLAGS_1\).* NOW"
  expect "$1 is read-only once it is bound" has "$segments" "GNU_RELRO"
  expect "$1 has no executable stack" has "$segments" "GNU_STACK .* RW "
  expect "$1 has no text relocations" lacks "$tags" "TEXTREL"
}
check_calls() {  # check_calls NAME FILE
  local symbols
  symbols="$(readelf --dyn-syms -W "$2")"
  expect "$1 guards its stack" has "$symbols" " UND __stack_chk_fail@"
  expect "$1 calls checked functions of the C library" has "$symbols" " UND __[a-z]+_chk@"
}
for program in latentd latentctl; do
  for file in "$build/bin/$program" "$root/bin/$program"; do
    check_form "$(shown "$file")" "$file"
    expect "$(shown "$file") is an executable of that kind" has "$(readelf -dW "$file")" "\(FLAGS_1\).* PIE"
  done
  check_calls "$program" "$build/bin/$program"
done
for plugin in "${plugins[@]}"; do
  for file in "$build/bin/$plugin" "$root/lib/latentd/$plugin"; do check_form "$(shown "$file")" "$file"; done
done
# A library that copies nothing calls no checked function, so the flag itself is looked for.
expect "all that is built asks for checked functions" \
  lacks "$(grep '"command":' "$build/compile_commands.json" | grep -v -- '-D_FORTIFY_SOURCE=2' || true)" .

# An empty element of a path is the current folder.
for file in "$build"/bin/*; do
  expect "$(shown "$file") never looks in the current folder: '$(run_paths "$file")'" lacks "$(run_paths "$file")" "^:|::|:$"
done
# What is installed looks for libraries in its own folders and the system's alone.
expect_path() {  # expect_path FILE PATH
  local path
  path="$(run_paths "$root/$1")"
  expect "installed $1 looks in '$2' alone; it says '$path'" test "$path" = "$2"
}
expect_path bin/latentd '$ORIGIN/../lib/latentd'
expect_path bin/latentctl ''
expect_path lib/latentd/latentd_sentencepiece.so ''
[ ! -f "$root/lib/latentd/latentd_cuda.so" ] || expect_path lib/latentd/latentd_cuda.so '$ORIGIN'

# And it is whole: it runs, with none of its libraries from where the build found them. Links stand for LibTorch's.
export CMAKE_INSTALL_MODE=ABS_SYMLINK
for component in libtorch libtorch_cuda; do
  cmake --install "$build" --prefix "$root" --component "$component" >/dev/null
done
unset CMAKE_INSTALL_MODE
for program in latentd latentctl; do
  expect "installed $program runs" "$root/bin/$program" --version
done
own="$(cd "$root" && pwd -P)"
for file in "$root/bin/latentd" "$root"/lib/latentd/latentd_*.so; do
  libraries="$(ldd "$file")"
  name="$(basename "$file")"
  expect "installed $name finds all its libraries" lacks "$libraries" "not found"
  expect "installed $name has LibTorch and CUDA of its own folder, all else of the system" \
    lacks "$(grep '=> /' <<<"$libraries" | grep -vE "=> ($root|$own|/lib|/usr/lib)/" || true)" .
done
echo "$failures failures"
exit $((failures > 0))
