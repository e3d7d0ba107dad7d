//! The clients: each has one connection and sends one request after the other.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::LocalSet;
use tokio::time::timeout;

use crate::backend::CHUNKS;

/// Clients of plain answers.
const PLAIN_CLIENTS: usize = 8;

/// Clients of streams.
const STREAM_CLIENTS: usize = 64;

/// A round that takes longer fails.
const ROUND_MAX: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    Plain {
        prompt_bytes: usize,
        requests: usize,
    },
    /// One stream for each client.
    Streams { prompt_bytes: usize },
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
    pub fn all(requests: usize) -> Vec<Self> {
        let plain = [200, 8 << 10, 128 << 10].map(|prompt_bytes| Self::Plain {
            prompt_bytes,
            requests: if prompt_bytes > 64 << 10 {
                requests / 4
            } else {
                requests
            },
        });
        let mut all = plain.to_vec();
        all.push(Self::Streams { prompt_bytes: 200 });
        all
    }

    pub fn name(&self) -> String {
        match self {
            Self::Plain { prompt_bytes, .. } if *prompt_bytes < 1024 => {
                format!("plain, {prompt_bytes} B")
            }
            Self::Plain { prompt_bytes, .. } => format!("plain, {} KiB", prompt_bytes >> 10),
            Self::Streams { .. } => format!("{STREAM_CLIENTS} streams × {CHUNKS} chunks"),
        }
    }

    const fn prompt_bytes(&self) -> usize {
        match self {
            Self::Plain { prompt_bytes, .. } | Self::Streams { prompt_bytes } => *prompt_bytes,
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

/// Runs one round.
pub fn run(address: SocketAddr, load: &Load) -> anyhow::Result<Measured> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (clients, each, is_stream) = match *load {
        Load::Plain { requests, .. } => (PLAIN_CLIENTS, requests / PLAIN_CLIENTS, false),
        Load::Streams { .. } => (STREAM_CLIENTS, 1, true),
    };
    let latencies = Rc::new(RefCell::new(Vec::new()));
    let began = Instant::now();
    let tasks = LocalSet::new();
    let load = *load;
    tasks.block_on(&runtime, async {
        let mut running = Vec::new();
        for number in 0..clients {
            let latencies = Rc::clone(&latencies);
            running.push(tokio::task::spawn_local(async move {
                let mut client = Client::connect(address).await?;
                for turn in 0..each {
                    let request = request(load, number * 1_000_000 + turn, is_stream);
                    let latency = client.ask(&request, is_stream).await?;
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
    let wall = began.elapsed();
    let mut latencies = latencies.take();
    latencies.sort_unstable();
    Ok(Measured {
        requests: latencies.len(),
        wall,
        latencies,
    })
}

/// A chat whose text differs from the first word on.
fn request(load: Load, number: usize, is_stream: bool) -> Vec<u8> {
    let mut text = format!("Question {number}. ");
    while text.len() < load.prompt_bytes() {
        text.push_str("The quick brown fox jumps over the lazy dog. ");
    }
    text.truncate(load.prompt_bytes());
    let stream = if is_stream { ",\"stream\":true" } else { "" };
    let body = format!(
        r#"{{"model":"m","max_tokens":128,"messages":[{{"role":"user","content":"{text}"}}]{stream}}}"#
    );
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    [head.into_bytes(), body.into_bytes()].concat()
}

struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    async fn connect(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            buffer: Vec::with_capacity(64 << 10),
        })
    }

    /// Returns the time to the whole answer, or to the first token of a stream.
    async fn ask(&mut self, request: &[u8], is_stream: bool) -> anyhow::Result<Duration> {
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

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}
