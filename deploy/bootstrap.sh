#!/usr/bin/env bash
# Installs what latentd is built and tested with: Debian packages (as root, or through sudo) and a Python
# environment with LibTorch, the reference implementations and the gRPC tools. Does nothing that is done
# already; takes about a second then.
#
#   deploy/bootstrap.sh            everything
#   LATENTD_VENV=/path …           the Python environment elsewhere than in .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(
  # tools
  g++ cmake ninja-build pkg-config ccache mold git ca-certificates python3 python3-venv
  # gRPC, protobuf, Abseil
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev
  # the daemon's other libraries
  libspdlog-dev libtomlplusplus-dev libcli11-dev nlohmann-json3-dev
  libsentencepiece-dev libpcre2-dev libutf8proc-dev libpng-dev libjpeg-dev
  libwebp-dev libgif-dev libssl-dev
  # tests; readelf, the fuzz targets' compiler, the style of the sources
  libgtest-dev libgmock-dev binutils clang clang-format libclang-rt-14-dev
)
missing=()
for p in "${packages[@]}"; do
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "bootstrap: installing Debian packages: ${missing[*]}"
  sudo=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "bootstrap: needs root or sudo to install packages" >&2; exit 1; }
    sudo=(sudo)
  fi
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

venv="${LATENTD_VENV:-$PWD/.venv}"
stamp="$venv/.latentd-requirements"
if ! cmp -s deploy/requirements.txt "$stamp" 2>/dev/null; then
  echo "bootstrap: installing Python packages into $venv (LibTorch and its libraries are about 3 GB)"
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r deploy/requirements.txt
  cp deploy/requirements.txt "$stamp"
fi
echo "bootstrap: ready"
