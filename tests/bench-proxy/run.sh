#!/usr/bin/env bash
# Compares the router with direct connections, nginx, HAProxy, vllm-router and sglang-router as HTTP
# proxies. Prints a table for README.md here. Peers that cannot be installed are left out.
#
# usage: tests/bench-proxy/run.sh [options of the benchmark, as --requests 2000 --only warmroute]
#        tests/bench-proxy/run.sh --mock-engine target/release/warmroute-mock-engine
#          compares routing by the cache, with engines that have one; the router with the index in
#          its process, and over NATS with shims and an indexer;
#          --load "128 KiB, code" or --load "128 KiB, multilingual" runs one of the loads
#        tests/bench-proxy/run.sh --cores 0-7 --client-threads 8 --load plain
#          the proxies on these processors, with as many threads of clients, and the loads whose names begin so
#        tests/bench-proxy/run.sh --attacks --mock-engine target/release/warmroute-mock-engine
#          measures quiet clients alone and beside each attack, by clients or by engines that
#          misbehave for the attack's requests alone; takes --rounds, --seconds (of one
#          measurement) and --only (part of the name of a proxy or an attack)
#        tests/bench-proxy/run.sh | tee table.md
#        tests/bench-proxy/plot.py docs/proxy-cpu.svg table.md
#          draws the CPU seconds per 1,000 requests of the table
set -euo pipefail
cd "$(dirname "$0")/../.."
. deploy/lib.sh
need_command nginx nginx-light
need_command haproxy haproxy
need_nats_server
peers=${PEERS:-.venv/bench-proxy}
if [ ! -x "$peers/bin/python" ]; then
    python3 -m venv "$peers"
    for peer in vllm-router==0.1.17 sglang-router==0.3.2; do
        "$peers/bin/pip" install --quiet "$peer" || echo "without $peer" >&2
    done
fi
router=${ROUTER:-}
if [ -z "$router" ]; then
    cargo build --release --locked -p warmroute-router -p warmroute-mock-engine \
        -p warmroute-indexer -p warmroute-shim
    router=target/release/warmroute-router
fi
# Without them beside the router, the row over NATS is left out.
plane=(--nats-server "$(nats_server)")
for program in indexer shim; do
    path=$(dirname "$router")/warmroute-$program
    [ ! -x "$path" ] || plane+=("--$program" "$path")
done
exec cargo run --release --quiet --manifest-path tests/bench-proxy/Cargo.toml \
    --target-dir target/bench-proxy -- --router "$router" --peers "$peers/bin" "${plane[@]}" "$@"
