//! A mock engine that costs little: no parser but for the end of a head, no model.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy, sink};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{MissedTickBehavior, interval};

use crate::client::contains;
use crate::faults::Fault;

/// Chunks of a stream.
pub const CHUNKS: usize = 128;

/// Time between two chunks of a stream: that of a fast engine.
pub const CHUNK_PERIOD: Duration = Duration::from_millis(10);

const EVENT: &str = concat!(
    r#"data: {"id":"chatcmpl-0123456789","object":"chat.completion.chunk","created":1,"#,
    r#""model":"m","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"#,
    r#""finish_reason":null}]}"#,
    "\n\n"
);

pub const STREAM_HEAD: &str = "HTTP/1.1 200 OK\r\n\
    content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";

const ANSWER: &str = concat!(
    r#"{"id":"chatcmpl-0123456789","object":"chat.completion","created":1,"model":"m","#,
    r#""choices":[{"index":0,"message":{"role":"assistant","content":"One answer."},"#,
    r#""finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":3,"#,
    r#""total_tokens":13}}"#
);

const INFO: &str = r#"{"model_path":"m","tokenizer_path":"m","is_generation":true,
    "model_id":"m","served_model_name":"m","tp_size":1,"dp_size":1,"version":"0.33.0"}"#;

/// In a request for a stream without an end, which comes faster than others.
pub const ENDLESS_MARK: &str = "\"max_tokens\":1000000";

/// Events of a stream without an end that are written together: 8 KiB.
const ENDLESS_EVENTS: usize = 44;

/// A longer body asks for no fault.
const FAULT_BODY_MAX: usize = 4096;

/// A longer body is not kept, and asks for no stream.
const KEPT_BODY_MAX: usize = 1 << 20;

/// Least threads that serve all engines.
pub const THREADS_MIN: usize = 4;

/// What all engines serve.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    pub max_model_len: u32,
    /// The engine that answers `/tokenize`; `None`: 404.
    pub tokenize: Option<SocketAddr>,
}

impl Served {
    /// What proxies read of an engine at their start.
    fn models(self) -> String {
        format!(
            r#"{{"object":"list","data":[{{"id":"m","object":"model","created":1,
            "owned_by":"vllm","root":"m","parent":null,"max_model_len":{}}}]}}"#,
            self.max_model_len
        )
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Answer,
    Stream,
    EndlessStream,
    Fault(Fault),
}

/// Starts so many engines on so many threads.
pub fn start(count: usize, served: Served, threads: usize) -> anyhow::Result<Vec<SocketAddr>> {
    let bind = |_| {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    let listeners = (0..count).map(bind).collect::<io::Result<Vec<_>>>()?;
    let addresses = listeners.iter().map(std::net::TcpListener::local_addr);
    let addresses = addresses.collect::<io::Result<Vec<_>>>()?;
    let mut listeners = listeners.into_iter().peekable();
    while listeners.peek().is_some() {
        let part = listeners.by_ref().take(count.div_ceil(threads)).collect();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("starting the backends' runtime")?;
        std::thread::spawn(move || runtime.block_on(serve_all(part, served)));
    }
    Ok(addresses)
}

async fn serve_all(listeners: Vec<std::net::TcpListener>, served: Served) {
    for listener in listeners {
        let Ok(listener) = TcpListener::from_std(listener) else {
            continue;
        };
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, served));
            }
        });
    }
    std::future::pending().await
}

/// Serves a connection until it closes. Errors end it.
async fn serve(mut stream: TcpStream, served: Served) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(256 << 10);
    let models = served.models();
    loop {
        let Some((wanted, path)) = read_request(&mut stream, &mut buffer).await? else {
            return Ok(());
        };
        match wanted {
            Wanted::Answer => {}
            Wanted::Stream => {
                write_events(&mut stream).await?;
                continue;
            }
            Wanted::EndlessStream => return write_endless_events(&mut stream).await,
            // A router sends the text to `/tokenize`, too.
            Wanted::Fault(_) if path == "/tokenize" => {}
            Wanted::Fault(fault) => {
                if fault.serve(&mut stream).await? {
                    continue;
                }
                return Ok(());
            }
        }
        if let ("/tokenize", Some(tokenizing)) = (path.as_str(), served.tokenize) {
            return forward(&buffer, tokenizing, &mut stream).await;
        }
        let (status, body) = match path.as_str() {
            "/v1/chat/completions" => (200, ANSWER),
            "/v1/models" => (200, models.as_str()),
            "/health" | "/health_generate" => (200, ""),
            "/get_model_info" | "/model_info" | "/get_server_info" | "/server_info"
            | "/version" => (200, INFO),
            _ => (404, "{}"),
        };
        let answer = format!(
            "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n\
             {body}",
            body.len()
        );
        stream.write_all(answer.as_bytes()).await?;
    }
}

/// Reads one request to its end. Returns what it asks for, and its path.
async fn read_request(
    stream: &mut TcpStream,
    buffer: &mut Vec<u8>,
) -> io::Result<Option<(Wanted, String)>> {
    buffer.clear();
    let head_end = loop {
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
        if let Some(at) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break at + 4;
        }
    };
    let head = String::from_utf8_lossy(&buffer[..head_end]).to_lowercase();
    let path = head.split(' ').nth(1).unwrap_or("/");
    let path = path.split('?').next().unwrap_or("/").to_owned();
    let header = |name: &str| head.lines().find_map(|line| line.strip_prefix(name));
    let length = header("content-length:").and_then(|value| value.trim().parse::<usize>().ok());
    if let Some(length) = length.filter(|length| *length > KEPT_BODY_MAX) {
        let rest = (head_end + length).saturating_sub(buffer.len());
        let read = copy(&mut stream.take(rest as u64), &mut sink()).await?;
        return Ok((read == rest as u64).then_some((Wanted::Answer, path)));
    }
    let is_chunked = header("transfer-encoding:").is_some();
    let is_whole = |bytes: &[u8]| match length {
        Some(length) => bytes.len() >= head_end + length,
        None => !is_chunked || bytes.ends_with(b"0\r\n\r\n"),
    };
    while !is_whole(buffer) {
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
    // Some proxies write the body's fields in another order.
    let body = &buffer[head_end..];
    let fault = Some(body)
        .filter(|body| body.len() <= FAULT_BODY_MAX)
        .and_then(Fault::wanted);
    let wanted = if let Some(fault) = fault {
        Wanted::Fault(fault)
    } else if !contains(body, b"\"stream\":true") {
        Wanted::Answer
    } else if contains(body, ENDLESS_MARK.as_bytes()) {
        Wanted::EndlessStream
    } else {
        Wanted::Stream
    };
    Ok(Some((wanted, path)))
}

/// Forwards one request. The answer closes the connection.
async fn forward(request: &[u8], to: SocketAddr, answer: &mut TcpStream) -> io::Result<()> {
    let mut engine = TcpStream::connect(to).await?;
    let line_end = request.iter().position(|byte| *byte == b'\n');
    let (line, rest) = request.split_at(line_end.map_or(0, |at| at + 1));
    engine
        .write_all(&[line, b"connection: close\r\n", rest].concat())
        .await?;
    copy(&mut engine, answer).await?;
    Ok(())
}

async fn write_events(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(STREAM_HEAD.as_bytes()).await?;
    let event = chunk(EVENT);
    let mut ticks = interval(CHUNK_PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for _ in 0..CHUNKS {
        ticks.tick().await;
        stream.write_all(event.as_bytes()).await?;
    }
    let end = chunk("data: [DONE]\n\n") + "0\r\n\r\n";
    stream.write_all(end.as_bytes()).await
}

/// Ends when the connection does.
async fn write_endless_events(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(STREAM_HEAD.as_bytes()).await?;
    let events = chunk(EVENT).repeat(ENDLESS_EVENTS);
    let mut ticks = interval(CHUNK_PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        stream.write_all(events.as_bytes()).await?;
    }
}

pub fn chunk(event: &str) -> String {
    format!("{:x}\r\n{event}\r\n", event.len())
}
