#!/usr/bin/env bash
# Measures what bouncer costs behind Envoy. Arguments go to the measurement: scripts/bench.sh speed --rounds 15
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/need.sh wrk wrk
scripts/need.sh redis-server redis-server
envoy=$(scripts/envoy.sh)
cargo build --release --locked --bin bouncer --example allow --example upstream --example bench
# Each held request is a connection here and in Envoy.
ulimit -n "$(ulimit -Hn)"
bin=${CARGO_TARGET_DIR:-target}/release
exec "$bin/examples/bench" --envoy "$envoy" --bin "$bin" "$@"
