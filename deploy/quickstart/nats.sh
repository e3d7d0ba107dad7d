# The distributed part of quickstart.sh. Sourced, not run.

# A restarted server keeps its port and directory.
nats_port=-1
start_nats() {
  rm -f "$run"/nats-server_*.ports
  "$(nats_server)" -js -a 127.0.0.1 -p "$nats_port" -sd "$run/streams" --ports_file_dir "$run" \
    >>"$run/nats.err" 2>&1 &
  pid_of[nats]=$!
  for _ in $(seq 300); do
    nats_port=$(sed -n 's|.*nats://127\.0\.0\.1:\([0-9]*\).*|\1|p' "$run/nats-server_${pid_of[nats]}.ports" \
      2>/dev/null || true)
    [ -n "$nats_port" ] && break
    sleep 0.1
  done
  [ -n "$nats_port" ] || { cat "$run/nats.err" >&2; exit 1; }
}

start_indexer() {
  start "$1" "$target/warmroute-indexer" "${nats[@]}" --host 127.0.0.1 --port "$2"
}

step "starting nats-server, two mock engines with shims, two indexers, two routers"
start_nats
nats=(--nats-url "nats://127.0.0.1:$nats_port" --namespace quickstart)
"$target/warmroute-indexer" "${nats[@]}" init --max-bytes 64MiB >"$run/init.out" 2>"$run/init.err" || { cat "$run/init.err" >&2; exit 1; }
start_engines
for name in "${workers[@]}"; do
  start "shim-$name" "$target/warmroute-shim" "${nats[@]}" --host 127.0.0.1 --port 0 \
    --worker-id "$name" --worker-url "$(url "$name")" --advertise-url "$(url "$name")" \
    --kv-endpoint "tcp://127.0.0.1:$(number "$name" kv)" \
    --kv-replay-endpoint "tcp://127.0.0.1:$(number "$name" replay)" --state-dir "$run/state"
done
start_indexer indexer-1 0
start_indexer indexer-2 0
router=router-1
start router-1 "$target/warmroute-router" "${nats[@]}" --config "$run/router.toml" --port "$port" --admin-port 0 --tokenizer "$tokenizer"
start router-2 "$target/warmroute-router" "${nats[@]}" --config "$run/router.toml" --port 0 --admin-port 0 --tokenizer "$tokenizer"
until_ready shim-engine-a shim-engine-b indexer-1 indexer-2 router-1 router-2

step "three chats with the same long system prompt, through both routers"
ask router-1 "Who wrote Faust?"
first=$worker
# The engine publishes new blocks with its answer; the index needs a moment to apply them.
sleep 0.5
ask_warm router-2 "Who wrote Emma?"
same_worker
ask_warm router-1 "Who wrote Ulysses?"
same_worker
echo "the second and third went to the worker that already held the prefix, through either router"

step "kill -9 of an indexer: the other one answers"
indexer_port=$(number indexer-1 port)
crash indexer-1
ask_warm router-2 "Who wrote Hamlet?"

step "kill -9 of nats-server: requests are served without the index"
crash nats
ask router-1 "Who wrote Candide?"
ask router-2 "Who wrote Medea?"

step "restart of both: they keep their ports and streams"
start_nats
start_indexer indexer-1 "$indexer_port"
until_ready indexer-1 indexer-2
ask_warm router-1 "Who wrote Odes?"
ask_warm router-2 "Who wrote Emile?"
