//! Requests of gateways: what a stream does to load, metrics and circuit breakers.

use super::*;
use crate::picker::testing::FakeGateway;

const OUTPUT: &str = "data: {\"choices\":[{\"text\":\"x\"}]}\n\n";
const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":40,\"completion_tokens\":1,\
    \"prompt_tokens_details\":{\"cached_tokens\":0}}}\n\ndata: [DONE]\n\n";

fn address(engine: &Engine) -> &str {
    engine.url.trim_start_matches("http://")
}

fn streamed() -> String {
    streaming().to_string()
}

fn requests(world: &World) -> Vec<u32> {
    let loads = world.loads();
    loads.iter().map(|load| load.active_requests).collect()
}

#[tokio::test]
async fn a_stream_through_a_gateway_is_accounted_as_the_proxys() {
    let engines = [Engine::start().await, Engine::start().await];
    let world = World::with(&[&engines[0], &engines[1]]).await;
    let mut gateway = FakeGateway::begin(&world.app).await;
    gateway.send_request("/v1/completions", &streamed(), None);
    let (endpoints, headers) = gateway.routed().await;
    let [first, second] = [&engines[0], &engines[1]].map(address);
    assert_eq!(endpoints, format!("{first},{second}"));
    assert_eq!(headers["x-data-parallel-rank"], "0");
    let length = streamed().len();
    assert_eq!(gateway.answer().await, format!("request_body {length}+"));
    assert_eq!(requests(&world), [1, 0]);
    gateway.send_head("200", "text/event-stream", Some(first));
    assert_eq!(gateway.answer().await, "response_headers");
    gateway.send_piece(OUTPUT);
    assert_eq!(
        gateway.answer().await,
        format!("response_body {}", OUTPUT.len())
    );
    // The first token ends the prefill.
    world
        .until(|loads| loads[0].prefill_tokens == 0 && loads[0].active_requests == 1)
        .await;
    gateway.send_piece(USAGE);
    assert_eq!(
        gateway.answer().await,
        format!("response_body {}", USAGE.len())
    );
    gateway.send("response_body 0+");
    assert_eq!(gateway.answer().await, "response_body 0+");
    assert_eq!(gateway.answer().await, "end");
    assert_eq!(gateway.grpc_status(), "0");
    world.until_quiet().await;
    for (series, count) in [
        ("requests_total{outcome=\"ok\",route=\"completions\"}", 1),
        ("picker_streams_total{outcome=\"complete\"}", 1),
        ("model_output_tokens_total{model=\"m\",worker=\"w0\"}", 1),
    ] {
        assert_eq!(world.metric(series), count, "{series}");
    }
    assert_eq!(
        engines[0].asked() + engines[1].asked(),
        0,
        "the gateway asks"
    );
}

/// At whichever message the gateway stops, by a reset or by half-closing.
#[tokio::test]
async fn an_abandoned_stream_leaves_nothing_behind() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let body = streamed();
    let script: [&dyn Fn(&FakeGateway); 5] = [
        &|gateway| gateway.send_request("/v1/completions", &body, None),
        &|gateway| gateway.send_head("200", "text/event-stream", Some(address(&engine))),
        &|gateway| gateway.send_piece(OUTPUT),
        &|gateway| gateway.send_piece("data: {\"choi"),
        &|gateway| gateway.send_piece("ces\":[]}\n\n"),
    ];
    for count in 0..=script.len() {
        for closes in [false, true] {
            let mut gateway = FakeGateway::begin(&world.app).await;
            for (number, send) in script[..count].iter().enumerate() {
                send(&gateway);
                gateway.answer().await;
                if number == 0 {
                    gateway.answer().await;
                }
            }
            assert_eq!(requests(&world), [u32::from(count > 0)]);
            if closes {
                gateway.half_close();
                assert_eq!(gateway.answer().await, "end");
                assert_eq!(gateway.grpc_status(), "14");
            }
            drop(gateway);
            world.until_quiet().await;
        }
    }
    // A head alone: its body never comes.
    let gateway = FakeGateway::begin(&world.app).await;
    gateway.send("request_headers");
    drop(gateway);
    world.until_quiet().await;
    let abandoned = world.metric("picker_streams_total{outcome=\"abandoned\"}");
    // Those without a message were not begun.
    assert_eq!(abandoned, 11);
    assert_eq!(
        world.metric("picker_streams_total{outcome=\"complete\"}"),
        0
    );
}

#[tokio::test]
async fn the_slot_follows_the_endpoint_that_served() {
    let engines = [Engine::start().await, Engine::start().await];
    let world = World::with(&[&engines[0], &engines[1]]).await;
    let mut gateway = FakeGateway::begin(&world.app).await;
    gateway.send_request("/v1/completions", &streamed(), None);
    gateway.routed().await;
    gateway.answer().await;
    gateway.send_head("200", "text/event-stream", Some(address(&engines[1])));
    assert_eq!(gateway.answer().await, "response_headers");
    assert_eq!(requests(&world), [0, 1]);
    assert_eq!(world.metric("retries_total{reason=\"gateway\"}"), 1);
    drop(gateway);
    world.until_quiet().await;
    // One that the router does not know has the request; nothing is accounted for it.
    let mut gateway = FakeGateway::begin(&world.app).await;
    gateway.send_request("/v1/completions", &streamed(), None);
    gateway.routed().await;
    gateway.answer().await;
    gateway.send_head("200", "text/event-stream", Some("192.0.2.1:1"));
    assert_eq!(gateway.answer().await, "response_headers");
    assert_eq!(requests(&world), [0, 0]);
}

/// No engine answered: the gateway's own answer frees the slot before its body ends.
#[tokio::test]
async fn a_gateways_own_error_is_passed_on() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let mut gateway = FakeGateway::begin(&world.app).await;
    gateway.send_request("/v1/completions", &streamed(), None);
    gateway.routed().await;
    gateway.answer().await;
    gateway.send_head("503", "text/plain", None);
    assert_eq!(gateway.answer().await, "response_headers");
    assert_eq!(requests(&world), [0]);
    gateway.send("response_body 95+");
    assert_eq!(gateway.answer().await, "response_body 95+");
    assert_eq!(gateway.answer().await, "end");
    assert_eq!(gateway.grpc_status(), "0");
    world.until_quiet().await;
}

#[tokio::test]
async fn what_is_not_routed_is_refused_with_the_proxys_statuses() {
    let engines = [Engine::start().await, Engine::start().await];
    let world = World::with_active_max(&[&engines[0], &engines[1]], 1).await;
    let refused = async |body: &str, subset: Option<&[&str]>| {
        let mut gateway = FakeGateway::begin(&world.app).await;
        gateway.send_request("/v1/completions", body, subset);
        gateway.answer().await
    };
    let streamed = streamed();
    assert_eq!(refused("{", None).await, "immediate 400");
    let unknown = r#"{"model":"other","prompt":[1]}"#;
    assert_eq!(refused(unknown, None).await, "immediate 404");
    for subset in [&[][..], &["192.0.2.1:1"], &["a-name:1"]] {
        assert_eq!(refused(&streamed, Some(subset)).await, "immediate 503");
    }
    // One in a subset, then none has room.
    world.set("engines.queue_timeout_secs = 0");
    let mut held = Vec::new();
    for engine in [&engines[1], &engines[0]] {
        let mut gateway = FakeGateway::begin(&world.app).await;
        let subset = [address(engine)];
        gateway.send_request("/v1/completions", &streamed, Some(&subset));
        assert_eq!(gateway.routed().await.0, subset[0]);
        held.push(gateway);
    }
    assert_eq!(refused(&streamed, None).await, "immediate 429");
    drop(held);
    world.set_down(0, &engines[0]);
    world.set_down(1, &engines[1]);
    assert_eq!(refused(&streamed, None).await, "immediate 503");
    world.until_quiet().await;
}

/// A gateway decides which paths clients may reach.
#[tokio::test]
async fn requests_without_prompts_pass_with_an_endpoint() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    for path in ["/v1/models", "/anything?x=1", "/health"] {
        let mut gateway = FakeGateway::begin(&world.app).await;
        gateway.send_request(path, "", None);
        assert_eq!(gateway.routed().await.0, address(&engine), "{path}");
        drop(gateway);
    }
    world.until_quiet().await;
}

/// Where a gateway does not wait for the choice, its own answer passes.
#[tokio::test]
async fn a_gateway_that_stops_waiting_ends_the_request() {
    let engine = Engine::start().await;
    let world = World::with_active_max(&[&engine], 1).await;
    let mut first = FakeGateway::begin(&world.app).await;
    first.send_request("/v1/completions", &streamed(), None);
    first.routed().await;
    let mut second = FakeGateway::begin(&world.app).await;
    second.send_request("/v1/completions", &streamed(), None);
    second.send_head("504", "text/plain", None);
    assert_eq!(second.answer().await, "response_headers");
    second.send("response_body 24+");
    assert_eq!(second.answer().await, "response_body 24+");
    assert_eq!(second.answer().await, "end");
    assert_eq!(second.grpc_status(), "0");
    assert_eq!(
        world.metric("picker_streams_total{outcome=\"answered\"}"),
        1
    );
    drop(first);
    world.until_quiet().await;
}

#[tokio::test]
async fn a_message_that_cannot_follow_fails_the_stream() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let mut gateway = FakeGateway::begin(&world.app).await;
    gateway.send("request_body 1");
    assert_eq!(gateway.answer().await, "end");
    assert_eq!(gateway.grpc_status(), "3");
    assert_eq!(world.metric("picker_streams_total{outcome=\"failed\"}"), 1);
}
