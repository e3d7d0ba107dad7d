//! The clients: each has one connection and sends one request after the other.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::LocalSet;
use tokio::time::timeout;

use crate::backend::CHUNKS;
use crate::prompts::{self, Corpus, Novelty, Prompts};

/// Clients of plain answers in one thread.
pub const PLAIN_CLIENTS: usize = 8;

/// Clients of streams in one thread.
const STREAM_CLIENTS: usize = 64;

/// Streams of each client: one alone takes fewer than ten of the ticks in which processor time is
/// counted.
const STREAMS_EACH: usize = 4;

/// A round that takes longer fails.
const ROUND_MAX: Duration = Duration::from_secs(120);

#[derive(Clone)]
pub enum Load {
    Plain {
        prompt_bytes: usize,
        requests: usize,
    },
    /// [`STREAMS_EACH`] for each client.
    Streams { prompt_bytes: usize },
    /// Plain answers to texts of a corpus.
    Prompts {
        texts: Arc<Prompts>,
        novelty: Novelty,
        prompt_bytes: usize,
        requests: usize,
    },
}

/// What the clients saw in one round.
#[derive(Default)]
pub struct Measured {
    pub requests: usize,
    pub wall: Duration,
    /// Times to whole answers, or to first tokens; sorted.
    pub latencies: Vec<Duration>,
}

impl Load {
    /// What proxies are compared by.
    pub fn proxying(requests: usize) -> Vec<Self> {
        let plain = [200, 8 << 10, 128 << 10].map(|prompt_bytes| Self::Plain {
            prompt_bytes,
            requests: fewer_if_long(requests, prompt_bytes),
        });
        let mut all = plain.to_vec();
        all.push(Self::Streams { prompt_bytes: 200 });
        all
    }

    /// What routing by the cache is compared by.
    pub fn prompts(requests: usize) -> anyhow::Result<Vec<Self>> {
        let load = |texts: &Arc<Prompts>, novelty, prompt_bytes| Self::Prompts {
            texts: Arc::clone(texts),
            novelty,
            prompt_bytes,
            requests: fewer_if_long(requests, prompt_bytes),
        };
        let prose = Arc::new(Prompts::prose()?);
        let mut loads = Vec::new();
        for novelty in [Novelty::New, Novelty::MostlySeen] {
            loads.extend([8 << 10, 128 << 10].map(|bytes| load(&prose, novelty, bytes)));
        }
        for texts in [Prompts::code()?, Prompts::multilingual()?] {
            loads.push(load(&Arc::new(texts), Novelty::New, 128 << 10));
        }
        Ok(loads)
    }

    pub fn name(&self) -> String {
        match self {
            Self::Plain { prompt_bytes, .. } if *prompt_bytes < 1024 => {
                format!("plain, {prompt_bytes} B")
            }
            Self::Plain { prompt_bytes, .. } => format!("plain, {} KiB", prompt_bytes >> 10),
            Self::Prompts {
                texts,
                novelty,
                prompt_bytes,
                ..
            } => {
                let what = match (texts.corpus, novelty) {
                    (_, Novelty::MostlySeen) => "90 % seen",
                    (Corpus::Prose, Novelty::New) => "new",
                    (Corpus::Code, Novelty::New) => "code",
                    (Corpus::Multilingual, Novelty::New) => "multilingual",
                };
                format!("{} KiB, {what}", prompt_bytes >> 10)
            }
            Self::Streams { .. } => format!("{STREAM_CLIENTS} streams × {CHUNKS} chunks"),
        }
    }

    pub const fn is_stream(&self) -> bool {
        matches!(self, Self::Streams { .. })
    }

    /// In JSON.
    fn text(&self, number: usize) -> String {
        match self {
            Self::Plain { prompt_bytes, .. } | Self::Streams { prompt_bytes } => {
                fox(number, *prompt_bytes)
            }
            Self::Prompts {
                texts,
                novelty,
                prompt_bytes,
                ..
            } => prompts::escaped(&texts.prompt(*novelty, number, *prompt_bytes)),
        }
    }
}

impl Measured {
    pub fn percentile(&self, percent: usize) -> Duration {
        let last = self.latencies.len().saturating_sub(1);
        let at = (self.latencies.len() * percent / 100).min(last);
        self.latencies.get(at).copied().unwrap_or_default()
    }
}

/// Texts between those of two threads.
const TEXTS_OF_THREAD: usize = 1 << 40;

/// Runs one round, with the load's clients in each thread. The texts differ from those of other
/// values of `first_text`.
pub fn run(
    address: SocketAddr,
    load: &Load,
    first_text: usize,
    threads: usize,
) -> anyhow::Result<Measured> {
    let began = Instant::now();
    let clients =
        |number: usize| move || run_thread(address, load, first_text + number * TEXTS_OF_THREAD);
    let latencies = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|number| scope.spawn(clients(number)))
            .collect();
        let mut all = Vec::new();
        for thread in threads {
            all.extend(
                thread
                    .join()
                    .map_err(|_| anyhow!("a thread of clients panicked"))??,
            );
        }
        anyhow::Ok(all)
    });
    let (wall, mut latencies) = (began.elapsed(), latencies?);
    latencies.sort_unstable();
    Ok(Measured {
        requests: latencies.len(),
        wall,
        latencies,
    })
}

/// Returns the latencies of one thread's clients.
fn run_thread(
    address: SocketAddr,
    load: &Load,
    first_text: usize,
) -> anyhow::Result<Vec<Duration>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (clients, each) = match load {
        Load::Plain { requests, .. } | Load::Prompts { requests, .. } => {
            (PLAIN_CLIENTS, requests / PLAIN_CLIENTS)
        }
        Load::Streams { .. } => (STREAM_CLIENTS, STREAMS_EACH),
    };
    let latencies = Rc::new(RefCell::new(Vec::new()));
    let tasks = LocalSet::new();
    tasks.block_on(&runtime, async {
        let mut running = Vec::new();
        for number in 0..clients {
            let (latencies, load) = (Rc::clone(&latencies), load.clone());
            running.push(tokio::task::spawn_local(async move {
                let mut client = Client::connect(address).await?;
                for turn in 0..each {
                    let request = request(&load, first_text + number * 1_000_000 + turn);
                    let latency = client.ask(&request, load.is_stream()).await?;
                    latencies.borrow_mut().push(latency);
                }
                anyhow::Ok(())
            }));
        }
        let all = async {
            for client in running {
                client.await??;
            }
            anyhow::Ok(())
        };
        timeout(ROUND_MAX, all)
            .await
            .context("the round does not end")?
    })?;
    Ok(latencies.take())
}

const fn fewer_if_long(requests: usize, prompt_bytes: usize) -> usize {
    if prompt_bytes > 64 << 10 {
        requests / 4
    } else {
        requests
    }
}

/// A text that differs from others from the second word on.
fn fox(number: usize, bytes: usize) -> String {
    let mut text = format!("Question {number}. ");
    while text.len() < bytes {
        text.push_str("The quick brown fox jumps over the lazy dog. ");
    }
    text.truncate(bytes);
    text
}

pub fn request(load: &Load, number: usize) -> Vec<u8> {
    let text = load.text(number);
    let stream = if load.is_stream() {
        ",\"stream\":true"
    } else {
        ""
    };
    let body = format!(
        r#"{{"model":"m","max_tokens":16,"messages":[{{"role":"user","content":"{text}"}}]{stream}}}"#
    );
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    [head.into_bytes(), body.into_bytes()].concat()
}

pub struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    pub async fn connect(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            buffer: Vec::with_capacity(64 << 10),
        })
    }

    /// Returns the time to the whole answer, or to the first token of a stream.
    pub async fn ask(&mut self, request: &[u8], is_stream: bool) -> anyhow::Result<Duration> {
        let began = Instant::now();
        self.stream.write_all(request).await?;
        self.buffer.clear();
        let mut first_token = None;
        loop {
            let read = self.stream.read_buf(&mut self.buffer).await?;
            ensure!(read > 0, "closed before the answer's end");
            if is_stream {
                if first_token.is_none() && contains(&self.buffer, b"data: ") {
                    self.check_status()?;
                    first_token = Some(began.elapsed());
                }
                if self.buffer.ends_with(b"0\r\n\r\n") {
                    return first_token.context("no token");
                }
                // Only the end of the transfer is looked for.
                if first_token.is_some() && self.buffer.len() > 32 << 10 {
                    self.buffer.drain(..self.buffer.len() - 16);
                }
            } else if self.has_whole_answer()? {
                return Ok(began.elapsed());
            }
        }
    }

    fn check_status(&self) -> anyhow::Result<()> {
        let line = String::from_utf8_lossy(&self.buffer[..self.buffer.len().min(300)]);
        ensure!(line.starts_with("HTTP/1.1 200"), "not a 200: {line}");
        Ok(())
    }

    fn has_whole_answer(&self) -> anyhow::Result<bool> {
        let Some(end) = self
            .buffer
            .windows(4)
            .position(|bytes| bytes == b"\r\n\r\n")
        else {
            return Ok(false);
        };
        self.check_status()?;
        let head = String::from_utf8_lossy(&self.buffer[..end]).to_lowercase();
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length:"));
        Ok(match length {
            Some(length) => self.buffer.len() >= end + 4 + length.trim().parse::<usize>()?,
            None => self.buffer.ends_with(b"0\r\n\r\n"),
        })
    }
}

pub fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}
