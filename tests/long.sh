#!/usr/bin/env bash
# The checks that take minutes to hours. Run before a release.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

step "token ids: 100,000 texts and all characters for each family of tokenizers"
cargo test --release --locked -p warmroute-chat --lib -- --ignored --nocapture
