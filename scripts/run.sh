#!/usr/bin/env bash
# Runs the whole: sample upstream, bouncer with its built-in configuration, Envoy with the shipped one. Ctrl-C ends it.
# REPLICAS bouncers behind the one Envoy, with a Redis (REDIS=1) and a RabbitMQ (RABBITMQ=1) of their own where asked.
set -euo pipefail
cd "$(dirname "$0")/.."

: "${ENVOY_PORT:=8080}" "${ENVOY_ADMIN_PORT:=9901}" "${GRPC_PORT:=9191}" "${ADMIN_PORT:=9192}" "${UPSTREAM_PORT:=8081}"
: "${REPLICAS:=1}" "${REDIS:=}" "${RABBITMQ:=}" "${REDIS_URL:=}"
readonly host=127.0.0.1
readonly logs=target/run/$ENVOY_PORT
# `dev` is built in a fraction of the time, and runs slower.
readonly profile=${PROFILE:-release}
names=() pids=()
ports=(ENVOY_PORT ENVOY_ADMIN_PORT GRPC_PORT ADMIN_PORT UPSTREAM_PORT)

say() { echo "$*" >&2; }

listening() { (exec 3<>"/dev/tcp/$host/$1") 2>/dev/null; }

# shellcheck source=scripts/servers.sh
. scripts/servers.sh

check_servers() {
    local name
    if [[ ! $REPLICAS =~ ^[1-9][0-9]?$ ]]; then
        say "REPLICAS=$REPLICAS is not a number of replicas from 1 to 99"
        exit 1
    fi
    for name in REDIS RABBITMQ; do
        if [[ ! ${!name} =~ ^[01]?$ ]]; then
            say "$name=${!name} is neither 1 nor 0"
            exit 1
        fi
    done
    if [[ $REDIS == 1 && -n $REDIS_URL ]]; then
        say "REDIS=1 starts a Redis and REDIS_URL names one; choose one of them"
        exit 1
    fi
    if [[ $RABBITMQ == 1 && $REDIS != 1 && -z $REDIS_URL ]]; then
        say "RABBITMQ=1 needs REDIS=1 or REDIS_URL: tickets without shared slots order nothing"
        exit 1
    fi
}

# GRPC_PORT_2, ADMIN_PORT_2 and so on: two above those of the replica before.
number_replicas() {
    local name i
    for ((i = 2; i <= REPLICAS; i++)); do
        for name in GRPC_PORT ADMIN_PORT; do
            # What is no number is for check_ports to refuse.
            [[ ${!name} =~ ^[1-9][0-9]*$ ]] || return 0
            printf -v "${name}_$i" %s "$((${!name} + 2 * (i - 1)))"
            ports+=("${name}_$i")
        done
    done
}

check_ports() {
    local name other
    local -A seen=()
    for name in "${ports[@]}"; do
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
            say "port ${!name} is taken; choose another one: make run ${name%_[0-9]*}=..."
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
        kill "-$([[ ${names[i]} == bouncer* ]] && echo INT || echo TERM)" "${pids[i]}" 2>/dev/null || true
    done
    sleep 0.2
    for i in "${!pids[@]}"; do
        [[ ${names[i]} != bouncer* ]] || kill -INT "${pids[i]}" 2>/dev/null || true
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

# Forgets a bouncer that ended, and fails where something else did, or no bouncer is left.
lose_a_replica() {
    local i lost='' left=0
    for i in "${!pids[@]}"; do
        if kill -0 "${pids[i]}" 2>/dev/null; then
            [[ ${names[i]} != bouncer* ]] || left=$((left + 1))
        elif [[ ${names[i]} == bouncer* ]]; then
            lost=${lost:-$i}
        else
            return 1
        fi
    done
    [[ -n $lost ]] && ((left > 0)) || return 1
    say "$left of $REPLICAS replicas left"
    unset "names[$lost]" "pids[$lost]"
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
    local port
    for port in "${admin_ports[@]}"; do
        answers "$port" /ready 200 || return
    done
    answers "$UPSTREAM_PORT" /health 200 && answers "$ENVOY_PORT" /anything 401
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

# start_bouncer [NUMBER] : the first replica, or a further one.
start_bouncer() {
    local of=${1:+_$1}
    local grpc=GRPC_PORT$of admin=ADMIN_PORT$of
    admin_ports+=("${!admin}")
    start "bouncer${1:+-$1}" env -u REDIS_URL "${bouncer_env[@]}" "BOUNCER_LISTEN__GRPC=$host:${!grpc}" \
        "BOUNCER_LISTEN__ADMIN=$host:${!admin}" "$built/bouncer" serve
    replicas+=("$host:${!grpc}")
}

check_servers
number_replicas
check_ports
envoy=$(scripts/envoy.sh)
cargo build --profile "$profile" --locked --bin bouncer --example upstream
mkdir -p "$logs"

built=${CARGO_TARGET_DIR:-target}/$([[ $profile == dev ]] && echo debug || echo "$profile")
bouncer_env=() replicas=() admin_ports=()

trap stop EXIT
trap 'exit 0' INT TERM HUP
start upstream "$built/examples/upstream" "$host:$UPSTREAM_PORT"
if [[ $REDIS == 1 ]]; then
    start_redis
    REDIS_URL=redis://$host:$redis_port
fi
if [[ -n $REDIS_URL ]]; then
    bouncer_env+=("REDIS_URL=$REDIS_URL")
fi
if [[ $RABBITMQ == 1 ]]; then
    start_rabbitmq
    bouncer_env+=("RABBITMQ_URL=amqp://guest:guest@$host:$rabbitmq_port/%2f")
fi
if ((REPLICAS > 1)); then
    # There is another one to move to.
    bouncer_env+=(BOUNCER_SHUTDOWN__HELD=move)
fi
start_bouncer
for ((i = 2; i <= REPLICAS; i++)); do
    start_bouncer "$i"
done
envoy/addresses.sh "$host:$ENVOY_PORT" "$host:$ENVOY_ADMIN_PORT" "$host:$UPSTREAM_PORT" "${replicas[@]}" \
    <envoy/envoy.yaml >"$logs/envoy.yaml"
start envoy "$envoy" -c "$logs/envoy.yaml" --disable-hot-restart --file-flush-interval-msec 200
wait_until_ready

url=http://$host:$ENVOY_PORT
cat <<END
ready $url (Ctrl-C ends it; logs in $logs/, Envoy's statistics on http://$host:$ENVOY_ADMIN_PORT)
  curl -i $url/anything                                     # no key: 401
  curl -i $url/anything -H 'x-api-key: key_t3_demo'         # 200, see the X-RateLimit headers
  curl -s -o /dev/null -w '%{http_code}\n' -Z --parallel-immediate -H 'authorization: Bearer key_t1_demo' '$url/anything?[1-30]' | sort | uniq -c   # 200 until the bucket is empty, then 429
END
if ((REPLICAS > 1)); then
    echo "  curl -s http://$host:{$(IFS=, && echo "${admin_ports[*]}")}/stats   # each replica's own view"
fi
if [[ $REDIS == 1 ]]; then
    echo "  redis-cli -p $redis_port                                                    # the Redis of this run"
fi

# Until a signal, or until one of them ends without being asked. A bouncer may, as long as another one is left.
while wait -n "${pids[@]}" 2>/dev/null || true; do
    report_death || true
    lose_a_replica || exit 1
done
