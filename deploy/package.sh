#!/usr/bin/env bash
# Builds and tries the packages in dist/: a Python wheel, a tarball and a container image.
#
#   deploy/package.sh         from a release build that runs with glibc 2.28 and later
#   deploy/package.sh --dev   from the development build; needs the glibc of this machine
#
# As root on a Debian-like machine with Rust; the network is used for package registries only.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

profile=release
case "$*" in
  "") ;;
  --dev) profile=dev ;;
  *) echo "unknown arguments: $*" >&2; exit 2 ;;
esac
[ "$(id -u)" = 0 ] || { echo "run as root: images are assembled in a chroot" >&2; exit 1; }

command -v cargo >/dev/null 2>&1 || { echo "please install Rust first: see https://rustup.rs" >&2; exit 1; }
need_command g++ g++
need_command curl curl
need_command strip binutils
need_command buildah buildah
need_command systemd-analyze systemd
need_file /etc/ssl/certs/ca-certificates.crt ca-certificates
need_python_packages "cyclonedx-python-lib[json-validation]==11.12.0"

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
triple=$(uname -m)-unknown-linux-gnu
name=warmroute-$version-$(uname -m)-linux
products=(warmroute-router warmroute-indexer warmroute-shim)
packaged=("${products[@]}" warmroute-mock-engine)
library=libwarmroute_publisher.so
dist=$PWD/dist
# Packages of the development build do not replace those of a release.
[ "$profile" = release ] || dist=$dist/dev
work=$(mktemp -d)
storage=(--storage-driver vfs --root "$work/storage" --runroot "$work/runroot")
container=
clean() {
  trap - EXIT
  [ -z "$container" ] || buildah "${storage[@]}" rm "$container" >/dev/null 2>&1 || true
  rm -rf "$work"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
  echo "$*" >&2
  exit 1
}

# is_version BINARY [COMMAND…]: `--version` of BINARY, run by COMMAND, is that of this package.
is_version() {
  local binary=$1 printed
  shift
  printed=$("$@" "$binary" --version)
  # The mock engine is no part of an installation and has no commit.
  case "$printed" in
    "$(basename "$binary") $expected" | "warmroute-mock-engine $version") ;;
    *) fail "$binary: expected version $expected, got: $printed" ;;
  esac
}

step "building ($profile)"
binaries=("${packaged[@]}" warmroute-manual)
if [ "$profile" = release ]; then
  BUILD_COMMIT=$(git describe --always --dirty --abbrev=7 --exclude='*' 2>/dev/null || echo unknown)
  export BUILD_COMMIT
  # Zig links against an older glibc than that of this machine, and its C++ library is static.
  need_python_packages cargo-zigbuild==0.24.0 ziglang==0.17.1
  PATH=$PWD/.venv/bin:$PATH cargo zigbuild --release --locked --target "$triple.2.28" \
    "${binaries[@]/#/--bin=}"
  PATH=$PWD/.venv/bin:$PATH cargo zigbuild --release --locked --target "$triple.2.28" \
    --package warmroute-publisher --lib
  built=${CARGO_TARGET_DIR:-target}/$triple/release
else
  cargo build --locked "${binaries[@]/#/--bin=}"
  cargo build --locked --package warmroute-publisher --lib
  built=${CARGO_TARGET_DIR:-target}/debug
fi
expected="$version (${BUILD_COMMIT:-unknown})"
mkdir "$work/bin"
for binary in "${packaged[@]}"; do
  strip -o "$work/bin/$binary" "$built/$binary"
done
strip -o "$work/$library" "$built/$library"
"$built/warmroute-manual" "$work/manual"

# Times inside the packages, so that equal sources make equal packages. Not set for the build: C
# libraries would be compiled again for each commit.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH

for part in bill wheel tarball image; do
  . "deploy/package/$part.sh"
done

step "packages"
(cd "$dist" && sha256sum -- *"$version"* >SHA256SUMS && sha256sum --quiet -c SHA256SUMS)
ls -l --block-size=K "$dist"
