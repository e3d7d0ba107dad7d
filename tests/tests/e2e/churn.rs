//! Clients that disconnect: no slot remains, and the engines abort their requests.

use std::time::Duration;

use fastrand::Rng;
use futures_util::StreamExt as _;
use serde_json::json;
use tokio::time::timeout;

use crate::fleet::traffic::{request, send, serve};
use crate::fleet::{Engines, Flags, Fleet, Mode, client};

const AT_ONCE: usize = 100;

/// The moment at which a client leaves.
#[derive(Clone, Copy)]
enum Vanish {
    BeforeAnyAnswer,
    BeforeTheFirstToken,
    MidStream,
}

on_both_planes!(vanished_clients_leave_nothing_behind);
on_both_planes!(chunks_arrive_as_the_engine_sends_them);
on_both_planes!(a_killed_engine_is_left_out);
on_both_planes!(an_engine_that_says_it_is_ill_is_left_out_until_it_is_well);

/// A rank runs two requests, so that most of a hundred clients wait in a queue.
async fn vanished_clients_leave_nothing_behind(mode: Mode) {
    let many = match mode {
        Mode::Embedded => 2_000,
        Mode::Nats { .. } => 500,
    };
    let flags = &[
        "--itl-ms",
        "2",
        "--prefill-tokens-per-sec",
        "20000",
        "--max-num-seqs",
        "2",
    ];
    let engines = Engines {
        count: 3,
        ranks: 2,
        blocks: 400,
        flags,
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    let clients = futures_util::stream::iter(0..many).map(|number| {
        let fleet = &fleet;
        async move {
            let mut rng = Rng::with_seed(u64::try_from(number).unwrap());
            let vanish = match rng.u8(0..3) {
                0 => Vanish::BeforeAnyAnswer,
                1 => Vanish::BeforeTheFirstToken,
                _ => Vanish::MidStream,
            };
            vanishing(fleet, &mut rng, vanish).await;
        }
    });
    clients.buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;

    fleet.until_idle().await;
    let quiet = async |fleet: &Fleet| {
        let ended = fleet.counted("finished").await + fleet.counted("aborted").await;
        fleet.counted("active").await == 0 && fleet.counted("started").await == ended
    };
    fleet.until("the engines work for nobody", quiet).await;
    let aborted = fleet.counted("aborted").await;
    let cancelled = fleet
        .metric("warmroute_router_upstream_cancels_total")
        .await;
    println!("{many} clients: {aborted} requests aborted, {cancelled} cancels counted");
    assert!(aborted > 0, "clients that leave cancel what they asked");
    assert!(cancelled > 0.0, "and it is counted");

    let (path, body) = request(&mut Rng::with_seed(7));
    serve(&fleet, path, &body).await;
    fleet.until_idle().await;
}

async fn vanishing(fleet: &Fleet, rng: &mut Rng, vanish: Vanish) {
    let (path, mut body) = request(rng);
    body["stream"] = json!(true);
    body["max_tokens"] = json!(64);
    // An own connection that closes with its client.
    let asked = async {
        let client = client().pool_max_idle_per_host(0).build().unwrap();
        client.post(fleet.url(path)).json(&body).send().await
    };
    let patience = Duration::from_millis(rng.u64(0..10));
    match vanish {
        Vanish::BeforeAnyAnswer => drop(timeout(patience, asked).await),
        Vanish::BeforeTheFirstToken => drop(asked.await),
        Vanish::MidStream => {
            if let Ok(answer) = asked.await {
                let mut chunks = answer.bytes_stream();
                for _ in 0..rng.usize(1..20) {
                    drop(chunks.next().await);
                }
            }
        }
    }
}

/// Prints the gaps in the client's view, because no machine promises a time. Asserts the number of
/// chunks, so nothing is buffered.
async fn chunks_arrive_as_the_engine_sends_them(mode: Mode) {
    let engines = Engines {
        count: 1,
        ranks: 1,
        blocks: 400,
        flags: &["--itl-ms", "40"],
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    let body =
        json!({"model": "mock", "prompt": "Count to ten.", "max_tokens": 10, "stream": true});
    for (name, url) in [
        ("direct", fleet.engine(0, "/v1/completions")),
        ("routed", fleet.url("/v1/completions")),
    ] {
        let answer = fleet.http.post(url).json(&body).send().await.unwrap();
        let mut chunks = answer.bytes_stream();
        let mut gaps = Vec::new();
        let mut last = tokio::time::Instant::now();
        while let Some(chunk) = chunks.next().await {
            chunk.unwrap();
            gaps.push(last.elapsed().as_millis());
            last = tokio::time::Instant::now();
        }
        println!("{name}: gaps in ms {gaps:?}");
        // One chunk for each token, and `[DONE]`.
        assert_eq!(gaps.len(), 11, "{name}: chunks of 10 tokens");
    }
    fleet.until_idle().await;
}

/// A killed worker costs no request that another one can serve, and gets no more requests.
async fn a_killed_engine_is_left_out(mode: Mode) {
    let engines = Engines {
        count: 3,
        ranks: 1,
        blocks: 400,
        flags: &["--profile", "instant"],
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    let mut rng = Rng::with_seed(3);
    for _ in 0..10 {
        let (path, body) = request(&mut rng);
        serve(&fleet, path, &body).await;
    }
    fleet.engines[1].process.kill();
    for _ in 0..60 {
        let (path, body) = request(&mut rng);
        let served = serve(&fleet, path, &body).await;
        assert_ne!(served.worker, "worker-1");
    }
    fleet.until_idle().await;
    fleet.engines[0].process.kill();
    fleet.engines[2].process.kill();
    let (path, body) = request(&mut rng);
    let answer = send(&fleet, path, &body).await;
    assert!(answer.status().is_server_error(), "{}", answer.status());
    let error: serde_json::Value = answer.json().await.unwrap();
    assert!(error["error"]["message"].is_string(), "{error}");
    fleet.until_idle().await;
}

/// It still accepts requests and would fail them.
async fn an_engine_that_says_it_is_ill_is_left_out_until_it_is_well(mode: Mode) {
    let engines = Engines {
        count: 3,
        ranks: 1,
        blocks: 400,
        flags: &["--profile", "instant"],
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    let mut rng = Rng::with_seed(4);
    says(&fleet, 1, 503).await;
    for _ in 0..60 {
        let (path, body) = request(&mut rng);
        let served = serve(&fleet, path, &body).await;
        assert_ne!(served.worker, "worker-1");
    }
    fleet.until_idle().await;
    says(&fleet, 1, 200).await;
    let mut asked = 0;
    loop {
        let (path, body) = request(&mut rng);
        if serve(&fleet, path, &body).await.worker == "worker-1" {
            break;
        }
        asked += 1;
        assert!(asked < 500, "it is never asked again");
    }
    fleet.until_idle().await;
}

/// Sets the status of an engine's `/health` and waits until every router has it.
async fn says(fleet: &Fleet, engine: usize, health: u16) {
    let fault = fleet.http.post(fleet.engine(engine, "/debug/fault"));
    let answer = fault.json(&json!({ "health": health })).send();
    assert!(answer.await.unwrap().status().is_success());
    let well = fleet.engines.len() - usize::from(health != 200);
    let expected = f64::from(u32::try_from(well * fleet.routers.len()).unwrap());
    let is_known = async |fleet: &Fleet| {
        let healthy = fleet.metric("warmroute_router_worker_healthy").await;
        (healthy - expected).abs() < 0.5
    };
    fleet.until("every router knows how it is", is_known).await;
}
