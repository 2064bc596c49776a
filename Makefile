# What people type. The work is in scripts/ and cargo.

# Ports of `make run`; 127.0.0.1 only.
export ENVOY_PORT ?= 8080
export ENVOY_ADMIN_PORT ?= 9901
export GRPC_PORT ?= 9191
export ADMIN_PORT ?= 9192
export UPSTREAM_PORT ?= 8081
# Buckets in this Redis instead of in bouncer's memory: make run REDIS_URL=redis://localhost:6379
export REDIS_URL ?=
# Bouncers behind the one Envoy, with a Redis and a RabbitMQ of their own: make run REPLICAS=2 REDIS=1 RABBITMQ=1
# Ports of further replicas are the first's plus 2 each: 9193 and 9194, 9195 and 9196, ...
export REPLICAS ?= 1
export REDIS ?=
export RABBITMQ ?=
# How `make run` builds: release, or dev, which is there sooner and runs slower.
export PROFILE ?= release
# An Envoy to use instead of the one on PATH or a fetched one.
export ENVOY_BIN ?=

.PHONY: help run test model bench build fmt fmt-check lint doc deny check-ci clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# A shell cannot trap a signal that was ignored when it started, as SIGINT is in `make run &` of a script.
run: ## Envoy, bouncer with its built-in configuration and a sample upstream, ready for curl; Ctrl-C ends it
	@exec env --default-signal=INT,TERM,HUP scripts/run.sh

test: ## all tests, after fetching what they need
	@exec scripts/test.sh

bench: ## what bouncer costs behind Envoy; arguments: make bench BENCH="speed --rounds 15"
	@exec scripts/bench.sh $(BENCH)

model: ## the hand-over protocol at sizes that `make test` leaves out, with the number of states (minutes)
	cargo test --locked --test model -- --ignored --nocapture --test-threads=2

build: ## the release binary, target/release/bouncer
	cargo build --release --locked --bin bouncer

fmt: ## format the code
	cargo fmt --all

fmt-check: ## fail where the code is not formatted
	cargo fmt --all --check

lint: ## clippy, warnings denied
	cargo clippy --locked --all-targets -- -D warnings

doc: ## the documentation, warnings denied
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps

deny: ## licences, advisories and sources of dependencies (needs cargo-deny)
	cargo deny --all-features check

check-ci: ## everything CI checks
	@exec .ci/run

clean: ## remove what was built and fetched
	cargo clean
	rm -rf .envoy .tools
