#!/usr/bin/env bash
# Breaks one of three mock engines behind each router in turn, and prints the table of
# docs/RELIABILITY.md: what clients lost, the broken engine's share of the traffic, and its share
# after its recovery. Peers that cannot be installed are left out.
#
# usage: tests/fault-table.sh [ROWS]     parts of rows' names, separated by commas
#   FAULT_TABLE_FRONTS="one router,smg"  parts of routers' names
#   FAULT_TABLE_AT_ONCE=8                fleets at a time; 4 by default
#   FAULT_TABLE_PROFILE=dev              a development build
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh
need_nats_server
peers=${PEERS:-.venv/fault-table}
if [ ! -x "$peers/bin/python" ]; then
    python3 -m venv "$peers"
    for peer in vllm-router==0.1.17 sglang-router==0.3.2 smg==1.13.0; do
        "$peers/bin/pip" install --quiet "$peer" || echo "without $peer" >&2
    done
fi
PEERS=$(realpath "$peers")/bin FAULT_TABLE_ROWS=${1:-} exec cargo test --quiet --locked \
    --profile "${FAULT_TABLE_PROFILE:-release}" -p warmroute-tests --test e2e -- \
    --ignored --nocapture fault_table
