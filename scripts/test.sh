#!/usr/bin/env bash
# Sets up what the tests need, then runs them all. Arguments go to the test runner: scripts/test.sh e2e_smoke
set -euo pipefail
cd "$(dirname "$0")/.."

missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
# The programs that it keeps off PATH, as the tests start a broker of their own.
[[ -x /usr/lib/rabbitmq/bin/rabbitmq-server ]] || missing+=(rabbitmq-server)
if ((${#missing[@]})); then
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        echo "installing ${missing[*]}" >&2
        apt-get update -qq
        # Tests start servers of their own; the packages need not start one.
        DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
    else
        echo "the tests need ${missing[*]} (Debian: apt-get install ${missing[*]})" >&2
        exit 1
    fi
fi
ENVOY_BIN=$(scripts/envoy.sh)
export ENVOY_BIN

if command -v cargo-nextest >/dev/null; then
    cargo nextest run --locked "$@"
    # Not run by nextest.
    cargo test --locked --doc
else
    # Without nextest's groups, two at a time is what the tests against a real Envoy bear on a small machine.
    cargo test --locked "$@" -- --test-threads=2
fi
