#!/usr/bin/env bash
# Configures and builds a preset: deploy/build.sh PRESET [TARGET…]. Used by demo.sh and tests/run.sh.
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
cmake --build --preset "$preset" "${targets[@]}" -- --quiet
