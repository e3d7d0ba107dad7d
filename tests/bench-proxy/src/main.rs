//! The router as an HTTP proxy, against direct connections and other proxies, in one run.
//!
//! Backends and clients are threads of this process; each proxy is a process of its own. Times of a
//! busy machine say little, so the main figure is the processor time that the proxy's processes
//! take per 1,000 requests, from `/proc`. Rounds of all proxies alternate, and the median round
//! counts.

mod attacks;
mod backend;
mod client;
mod engines;
mod options;
mod process;
mod prompts;
mod table;

use anyhow::Context as _;

use client::{Load, Measured};
use engines::Engines;
use options::{Mode, Options};
use process::{Proxy, ProxyKind};

/// Most requests of one client in a round.
const REQUESTS_MAX: usize = 10_000;

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
    let options = Options::parse(std::env::args().skip(1))?;
    match (&options.mode, &options.mock_engine) {
        (Mode::Compare, None) => {
            let threads = options.client_threads.max(backend::THREADS_MIN);
            let engines = Engines::light(options.backends, threads)?;
            let loads = Load::proxying(options.requests);
            compare(&options, &engines, &ProxyKind::PROXYING, loads)
        }
        (Mode::Compare, Some(binary)) => {
            let engines = Engines::mock(binary, &options.tokenizer, options.backends)?;
            let loads = Load::prompts(options.requests)?;
            compare(&options, &engines, &ProxyKind::CACHE_AWARE, loads)
        }
        (Mode::Attacks, binary) => {
            let binary = binary.as_deref().context("--attacks needs --mock-engine")?;
            let engines = Engines::tokenizing(binary, &options.tokenizer, options.backends)?;
            attacks::measure_all(&engines, &options)
        }
        (Mode::Attacker { attack, target }, _) => attacks::attacker::run(*attack, *target),
    }
}

/// Prints a table of the loads and proxies.
fn compare(
    options: &Options,
    engines: &Engines,
    kinds: &[ProxyKind],
    loads: Vec<Load>,
) -> anyhow::Result<()> {
    let wanted = |kind: &ProxyKind| match &options.only {
        Some(only) => kind.name().contains(only.as_str()) || *kind == ProxyKind::Direct,
        None => true,
    };
    let mut proxies = Vec::new();
    for kind in kinds.iter().copied().filter(wanted) {
        match Proxy::start(kind, &engines.engines, options) {
            Ok(proxy) => proxies.push(proxy),
            Err(error) => eprintln!("without {}: {error:#}", kind.name()),
        }
    }
    let mut cells = Vec::new();
    let mut first_texts = (0..).step_by(REQUESTS_MAX);
    let is_wanted = |load: &Load| {
        let start = options.load.as_deref();
        start.is_none_or(|start| load.name().starts_with(start))
    };
    for load in loads.into_iter().filter(is_wanted) {
        let mut rounds: Vec<Vec<Round>> = proxies.iter().map(|_| Vec::new()).collect();
        for round in 0..=options.rounds {
            for (proxy, rounds) in proxies.iter().zip(&mut rounds) {
                let before = proxy.cpu_secs()?;
                // Each round and each proxy has texts of its own.
                let first_text = first_texts.next().unwrap_or_default();
                let threads = options.client_threads;
                let measured = client::run(proxy.address, &load, first_text, threads)
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
