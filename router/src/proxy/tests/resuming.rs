//! Streams that another worker goes on with.

use super::*;

const CHUNK: &str = concat!(
    r#"data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"text":"a","#,
    r#""prompt_token_ids":[1,2,3],"token_ids":[7],"finish_reason":null}]}"#,
    "\n\n"
);

#[tokio::test]
async fn a_client_that_closes_while_its_stream_is_resumed_counts_once() {
    let engines = [Engine::start().await, Engine::start().await];
    let world = World::with(&[]).await;
    for (number, engine) in engines.iter().enumerate() {
        world.add_bounded(number, engine);
    }
    world.set("resume_streams = \"completions\"");
    let json = json!({"model": "m", "prompt": [1, 2, 3], "max_tokens": 50, "stream": true});
    let begins = async {
        // The head is held back until the first event.
        let first = tokio::select! {
            () = engines[0].until_asked() => 0,
            () = engines[1].until_asked() => 1,
        };
        engines[first].send(CHUNK).await;
        first
    };
    let (mut response, first) = tokio::join!(world.send("/v1/completions", &json), begins);
    let chunk = in_time("the first event", response.chunk());
    assert!(chunk.await.unwrap().is_some());
    engines[first].break_stream();
    let second = &engines[1 - first];
    second.until_asked().await;
    drop(response);
    second.until_abandoned().await;
    world.until_quiet().await;
    for (phase, count) in [("before_head", 0), ("before_first_token", 0), ("stream", 1)] {
        let series = format!("upstream_cancels_total{{phase=\"{phase}\"}}");
        assert_eq!(world.metric(&series), count, "{phase}");
    }
}
