//! The router as an HTTP proxy, against direct connections and other proxies, in one run.
//!
//! Backends and clients are threads of this process; each proxy is a process of its own. Times of a
//! busy machine say little, so the main figure is the processor time that the proxy's processes
//! take per 1,000 requests, from `/proc`. Rounds of all proxies alternate, and the median round
//! counts.

mod backend;
mod client;
mod engines;
mod process;
mod prompts;
mod table;

use std::path::PathBuf;

use anyhow::{Context as _, bail};

use client::{Load, Measured};
use engines::Engines;
use process::{Proxy, ProxyKind};

/// Most requests of one client in a round.
const REQUESTS_MAX: usize = 10_000;

struct Options {
    router: PathBuf,
    peers: PathBuf,
    /// Engines behind each proxy.
    backends: usize,
    /// The program of mock engines with a prefix cache: compares routing by the cache. `None`: light
    /// engines without a cache.
    mock_engine: Option<PathBuf>,
    /// The tokenizer of the mock engines and the router.
    tokenizer: PathBuf,
    /// The processors that the router may use, as `taskset` takes them; `None`: all.
    cores: Option<String>,
    requests: usize,
    rounds: usize,
    only: Option<String>,
}

/// What one proxy took for one load.
struct Cell {
    proxy: &'static str,
    load: Load,
    rounds: Vec<Round>,
}

struct Round {
    measured: Measured,
    cpu_secs: f64,
    peak_mib: f64,
}

fn main() -> anyhow::Result<()> {
    let options = options()?;
    let (engines, kinds, loads) = match &options.mock_engine {
        None => (
            Engines::light(options.backends)?,
            ProxyKind::PROXYING.as_slice(),
            Load::proxying(options.requests),
        ),
        Some(binary) => (
            Engines::mock(binary, &options.tokenizer, options.backends)?,
            ProxyKind::CACHE_AWARE.as_slice(),
            Load::prompts(options.requests)?,
        ),
    };
    let wanted = |kind: &ProxyKind| match &options.only {
        Some(only) => kind.name().contains(only.as_str()) || *kind == ProxyKind::Direct,
        None => true,
    };
    let mut proxies = Vec::new();
    for kind in kinds.iter().copied().filter(wanted) {
        match Proxy::start(kind, &engines.engines, &options) {
            Ok(proxy) => proxies.push(proxy),
            Err(error) => eprintln!("without {}: {error:#}", kind.name()),
        }
    }
    let mut cells = Vec::new();
    let mut first_texts = (0..).step_by(REQUESTS_MAX);
    for load in loads {
        let mut rounds: Vec<Vec<Round>> = proxies.iter().map(|_| Vec::new()).collect();
        for round in 0..=options.rounds {
            for (proxy, rounds) in proxies.iter().zip(&mut rounds) {
                let before = proxy.cpu_secs()?;
                // Each round and each proxy has texts of its own.
                let first_text = first_texts.next().unwrap_or_default();
                let measured = client::run(proxy.address, &load, first_text)
                    .with_context(|| format!("{} {}", proxy.kind.name(), load.name()))?;
                let cpu_secs = proxy.cpu_secs()? - before;
                eprintln!("{}, {}: {cpu_secs:.2} s", load.name(), proxy.kind.name());
                // The first round opens connections.
                if round > 0 {
                    let peak_mib = proxy.peak_mib()?;
                    rounds.push(Round {
                        measured,
                        cpu_secs,
                        peak_mib,
                    });
                }
            }
        }
        for (proxy, rounds) in proxies.iter().zip(rounds) {
            cells.push(Cell {
                proxy: proxy.kind.name(),
                load: load.clone(),
                rounds,
            });
        }
    }
    print!("{}", table::render(&cells));
    Ok(())
}

fn options() -> anyhow::Result<Options> {
    let mut options = Options {
        router: "target/release/warmroute-router".into(),
        peers: ".venv/bench-proxy/bin".into(),
        backends: 4,
        mock_engine: None,
        tokenizer: "tests/fixtures/tiny".into(),
        cores: None,
        requests: 2000,
        rounds: 3,
        only: None,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments
            .next()
            .with_context(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--router" => options.router = value.into(),
            "--peers" => options.peers = value.into(),
            "--backends" => options.backends = value.parse()?,
            "--mock-engine" => options.mock_engine = Some(value.into()),
            "--tokenizer" => options.tokenizer = value.into(),
            "--cores" => options.cores = Some(value),
            "--requests" => options.requests = value.parse()?,
            "--rounds" => options.rounds = value.parse()?,
            "--only" => options.only = Some(value),
            _ => bail!("unknown flag {flag}"),
        }
    }
    Ok(options)
}
