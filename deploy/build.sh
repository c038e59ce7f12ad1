#!/usr/bin/env bash
# Configures and builds a preset: deploy/build.sh PRESET [TARGET…]. Used by demo.sh and tests/run.sh.
# Says how far it is: on a terminal in one line that moves, else in a line every ten seconds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
preset="$1"; shift
venv="${LATENTD_VENV:-$PWD/.venv}"
if [ ! -f "build/$preset/build.ninja" ]; then
  log="$(mktemp)"
  cmake --preset "$preset" -DLATENTD_VENV="$venv" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
  rm -f "$log"
fi
targets=(); for t in "$@"; do targets+=(--target "$t"); done
export NINJA_STATUS="build $preset: %f of %t, %es; "
if [ -t 1 ]; then
  cmake --build --preset "$preset" "${targets[@]}"
else
  cmake --build --preset "$preset" "${targets[@]}" 2>&1 | deploy/progress.sh 10
fi
