#!/usr/bin/env bash
# From nothing to pictures: installs what is missing, builds, starts the daemon with the demo model, draws
# without and with a LoRA, and stops the daemon. The pictures stay in out/demo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

began=$SECONDS
part() {
  local name="$1" start=$SECONDS; shift
  echo "== $name"
  "$@"
  echo "== $name: $((SECONDS - start)) s"
}
part "set-up" deploy/bootstrap.sh
part "build" deploy/build.sh release latentd latentctl

out=out/demo
mkdir -p "$out"
run="$(mktemp -d)"
build/release/bin/latentd --config deploy/demo/latentd.toml --listen "unix:$run/latentd.sock" \
  --upload-dir "$run/uploads" 2>"$out/latentd.log" &
daemon=$!
stop() { kill -TERM "$daemon" 2>/dev/null || true; wait "$daemon" 2>/dev/null || true; rm -rf "$run"; }
trap stop EXIT
ctl() { build/release/bin/latentctl --address "unix:$run/latentd.sock" "$@"; }

for _ in $(seq 100); do
  ctl health >/dev/null 2>&1 && break
  kill -0 "$daemon" 2>/dev/null || { cat "$out/latentd.log" >&2; exit 1; }
  sleep 0.1
done
ctl health

draw() {
  ctl models
  ctl loras
  local prompt="a red circle on a blue background"
  ctl generate "$prompt" --seed 7 -o "$out/plain.png" --show
  for lora in $(ctl --json loras | "${LATENTD_VENV:-.venv}/bin/python" -c \
      'import json, sys; print(*[l["name"] for l in json.load(sys.stdin)["loras"]])'); do
    ctl generate "$prompt" --seed 7 --lora "$lora:1" -o "$out/lora-$lora.png" --show
  done
  ctl generate "a big yellow star on a black background" --seed 3 -o "$out/star.png"
  ctl cache
}
part "pictures" draw
part "stop" stop
trap - EXIT
echo
echo "Pictures in $out:"
ls -1 "$out"/*.png
echo "All of it took $((SECONDS - began)) s."
