#!/usr/bin/env bash
# Warmroute on this machine, in one process, in front of two mock engines.
#
#   ./quickstart.sh           builds, starts, shows a cache hit, then serves until Ctrl-C
#   ./quickstart.sh --once    the same, but ends after the demonstration
#
# WARMROUTE_PORT chooses another port than 8080 (0: any free one).
set -euo pipefail
cd "$(dirname "$0")"
. deploy/lib.sh

once=no
for argument in "$@"; do
  case "$argument" in
    --once) once=yes ;;
    *) echo "unknown argument: $argument" >&2; exit 2 ;;
  esac
done
port=${WARMROUTE_PORT:-8080}
[ "$once" = no ] || port=0
# The router reads WARMROUTE_* itself; here only the flag below counts.
unset WARMROUTE_PORT

if ! command -v cargo >/dev/null 2>&1; then
  echo "please install Rust first: see https://rustup.rs" >&2
  exit 1
fi
need_command g++ g++
need_command curl curl

step "building"
cargo build --locked --package warmroute-router --package warmroute-tests --bins
target=${CARGO_TARGET_DIR:-target}/debug

logs=$(mktemp -d)
pids=()
stop() {
  trap - EXIT INT TERM
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  rm -rf "$logs"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# start NAME COMMAND…: runs it in the background; its first line on stdout is its addresses.
start() {
  local name=$1
  shift
  "$@" >"$logs/$name.out" 2>"$logs/$name.err" &
  local pid=$!
  pids+=("$pid")
  for _ in $(seq 300); do
    [ -s "$logs/$name.out" ] && return
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  echo "$name did not start:" >&2
  cat "$logs/$name.err" >&2
  exit 1
}

# number NAME KEY: a number, or the first of a list, in what NAME printed at its start.
number() {
  sed -n "1s/.*\"$2\":\[\{0,1\}\([0-9]*\).*/\1/p" "$logs/$1.out"
}

step "starting two mock engines and the router"
tokenizer=tests/fixtures/tiny
workers=()
for name in engine-a engine-b; do
  start "$name" "$target/warmroute-mock-engine" --port 0 --kv-port 0 --replay-port 0 \
    --block-size 16 --num-blocks 4096 --model mock --tokenizer "$tokenizer"
  kv=tcp://127.0.0.1:$(number "$name" kv)
  replay=tcp://127.0.0.1:$(number "$name" replay)
  workers+=(--worker "http://127.0.0.1:$(number "$name" port),kv=$kv,replay=$replay,id=$name")
done
start router "$target/warmroute-router" --port "$port" --admin-port 0 \
  --tokenizer "$tokenizer" "${workers[@]}"
url=http://127.0.0.1:$(number router port)
admin=http://127.0.0.1:$(number router admin_port)

for _ in $(seq 300); do
  curl -fs "$url/readyz" >/dev/null && break
  sleep 0.1
done
curl -fsS "$url/readyz" >/dev/null

# ask QUESTION: a chat whose long system prompt is the same every time.
system="You are a patient librarian. $(printf 'Rule %s: answer briefly and name your source. ' $(seq 30))"
ask() {
  curl -fsS -D "$logs/headers" -o "$logs/body" "$url/v1/chat/completions" \
    -H 'content-type: application/json' -d "{\"model\":\"mock\",\"max_tokens\":8,\"messages\":[
      {\"role\":\"system\",\"content\":\"$system\"},{\"role\":\"user\",\"content\":\"$1\"}]}"
  cached=$(sed -n 's/.*"cached_tokens": *\([0-9]*\).*/\1/p' "$logs/body")
  worker=$(header x-warmroute-worker)
  overlap=$(header x-warmroute-overlap-blocks)
  printf '%-28s -> %s, overlap %s blocks, engine reports %s cached tokens (index %s)\n' \
    "$1" "$worker" "$overlap" "$cached" "$(header x-warmroute-index-state)"
}
header() {
  tr -d '\r' <"$logs/headers" | sed -n "s/^$1: *//Ip"
}

step "three chats with the same long system prompt"
ask "Who wrote Faust?"
first=$worker
# The engine tells about new blocks with its answer; give the index the blink that it needs.
sleep 0.5
for question in "Who wrote Emma?" "Who wrote Ulysses?"; do
  ask "$question"
  if [ "$worker" != "$first" ] || [ "$overlap" = 0 ] || [ "$cached" != $((overlap * 16)) ]; then
    echo "expected the worker that holds the prefix, and its credit to be what the engine reports" >&2
    exit 1
  fi
done
echo "the second and third went to the worker that already held the prefix"

cat <<TEXT

Send your own:

  curl $url/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model":"mock","messages":[{"role":"user","content":"hello"}]}' -i

  $url/v1/models        what can be asked
  $admin/workers   what the router knows of each worker
  $admin/v1/slots  the load on each
  $admin/metrics
TEXT
if [ "$once" = no ]; then
  printf '\nServing until Ctrl-C.\n'
  wait "${pids[@]}"
fi
