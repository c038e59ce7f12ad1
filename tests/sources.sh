#!/usr/bin/env bash
# The style of the sources (.clang-format), and the one direction in which folders include each other. Prints what does
# not hold, with what mends it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
failed=0

# Where this is no work tree of git (a copy of the sources), files are taken as they lie.
list() {
  git ls-files -- "$@" 2>/dev/null || find cache patcher families server tests \( -name '*.cc' -o -name '*.h' \)
}

if ! list '*.cc' '*.h' | xargs clang-format --dry-run -Werror 2>/tmp/sources.$$; then
  grep -m 20 'error:' /tmp/sources.$$ || true
  echo "not as .clang-format has it; git ls-files '*.cc' '*.h' | xargs clang-format -i mends it"
  failed=1
fi
rm -f /tmp/sources.$$

# forbid FOLDER PATTERN: no file below FOLDER includes what begins so.
forbid() {
  if grep -rnE --include='*.cc' --include='*.h' "^#include \"($2)" "$1"; then
    echo "$1 may not include $2"
    failed=1
  fi
}
forbid cache 'patcher/|families/|server/'
forbid cache/base 'cache/[a-z_0-9]+\.h|cache/weights/'
forbid patcher 'families/|server/'
forbid families 'server/'
forbid families/nn 'families/(encoders|vae|sampling|flux|sd|sd15|sdxl)/'
forbid families/sampling 'families/(encoders|vae|flux|sd|sd15|sdxl)/'
forbid server/media 'server/(runtime|session|catalog|ctl)/'
forbid server/ctl 'server/(runtime|session|catalog/(catalog|pin_board|lora_set|embedding_set)|server_core)'
forbid server/runtime 'server/(session|ctl)/'
exit $failed
