#!/usr/bin/env bash
# Sets up, builds and runs every test. Ends with ctest's own closing lines.
#
#   tests/run.sh            everything
#   tests/run.sh -R NAME    further arguments go to ctest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

began=$SECONDS
part() {  # part NAME COMMAND…: runs it and says how long it took
  local name="$1" start=$SECONDS; shift
  echo "== $name"
  "$@"
  echo "== $name: $((SECONDS - start)) s"
}
part "set-up" deploy/bootstrap.sh
part "build (release)" deploy/build.sh release
part "build (core and readers of files under ASan)" deploy/build.sh asan core_tests untrusted_tests
part "build (core under TSan)" deploy/build.sh tsan core_tests
echo "== tests (so far $((SECONDS - began)) s)"
exec ctest --test-dir build/release --output-on-failure "$@"
