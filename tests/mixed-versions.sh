#!/usr/bin/env bash
# Parts of two versions on one plane: builds another commit's binaries beside this tree's, and
# upgrades and rolls back a fleet one part at a time under traffic. About five minutes, and the build.
#
#   tests/mixed-versions.sh REF   the other version: a tag or commit
#
# OTHER_TARGET_DIR  the other version's build directory (target/mixed-versions/build)
#
# See docs/OPERATIONS.md, section 3.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

[ $# = 1 ] || { echo "usage: $0 REF" >&2; exit 2; }
commit=$(git rev-parse --verify "$1^{commit}")
place=$PWD/target/mixed-versions
tree=$place/tree
build=${OTHER_TARGET_DIR:-$place/build}

need_command g++ g++
need_command haproxy haproxy
need_nats_server

remove_tree() {
  git worktree remove --force "$tree" 2>/dev/null || rm -rf "$tree"
  git worktree prune
}

step "building $commit"
mkdir -p "$place"
remove_tree
trap remove_tree EXIT
git worktree add --quiet --detach "$tree" "$commit"
(cd "$tree" && CARGO_TARGET_DIR=$build cargo build --locked --quiet -p warmroute-tests --bins)

# A version without these settings refuses them, and explains its choices without being asked.
settings=$tree/tests/fixtures/explain.toml
[ -e "$settings" ] || settings=

step "this version and $commit on one plane"
OTHER_BINARIES=$build/debug OTHER_SETTINGS=$settings \
  cargo test --locked -p warmroute-tests --test e2e -- --ignored --nocapture plane::upgrade::
