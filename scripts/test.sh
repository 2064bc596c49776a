#!/usr/bin/env bash
# Sets up what the tests need, then runs them all. Arguments go to the test runner: scripts/test.sh e2e_smoke
set -euo pipefail
cd "$(dirname "$0")/.."

# The program that a test starts, and Debian's package of it.
declare -A packages=([redis-server]=redis-server [prometheus]=prometheus [promtool]=prometheus)

# Tests start servers of their own, so the packages must not start one: Debian asks this file before they do.
install() {
    local policy=/usr/sbin/policy-rc.d
    if [[ ! -e $policy ]]; then
        trap "rm -f $policy" EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
    fi
    echo "installing $*" >&2
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}

missing=()
for program in "${!packages[@]}"; do
    command -v "$program" >/dev/null || missing+=("${packages[$program]}")
done
if ((${#missing[@]})); then
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        # In a process of its own, so that what it left behind for the time of the install goes with it.
        (install "${missing[@]}")
    else
        echo "the tests need ${missing[*]} (Debian: apt-get install ${missing[*]})" >&2
        exit 1
    fi
fi
ENVOY_BIN=$(scripts/envoy.sh)
CHECK_JSONSCHEMA=$(scripts/schema-check.sh)
export ENVOY_BIN CHECK_JSONSCHEMA

if command -v cargo-nextest >/dev/null; then
    cargo nextest run --locked "$@"
    # Not run by nextest.
    cargo test --locked --doc
else
    # Without nextest's groups, two at a time is what the tests against a real Envoy bear on a small machine.
    cargo test --locked "$@" -- --test-threads=2
fi
