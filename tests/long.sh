#!/usr/bin/env bash
# The checks that take minutes to hours. Run before a release.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

step "token ids: 100,000 texts and all characters for each family of tokenizers"
cargo test --release --locked -p warmroute-chat --lib -- --ignored --nocapture

step "3 to 40 to 5 workers under load, over NATS"
need_nats_server
need_command prometheus prometheus
SCALE_TO=40 cargo test --locked -p warmroute-tests --test e2e -- --nocapture \
  scaling::workers_come_and_go

step "as many idle connections as the limit of open files allows"
IDLE_CONNECTIONS=max cargo test --locked -p warmroute-tests --test e2e -- --nocapture \
  idle_connections

step "ten minutes at 200 requests a second"
STEADY_SECS=600 cargo test --locked -p warmroute-tests --test e2e -- --nocapture steady

step "an engine that swallows requests, before each router"
tests/fault-table.sh
