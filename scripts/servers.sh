# Private servers for run.sh, which sources this: on free ports of loopback, with all they keep in the folder of the run.
# shellcheck shell=bash

# A port that nothing listens on, below those that Linux gives to outgoing connections.
free_port() {
    local port
    while true; do
        port=$((RANDOM % 10000 + 20000))
        if ! listening "$port" && [[ " ${taken[*]-} " != *" $port "* ]]; then
            taken+=("$port")
            free=$port
            return
        fi
    done
}
taken=() free=

# until_listening PORT : so that what comes next does not begin with an outage.
until_listening() {
    local deadline=$((SECONDS + 60))
    until listening "$1"; do
        if report_death; then
            exit 1
        fi
        if ((SECONDS >= deadline)); then
            say "nothing listens on port $1 after a minute; see $logs/"
            exit 1
        fi
        sleep 0.05
    done
}

# start_redis : sets redis_port.
start_redis() {
    if ! command -v redis-server >/dev/null; then
        say "REDIS=1 needs redis-server on PATH (Debian: apt-get install redis-server)"
        exit 1
    fi
    free_port
    redis_port=$free
    # Nothing is saved: a run begins with full buckets.
    start redis redis-server --port "$redis_port" --bind "$host" --save '' --appendonly no --dir "$PWD/$logs"
    until_listening "$redis_port"
}

# The script that runs as whoever calls it. Debian's one on PATH changes the user, and takes the machine's own broker.
rabbitmq_server() {
    local binary
    for binary in /usr/lib/rabbitmq/bin/rabbitmq-server "$(command -v rabbitmq-server)"; do
        if [[ -x $binary ]]; then
            echo "$binary"
            return
        fi
    done
    say "RABBITMQ=1 needs rabbitmq-server (Debian: apt-get install rabbitmq-server)"
    return 1
}

# start_rabbitmq : sets rabbitmq_port. Everything of it is private, its Erlang port mapper too.
start_rabbitmq() {
    local binary folder=$PWD/$logs/rabbitmq epmd_port dist_port
    binary=$(rabbitmq_server) || exit 1
    free_port && rabbitmq_port=$free
    free_port && dist_port=$free
    free_port && epmd_port=$free
    rm -rf "$folder"
    mkdir -p "$folder"
    (umask 077 && echo "bouncer$RANDOM$RANDOM" >"$folder/.erlang.cookie")
    echo '[].' >"$folder/plugins"
    : >"$folder/rabbitmq.conf"
    start epmd epmd -port "$epmd_port" -address "$host"
    until_listening "$epmd_port"
    start rabbitmq env HOME="$folder" RABBITMQ_NODENAME="bouncer-$rabbitmq_port@localhost" \
        RABBITMQ_NODE_IP_ADDRESS="$host" RABBITMQ_NODE_PORT="$rabbitmq_port" RABBITMQ_DIST_PORT="$dist_port" \
        ERL_EPMD_PORT="$epmd_port" ERL_EPMD_ADDRESS="$host" \
        RABBITMQ_MNESIA_BASE="$folder/data" RABBITMQ_LOG_BASE="$folder/log" RABBITMQ_PID_FILE="$folder/pid" \
        RABBITMQ_CONFIG_FILE="$folder/rabbitmq.conf" RABBITMQ_CONF_ENV_FILE="$folder/none" \
        RABBITMQ_ENABLED_PLUGINS_FILE="$folder/plugins" RUNNING_UNDER_SYSTEMD=true \
        RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS='+sbwt none +sbwtdcpu none +sbwtdio none +S 2:2 -start_epmd false' \
        "$binary"
    until_listening "$rabbitmq_port"
}
