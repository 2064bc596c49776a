#!/usr/bin/env bash
# Prints the path of a check-jsonschema, which brings the compose specification's schema with it: CHECK_JSONSCHEMA, else
# the one in .tools/, fetched there when missing.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.39.0
venv=.tools/check-jsonschema
# Written last, so an install that was interrupted is not taken for a whole one.
stamp=.tools/check-jsonschema-$version

if [[ -n ${CHECK_JSONSCHEMA:-} ]]; then
    [[ -f $CHECK_JSONSCHEMA && -x $CHECK_JSONSCHEMA ]] || { echo "CHECK_JSONSCHEMA=$CHECK_JSONSCHEMA is not an executable file" >&2; exit 1; }
    echo "$CHECK_JSONSCHEMA"
    exit
fi

mkdir -p .tools
# Two makes at once fetch it once.
exec 9>.tools/lock
flock 9
if [[ ! -e $stamp ]]; then
    echo "fetching check-jsonschema $version into .tools/ (once)" >&2
    rm -rf "$venv"
    if ! python3 -m venv "$venv" >&2; then
        echo "python3 with venv and pip is needed to check compose.yaml (Debian: apt-get install python3-venv)" >&2
        exit 1
    fi
    "$venv/bin/pip" install --quiet --disable-pip-version-check "check-jsonschema==$version" >&2
    touch "$stamp"
fi
echo "$PWD/$venv/bin/check-jsonschema"
