//! Three mock engines behind routers, of which one that has a hot prefix is broken for a while.

use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};

use super::fault::Fault;
use super::load::{self, LATE, Load, PATH, Sent, hot_chat};
use crate::fleet::{Engines, Fleet};

pub(super) const ENGINES: Engines = Engines {
    count: 3,
    ranks: 1,
    blocks: 16_384,
    flags: &["--prefill-tokens-per-sec", "40000", "--itl-ms", "10"],
};

/// Requests with the hot prefix before the load: later ones follow them.
const PRIMING: u64 = 6;

/// Seconds since the load's beginning.
pub(super) struct Times {
    pub(super) begin: u64,
    pub(super) end: u64,
    /// Length of the load.
    pub(super) all: u64,
}

/// Times of the table. The worker's share is measured from 10 s after the fault's beginning to its
/// end, and in the last 10 s of the load, from 20 s to 30 s after the fault's end.
pub(super) const TABLE: Times = Times {
    begin: 10,
    end: 40,
    all: 70,
};

const MEASURED: u64 = 10;

/// What clients and engines saw of one row.
pub(super) struct Figures {
    pub(super) sent: Vec<Sent>,
    /// The broken worker's share of the requests that reached engines from 10 s after the fault's
    /// beginning on.
    pub(super) broken_share: f64,
    /// The worker's share at the end of the load, over a third.
    pub(super) back: f64,
    /// Smallest share of a worker over the whole load, over a third.
    pub(super) least: f64,
}

impl Figures {
    /// Requests whose answer is an error or is not whole. Poisoned ones do not count.
    pub(super) fn failed(&self, fault: Option<Fault>) -> usize {
        let is_poisoned = |sent: &Sent| sent.is_marked && fault == Some(Fault::Poison);
        let failed = |sent: &&Sent| sent.failed.is_some() && !is_poisoned(sent);
        self.sent.iter().filter(failed).count()
    }

    /// Whole answers that waited for a byte for longer than 10 s.
    pub(super) fn late(&self, own_silence: Duration) -> usize {
        let late = |sent: &&Sent| sent.failed.is_none() && sent.waited > LATE + own_silence;
        self.sent.iter().filter(late).count()
    }
}

/// Sends requests with the hot prefix to one router until engines serve them. Returns the engine
/// that got most of them.
pub(super) async fn prime(fleet: &Fleet, base: &str) -> usize {
    let ready = async || {
        let chat = fleet.http.post(format!("{base}{PATH}")).json(&hot_chat(0));
        let answer = chat.send().await;
        answer.is_ok_and(|answer| answer.status().is_success())
    };
    let is_ready = async |_: &Fleet| ready().await;
    fleet.until("a router serves", is_ready).await;
    for number in 1..PRIMING {
        let chat = hot_chat(number);
        let chat = fleet.http.post(format!("{base}{PATH}")).json(&chat);
        chat.send().await.expect("an answer");
    }
    let received = received(fleet).await;
    (0..received.len()).max_by_key(|at| received[*at]).unwrap()
}

/// Runs a load during which the fault begins and ends at these engines.
pub(super) async fn run(
    fleet: &Fleet,
    bases: &[String],
    load: Load,
    (fault, broken): (Option<Fault>, &[usize]),
    times: &Times,
) -> Figures {
    let begun = Instant::now();
    let until = async |secs: u64| sleep_until(begun + Duration::from_secs(secs)).await;
    let timeline = async {
        let first = received(fleet).await;
        until(times.begin).await;
        for &engine in broken {
            if let Some(fault) = fault {
                fault.begin(fleet, engine).await;
            }
        }
        until(times.begin + MEASURED).await;
        let settled = received(fleet).await;
        until(times.end).await;
        let before_end = received(fleet).await;
        for &engine in broken {
            if let Some(fault) = fault {
                fault.end(fleet, engine).await;
            }
        }
        until(times.all - MEASURED).await;
        let healed = received(fleet).await;
        until(times.all).await;
        [first, settled, before_end, healed, received(fleet).await]
    };
    let (sent, counts) = tokio::join!(load::run(bases, load), timeline);
    let [first, settled, before_end, healed, last] = &counts;
    let victim = broken.first().copied().unwrap_or_default();
    let least = (0..first.len()).map(|engine| share(engine, first, last));
    Figures {
        broken_share: match fault {
            // It cannot count, and counts late what waits in its sockets.
            Some(Fault::Freeze) => held_share(&sent, times),
            _ => share(victim, settled, before_end),
        },
        back: 3.0 * share(victim, healed, last),
        least: 3.0 * least.fold(1.0, f64::min),
        sent,
    }
}

/// The share of requests that a frozen worker kept for a second or longer.
fn held_share(sent: &[Sent], times: &Times) -> f64 {
    let settled = Duration::from_secs(times.begin + MEASURED);
    let of_time = |sent: &&Sent| sent.at >= settled && sent.at < Duration::from_secs(times.end);
    let of_time: Vec<&Sent> = sent.iter().filter(of_time).collect();
    let held = of_time
        .iter()
        .filter(|sent| sent.waited >= Duration::from_secs(1));
    held.count() as f64 / of_time.len().max(1) as f64
}

/// One engine's share of the requests between two counts.
fn share(engine: usize, before: &[u64], after: &[u64]) -> f64 {
    let got = |at: usize| after[at].saturating_sub(before[at]);
    let all: u64 = (0..before.len()).map(got).sum();
    got(engine) as f64 / all.max(1) as f64
}

/// Requests that each engine received. 0 for one that does not answer.
async fn received(fleet: &Fleet) -> Vec<u64> {
    let mut all = Vec::new();
    for engine in 0..fleet.engines.len() {
        let counters = fleet.get(fleet.engine(engine, "/debug/counters"));
        let counters = timeout(Duration::from_secs(1), counters).await;
        let received = counters.map_or(0, |counters| counters["received"].as_u64().unwrap());
        all.push(received);
    }
    all
}

/// Requests that one engine finished.
pub(super) async fn finished(fleet: &Fleet, engine: usize) -> u64 {
    let counters = fleet.get(fleet.engine(engine, "/debug/counters")).await;
    counters["ranks"][0]["finished"].as_u64().expect("a count")
}
