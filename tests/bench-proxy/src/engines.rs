//! The engines behind the proxies: light ones in this process, or mock engines with a real prefix
//! cache and cache events, a process each.

use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::Context as _;

use crate::backend::{self, Served};

/// Blocks of 16 tokens that each mock engine caches.
const CACHE_BLOCKS: &str = "65536";

/// Engines that serve until dropped.
pub struct Engines {
    pub engines: Vec<Engine>,
    processes: Vec<Child>,
}

#[derive(Clone, Copy, Debug)]
pub struct Engine {
    pub address: SocketAddr,
    /// `None`: it publishes none.
    pub events: Option<EventPorts>,
}

/// ZMQ ports of one engine.
#[derive(Clone, Copy, Debug)]
pub struct EventPorts {
    pub live: u16,
    pub replay: u16,
}

impl Engines {
    pub fn light(count: usize, threads: usize) -> anyhow::Result<Self> {
        let served = Served {
            max_model_len: 131_072,
            tokenize: None,
        };
        Self::light_that_serve(served, count, threads)
    }

    /// Light engines that a router tokenizes prompts for, with a model that takes long ones: one
    /// mock engine answers for them what the router compares its token ids with.
    pub fn tokenizing(binary: &Path, tokenizer: &Path, count: usize) -> anyhow::Result<Self> {
        let mut started = Self::mock(binary, tokenizer, 1)?;
        let served = Served {
            max_model_len: 10_000_000,
            tokenize: started.engines.first().map(|engine| engine.address),
        };
        let light = Self::light_that_serve(served, count, backend::THREADS_MIN)?;
        started.engines = light.engines.clone();
        Ok(started)
    }

    fn light_that_serve(served: Served, count: usize, threads: usize) -> anyhow::Result<Self> {
        let addresses = backend::start(count, served, threads)?;
        let engine = |address| Engine {
            address,
            events: None,
        };
        Ok(Self {
            engines: addresses.into_iter().map(engine).collect(),
            processes: Vec::new(),
        })
    }

    /// Starts mock engines that compute in no time.
    pub fn mock(binary: &Path, tokenizer: &Path, count: usize) -> anyhow::Result<Self> {
        let mut started = Self {
            engines: Vec::new(),
            processes: Vec::new(),
        };
        for _ in 0..count {
            let mut process = Command::new(binary)
                .args(["--port", "0", "--kv-port", "0", "--replay-port", "0"])
                .args(["--model", "m", "--profile", "instant", "--tokenizer"])
                .arg(tokenizer)
                .args(["--num-blocks", CACHE_BLOCKS])
                .args(["--max-num-batched-tokens", "1048576"])
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .with_context(|| format!("{}", binary.display()))?;
            let output = process.stdout.take();
            started.processes.push(process);
            let mut ports = String::new();
            BufReader::new(output.context("no output")?).read_line(&mut ports)?;
            let port = |name| port(&ports, name).with_context(|| format!("no {name} in {ports}"));
            started.engines.push(Engine {
                address: (Ipv4Addr::LOCALHOST, port("port")?).into(),
                events: Some(EventPorts {
                    live: port("kv")?,
                    replay: port("replay")?,
                }),
            });
        }
        Ok(started)
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        for process in &mut self.processes {
            drop(process.kill());
            drop(process.wait());
        }
    }
}

/// The number, or the first of a list, that the name has in a line of JSON.
fn port(line: &str, name: &str) -> Option<u16> {
    let (_, rest) = line.split_once(&format!("\"{name}\":"))?;
    let digits = rest.trim_start_matches([' ', '[']);
    let end = digits.find(|character: char| !character.is_ascii_digit())?;
    digits[..end].parse().ok()
}
