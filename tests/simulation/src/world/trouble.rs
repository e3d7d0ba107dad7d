//! Engines that run and swallow requests, and how many requests that may cost.
//!
//! An engine in trouble keeps its process and its socket. Routers detect it by what its requests and
//! probes show. In worlds without other faults the number of lost requests is bounded.

use std::time::Duration;

use super::World;
use super::client::RequestEnd;
use super::host::{Event, Http};
use super::plane::At;
use warmroute_router::sim::EngineRequest;

/// A request that waits longer for its first byte is lost, as one that fails is.
const LATE: Duration = Duration::from_secs(10);

/// Requests that all routers together may lose to one engine.
const LOST_MAX: u64 = 3;

/// Requests that each router may lose to an engine that fails in mid-stream. What a client has a byte
/// of cannot be repeated: three failures open the circuit breaker of a router, and further ones may be
/// in progress.
const LOST_IN_STREAMS_MAX: u64 = 5;

/// A crawling engine computes at one turn in so many.
const CRAWL: u64 = 40;

/// What is wrong with an engine that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Accepts requests and computes nothing. Probes pass.
    Hangs,
    /// Reads nothing: SIGSTOP.
    Frozen,
    /// Accepts requests, computes nothing, and says that it sleeps.
    Asleep,
    /// Answers each request with an error status.
    Fails,
    /// The first event of each answer is an error.
    ErrorFirst,
    /// The second one is.
    ErrorLater,
    /// All engines fail one client's requests: those with a cache salt.
    FailsOne,
    /// Each step takes many times as long.
    Crawls,
}

impl Trouble {
    pub const ALL: [Self; 8] = [
        Self::Hangs,
        Self::Frozen,
        Self::Asleep,
        Self::Fails,
        Self::ErrorFirst,
        Self::ErrorLater,
        Self::FailsOne,
        Self::Crawls,
    ];

    const fn lost_max(self, routers: u64) -> u64 {
        match self {
            Self::ErrorLater => LOST_IN_STREAMS_MAX * routers,
            // Failures of the client's own do not count.
            Self::FailsOne => 0,
            Self::Hangs
            | Self::Frozen
            | Self::Asleep
            | Self::Fails
            | Self::ErrorFirst
            | Self::Crawls => LOST_MAX,
        }
    }
}

/// An engine's trouble.
#[derive(Default)]
pub(super) struct EngineTrouble {
    pub(super) present: Option<Trouble>,
    pub(super) since: At,
    /// What reached it while it was frozen.
    unread: Vec<Event>,
    /// Turns to compute.
    turns: u64,
}

/// Requests that ended since an engine was in trouble.
#[derive(Clone, Debug, Default)]
pub struct Losses {
    pub trouble: Option<Trouble>,
    pub ended: u64,
    /// Those that failed or were late, by router.
    pub lost: Vec<u64>,
}

impl World {
    pub(super) fn trouble(&mut self, at: usize, trouble: Trouble) -> bool {
        if !self.engines[at].is_up || self.losses.trouble.is_some() {
            return false;
        }
        let lasts = Duration::from_millis(self.dice.later.u64(12_000..25_000));
        self.fault_lasts(lasts);
        let all = 0..self.engines.len();
        for engine in all.filter(|engine| *engine == at || trouble == Trouble::FailsOne) {
            let state = &mut self.engines[engine].trouble;
            (state.present, state.since) = (Some(trouble), self.now);
            self.plan(lasts, Event::TroubleOver(engine));
        }
        self.losses.trouble = Some(trouble);
        self.losses.lost = vec![0; self.routers.len()];
        true
    }

    pub(super) fn trouble_over(&mut self, at: usize) {
        let engine = &mut self.engines[at];
        if engine.trouble.present.take().is_none() {
            return;
        }
        engine.up_since = self.now;
        for event in std::mem::take(&mut engine.trouble.unread) {
            self.plan(Duration::ZERO, event);
        }
        self.note(|| format!("engine {at}: its trouble is over"));
    }

    /// What reaches an engine. `None`: it is frozen, and reads it later.
    pub(super) fn as_read(&mut self, event: Event) -> Option<Event> {
        let (Event::Submit { engine, .. }
        | Event::HangUp { engine, .. }
        | Event::ProbeEngine { engine, .. }) = &event
        else {
            return Some(event);
        };
        let state = &mut self.engines[*engine].trouble;
        if state.present != Some(Trouble::Frozen) {
            return Some(event);
        }
        state.unread.push(event);
        None
    }

    /// Whether the engine computes at this turn.
    pub(super) fn computes(&mut self, at: usize) -> bool {
        let state = &mut self.engines[at].trouble;
        state.turns += 1;
        match state.present {
            Some(Trouble::Hangs | Trouble::Frozen | Trouble::Asleep) => false,
            Some(Trouble::Crawls) => state.turns.is_multiple_of(CRAWL),
            Some(
                Trouble::Fails | Trouble::ErrorFirst | Trouble::ErrorLater | Trouble::FailsOne,
            )
            | None => true,
        }
    }

    /// The answer to a request of a router, if the engine fails it immediately.
    pub(super) fn failure(&self, at: usize, request: &EngineRequest) -> Option<Http> {
        match self.engines[at].trouble.present? {
            Trouble::Fails => Some(Http::Failed),
            Trouble::ErrorFirst => Some(Http::ErrorEvent),
            Trouble::FailsOne if request.cache_salt.is_some() => Some(Http::Failed),
            Trouble::FailsOne
            | Trouble::Hangs
            | Trouble::Frozen
            | Trouble::Asleep
            | Trouble::ErrorLater
            | Trouble::Crawls => None,
        }
    }

    /// A request of a router whose client stayed is over.
    pub(super) fn request_ended(&mut self, at: usize, end: RequestEnd) {
        let Some(trouble) = self.losses.trouble else {
            return;
        };
        self.losses.ended += 1;
        let is_meant = trouble == Trouble::FailsOne && end.is_salted;
        if is_meant || !end.has_failed && end.waited <= LATE {
            return;
        }
        self.losses.lost[at] += 1;
        let lost: u64 = self.losses.lost.iter().sum();
        let routers = self.routers.len() as u64;
        self.note(|| format!("router {at}: a request is lost: {end:?}"));
        // Other faults cost requests too.
        if self.rates.is_calm && lost > trouble.lost_max(routers) {
            self.fail(format!(
                "{routers} routers lost {lost} requests to {trouble:?}"
            ));
        }
    }
}
