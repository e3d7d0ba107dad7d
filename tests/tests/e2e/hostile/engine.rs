//! A mock engine behind a server that misbehaves where a request's body asks for it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy, sink};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::fleet::{ENGINE, Place, Process, TOKENIZER, free_port, strings};

/// Bytes of the line of [`Act::LongLine`].
pub(super) const LINE_BYTES: usize = 256 << 20;

/// A longer body is not given to the mock engine, which would take long to tokenize it.
const SERVED_BODY_MAX: usize = 256 << 10;

const ANSWER: &str = concat!(
    r#"{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"mock","#,
    r#""choices":[{"index":0,"message":{"role":"assistant","content":"Yes."},"#,
    r#""finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":2,"#,
    r#""total_tokens":12}}"#
);

/// The model's length, which bounds the prompts that are tokenized, is not that of the mock engine's
/// cache.
const MODELS: &str = concat!(
    r#"{"object":"list","data":[{"id":"mock","object":"model","created":1,"#,
    r#""owned_by":"vllm","root":"mock","parent":null,"max_model_len":10000000}]}"#
);

/// How an engine answers a request whose body has the act's mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// The connection is reset when the request is read.
    Reset,
    /// There is no answer.
    Hang,
    /// The connection ends before the announced bytes.
    ShortAnswer,
    /// More bytes than announced, which look like an answer.
    LongAnswer,
    /// One event of [`LINE_BYTES`] without a line end.
    LongLine,
}

/// What becomes of a connection that the router uses again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reuse {
    Served,
    /// It is reset when a further request of a client is read.
    Reset,
}

/// Ends when it is dropped.
pub(super) struct HostileEngine {
    process: Process,
    url: String,
    kv: u16,
    replay: u16,
    resets: Arc<AtomicUsize>,
    _server: AbortOnDropHandle<()>,
}

/// A request as it arrived, without its body if that is long.
struct Asked {
    bytes: Vec<u8>,
    act: Option<Act>,
    is_chat: bool,
    /// The answer, if it is not the mock engine's.
    answer: Option<&'static str>,
}

impl Act {
    const ALL: [Self; 5] = [
        Self::Reset,
        Self::Hang,
        Self::ShortAnswer,
        Self::LongAnswer,
        Self::LongLine,
    ];

    /// A member of a body, with its comma.
    pub(super) const fn mark(self) -> &'static str {
        match self {
            Self::Reset => r#""metadata":{"act":"reset"},"#,
            Self::Hang => r#""metadata":{"act":"hang"},"#,
            Self::ShortAnswer => r#""metadata":{"act":"short"},"#,
            Self::LongAnswer => r#""metadata":{"act":"long"},"#,
            Self::LongLine => r#""metadata":{"act":"line"},"#,
        }
    }

    fn of(request: &[u8]) -> Option<Self> {
        let has = |act: &Self| find(request, act.mark().as_bytes()).is_some();
        Self::ALL.into_iter().find(has)
    }
}

impl HostileEngine {
    pub(super) async fn start(place: &Place, name: &str, reuse: Reuse) -> Self {
        let (kv, replay) = (free_port(), free_port());
        let ports = [free_port(), kv, replay].map(|port| port.to_string());
        let arguments = strings(&[
            "--port",
            &ports[0],
            "--kv-port",
            &ports[1],
            "--replay-port",
            &ports[2],
            "--model=mock",
            "--tokenizer",
            TOKENIZER,
            "--num-blocks=16384",
            "--profile=instant",
        ]);
        let log = place.path(&format!("{name}.log"));
        let process = Process::start(ENGINE, &log, arguments).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let resets = Arc::new(AtomicUsize::new(0));
        let behind = process.base().trim_start_matches("http://").to_owned();
        let count = Arc::clone(&resets);
        let serve = async move {
            let tasks = TaskTracker::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (behind, count) = (behind.clone(), Arc::clone(&count));
                tasks.spawn(async move {
                    // An error is the router's end of the connection.
                    drop(converse(stream, &behind, reuse, &count).await);
                });
            }
        };
        Self {
            process,
            url,
            kv,
            replay,
            resets,
            _server: AbortOnDropHandle::new(TaskTracker::new().spawn(serve)),
        }
    }

    /// As a router's `--worker` has it.
    pub(super) fn worker(&self, name: &str) -> String {
        let (url, kv, replay) = (&self.url, self.kv, self.replay);
        format!("{url},kv=tcp://127.0.0.1:{kv},replay=tcp://127.0.0.1:{replay},id={name}")
    }

    /// Connections that were reset so far.
    pub(super) fn resets(&self) -> usize {
        assert!(self.process.is_running());
        self.resets.load(Ordering::Relaxed)
    }
}

async fn converse(
    mut stream: TcpStream,
    behind: &str,
    reuse: Reuse,
    resets: &AtomicUsize,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut is_reused = false;
    while let Some(asked) = read_request(&mut stream).await? {
        let act = match reuse {
            Reuse::Reset if is_reused && asked.is_chat => Some(Act::Reset),
            Reuse::Reset | Reuse::Served => asked.act,
        };
        is_reused = true;
        if let Some(act) = act {
            return misbehave(stream, act, resets).await;
        }
        let answer = match asked.answer {
            Some(json) => {
                let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
                format!("{head}content-length: {}\r\n\r\n{json}", json.len()).into_bytes()
            }
            None => served(&asked.bytes, behind).await?,
        };
        stream.write_all(&answer).await?;
    }
    Ok(())
}

async fn misbehave(mut stream: TcpStream, act: Act, resets: &AtomicUsize) -> io::Result<()> {
    let json = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
    match act {
        Act::Reset => {
            resets.fetch_add(1, Ordering::Relaxed);
            stream.set_zero_linger()
        }
        Act::Hang => until_closed(&mut stream).await,
        Act::ShortAnswer => {
            let answer = format!("{json}content-length: 1073741824\r\n\r\n{{");
            stream.write_all(answer.as_bytes()).await
        }
        Act::LongAnswer => {
            let forged = format!("{json}content-length: 6\r\n\r\nforged");
            let answer = format!(
                "{json}content-length: 2\r\n\r\n{{}}{}",
                forged.repeat(10_000)
            );
            stream.write_all(answer.as_bytes()).await?;
            until_closed(&mut stream).await
        }
        Act::LongLine => {
            let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: ";
            stream.write_all(head).await?;
            let piece = vec![b'x'; 256 << 10];
            for _ in 0..LINE_BYTES / piece.len() {
                stream.write_all(&piece).await?;
            }
            Ok(())
        }
    }
}

async fn until_closed(stream: &mut TcpStream) -> io::Result<()> {
    copy(stream, &mut sink()).await.map(drop)
}

/// The mock engine's answer, whose connection is another one.
async fn served(request: &[u8], behind: &str) -> io::Result<Vec<u8>> {
    let line_end = find(request, b"\r\n").unwrap_or(0) + 2;
    let (line, rest) = request.split_at(line_end);
    let mut engine = TcpStream::connect(behind).await?;
    let closing: &[u8] = b"connection: close\r\n";
    engine.write_all(&[line, closing, rest].concat()).await?;
    let mut answer = Vec::new();
    engine.read_to_end(&mut answer).await?;
    if let Some(at) = find(&answer, closing) {
        answer.drain(at..at + closing.len());
    }
    Ok(answer)
}

/// Reads a request to its end; `None` at the end of the connection.
async fn read_request(stream: &mut TcpStream) -> io::Result<Option<Asked>> {
    let mut bytes = Vec::with_capacity(8 << 10);
    let head_end = loop {
        if stream.read_buf(&mut bytes).await? == 0 {
            return Ok(None);
        }
        if let Some(at) = find(&bytes, b"\r\n\r\n") {
            break at + 4;
        }
    };
    let head = String::from_utf8_lossy(&bytes[..head_end]).to_lowercase();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length:"));
    let length: usize = length.map_or(0, |text| text.trim().parse().unwrap());
    let is_chat = head.starts_with("post /v1/chat/completions ");
    let end = head_end + length;
    let answer = match () {
        () if head.starts_with("get /v1/models ") => Some(MODELS),
        () if length > SERVED_BODY_MAX => Some(ANSWER),
        () => None,
    };
    let kept = end.min(head_end + SERVED_BODY_MAX);
    while bytes.len() < kept {
        if stream.read_buf(&mut bytes).await? == 0 {
            return Ok(None);
        }
    }
    let rest = end.saturating_sub(bytes.len()) as u64;
    copy(&mut stream.take(rest), &mut sink()).await?;
    let act = Act::of(&bytes[head_end..]);
    Ok(Some(Asked {
        bytes,
        act,
        is_chat,
        answer,
    }))
}

fn find(bytes: &[u8], part: &[u8]) -> Option<usize> {
    bytes.windows(part.len()).position(|window| window == part)
}
