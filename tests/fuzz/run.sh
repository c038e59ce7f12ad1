#!/usr/bin/env bash
# Builds the fuzz targets with clang and runs each for a while, one after the other:
#
#   tests/fuzz/run.sh            60 seconds each
#   tests/fuzz/run.sh 600        so many seconds each
#   tests/fuzz/run.sh 600 json   only those that are named
#
# Prints how many inputs were tried. Ends with an error when one crashed, hung for 10 s or took 2 GB: it lies in
# build/fuzz/found then; mend what it shows and keep it in tests/fuzz/corpus. Inputs that reached new code are kept in
# build/fuzz/corpus, where the next run goes on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
seconds="${1:-60}"
declare -A max_len=([prompt]=2048 [tokenizer]=8192)  # longer ones say little and take long
[ $# -gt 0 ] && shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(spiece safetensors json tokenizer prompt image)

deploy/build.sh fuzz fuzz_targets

# Leaks: the library of the plug-in is not built with sanitizers, so those in it are nobody's to find.
export ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=16:malloc_context_size=8
# One target writes the files that it has read; on a disk that is most of its time.
[ -w /dev/shm ] && export TMPDIR=/dev/shm

status=0
for name in "${targets[@]}"; do
  grown="build/fuzz/corpus/$name"
  found="build/fuzz/found/$name"
  log="build/fuzz/$name.log"
  mkdir -p "$grown" "$found"
  dictionary=()
  [ -f "tests/fuzz/$name.dict" ] && dictionary=("-dict=tests/fuzz/$name.dict")
  if "build/fuzz/tests/fuzz_$name" "$grown" "tests/fuzz/corpus/$name" \
      -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len="${max_len[$name]:-65536}" -print_final_stats=1 \
      -artifact_prefix="$found/" "${dictionary[@]}" >"$log" 2>&1; then
    result=ok
  else
    result="FAILED, see $log"
    status=1
  fi
  runs="$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")"
  inputs="$(ls "$grown" | wc -l)"
  echo "$name: ${runs:-?} runs, $inputs inputs kept beside the corpus: $result"
done
exit $status
