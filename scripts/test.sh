#!/usr/bin/env bash
# Sets up what the tests need, then runs them all. Arguments go to the test runner: scripts/test.sh e2e_smoke
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/need.sh redis-server redis-server
# The programs that it keeps off PATH, as the tests start a broker of their own.
scripts/need.sh /usr/lib/rabbitmq/bin/rabbitmq-server rabbitmq-server
scripts/need.sh prometheus prometheus
scripts/need.sh promtool prometheus
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
