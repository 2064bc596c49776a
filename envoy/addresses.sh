#!/bin/sh
# envoy.yaml with other addresses, and nothing else changed:
#
#   addresses.sh LISTENER ADMIN UPSTREAM BOUNCER... <envoy.yaml
#
# Each is HOST:PORT, and there is one BOUNCER a replica. Where a replica or the upstream has a name instead of an IPv4
# address, its name is resolved (STRICT_DNS). For whatever runs the shipped file elsewhere: `make run`, compose.yaml.
set -eu

if [ $# -lt 4 ]; then
    echo "usage: $0 LISTENER ADMIN UPSTREAM BOUNCER... <envoy.yaml" >&2
    exit 64
fi
config=$(cat)

# address PORT : the address that the shipped file has with this port. The space keeps 8080 from being found in 80801.
address() { echo "address: 127.0.0.1, port_value: $1 "; }

# A file in which one of them is not found would be passed on half changed.
for port in 8080 9901 8081 9191; do
    case $config in
    *"$(address "$port")"*) ;;
    *) echo "$0: nothing listens on port $port in this envoy.yaml" >&2 && exit 1 ;;
    esac
done

# socket HOST:PORT : the same, with this address.
socket() { echo "address: ${1%:*}, port_value: ${1##*:} "; }

listener=$(socket "$1") admin=$(socket "$2") upstream=$(socket "$3")
named=$3
shift 3
replicas=
for replica; do
    named="$named $replica"
    replicas="${replicas:+$replicas, }{ endpoint: { address: { socket_address: { $(socket "$replica")} } } }"
done
case $(echo "$named" | tr -d '0-9.: ') in
'') type=STATIC ;;
*) type=STRICT_DNS ;;
esac

# By way of names, so that a port which is another one's default is not replaced twice.
printf '%s\n' "$config" | sed \
    -e "s/$(address 8080)/@LISTENER@/; s/$(address 9901)/@ADMIN@/; s/$(address 8081)/@UPSTREAM@/" \
    -e "s/{ endpoint: { address: { socket_address: { $(address 9191)} } } }/@REPLICAS@/" \
    -e "s/@LISTENER@/$listener/; s/@ADMIN@/$admin/; s/@UPSTREAM@/$upstream/; s/@REPLICAS@/$replicas/" \
    -e "s/type: STATIC\$/type: $type/"
