//! The router as an HTTP proxy, against direct connections and other proxies, in one run.
//!
//! Backends and clients are threads of this process; each proxy is a process of its own. Times of a
//! busy machine say little, so the main figure is the processor time that the proxy's processes
//! take per 1,000 requests, from `/proc`. Rounds of all proxies alternate, and the median round
//! counts. What a distributed router needs beside it is measured too, and not added to its row.

mod admin;
mod attacks;
mod backend;
mod client;
mod engines;
mod faults;
mod options;
mod plane;
mod process;
mod prompts;
mod table;
mod usage;

use std::rc::Rc;

use anyhow::{Context as _, ensure};

use client::{Load, Measured};
use engines::Engines;
use options::{Mode, Options};
use process::{Proxy, ProxyKind};
use usage::Usage;

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
    usage: Usage,
    /// The other processes that the proxy needs.
    beside: Vec<(&'static str, Usage)>,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse(std::env::args().skip(1))?;
    match (&options.mode, &options.mock_engine) {
        (Mode::Compare, None) => {
            let threads = options.client_threads.max(backend::THREADS_MIN);
            let engines = Rc::new(Engines::light(options.backends, threads)?);
            let loads = Load::proxying(options.requests);
            let shared = || Ok(Rc::clone(&engines));
            compare(&options, shared, &ProxyKind::PROXYING, loads)
        }
        (Mode::Compare, Some(binary)) => {
            // Each proxy has engines of its own: a router follows the events of all its engines,
            // and would do so in the rounds of other proxies.
            let own = || Engines::mock(binary, &options.tokenizer, options.backends).map(Rc::new);
            let loads = Load::prompts(options.requests)?;
            compare(&options, own, &ProxyKind::CACHE_AWARE, loads)
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
    engines: impl Fn() -> anyhow::Result<Rc<Engines>>,
    kinds: &[ProxyKind],
    loads: Vec<Load>,
) -> anyhow::Result<()> {
    let wanted = |kind: &ProxyKind| match &options.only {
        Some(only) => kind.name().contains(only.as_str()) || *kind == ProxyKind::Direct,
        None => true,
    };
    // Proxies are dropped first.
    let (mut behind, mut proxies) = (Vec::new(), Vec::new());
    for kind in kinds.iter().copied().filter(wanted) {
        let engines = engines()?;
        match Proxy::start(kind, &engines.engines, options) {
            Ok(proxy) => {
                proxies.push(proxy);
                behind.push(engines);
            }
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
                // Each round and each proxy has texts of its own.
                let first_text = first_texts.next().unwrap_or_default();
                let measured = measure(proxy, &load, first_text, options)
                    .with_context(|| format!("{} {}", proxy.kind.name(), load.name()))?;
                // The first round opens connections.
                if round > 0 {
                    rounds.push(measured);
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
    print!("{}{}", table::render(&cells), table::render_beside(&cells));
    Ok(())
}

/// One round of one proxy. Fails if a router with an index decides mostly without it.
fn measure(
    proxy: &Proxy,
    load: &Load,
    first_text: usize,
    options: &Options,
) -> anyhow::Result<Round> {
    let decided = proxy.decided()?;
    let (before, before_beside) = (proxy.usage()?, proxy.usage_beside()?);
    let measured = client::run(proxy.address, load, first_text, options.client_threads)?;
    let usage = proxy.usage()?.since(before);
    let mut beside = proxy.usage_beside()?;
    for ((_, usage), (_, before)) in beside.iter_mut().zip(before_beside) {
        *usage = usage.since(before);
    }
    let (name, load) = (proxy.kind.name(), load.name());
    eprintln!("{load}, {name}: {:.2} s", usage.cpu_secs);
    if let (Some(before), Some(now)) = (decided, proxy.decided()?) {
        let decided = now.since(&before);
        eprintln!("{load}, {name}: {decided}");
        let is_by_index = decided.by_index() * 2 > decided.all();
        ensure!(is_by_index, "most decisions without the index");
    }
    Ok(Round {
        measured,
        usage,
        beside,
    })
}
