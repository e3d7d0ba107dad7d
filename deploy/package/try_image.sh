#!/usr/bin/env bash
# try_image.sh ROOT: starts the router of an image's root directory as its user, with that directory
# read-only, and asks for /health. In a mount namespace of its own.
set -euo pipefail
root=$1

mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
if touch "$root/tmp/written" 2>/dev/null; then
  echo "the root directory is not read-only" >&2
  exit 1
fi
out=$(mktemp -d)
router=
clean() {
  trap - EXIT
  [ -z "$router" ] || kill "$router" 2>/dev/null || true
  wait || true
  rm -rf "$out"
}
trap clean EXIT

env --ignore-environment PATH=/usr/local/bin "$(command -v chroot)" --userspec=10001:10001 "$root" \
  /usr/local/bin/warmroute-router --host 127.0.0.1 --port 0 --admin-port 0 \
  --worker http://127.0.0.1:1,id=absent >"$out/ports" 2>"$out/log" &
router=$!
for _ in $(seq 300); do
  [ -s "$out/ports" ] && break
  kill -0 "$router" 2>/dev/null || break
  sleep 0.1
done
port=$(sed -n 's/.*"port":\([0-9]*\).*/\1/p' "$out/ports")
if [ -z "$port" ] || ! curl -fsS --max-time 10 "http://127.0.0.1:$port/health" >/dev/null; then
  echo "the router of the image does not answer:" >&2
  cat "$out/log" >&2
  exit 1
fi
echo "the router of the image answers"
kill -TERM "$router"
wait "$router" || { echo "the router failed at its end" >&2; exit 1; }
router=
