# The one-process part of quickstart.sh. Sourced, not run.

step "starting two mock engines and the router"
start_engines
specs=()
for name in "${workers[@]}"; do
  kv=tcp://127.0.0.1:$(number "$name" kv)
  replay=tcp://127.0.0.1:$(number "$name" replay)
  specs+=(--worker "$(url "$name"),kv=$kv,replay=$replay,id=$name")
done
router=router
start router "$target/warmroute-router" --config "$run/router.toml" --port "$port" --admin-port 0 --tokenizer "$tokenizer" "${specs[@]}"
until_ready router

step "three chats with the same long system prompt"
ask router "Who wrote Faust?"
first=$worker
# The engine publishes new blocks with its answer; the index needs a moment to apply them.
sleep 0.5
for question in "Who wrote Emma?" "Who wrote Ulysses?"; do
  ask_warm router "$question"
  same_worker
done
echo "the second and third went to the worker that already held the prefix"
