#!/usr/bin/env bash
# Is the API still compatible with that of the commit that CHANGELOG.md names?
#
#   breaking.sh BUF DESCRIPTORS PROTOC [-I FOLDER]…    DESCRIPTORS: of the API as it is (latentd.binpb)
#
# Ends with 77 where the commit's files cannot be had: no git here, or a clone without history.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
buf="$1" now="$2" protoc="$3"; shift 3
commit="$(sed -nE 's/.*checked against the (commit|tag) named here: ([^ .]+)\.?$/\2/p' CHANGELOG.md)"
[ -n "$commit" ] || { echo "CHANGELOG.md names no commit to compare the API with" >&2; exit 1; }
git rev-parse --quiet --verify "$commit^{commit}" >/dev/null 2>&1 || { echo "no commit $commit here"; exit 77; }
then="$(mktemp -d)"; trap 'rm -rf "$then"' EXIT
git archive "$commit" proto | tar -x -C "$then"
files=(); while IFS= read -r file; do files+=("$file"); done < <(cd "$then/proto" && find . -name '*.proto' | sed 's|^\./||')
"$protoc" -I "$then/proto" "$@" --include_imports "--descriptor_set_out=$then/then.binpb" "${files[@]}"
"$buf" breaking "$now" --config proto/buf.yaml --against "$then/then.binpb"
