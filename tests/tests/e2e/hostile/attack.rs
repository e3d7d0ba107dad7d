//! The attacks whose memory is bounded.

use std::fmt::Write as _;

use fastrand::Rng;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::engine::{Act, LINE_BYTES};
use super::{CHAT, Target, chat, post, words};
use crate::fleet::PATIENCE;

const MIB: usize = 1 << 20;

/// Clients of an attack at a time.
const CLIENTS: usize = 64;

/// Requests of an attack that are held as a whole.
const LARGE_CLIENTS: usize = 4;

/// What a slow body announces.
const SLOW_BODY_BYTES: usize = 32 * MIB;

const KEYS: usize = 300_000;

const NESTING: usize = 100_000;

const HEADER_BYTES: usize = 60_000;

/// Above `max_prompt_bytes`.
pub(super) const LONG_PROMPT_BYTES: usize = 18_600_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attack {
    SlowBodies,
    SlowHeads,
    Smuggling,
    HeaderBombs,
    DeepJson,
    ManyKeys,
    LongPrompt,
    Hang,
    Reset,
    ShortAnswers,
    LongAnswers,
    LongLine,
}

impl Attack {
    pub(super) const ALL: [Self; 12] = [
        Self::SlowBodies,
        Self::SlowHeads,
        Self::Smuggling,
        Self::HeaderBombs,
        Self::DeepJson,
        Self::ManyKeys,
        Self::LongPrompt,
        Self::Hang,
        Self::Reset,
        Self::ShortAnswers,
        Self::LongAnswers,
        Self::LongLine,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::SlowBodies => "64 slow bodies of 32 MiB",
            Self::SlowHeads => "64 slow heads",
            Self::Smuggling => "request smuggling",
            Self::HeaderBombs => "64 heads of 60 KB",
            Self::DeepJson => "JSON 100,000 deep",
            Self::ManyKeys => "4 bodies of 300,000 keys",
            Self::LongPrompt => "prompt of 18.6 MB",
            Self::Hang => "64 engine hangs",
            Self::Reset => "64 engine resets",
            Self::ShortAnswers => "64 answers of less than 1 GiB",
            Self::LongAnswers => "64 answers of more than 2 bytes",
            Self::LongLine => "line of 256 MiB",
        }
    }

    /// Most memory beyond that of the idle router, in MiB.
    pub(super) const fn growth_max_mib(self) -> u64 {
        match self {
            Self::SlowBodies | Self::SlowHeads | Self::Smuggling => 16,
            Self::HeaderBombs | Self::Hang | Self::Reset => 24,
            Self::ShortAnswers | Self::LongAnswers | Self::LongLine => 24,
            // Bodies of 0.2 MB, four at a time.
            Self::DeepJson => 24,
            // Each body, the JSON of its members, and its text as the prompt.
            Self::ManyKeys => 64,
            // The body, as it arrives and whole.
            Self::LongPrompt => 64,
        }
    }

    /// Returns when its effect on the router is there, or over. Checks the answers.
    pub(super) async fn run(self, target: &Target) {
        match self {
            Self::SlowBodies => slow_bodies(target).await,
            Self::SlowHeads => slow_heads(target).await,
            Self::Smuggling => smuggling(target).await,
            Self::HeaderBombs => header_bombs(target).await,
            Self::DeepJson => deep_json(target).await,
            Self::ManyKeys => hung_bodies(target, LARGE_CLIENTS, &many_keys).await,
            Self::LongPrompt => long_prompt(target).await,
            Self::Hang => hung_bodies(target, CLIENTS, &|mark| chat(mark, "Hang.")).await,
            Self::Reset => lies(target, Act::Reset, "HTTP/1.1 502").await,
            Self::ShortAnswers => lies(target, Act::ShortAnswer, "HTTP/1.1 200").await,
            Self::LongAnswers => lies(target, Act::LongAnswer, "HTTP/1.1 ").await,
            Self::LongLine => long_line(target).await,
        }
    }
}

/// A chat of this mark with an object of many members.
pub(super) fn many_keys(mark: &str) -> String {
    let mut members = format!("{mark}\"chat_template_kwargs\":{{");
    for key in 0..KEYS {
        let comma = if key == 0 { "" } else { "," };
        write!(members, "{comma}\"key{key:06}\":1").unwrap();
    }
    members.push_str("},");
    chat(&members, "Hi.")
}

/// The streams of clients that stay connected.
async fn connections(target: &Target, start: &[u8], count: usize) -> Vec<TcpStream> {
    let mut streams = Vec::new();
    for _ in 0..count {
        streams.push(target.send(start).await);
    }
    streams
}

/// Sends a few more bytes on each connection, one at a time.
async fn drip(streams: &mut [TcpStream], byte: &[u8]) {
    for _ in 0..20 {
        for stream in &mut *streams {
            stream.write_all(byte).await.unwrap();
        }
    }
}

async fn slow_bodies(target: &Target) {
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n\
         content-length: {SLOW_BODY_BYTES}\r\n\r\n{{"
    );
    let mut streams = connections(target, head.as_bytes(), CLIENTS).await;
    drip(&mut streams, b" ").await;
    let are_open = async |target: &Target| target.metric("buffered_bytes").await >= CLIENTS as f64;
    target.until("the bodies are read", are_open).await;
    target.ask(chat("", "Hello.")).await;
}

async fn slow_heads(target: &Target) {
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: r\r\nx-slow: ");
    let mut streams = connections(target, head.as_bytes(), CLIENTS).await;
    drip(&mut streams, b"a").await;
    target.ask(chat("", "Hello.")).await;
}

/// Each request has one meaning: a second one that the framing hides is served or is not, and no
/// answer but its own reaches the next client.
async fn smuggling(target: &Target) {
    let json = chat("", "Hello.");
    let hidden = String::from_utf8(post("", &json)).unwrap();
    let chunked = format!("{:x}\r\n{json}\r\n0\r\n\r\n{hidden}", json.len());
    let framings = [
        "content-length: 5\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
        "transfer-encoding: xchunked\r\n",
        "transfer-encoding : chunked\r\n",
        " transfer-encoding: chunked\r\n",
        "x: y\r\n transfer-encoding: chunked\r\n",
        "content-length: 26\r\ncontent-length: 5\r\n",
        "content-length: +26\r\n",
        "content-length: 0x1a\r\n",
        "content-length: 99999999999999999999\r\n",
        "content-length: -1\r\n",
        "content-length: 0\r\n",
        "x\0y: a\r\n",
    ];
    for framing in framings.iter().cycle().take(CLIENTS) {
        let request = format!("POST {CHAT} HTTP/1.1\r\nhost: r\r\n{framing}\r\n{chunked}");
        let mut stream = target.send(request.as_bytes()).await;
        stream.shutdown().await.ok();
        let answer = read_all(stream).await;
        assert!(answer.matches("HTTP/1.1 200").count() <= 2, "{answer}");
    }
}

/// Few long header lines, and many short ones.
async fn header_bombs(target: &Target) {
    let (count, json) = ([1, 60, 9_000], chat("", "Hello."));
    let heads = count.map(|count| {
        let mut lines = String::new();
        for number in 0..count {
            let value = "a".repeat((HEADER_BYTES / count).saturating_sub(8).max(1));
            write!(lines, "{number}:{value}\r\n").unwrap();
        }
        post(&lines, &json)
    });
    let mut streams = Vec::new();
    for head in heads.iter().cycle().take(CLIENTS) {
        streams.push(target.send(head).await);
    }
    for stream in streams {
        // A refused head is a status or, while it is still sent, a reset.
        let first = first_line(stream).await;
        assert!(
            first.is_empty() || first.starts_with("HTTP/1.1 "),
            "{first}"
        );
    }
}

async fn deep_json(target: &Target) {
    let (open, close) = ("[".repeat(NESTING), "]".repeat(NESTING));
    for field in ["metadata", "chat_template_kwargs", "tools"] {
        let body = chat(&format!("\"{field}\":{{\"a\":{open}{close}}},"), "Hi.");
        let mut streams = Vec::new();
        for _ in 0..LARGE_CLIENTS {
            streams.push(target.send(&post("", &body)).await);
        }
        for stream in streams {
            let first = first_line(stream).await;
            assert!(first.starts_with("HTTP/1.1 400"), "{field}: {first}");
        }
    }
}

/// Bodies that the engines take and do not answer. Their clients hang up.
async fn hung_bodies(target: &Target, count: usize, body: &dyn Fn(&str) -> String) {
    let body = body(Act::Hang.mark());
    let streams = connections(target, &post("", &body), count).await;
    let are_sent = async |target: &Target| {
        let page = target.admin("/v1/slots").await;
        let slots: serde_json::Value = serde_json::from_str(&page).unwrap();
        let sources = slots["sources"].as_array().unwrap().iter();
        let active = sources.map(|source| source["active_requests"].as_u64().unwrap());
        active.sum::<u64>() >= count as u64
    };
    target
        .until("the engines have the requests", are_sent)
        .await;
    target.ask(chat("", "Hello.")).await;
    drop(streams);
}

async fn long_prompt(target: &Target) {
    let text = words(&mut Rng::with_seed(11), LONG_PROMPT_BYTES);
    target.ask(chat("", &text)).await;
}

/// Answers that an engine breaks off, or that go on after their end.
async fn lies(target: &Target, act: Act, status: &str) {
    let request = post("connection: close\r\n", &chat(act.mark(), "Lie."));
    let streams = connections(target, &request, CLIENTS).await;
    for stream in streams {
        let answer = read_all(stream).await;
        assert!(answer.starts_with(status), "{act:?}: {answer}");
        assert!(!answer.contains("forged"), "{act:?}: {answer}");
    }
}

/// The client reads all of it.
async fn long_line(target: &Target) {
    let body = chat(
        &format!("{}\"stream\":true,", Act::LongLine.mark()),
        "Line.",
    );
    let mut stream = target.send(&post("connection: close\r\n", &body)).await;
    let (mut piece, mut sum) = (vec![0; 256 << 10], 0);
    loop {
        let read = timeout(PATIENCE, stream.read(&mut piece)).await;
        match read.expect("the line goes on") {
            Ok(0) | Err(_) => break,
            Ok(read) => sum += read,
        }
    }
    assert!(sum >= LINE_BYTES, "{sum}");
}

/// All that is received until the connection ends.
async fn read_all(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    let read = timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
    // An error is a reset, after which there is no more.
    drop(read.expect("the connection ends"));
    String::from_utf8_lossy(&answer).into_owned()
}

async fn first_line(mut stream: TcpStream) -> String {
    let mut start = [0; 16];
    let read = timeout(PATIENCE, stream.read(&mut start)).await;
    let read = read.expect("an answer").unwrap_or(0);
    String::from_utf8_lossy(&start[..read]).into_owned()
}
