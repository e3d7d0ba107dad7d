#!/usr/bin/env bash
# Warmroute on this machine, in front of two mock engines.
#
#   ./quickstart.sh           one process: builds, starts, shows a cache hit, serves until Ctrl-C
#   ./quickstart.sh --nats    distributed over NATS: two shims, indexers and routers; kills some
#   --once                    ends after the demonstration
#   --binaries DIRECTORY      runs installed binaries instead of building them
#
# WARMROUTE_PORT: the (first) router's port instead of 8080 (0: any free one).
set -euo pipefail
cd "$(dirname "$0")"
. deploy/lib.sh

once=no
plane=embedded
target=
while [ $# -gt 0 ]; do
  case "$1" in
    --once) once=yes ;;
    -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//p;}' "$0"; exit ;;
    --nats) plane=nats ;;
    --binaries) target=${2:?--binaries needs a directory}; shift ;;
    *) echo "unknown argument: $1" >&2; exit 2 ;;
  esac
  shift
done
port=${WARMROUTE_PORT:-8080}
[ "$once" = no ] || port=0
# The binaries read WARMROUTE_* variables; the quick start passes flags only.
unset WARMROUTE_PORT

need_command curl curl
binaries=(warmroute-router warmroute-mock-engine)
if [ "$plane" = nats ]; then
  need_nats_server
  binaries+=(warmroute-shim warmroute-indexer)
fi

if [ -z "$target" ]; then
  if ! command -v cargo >/dev/null 2>&1; then
    echo "please install Rust first: see https://rustup.rs" >&2
    exit 1
  fi
  need_command g++ g++
  step "building"
  cargo build --locked --profile quickstart "${binaries[@]/#/--bin=}"
  target=${CARGO_TARGET_DIR:-target}/quickstart
fi

# State of this run: logs, and with NATS the streams and the shims' checkpoints.
run=$(mktemp -d)
# Answers name the worker and its cached blocks.
printf '[admin]\nexplain_headers = "all"\n' > "$run/router.toml"
declare -A pid_of
stop() {
  trap - EXIT INT TERM
  for pid in "${pid_of[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  rm -rf "$run"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# start NAME COMMAND…: runs it in the background. Its first line on stdout contains its addresses.
start() {
  local name=$1
  shift
  "$@" >"$run/$name.out" 2>>"$run/$name.err" &
  pid_of[$name]=$!
  for _ in $(seq 300); do
    [ -s "$run/$name.out" ] && return
    kill -0 "${pid_of[$name]}" 2>/dev/null || break
    sleep 0.1
  done
  echo "$name did not start:" >&2
  cat "$run/$name.err" >&2
  exit 1
}

# number NAME KEY: a number, or the first of a list, in NAME's first line.
number() {
  sed -n "1s/.*\"$2\":\[\{0,1\}\([0-9]*\).*/\1/p" "$run/$1.out"
}

url() {
  echo "http://127.0.0.1:$(number "$1" "${2:-port}")"
}

# until_ready NAME…
until_ready() {
  local name
  for name in "$@"; do
    for _ in $(seq 300); do
      curl -fs "$(url "$name")/readyz" >/dev/null && break
      sleep 0.1
    done
    curl -fsS "$(url "$name")/readyz" >/dev/null
  done
}

# crash NAME: kill -9.
crash() {
  kill -9 "${pid_of[$1]}"
  wait "${pid_of[$1]}" 2>/dev/null || true
  unset "pid_of[$1]"
}

# ask ROUTER QUESTION: a chat with the common long system prompt.
system="You are a patient librarian. $(printf 'Rule %s: answer briefly and name your source. ' $(seq 30))"
ask() {
  exchange "$@"
  show "$@"
}
show() {
  printf '%-9s %-19s -> %s, overlap %2s blocks, engine reports %3s cached tokens (index %s)\n' \
    "$1" "$2" "$worker" "$overlap" "$cached" "$state"
}
exchange() {
  curl -fsS -D "$run/headers" -o "$run/body" "$(url "$1")/v1/chat/completions" \
    -H 'content-type: application/json' -d "{\"model\":\"mock\",\"max_tokens\":8,\"messages\":[
      {\"role\":\"system\",\"content\":\"$system\"},{\"role\":\"user\",\"content\":\"$2\"}]}"
  cached=$(sed -n 's/.*"cached_tokens": *\([0-9]*\).*/\1/p' "$run/body")
  worker=$(header x-warmroute-worker)
  overlap=$(header x-warmroute-overlap-blocks)
  state=$(header x-warmroute-index-state)
}
header() {
  tr -d '\r' <"$run/headers" | sed -n "s/^$1: *//Ip"
}

# ask_warm ROUTER QUESTION: like ask, with a known prefix. On a busy machine the index may answer
# late; then the request is repeated.
ask_warm() {
  for _ in $(seq 100); do
    exchange "$@"
    [ "$state" = exact ] && break
    sleep 0.1
  done
  show "$@"
  if [ "$overlap" = 0 ] || [ "$cached" != $((overlap * 16)) ]; then
    echo "expected a worker that holds the prefix, and its credit to be what the engine reports" >&2
    exit 1
  fi
}

# The worker of the first question must serve this one too.
same_worker() {
  [ "$worker" = "$first" ] && return
  echo "expected $first, which holds the prefix" >&2
  exit 1
}

tokenizer=tests/fixtures/tiny
workers=(engine-a engine-b)
start_engines() {
  local name
  for name in "${workers[@]}"; do
    start "$name" "$target/warmroute-mock-engine" --port 0 --kv-port 0 --replay-port 0 \
      --block-size 16 --num-blocks 4096 --model mock --tokenizer "$tokenizer"
  done
}

if [ "$plane" = embedded ]; then
  . deploy/quickstart/embedded.sh
else
  . deploy/quickstart/nats.sh
fi

if [ "$once" = no ]; then
cat <<TEXT

Send your own:

  curl $(url "$router")/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model":"mock","messages":[{"role":"user","content":"hello"}]}' -i

  $(url "$router")/v1/models        served models
  $(url "$router" admin_port)/          live page, for a browser
  $(url "$router" admin_port)/workers   state of each worker
  $(url "$router" admin_port)/v1/slots  load of each worker
  $(url "$router" admin_port)/metrics
TEXT
  printf '\nServing until Ctrl-C.\n'
  wait "${pid_of[@]}"
fi
