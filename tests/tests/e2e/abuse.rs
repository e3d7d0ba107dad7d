//! Hostile input gets a clear error in OpenAI's form, and the next request works.

use fastrand::Rng;
use futures_util::StreamExt as _;
use reqwest::{Body, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use warmroute_process::access::keys::KeyHash;

use crate::fleet::traffic::{request, serve};
use crate::fleet::{
    Engines, Flags, Fleet, Mode, PATIENCE, Place, Process, ROUTER, client, free_port, strings,
};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test(flavor = "multi_thread")]
async fn hostile_requests_get_clear_errors() {
    let engines = Engines {
        count: 2,
        ranks: 1,
        blocks: 400,
        flags: &["--profile", "instant"],
    };
    let fleet = Fleet::start(Mode::Embedded, engines, Flags::default()).await;
    let mut rng = Rng::with_seed(5);
    let deep = format!(
        "{{\"model\":\"mock\",\"messages\":{}{}}}",
        "[".repeat(5000),
        "]".repeat(5000)
    );
    let cases: Vec<(&str, Vec<u8>, StatusCode)> = vec![
        ("nothing", vec![], StatusCode::BAD_REQUEST),
        ("no JSON", b"{\"model\": ".to_vec(), StatusCode::BAD_REQUEST),
        (
            "no UTF-8",
            b"{\"model\":\"\xff\xfe\"}".to_vec(),
            StatusCode::BAD_REQUEST,
        ),
        ("no object", b"[1,2]".to_vec(), StatusCode::BAD_REQUEST),
        (
            "no model",
            b"{\"messages\":[]}".to_vec(),
            StatusCode::BAD_REQUEST,
        ),
        ("deep", deep.into_bytes(), StatusCode::BAD_REQUEST),
        (
            "unknown model",
            b"{\"model\":\"nobody\",\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}".to_vec(),
            StatusCode::NOT_FOUND,
        ),
    ];
    for (name, body, status) in cases {
        let answer = fleet
            .http
            .post(fleet.url(CHAT))
            .body(body)
            .send()
            .await
            .unwrap();
        assert_eq!(answer.status(), status, "{name}");
        let error: Value = answer.json().await.unwrap();
        assert!(error["error"]["message"].is_string(), "{name}: {error}");
        assert!(error["error"]["type"].is_string(), "{name}: {error}");
        let (path, body) = request(&mut rng);
        serve(&fleet, path, &body).await;
    }
    fleet.until_idle().await;
}

/// 100 MB, announced or not: refused without buffering.
#[tokio::test(flavor = "multi_thread")]
async fn huge_bodies_are_refused_and_not_kept() {
    let engines = Engines {
        count: 1,
        ranks: 1,
        blocks: 400,
        flags: &["--profile", "instant"],
    };
    let flags = Flags {
        router: &["--max-body-bytes", "1048576"],
        ..Flags::default()
    };
    let fleet = Fleet::start(Mode::Embedded, engines, flags).await;
    let before = resident_kib(&fleet);
    let announced = Body::from(vec![b'x'; 100_000_000]);
    let chunks =
        futures_util::stream::iter((0..1600).map(|_| Ok::<_, std::io::Error>(vec![b'x'; 62_500])));
    for (name, body) in [
        ("announced", announced),
        ("chunked", Body::wrap_stream(chunks.boxed())),
    ] {
        // The answer may arrive, or the connection may close, before the whole body is sent.
        match fleet.http.post(fleet.url(CHAT)).body(body).send().await {
            Ok(answer) => assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE, "{name}"),
            Err(error) => assert!(error.is_request() || error.is_body(), "{name}: {error}"),
        }
        let (path, body) = request(&mut Rng::with_seed(9));
        serve(&fleet, path, &body).await;
    }
    let grown = resident_kib(&fleet).saturating_sub(before);
    println!("two bodies of 100 MB: {grown} KiB more resident");
    assert!(grown < 50_000, "{grown} KiB: the bodies were kept");
    fleet.until_idle().await;
}

/// Read as trees or lists, such values take up to 80 times their text. A model that is not served
/// keeps the bodies from the engine.
#[tokio::test(flavor = "multi_thread")]
async fn bodies_of_many_small_values_take_memory_by_their_size() {
    const BYTES: usize = 8 << 20;
    let (key, place) = ("wr-small-values", Place::new());
    let hash = KeyHash::of(key.as_bytes()).unwrap().to_hex();
    let settings = format!(
        "[[tenants]]\nname = \"t\"\nkeys = [{{ id = \"k\", sha256 = \"{hash}\" }}]\n\
         max_output_tokens = 4294967295\n"
    );
    let flags = Flags {
        router: place.router_flags(&settings),
        ..Flags::default()
    };
    for (path, start, item) in [
        ("/v1/responses", r#"{"model":"none","input":["#, "{}"),
        (
            "/v1/completions",
            r#"{"model":"none","max_tokens":1,"prompt":["#,
            "[1]",
        ),
        (
            "/v1/completions",
            r#"{"model":"none","max_tokens":1,"prompt":["#,
            "\"\"",
        ),
        (
            "/rerank",
            r#"{"model":"none","previous_response_id":["#,
            "{}",
        ),
    ] {
        // What one case frees would hide what the next one takes.
        let engines = Engines {
            count: 1,
            ranks: 1,
            blocks: 100,
            flags: &[],
        };
        let fleet = Fleet::start(Mode::Embedded, engines, flags).await;
        let before = status_kib(&fleet, "VmRSS");
        let items = vec![item; BYTES / (item.len() + 1)].join(",");
        let sent = fleet.http.post(fleet.url(path)).bearer_auth(key);
        let answer = sent.body(format!("{start}{items}]}}")).send().await;
        assert_eq!(
            answer.unwrap().status(),
            StatusCode::NOT_FOUND,
            "{path} {item}"
        );
        let grown = status_kib(&fleet, "VmHWM").saturating_sub(before);
        println!("{path} {item}: at most {grown} KiB more resident");
        assert!(
            grown < 5 * (BYTES as u64 >> 10),
            "{path} {item}: {grown} KiB"
        );
    }
}

/// Without any worker.
#[tokio::test(flavor = "multi_thread")]
async fn without_workers_the_router_says_so() {
    let engines = Engines {
        count: 1,
        ranks: 1,
        blocks: 400,
        flags: &["--profile", "instant"],
    };
    let fleet = Fleet::start(Mode::Embedded, engines, Flags::default()).await;
    fleet.engines[0].process.kill();
    let body = json!({"model": "mock", "messages": [{"role": "user", "content": "x"}]});
    for _ in 0..20 {
        let answer = fleet
            .http
            .post(fleet.url(CHAT))
            .json(&body)
            .send()
            .await
            .unwrap();
        let status = answer.status();
        assert!(
            [StatusCode::SERVICE_UNAVAILABLE, StatusCode::BAD_GATEWAY].contains(&status),
            "{status}"
        );
        let error: Value = answer.json().await.unwrap();
        assert!(error["error"]["message"].is_string(), "{error}");
    }
    fleet.until_idle().await;
}

fn resident_kib(fleet: &Fleet) -> u64 {
    status_kib(fleet, "VmRSS")
}

fn status_kib(fleet: &Fleet, field: &str) -> u64 {
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", fleet.routers[0].pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Few systems allow as many open files as the default of `--max-connections` needs.
#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_make_room_where_files_are_few() {
    const CONNECTIONS: usize = 400;
    // Seven eighths of what 128 files, one of 16 and the 18 of a rank leave of 300.
    const FITTING: usize = 119;
    let place = Place::new();
    let ports = [free_port(), free_port(), free_port()];
    let [engine, public, admin] = ports.map(|port| port.to_string());
    let router = strings(&["prlimit", "--nofile=200:300", ROUTER, "--host=127.0.0.1"]);
    let worker = format!("--worker=http://127.0.0.1:{engine},kv=tcp://127.0.0.1:{engine},id=w");
    let ports = ["--port", &public, "--admin-port", &admin, &worker];
    let arguments = router.into_iter().chain(strings(&ports)).collect();
    let _router = Process::start("/usr/bin/env", &place.path("router.log"), arguments).await;
    let log = || std::fs::read_to_string(place.path("router.log")).unwrap();
    // The soft limit is raised to the hard one.
    assert!(
        log().contains(&format!("connections={FITTING}")),
        "{}",
        log()
    );
    let mut held = Vec::new();
    for number in 0..CONNECTIONS {
        let mut stream = TcpStream::connect(format!("127.0.0.1:{public}"))
            .await
            .unwrap();
        let ask = b"GET /v1/models HTTP/1.1\r\nhost: w\r\n\r\n";
        stream.write_all(ask).await.unwrap();
        let mut head = [0; 8];
        let read = timeout(PATIENCE, stream.read_exact(&mut head)).await;
        assert!(read.unwrap().is_ok(), "connection {number}: {}", log());
        assert_eq!(&head, b"HTTP/1.1");
        held.push(stream);
    }
    let metrics = format!("http://127.0.0.1:{admin}/metrics");
    let page = client().build().unwrap().get(metrics).send().await.unwrap();
    let page = page.text().await.unwrap();
    let evicted = page
        .lines()
        .find_map(|line| line.strip_prefix("warmroute_router_connections_evicted_total "));
    let evicted: usize = evicted.unwrap().parse().unwrap();
    assert_eq!(evicted, CONNECTIONS - FITTING);
}
