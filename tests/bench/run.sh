#!/usr/bin/env bash
# Sets up, builds, measures everything, and prints one table of ratios with their limits. Takes half an hour, 16 GB of
# memory and 6 GB of disk below build/, most of it for SD and SDXL at full size. Ends with 1 when a limit is missed.
#
#   tests/bench/run.sh                      everything
#   tests/bench/run.sh --only demo files    parts; see bench.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
deploy/bootstrap.sh >&2
deploy/build.sh release latentd latentctl latentd_bench lock_bench >&2
# One thread, and none that spins while it waits: both sides are measured on the same terms.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
exec "${LATENTD_VENV:-.venv}/bin/python" tests/bench/bench.py "$@"
