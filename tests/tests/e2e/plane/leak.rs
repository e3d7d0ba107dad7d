//! Many requests that end in every possible way: no slot remains, and each is freed once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use super::streams::body;
use super::views::agree;
use crate::fleet::{Engines, Flags, Fleet, Mode};

/// Requests of a run (`LEAK_REQUESTS` overrides it), and the time after which no more are sent.
const REQUESTS: u64 = 20_000;
const TIME_MAX: Duration = Duration::from_secs(60);

const CLIENTS: usize = 128;

/// Counts of the possible ends.
#[derive(Default)]
struct Ends {
    left_waiting: AtomicU64,
    left_at_head: AtomicU64,
    left_in_stream: AtomicU64,
    whole: AtomicU64,
    refused: AtomicU64,
    broken: AtomicU64,
}

impl Ends {
    fn counted(&self) -> [(&'static str, u64); 6] {
        [
            ("left waiting", &self.left_waiting),
            ("left at the head", &self.left_at_head),
            ("left in mid-stream", &self.left_in_stream),
            ("whole", &self.whole),
            ("refused or failed", &self.refused),
            ("broken off", &self.broken),
        ]
        .map(|(name, count)| (name, get(count)))
    }
}

fn get(count: &AtomicU64) -> u64 {
    count.load(Ordering::Relaxed)
}

/// One client on its own connection, which closes with it.
async fn client(address: &str, number: u64, ends: &Ends) -> std::io::Result<()> {
    let mut rng = Rng::with_seed(number);
    let topic = rng.u32(0..50);
    let prompt = format!(
        "Topic {topic}. {}",
        "All begins alike. ".repeat(rng.usize(1..30))
    );
    let body = body(&prompt, 32).to_string();
    let length = body.len();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: r\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(request.as_bytes()).await?;
    // Chunks to read before leaving; `None`: leaves while it waits.
    let chunks = match rng.u8(0..4) {
        0 => {
            let patience = Duration::from_millis(rng.u64(0..60));
            let mut first = [0; 1];
            // It stops at whichever is first.
            drop(timeout(patience, stream.read(&mut first)).await);
            ends.left_waiting.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        1 => 0,
        2 => rng.usize(1..20),
        _ => usize::MAX,
    };
    let mut text = String::new();
    let mut buffer = vec![0; 16 << 10];
    loop {
        let read = stream.read(&mut buffer).await?;
        text.push_str(&String::from_utf8_lossy(&buffer[..read]));
        let has_head = text.contains("\r\n\r\n");
        if read == 0 || (has_head && !text.starts_with("HTTP/1.1 200")) {
            break;
        }
        if has_head && text.matches("data: ").count() >= chunks {
            let left = if chunks == 0 {
                &ends.left_at_head
            } else {
                &ends.left_in_stream
            };
            left.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
    }
    let end = if text.contains("data: [DONE]") {
        &ends.whole
    } else if text.starts_with("HTTP/1.1 200") || text.is_empty() {
        &ends.broken
    } else {
        &ends.refused
    };
    end.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

#[expect(
    clippy::disallowed_methods,
    reason = "how much load the machine can bear"
)]
fn requests() -> (u64, Duration) {
    match std::env::var("LEAK_REQUESTS") {
        Ok(number) => (number.parse().expect("a number"), Duration::MAX),
        Err(_) => (REQUESTS, TIME_MAX),
    }
}

/// Three ranks run four requests each, so that most requests queue. One engine is killed and
/// restarted repeatedly.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_stays_of_many_requests_however_they_end() {
    let engines = Engines {
        count: 3,
        ranks: 1,
        blocks: 4096,
        flags: &[
            "--itl-ms",
            "1",
            "--prefill-tokens-per-sec",
            "400000",
            "--max-num-seqs",
            "4",
        ],
    };
    let mode = Mode::Nats {
        indexers: 1,
        routers: 2,
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    let (many, time_max) = requests();
    let bases: Vec<String> = fleet.routers.iter().map(|router| router.base()).collect();
    let (ends, sent, begin) = (Ends::default(), AtomicU64::new(0), Instant::now());
    let clients = stream::iter(0..many).map(|number| {
        let address =
            bases[usize::try_from(number).unwrap() % bases.len()].trim_start_matches("http://");
        let (ends, sent) = (&ends, &sent);
        async move {
            if begin.elapsed() >= time_max {
                return;
            }
            sent.fetch_add(1, Ordering::Relaxed);
            if client(address, number, ends).await.is_err() {
                ends.broken.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let work = clients.buffer_unordered(CLIENTS).collect::<Vec<()>>();
    let kills = AtomicU64::new(0);
    let faults = async {
        loop {
            sleep(Duration::from_secs(3)).await;
            let kill = kills.fetch_add(1, Ordering::Relaxed);
            fleet.engines[2].process.kill();
            sleep(Duration::from_millis(500)).await;
            fleet.engines[2].process.restart().await;
            println!("restart {kill} after {:?}", begin.elapsed());
        }
    };
    tokio::select! {
        _ = work => {}
        () = faults => {}
    }
    // It may have been down when the last client left.
    fleet.engines[2].process.restart().await;
    let sent = sent.load(Ordering::Relaxed);
    println!(
        "{sent} requests in {:?}: {:?}",
        begin.elapsed(),
        ends.counted()
    );
    let [whole, refused, broken] = [&ends.whole, &ends.refused, &ends.broken].map(get);
    assert_eq!(refused, 0, "two engines serve at any time");
    assert!(whole > sent / 10, "{whole} of {sent} came to their end");
    // A killed engine had at most the open requests.
    let held = kills.into_inner() * CLIENTS as u64;
    assert!(broken <= held, "{broken} broke, {held} could");
    nothing_is_left(&fleet).await;
}

async fn nothing_is_left(fleet: &Fleet) {
    fleet.until_idle().await;
    let quiet = async |fleet: &Fleet| {
        let ended = fleet.counted("finished").await + fleet.counted("aborted").await;
        fleet.counted("active").await == 0 && fleet.counted("started").await == ended
    };
    fleet.until("the engines work for nobody", quiet).await;
    fleet
        .until("all routers agree", async |fleet| agree(fleet).await)
        .await;
    let metric = async |name: &str| fleet.metric(&format!("warmroute_router_{name}")).await;
    let (opened, freed) = (
        metric("slots_opened_total").await,
        metric("slots_freed_total").await,
    );
    let cancelled = metric("upstream_cancels_total").await;
    let (ignored, retries) = (
        metric("slot_changes_ignored_total").await,
        metric("retries_total").await,
    );
    println!("{opened} slots opened, {freed} freed; {retries} retries, {cancelled} cancels");
    assert!(opened > 0.0 && retries > 0.0 && cancelled > 0.0);
    assert!((opened - freed).abs() < 0.5, "each is freed exactly once");
    assert!(ignored.abs() < 0.5, "{ignored} changes that made no sense");
}
