//! Allocations of the threads that serve requests, for each request and for each chunk of a stream.
//! `cargo bench -p warmroute-router --bench allocations`.
//!
//! A router in this process, policy round-robin, in front of one engine. Client and engine run on
//! threads of their own, whose allocations are not counted.
#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    unsafe_code,
    reason = "a benchmark prints, stops when it is wrong, and counts allocations"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use clap::Parser as _;
use tokio::runtime::{Builder, Runtime};
use warmroute_router::config::{Config, RouterArgs};
use warmroute_router::run::Running;

/// Requests before those that count.
const WARM_UP: u64 = 200;
const REQUESTS: u64 = 1000;

/// Chunks of the shorter and of the longer streams.
const CHUNKS: [u64; 2] = [64, 576];
const STREAMS: u64 = 20;

thread_local! {
    static SERVES_REQUESTS: Cell<bool> = const { Cell::new(false) };
}
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

struct CountingAllocator;

fn count(bytes: usize) {
    if SERVES_REQUESTS.try_with(Cell::get).unwrap_or(false) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

// SAFETY: calls the system's allocator with what it was given.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's layout.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size.saturating_sub(layout.size()));
        // SAFETY: the caller's pointer and layout.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's pointer and layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const EVENT: &str = concat!(
    r#"data: {"id":"chatcmpl-0123456789","object":"chat.completion.chunk","created":1,"#,
    r#""model":"m","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"#,
    r#""finish_reason":null}]}"#,
    "\n\n"
);

const ANSWER: &str = concat!(
    r#"{"id":"chatcmpl-0123456789","object":"chat.completion","created":1,"model":"m","#,
    r#""choices":[{"index":0,"message":{"role":"assistant","content":"One answer."},"#,
    r#""finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":3,"#,
    r#""total_tokens":13}}"#
);

const MODELS: &str = r#"{"object":"list","data":[{"id":"m","object":"model"}]}"#;

/// Reads one message to its end; returns its head. `None`: the connection ended.
fn read_message(stream: &mut TcpStream) -> Option<String> {
    let mut bytes = Vec::new();
    let mut part = [0; 64 << 10];
    loop {
        let read = stream.read(&mut part).ok().filter(|read| *read > 0)?;
        bytes.extend_from_slice(&part[..read]);
        let Some(end) = bytes.windows(4).position(|at| at == b"\r\n\r\n") else {
            continue;
        };
        let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let is_whole = match length {
            Some(length) => bytes.len() >= end + 4 + length.parse::<usize>().unwrap(),
            None if head.contains("chunked") => bytes.ends_with(b"0\r\n\r\n"),
            None => true,
        };
        if is_whole {
            return Some(head);
        }
    }
}

/// An engine; a request to `/v1/chat/completions?N` gets a stream of N chunks.
fn serve_engine(mut stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    while let Some(head) = read_message(&mut stream) {
        let path = head.split(' ').nth(1).unwrap_or_default();
        let (path, chunks) = path.split_once('?').unwrap_or((path, ""));
        let body = match path {
            "/v1/chat/completions" => ANSWER,
            "/v1/models" => MODELS,
            _ => "",
        };
        if let Ok(chunks) = chunks.parse::<u64>() {
            write_stream(&mut stream, chunks);
            continue;
        }
        let length = body.len();
        let answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(answer.as_bytes()).unwrap();
    }
}

fn write_stream(stream: &mut TcpStream, chunks: u64) {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
                transfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let chunk = format!("{:x}\r\n{EVENT}\r\n", EVENT.len());
    for _ in 0..chunks {
        stream.write_all(chunk.as_bytes()).unwrap();
        // Each is a read of its own.
        thread::sleep(Duration::from_micros(300));
    }
    stream.write_all(b"0\r\n\r\n").unwrap();
}

fn start_engine() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            thread::spawn(move || serve_engine(stream));
        }
    });
    address
}

fn runtime(at_start: fn()) -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .on_thread_start(at_start)
        .enable_all()
        .build()
        .unwrap()
}

struct Client(TcpStream);

impl Client {
    fn connect(router: SocketAddr) -> Self {
        let stream = TcpStream::connect(router).unwrap();
        stream.set_nodelay(true).unwrap();
        Self(stream)
    }

    /// Returns the answer's status line and headers.
    fn ask(&mut self, path: &str, prompt_bytes: usize) -> String {
        let text = "word ".repeat(prompt_bytes / 5);
        let stream = path.contains('?');
        let body = format!(
            r#"{{"model":"m","stream":{stream},"messages":[{{"role":"user","content":"{text}"}}]}}"#
        );
        let length = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\n\r\n{body}"
        );
        self.0.write_all(request.as_bytes()).unwrap();
        read_message(&mut self.0).unwrap()
    }
}

/// Allocations and their bytes while a number of requests is served.
fn counted(client: &mut Client, path: &str, prompt_bytes: usize, requests: u64) -> (u64, u64) {
    let count = || {
        // Tasks of the last request end.
        thread::sleep(Duration::from_millis(100));
        (
            ALLOCATIONS.load(Ordering::Relaxed),
            BYTES.load(Ordering::Relaxed),
        )
    };
    let before = count();
    for _ in 0..requests {
        let head = client.ask(path, prompt_bytes);
        assert!(head.starts_with("http/1.1 200"), "{head}");
    }
    let after = count();
    (after.0 - before.0, after.1 - before.1)
}

fn main() {
    let engine = start_engine();
    let args = [
        "warmroute-router",
        "--host=127.0.0.1",
        "--port=0",
        "--admin-port=0",
        "--policy=round-robin",
        &format!("--worker=http://{engine}"),
    ];
    let config = Config::try_from(RouterArgs::parse_from(args)).unwrap();
    let (requests, background) = (runtime(|| SERVES_REQUESTS.set(true)), runtime(|| {}));
    let starting = Running::start(config, background.handle());
    let running = requests.block_on(starting).unwrap();
    let mut client = Client::connect(running.addresses.public);
    let chat = "/v1/chat/completions";
    while !client.ask(chat, 200).starts_with("http/1.1 200") {
        thread::sleep(Duration::from_millis(50));
    }
    println!("| load | allocations | bytes |\n|---|---|---|");
    for prompt_bytes in [200, 8 << 10, 128 << 10] {
        counted(&mut client, chat, prompt_bytes, WARM_UP);
        let (count, bytes) = counted(&mut client, chat, prompt_bytes, REQUESTS);
        let (count, bytes) = (count / REQUESTS, bytes / REQUESTS);
        println!("| request of {prompt_bytes} bytes | {count} | {bytes} |");
    }
    let [short, long] = CHUNKS.map(|chunks| {
        let path = format!("{chat}?{chunks}");
        counted(&mut client, &path, 200, STREAMS / 10);
        counted(&mut client, &path, 200, STREAMS)
    });
    let chunks = (CHUNKS[1] - CHUNKS[0]) * STREAMS;
    let each = |long: u64, short: u64| long.saturating_sub(short) as f64 / chunks as f64;
    let (count, bytes) = (each(long.0, short.0), each(long.1, short.1));
    println!("| chunk of a stream | {count:.2} | {bytes:.0} |");
}
