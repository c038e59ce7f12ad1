#!/usr/bin/env bash
# Thins out what a build says: progress.sh SECONDS. Of lines "build …: N of M, …; what" one passes in so many
# seconds, and the last of all, without what is built; every other line (warnings, errors) passes.
set -euo pipefail
every="$1"
next=0 held="" line=""
pass() { printf '%s\n' "${1%%; *}"; next=$((SECONDS + every)); held=""; }
while IFS= read -r line || [ -n "$line" ]; do
  case "$line" in
    "build "*": "[0-9]*" of "[0-9]*"; "*)
      if [ "$SECONDS" -ge "$next" ]; then pass "$line"; else held="$line"; fi ;;
    "ninja: no work to do.") ;;
    *) printf '%s\n' "$line" ;;
  esac
  line=""
done
[ -z "$held" ] || pass "$held"
