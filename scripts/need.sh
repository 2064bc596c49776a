#!/usr/bin/env bash
# Sees that a command is there: scripts/need.sh COMMAND PACKAGE. Root on Debian gets the package, others are told its name.
set -euo pipefail

command=$1 package=$2
if command -v "$command" >/dev/null; then
    exit
fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "$command is needed on PATH (Debian: apt-get install $package)" >&2
    exit 1
fi
echo "installing $package" >&2
apt-get update -qq
# Where the package brings a server, it need not start: tests and measurements start their own.
DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "$package" >&2
