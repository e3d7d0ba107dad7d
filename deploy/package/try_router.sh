#!/usr/bin/env bash
# try_router.sh COMMAND…: starts a router by COMMAND, asks for /health, and ends it.
set -euo pipefail

out=$(mktemp -d)
router=
clean() {
  trap - EXIT
  [ -z "$router" ] || kill "$router" 2>/dev/null || true
  wait || true
  rm -rf "$out"
}
trap clean EXIT

"$@" >"$out/ports" 2>"$out/log" &
router=$!
for _ in $(seq 300); do
  [ -s "$out/ports" ] && break
  kill -0 "$router" 2>/dev/null || break
  sleep 0.1
done
port=$(sed -n 's/.*"port":\([0-9]*\).*/\1/p' "$out/ports")
if [ -z "$port" ] || ! curl -fsS --max-time 10 "http://127.0.0.1:$port/health" >/dev/null; then
  echo "the router does not answer:" >&2
  cat "$out/log" >&2
  exit 1
fi
echo "the router answers"
kill -TERM "$router"
wait "$router" || { echo "the router failed at its end" >&2; exit 1; }
router=
