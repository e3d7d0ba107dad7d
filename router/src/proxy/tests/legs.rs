//! Requests on two workers: what each of them gets, and what becomes of them when one fails.

use std::time::Duration;

use tokio::time::advance;

use super::world::Frozen;
use super::*;

const PATH: &str = "/v1/completions";

fn legs(world: &World, leg: &str, outcome: &str) -> u64 {
    world.metric(&format!(
        "legs_total{{leg=\"{leg}\",outcome=\"{outcome}\"}}"
    ))
}

fn whole(world: &World, reason: &str) -> u64 {
    world.metric(&format!("whole_requests_total{{reason=\"{reason}\"}}"))
}

/// The worker that answered a request, which is served.
async fn served(world: &World, request: &Value) -> String {
    let response = world.send(PATH, request).await;
    assert_eq!(response.status(), 200);
    let worker = response.headers()["x-warmroute-worker"].clone();
    response.bytes().await.unwrap();
    world.until_quiet().await;
    worker.to_str().unwrap().to_owned()
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[tokio::test]
async fn one_worker_computes_the_prompt_and_another_answers() {
    let (prefill, decode) = (Engine::start().await, Engine::start().await);
    let world = World::with_roles(&[&prefill], &[&decode], None).await;
    let params = r#"{"remote_engine_id": "e","remote_block_ids":[[1, 2]],"x":1.50}"#;
    prefill.transfer_with(params);
    let text = r#"{ "model":"m","prompt":[1,2,3], "max_tokens":7,"min_tokens":7}"#;
    let sent = world.post(PATH, &Value::Null).body(text);
    let response = sent.header("x-request-id", "mine").send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["x-warmroute-worker"], "w1");
    let answer: Value = response.json().await.unwrap();
    assert!(answer.get("kv_transfer_params").is_none());
    let (first, second) = (prefill.last(), decode.last());
    assert_eq!((&*first.path, &*second.path), (PATH, PATH));
    for headers in [&first.headers, &second.headers] {
        assert_eq!(headers["x-request-id"], "mine");
        assert_eq!(headers["x-data-parallel-rank"], "0");
    }
    let sent = json_of(&first.body);
    assert_eq!(
        (&sent["max_tokens"], &sent["stream"]),
        (&json!(1), &json!(false))
    );
    assert!(sent.get("min_tokens").is_none());
    let (members, brace) = text.split_at(text.len() - 1);
    let expected = format!("{members},\"kv_transfer_params\":{params}{brace}");
    assert_eq!(second.body, expected);
    world.until_quiet().await;
    assert_eq!(legs(&world, "prefill", "served"), 1);
    assert_eq!(legs(&world, "decode", "served"), 1);
    let freed = world.app.core.core().counts().freed;
    assert_eq!((freed.completed, freed.failed, freed.aborted), (2, 0, 0));
}

#[tokio::test]
async fn each_leg_has_its_slot_while_it_is_in_progress() {
    let (prefill, decode) = (Engine::start().await, Engine::start().await);
    let world = World::with_roles(&[&prefill], &[&decode], None).await;
    prefill.answer_prefills(false);
    let sent = TaskTracker::new().spawn(world.post(PATH, &streaming()).send());
    prefill.until_asked().await;
    let active = |world: &World| -> Vec<u32> {
        let loads = world.loads();
        loads.iter().map(|load| load.active_requests).collect()
    };
    assert_eq!(active(&world), [1, 0]);
    prefill.answer_prefills(true);
    decode.until_asked().await;
    assert_eq!(active(&world), [0, 1]);
    let mut response = in_time("a head", sent).await.unwrap().unwrap();
    decode.release_event(&mut response).await;
    decode.end_stream();
    assert!(response.chunk().await.unwrap().is_none());
    world.until_quiet().await;
    assert!(!prefill.last().body.contains("\"stream\":true"));
    assert!(decode.last().body.contains("\"stream\":true"));
}

/// An engine counts transferred tokens as cached ones.
#[tokio::test]
async fn what_a_decode_leg_reports_as_cached_is_not_compared() {
    let (prefill, decode) = (Engine::start().await, Engine::start().await);
    let world = World::with_roles(&[&prefill], &[&decode], None).await;
    let reported = |world: &World| world.metric("overlap_reported_tokens_total");
    assert_eq!(served(&world, &body(40)).await, "w1");
    assert_eq!(reported(&world), 0);
    world.set("pd_uncached_threshold = 4000");
    served(&world, &body(40)).await;
    assert_eq!(reported(&world), 32);
}

#[tokio::test]
async fn an_answer_without_parameters_has_the_prompt_computed_again() {
    for params in ["null", "{}", "\"none\""] {
        let (prefill, decode) = (Engine::start().await, Engine::start().await);
        let world = World::with_roles(&[&prefill], &[&decode], None).await;
        prefill.transfer_with(params);
        assert_eq!(served(&world, &body(4)).await, "w1");
        assert_eq!(decode.last().body, body(4).to_string());
        assert_eq!(legs(&world, "prefill", "no_transfer"), 1);
        // Its slot counts the prompt, which it computes.
        assert_eq!(world.newest_decision()[0]["prefill_tokens"], 4);
    }
}

/// More bytes than an answer may have.
#[tokio::test]
async fn an_answer_that_is_too_large_has_no_parameters() {
    let (prefill, decode) = (Engine::start().await, Engine::start().await);
    let world = World::with_roles(&[&prefill], &[&decode], None).await;
    prefill.transfer_with(&format!("{{\"a\":\"{}\"}}", "x".repeat(9 << 20)));
    assert_eq!(served(&world, &body(4)).await, "w1");
    assert_eq!(legs(&world, "prefill", "no_transfer"), 1);
}

#[tokio::test]
async fn a_request_that_a_prefill_worker_refuses_is_served_whole() {
    let (prefill, decode) = (Engine::start().await, Engine::start().await);
    let world = World::with_roles(&[&prefill], &[&decode], None).await;
    prefill.answer_with(StatusCode::BAD_REQUEST);
    assert_eq!(served(&world, &body(4)).await, "w1");
    assert_eq!(decode.last().body, body(4).to_string());
    assert_eq!(legs(&world, "prefill", "refused"), 1);
    assert_eq!(world.metric("retries_total{reason=\"status\"}"), 0);
}

#[tokio::test]
async fn a_failed_prefill_leg_has_another_pair() {
    let failing = [
        Engine::mute().await,
        Engine::closing_after(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{\"a\":",
        )
        .await,
        Engine::closing_after(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 26\r\n\r\n\
              {\"error\":{\"message\":\"no\"}}",
        )
        .await,
        Engine::start().await,
    ];
    failing[3].answer_with(StatusCode::INTERNAL_SERVER_ERROR);
    for failing in failing {
        let (prefill, decode) = (Engine::start().await, Engine::start().await);
        let world = World::with_roles(&[&failing, &prefill], &[&decode], None).await;
        assert_eq!(served(&world, &body(4)).await, "w2");
        assert_eq!(prefill.asked(), 1);
        assert!(decode.last().body.contains("{\"remote\" : \"1\"}"));
        assert_eq!(legs(&world, "prefill", "failed"), 1);
        assert_eq!(legs(&world, "prefill", "served"), 1);
        assert_eq!(legs(&world, "decode", "served"), 1);
        assert_eq!(world.app.core.core().counts().freed.failed, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_prefill_leg_has_another_pair() {
    let _frozen = Frozen::new();
    let (silent, prefill) = (Engine::hung().await, Engine::start().await);
    let decode = Engine::start().await;
    let world = World::with_roles(&[&silent, &prefill], &[&decode], None).await;
    world.set("pd_uncached_threshold = 0\nfirst_token_timeout_secs = 6");
    let sent = TaskTracker::new().spawn(world.post(PATH, &body(4)).send());
    silent.until_asked().await;
    advance(Duration::from_secs(6)).await;
    let response = in_time("an answer", sent).await.unwrap().unwrap();
    assert_eq!(response.headers()["x-warmroute-worker"], "w2");
    assert_eq!(legs(&world, "prefill", "failed"), 1);
    assert_eq!(prefill.asked(), 1);
}

#[tokio::test]
async fn after_two_pairs_one_worker_serves_the_request() {
    let dead = [
        Engine::dead().await,
        Engine::dead().await,
        Engine::dead().await,
    ];
    let (prefill, decode) = (dead.each_ref(), Engine::start().await);
    let world = World::with_roles(&prefill, &[&decode], None).await;
    assert_eq!(served(&world, &body(4)).await, "w3");
    assert_eq!(decode.last().body, body(4).to_string());
    assert_eq!(legs(&world, "prefill", "failed"), 2);
    assert_eq!(whole(&world, "pairs_failed"), 1);
}

/// The engine may have taken the blocks: the parameters are spent.
#[tokio::test]
async fn a_failed_decode_leg_has_its_prompt_computed_again() {
    let failing = [Engine::mute().await, Engine::start().await];
    failing[1].answer_with(StatusCode::INTERNAL_SERVER_ERROR);
    for failing in failing {
        let (prefill, decode) = (Engine::start().await, Engine::start().await);
        // The second in turn is chosen first.
        let world = World::with_roles(&[&prefill], &[&decode, &failing], None).await;
        assert_eq!(served(&world, &body(4)).await, "w1");
        assert_eq!((prefill.asked(), decode.asked()), (2, 1));
        let params = &json_of(&decode.last().body)["kv_transfer_params"];
        assert_eq!(params["remote"], "2");
        assert_eq!(legs(&world, "prefill", "served"), 2);
        assert_eq!(legs(&world, "decode", "failed"), 1);
        assert_eq!(legs(&world, "decode", "served"), 1);
    }
}

#[tokio::test]
async fn parameters_that_were_not_sent_go_to_another_decode_worker() {
    let (prefill, decode) = (Engine::start().await, Engine::start().await);
    let dead = [Engine::dead().await, Engine::dead().await];
    let world = World::with_roles(&[&prefill], &[&dead[0], &dead[1], &decode], None).await;
    assert_eq!(served(&world, &body(4)).await, "w3");
    assert_eq!((prefill.asked(), decode.asked()), (1, 1));
    let params = &json_of(&decode.last().body)["kv_transfer_params"];
    assert_eq!(params["remote"], "1");
    assert_eq!(legs(&world, "decode", "unsent"), 2);
}

/// A prompt on which engines crash reaches no more of them than a whole request does.
#[tokio::test]
async fn a_request_on_which_engines_break_reaches_two() {
    let mute = [Engine::mute().await, Engine::mute().await];
    let decode = Engine::start().await;
    let crashing = World::with_roles(&[&mute[0], &mute[1]], &[&decode], None).await;
    assert_eq!(crashing.send(PATH, &body(4)).await.status(), 502);
    assert_eq!(
        (mute[0].asked(), mute[1].asked(), decode.asked()),
        (1, 1, 0)
    );
    crashing.until_quiet().await;
    assert_eq!(legs(&crashing, "prefill", "failed"), 2);
}

/// A computed prompt does not prove that the decode worker was at fault before.
#[tokio::test]
async fn a_request_on_which_decode_workers_break_opens_nothing() {
    let prefill = Engine::start().await;
    let mute = [Engine::mute().await, Engine::mute().await];
    let world = World::with_roles(&[&prefill], &[&mute[0], &mute[1]], None).await;
    for _ in 0..4 {
        assert_eq!(world.send(PATH, &body(4)).await.status(), 502);
    }
    let workers = world.app.fleet.snapshot();
    assert!(workers.iter().all(|worker| !worker.breaker.is_tripped()));
    assert_eq!(legs(&world, "decode", "failed"), 8);
    world.until_quiet().await;
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_leg_in_progress() {
    let (prefill, decode) = (Engine::start().await, Engine::start().await);
    let world = World::with_roles(&[&prefill], &[&decode], None).await;
    prefill.answer_prefills(false);
    let sent = TaskTracker::new().spawn(world.post(PATH, &body(4)).send());
    prefill.until_asked().await;
    sent.abort();
    prefill.until_abandoned().await;
    world.until_quiet().await;
    assert_eq!(decode.asked(), 0);
    prefill.answer_prefills(true);
    let sent = TaskTracker::new().spawn(world.post(PATH, &streaming()).send());
    decode.until_asked().await;
    sent.abort();
    decode.until_abandoned().await;
    world.until_quiet().await;
    assert_eq!(world.app.core.core().counts().freed.aborted, 2);
}

#[tokio::test]
async fn requests_for_one_worker_are_served_whole() {
    let (prefill, decode) = (Engine::start().await, Engine::start().await);
    let world = World::with_roles(&[&prefill], &[&decode], None).await;
    for (request, reason) in [
        (
            json!({"model": "m", "prompt": [1, 2], "n": 2}),
            "several_sequences",
        ),
        (
            json!({"model": "m", "prompt": [1, 2], "use_beam_search": true}),
            "beam_search",
        ),
        (
            json!({"model": "m", "prompt": [[1], [2]]}),
            "several_prompts",
        ),
        (
            json!({"model": "m", "prompt": [1, 2], "echo": true}),
            "echo",
        ),
        (
            json!({"model": "m", "prompt": [1, 2], "prompt_logprobs": 1}),
            "prompt_logprobs",
        ),
        (
            json!({"model": "m", "prompt": [1, 2], "kv_transfer_params": {"a": 1}}),
            "own_transfer",
        ),
    ] {
        assert_eq!(served(&world, &request).await, "w1");
        assert_eq!(decode.last().body, request.to_string());
        assert_eq!(whole(&world, reason), 1, "{reason}");
    }
    let other = json!({"model": "m", "input": "x"});
    assert_eq!(world.send("/v1/responses", &other).await.status(), 200);
    assert_eq!(whole(&world, "route"), 1);
    world.set("pd_uncached_threshold = 4");
    served(&world, &body(4)).await;
    assert_eq!(whole(&world, "cached"), 1);
    assert_eq!(prefill.asked(), 0);
    served(&world, &json!({"model": "m", "prompt": [9, 8, 7, 6, 5]})).await;
    assert_eq!(prefill.asked(), 1);
}

#[tokio::test]
async fn a_hint_is_for_the_whole_request_and_ends_with_a_failure() {
    let (prefill, decode) = (Engine::start().await, Engine::start().await);
    let mute = Engine::mute().await;
    let world = World::with_roles(&[&prefill], &[&mute, &decode], None).await;
    world.set("pd_uncached_threshold = 0\nworker_hint = \"follow\"");
    let hinted = world.post(PATH, &body(4));
    let hinted = hinted.header("x-dynamo-worker-instance-id", "w1");
    let response = hinted.send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(whole(&world, "hint"), 1);
    assert_eq!((mute.asked(), prefill.asked()), (1, 1));
    assert_eq!(legs(&world, "decode", "served"), 1);
}

#[tokio::test]
async fn without_a_prefill_worker_a_request_is_whole() {
    let (prefill, decode) = (Engine::start().await, Engine::start().await);
    let world = World::with_roles(&[&prefill], &[&decode], None).await;
    world.set_down(0, &prefill);
    assert_eq!(served(&world, &body(4)).await, "w1");
    assert_eq!(whole(&world, "no_pair"), 1);
    let plain = World::with(&[&decode]).await;
    served(&plain, &body(4)).await;
    assert_eq!(whole(&plain, "no_pair"), 0, "no role, no count");
}

#[tokio::test]
async fn without_memory_for_another_body_a_request_is_whole() {
    let (prefill, decode) = (Engine::start().await, Engine::start().await);
    let world = World::with_roles(&[&prefill], &[&decode], None).await;
    let bodies = &world.app.bodies;
    let share = bodies.charge(bodies.free_bytes()).unwrap();
    let response = world.send(PATH, &body(4)).await;
    assert_eq!(response.status(), 200);
    assert_eq!((prefill.asked(), whole(&world, "memory")), (0, 1));
    drop(share);
    response.bytes().await.unwrap();
    prefill.answer_prefills(false);
    let sent = TaskTracker::new().spawn(world.post(PATH, &body(4)).send());
    prefill.until_asked().await;
    let share = bodies.charge(bodies.free_bytes()).unwrap();
    prefill.answer_prefills(true);
    let response = in_time("an answer", sent).await.unwrap().unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(legs(&world, "prefill", "no_memory"), 1);
    drop((response, share));
    world.until_quiet().await;
}

/// A place that another request took while the prompt was computed.
#[tokio::test]
async fn a_computed_prompt_waits_for_a_decode_worker() {
    let (prefill, decode) = (Engine::start().await, Engine::start().await);
    let world = World::with_roles(&[&prefill], &[&decode], Some(1)).await;
    prefill.answer_prefills(false);
    let tasks = TaskTracker::new();
    let split = tasks.spawn(world.post(PATH, &body(4)).send());
    prefill.until_asked().await;
    let mut first = world.send(PATH, &streaming()).await;
    decode.release_event(&mut first).await;
    prefill.answer_prefills(true);
    let queued = async {
        while world.app.admission.size().requests != 1 {
            tokio::task::yield_now().await;
        }
    };
    in_time("the request waits", queued).await;
    assert_eq!(legs(&world, "decode", "no_worker"), 1);
    drop(first);
    let response = in_time("an answer", split).await.unwrap().unwrap();
    assert_eq!(response.status(), 200);
    response.bytes().await.unwrap();
    world.until_quiet().await;
}
