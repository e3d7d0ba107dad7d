//! The command line.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};

use crate::attacks::Attack;

#[derive(Clone, Debug)]
pub struct Options {
    pub mode: Mode,
    pub router: PathBuf,
    /// The programs beside a distributed router. `None`: it is left out.
    pub indexer: Option<PathBuf>,
    pub shim: Option<PathBuf>,
    pub nats_server: Option<PathBuf>,
    pub peers: PathBuf,
    /// Engines behind each proxy.
    pub backends: usize,
    /// The program of mock engines with a prefix cache. `None`: light engines without a cache.
    pub mock_engine: Option<PathBuf>,
    /// The tokenizer of the mock engines and the router.
    pub tokenizer: PathBuf,
    /// The processors that a proxy may use; `None`: all.
    pub cores: Option<Cores>,
    /// Threads of clients, each with its own connections and requests.
    pub client_threads: usize,
    /// Requests of one thread of clients in one round.
    pub requests: usize,
    pub rounds: usize,
    /// Time of one measurement beside an attack, and of one without.
    pub measurement: Duration,
    /// Part of the names of proxies and attacks.
    pub only: Option<String>,
    /// Beginning of the names of loads.
    pub load: Option<String>,
}

#[derive(Clone, Debug)]
pub enum Mode {
    /// Compares proxies; with `mock_engine`, routing by the cache.
    Compare,
    /// Measures quiet clients alone and beside each attack.
    Attacks,
    /// The process of one attack's clients, started by `Attacks`.
    Attacker { attack: Attack, target: SocketAddr },
}

/// Processors by their numbers.
#[derive(Clone, Debug)]
pub struct Cores(Vec<usize>);

impl Cores {
    /// Reads numbers and ranges, as `0,2-3`.
    fn parse(list: &str) -> anyhow::Result<Self> {
        let mut cores = Vec::new();
        for part in list.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            cores.extend(first.parse::<usize>()?..=last.parse()?);
        }
        Ok(Self(cores))
    }

    pub const fn count(&self) -> usize {
        self.0.len()
    }
}

/// As `taskset` takes them.
impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(usize::to_string).collect();
        f.write_str(&numbers.join(","))
    }
}

impl Options {
    pub fn parse(mut arguments: impl Iterator<Item = String>) -> anyhow::Result<Self> {
        let mut options = Self {
            mode: Mode::Compare,
            router: "target/release/warmroute-router".into(),
            indexer: None,
            shim: None,
            nats_server: None,
            peers: ".venv/bench-proxy/bin".into(),
            backends: 4,
            mock_engine: None,
            tokenizer: "tests/fixtures/tiny".into(),
            cores: None,
            client_threads: 1,
            requests: 2000,
            rounds: 3,
            measurement: Duration::from_secs(5),
            only: None,
            load: None,
        };
        while let Some(flag) = arguments.next() {
            if flag == "--attacks" {
                options.mode = Mode::Attacks;
                continue;
            }
            let mut value = || {
                let value = arguments.next();
                value.with_context(|| format!("{flag} needs a value"))
            };
            match flag.as_str() {
                "--router" => options.router = value()?.into(),
                "--indexer" => options.indexer = Some(value()?.into()),
                "--shim" => options.shim = Some(value()?.into()),
                "--nats-server" => options.nats_server = Some(value()?.into()),
                "--peers" => options.peers = value()?.into(),
                "--backends" => options.backends = value()?.parse()?,
                "--mock-engine" => options.mock_engine = Some(value()?.into()),
                "--tokenizer" => options.tokenizer = value()?.into(),
                "--cores" => options.cores = Some(Cores::parse(&value()?)?),
                "--client-threads" => options.client_threads = value()?.parse()?,
                "--requests" => options.requests = value()?.parse()?,
                "--rounds" => options.rounds = value()?.parse()?,
                "--seconds" => options.measurement = Duration::from_secs(value()?.parse()?),
                "--only" => options.only = Some(value()?),
                "--load" => options.load = Some(value()?),
                "--attacker" => {
                    let attack = Attack::named(&value()?)?;
                    let target = value()?.parse()?;
                    options.mode = Mode::Attacker { attack, target };
                }
                _ => bail!("unknown flag {flag}"),
            }
        }
        Ok(options)
    }
}
