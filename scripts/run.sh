#!/usr/bin/env bash
# Runs the whole: sample upstream, bouncer with its built-in configuration, Envoy with the shipped one. Ctrl-C ends it.
set -euo pipefail
cd "$(dirname "$0")/.."

: "${ENVOY_PORT:=8080}" "${ENVOY_ADMIN_PORT:=9901}" "${GRPC_PORT:=9191}" "${ADMIN_PORT:=9192}" "${UPSTREAM_PORT:=8081}"
readonly host=127.0.0.1
readonly logs=target/run/$ENVOY_PORT
# `dev` is built in a fraction of the time, and runs slower.
readonly profile=${PROFILE:-release}
names=() pids=()

say() { echo "$*" >&2; }

listening() { (exec 3<>"/dev/tcp/$host/$1") 2>/dev/null; }

check_ports() {
    local name other
    local -A seen=()
    for name in ENVOY_PORT ENVOY_ADMIN_PORT GRPC_PORT ADMIN_PORT UPSTREAM_PORT; do
        if [[ ! ${!name} =~ ^[1-9][0-9]{0,4}$ ]] || ((${!name} > 65535)); then
            say "$name=${!name} is not a port"
            exit 1
        fi
        other=${seen[${!name}]:-}
        if [[ -n $other ]]; then
            say "$name and $other are both ${!name}"
            exit 1
        fi
        seen[${!name}]=$name
        if listening "${!name}"; then
            say "port ${!name} is taken; choose another one: make run $name=..."
            exit 1
        fi
    done
}

# start NAME COMMAND... : in a session of its own, so that Ctrl-C reaches this script alone and the end has an order; and
# dead as soon as this script is, however that came about.
start() {
    local name=$1 guard=()
    shift
    if command -v setpriv >/dev/null; then
        guard=(setpriv --pdeathsig KILL)
    fi
    setsid "${guard[@]}" "$@" >"$logs/$name.log" 2>&1 &
    names+=("$name")
    pids+=($!)
}

# Ends everything that was started, and returns only when it is gone.
stop() {
    trap '' INT TERM HUP
    local i pid deadline
    # Nobody else is behind this bouncer, so it need not wait for Envoys to look away: a second SIGINT ends it at once.
    for i in "${!pids[@]}"; do
        kill "-$([[ ${names[i]} == bouncer ]] && echo INT || echo TERM)" "${pids[i]}" 2>/dev/null || true
    done
    sleep 0.2
    for i in "${!pids[@]}"; do
        [[ ${names[i]} != bouncer ]] || kill -INT "${pids[i]}" 2>/dev/null || true
    done
    deadline=$((SECONDS + 5))
    for pid in "${pids[@]}"; do
        while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do
            sleep 0.05
        done
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
}

# Says which of the children is dead, with the end of its log.
report_death() {
    local i
    for i in "${!pids[@]}"; do
        if ! kill -0 "${pids[i]}" 2>/dev/null; then
            say "${names[i]} ended by itself; the end of $logs/${names[i]}.log:"
            tail -n 20 "$logs/${names[i]}.log" >&2
            return 0
        fi
    done
    return 1
}

# answers PORT PATH PATTERN : whether a GET is answered with a status line like that.
answers() {
    local line
    exec 3<>"/dev/tcp/$host/$1" || return 1
    printf 'GET %s HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n' "$2" "$host" >&3
    IFS= read -r -t 5 line <&3 || true
    exec 3>&-
    [[ $line == HTTP/1.1\ $3* ]]
}

# Envoy's own 503 says that it does not see bouncer yet; a request without a key must get as far as bouncer's 401.
all_answer() {
    answers "$UPSTREAM_PORT" /health 200 && answers "$ADMIN_PORT" /ready 200 && answers "$ENVOY_PORT" /anything 401
}

wait_until_ready() {
    local deadline=$((SECONDS + 60))
    until (all_answer) 2>/dev/null; do
        if report_death; then
            exit 1
        fi
        if ((SECONDS >= deadline)); then
            say "not ready after a minute; see $logs/"
            exit 1
        fi
        sleep 0.1
    done
}

check_ports
envoy=$(scripts/envoy.sh)
cargo build --profile "$profile" --locked --bin bouncer --example upstream
mkdir -p "$logs"
# By way of names, so that a port which is another one's default is not replaced twice.
sed -e 's/port_value: 8080 /port_value: ENVOY_PORT /; s/port_value: 9901 /port_value: ENVOY_ADMIN_PORT /' \
    -e 's/port_value: 9191 /port_value: GRPC_PORT /; s/port_value: 8081 /port_value: UPSTREAM_PORT /' \
    -e "s/ ENVOY_PORT / $ENVOY_PORT /; s/ ENVOY_ADMIN_PORT / $ENVOY_ADMIN_PORT /" \
    -e "s/ GRPC_PORT / $GRPC_PORT /; s/ UPSTREAM_PORT / $UPSTREAM_PORT /" envoy/envoy.yaml >"$logs/envoy.yaml"

built=${CARGO_TARGET_DIR:-target}/$([[ $profile == dev ]] && echo debug || echo "$profile")
bouncer_env=("BOUNCER_LISTEN__GRPC=$host:$GRPC_PORT" "BOUNCER_LISTEN__ADMIN=$host:$ADMIN_PORT")
if [[ -n ${REDIS_URL:-} ]]; then
    bouncer_env+=("REDIS_URL=$REDIS_URL")
fi

trap stop EXIT
trap 'exit 0' INT TERM HUP
start upstream "$built/examples/upstream" "$host:$UPSTREAM_PORT"
start bouncer env -u REDIS_URL "${bouncer_env[@]}" "$built/bouncer" serve
start envoy "$envoy" -c "$logs/envoy.yaml" --disable-hot-restart --file-flush-interval-msec 200
wait_until_ready

url=http://$host:$ENVOY_PORT
cat <<END
ready $url (Ctrl-C ends it; logs in $logs/, Envoy's statistics on http://$host:$ENVOY_ADMIN_PORT)
  curl -i $url/anything                                     # no key: 401
  curl -i $url/anything -H 'x-api-key: key_t3_demo'         # 200, see the X-RateLimit headers
  curl -s -o /dev/null -w '%{http_code}\n' -Z --parallel-immediate -H 'authorization: Bearer key_t1_demo' '$url/anything?[1-30]' | sort | uniq -c   # 200 until the bucket is empty, then 429
END

# Until a signal, or until one of them ends without being asked.
wait -n "${pids[@]}" 2>/dev/null || true
report_death || true
exit 1
