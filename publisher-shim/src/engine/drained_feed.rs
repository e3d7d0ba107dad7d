//! The event feed of an engine that hands out each event once: TensorRT-LLM's
//! `POST /kv_cache_events`.
//!
//! One reader serves all ranks. An answer is the only copy of its events, so that a read in flight
//! outlives the call that waits for it, and what was read is kept, within a bound, in place of an
//! engine's replay buffer. A replay is answered when a read that began after its request has
//! succeeded: its end marker then means what a publisher's means, that nothing before the request
//! is missing.
//!
//! A read that fails may have lost events, and the engine may have restarted: no replay is answered
//! before the next event, whose number shows either. Nor is one before the first event: an engine
//! publishes when it starts, so that its events are with another reader, or not enabled.
//!
//! While this process does not hold the worker's lease, another one may read. Nothing of before is
//! continued then: the next event is the first one again.

mod kept_events;

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tracing::warn;
use warmroute_proto::{BlockSize, DpRank, EngineSeq};

use super::http::{EventRoute, ReadError};
use super::trtllm;
use super::{BURST_MAX, EngineEvent, EngineFeed, Frames, ReplayNotSent};
use crate::config::Endpoints;
use crate::source::ReplayId;
use crate::wire::END_OF_REPLAY;
use kept_events::{Continuity, KeptEvents};

const READ_EVERY: Duration = Duration::from_millis(50);
/// Pause after a failed read.
const RETRY: Duration = Duration::from_secs(1);
/// An answer without events takes this long where the route waits for some. In the versions that
/// wait, the engine's HTTP does nothing else until then.
const WAITED: Duration = Duration::from_millis(1500);
/// Such answers in a row that show it: a busy engine may be late.
const WAITED_READS: u32 = 3;
/// Pause after such an answer.
const PAUSE: Duration = Duration::from_secs(30);
/// Time without a first event after which that is logged.
const SILENCE: Duration = Duration::from_secs(30);
/// Between two equal warnings.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// What costs credit and is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum DrainWarning {
    #[error("a read failed: {0}")]
    Failed(ReadError),
    #[error(
        "some are missing: another process reads this route, which serves one reader only, or \
         more than event_buffer_max_size came between two reads"
    )]
    Gap,
    #[error(
        "the first ones are missing: another process reads this route, or did, and it serves one \
         reader only; what the engine held before gets no credit"
    )]
    JoinedLate,
    #[error(
        "there are none: kv_cache_config needs event_buffer_max_size and enable_block_reuse, and \
         no other process may read this route"
    )]
    Silent,
    #[error("no credit: they name rank {0}; set the number of ranks")]
    Rank(u32),
    #[error(
        "no credit: its route waits for them, and the engine's HTTP with it, which newer versions \
         do not; it is read twice a minute"
    )]
    Waits,
}

type Answer = Result<Vec<u8>, ReadError>;

/// A read in flight.
struct Read {
    begun: Instant,
    /// As of its begin.
    failures: u64,
    answer: Pin<Box<dyn Future<Output = Answer> + Send>>,
}

/// Reads the events of one engine, for all ranks.
pub(super) struct EventDrain {
    /// Held by the feed that waits for an answer.
    reader: tokio::sync::Mutex<Reader>,
    state: Mutex<DrainState>,
    changed: watch::Sender<()>,
}

struct Reader {
    route: EventRoute,
    read: Option<Read>,
    due: Instant,
    /// The first answer, as long as no event came.
    silent_since: Option<Instant>,
    has_events: bool,
    /// Answers in a row that waited.
    waited: u32,
    warned: Vec<(DrainWarning, Instant)>,
}

struct DrainState {
    begun: u64,
    /// The last read that succeeded.
    succeeded: u64,
    /// Failed reads and pauses.
    failures: u64,
    is_up: bool,
    /// Events of this life named it and it is not followed: any rank may serve a request.
    other_rank: Option<u32>,
    ranks: Vec<KeptEvents>,
}

impl EventDrain {
    pub(super) fn new(route: EventRoute, ranks: u32, block_size: Option<BlockSize>) -> Self {
        let reader = Reader {
            route,
            read: None,
            due: Instant::now(),
            silent_since: None,
            has_events: false,
            waited: 0,
            warned: Vec::new(),
        };
        let state = DrainState {
            begun: 0,
            succeeded: 0,
            failures: 0,
            is_up: false,
            other_rank: None,
            ranks: (0..ranks)
                .map(|rank| KeptEvents::new(rank, block_size))
                .collect(),
        };
        Self {
            reader: tokio::sync::Mutex::new(reader),
            state: Mutex::new(state),
            changed: watch::Sender::new(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, DrainState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next answer and takes it in. Cancel-safe.
    async fn read(&self) {
        let mut reader = self.reader.lock().await;
        let reader = &mut *reader;
        let read = match &mut reader.read {
            Some(read) => read,
            None => {
                sleep_until(reader.due).await;
                let failures = {
                    let mut state = self.lock();
                    state.begun += 1;
                    state.failures
                };
                reader.read.insert(Read {
                    begun: Instant::now(),
                    failures,
                    answer: Box::pin(reader.route.read()),
                })
            }
        };
        let answer = read.answer.as_mut().await;
        let (took, failures) = (read.begun.elapsed(), read.failures);
        reader.read = None;
        let mut state = self.lock();
        // Events of before a pause do not follow one another.
        if state.failures == failures {
            reader.take(&mut state, answer, took);
        }
        drop(state);
        self.changed.send_replace(());
    }
}

impl Reader {
    fn take(&mut self, state: &mut DrainState, answer: Answer, took: Duration) {
        let now = Instant::now();
        self.due = now + READ_EVERY;
        let events = match &answer {
            Ok(answer) => trtllm::events(answer).map_err(|_| ReadError::Unreadable),
            Err(error) => Err(*error),
        };
        let events = match events {
            Ok(events) => events,
            Err(error) => {
                self.due = now + RETRY;
                self.warn(now, DrainWarning::Failed(error));
                state.fail();
                return;
            }
        };
        state.succeeded = state.begun;
        state.is_up = true;
        if events.is_empty() {
            self.take_silence(now, took);
        } else {
            self.waited = 0;
        }
        let mut other_rank = None;
        for event in &events {
            self.has_events = true;
            let Some(kept) = state.ranks.get_mut(event.rank() as usize) else {
                other_rank = Some(event.rank());
                continue;
            };
            match kept.take(event) {
                Continuity::Next => {}
                Continuity::Restarted => state.other_rank = None,
                Continuity::JoinedLate => self.warn(now, DrainWarning::JoinedLate),
                Continuity::Gap => self.warn(now, DrainWarning::Gap),
            }
        }
        state.other_rank = other_rank.or(state.other_rank);
        if let Some(rank) = state.other_rank {
            self.warn(now, DrainWarning::Rank(rank));
        }
    }

    fn take_silence(&mut self, now: Instant, took: Duration) {
        self.waited = if took >= WAITED { self.waited + 1 } else { 0 };
        if self.waited >= WAITED_READS {
            self.due = now + PAUSE;
            self.warn(now, DrainWarning::Waits);
        }
        let since = *self.silent_since.get_or_insert(now);
        if !self.has_events && now - since >= SILENCE {
            self.warn(now, DrainWarning::Silent);
        }
    }

    fn warn(&mut self, now: Instant, warning: DrainWarning) {
        self.warned.retain(|(_, at)| now - *at < WARN_EVERY);
        if !self.warned.iter().any(|(known, _)| *known == warning) {
            self.warned.push((warning, now));
            warn!(
                route = self.route.url(),
                "the engine's cache events: {warning}"
            );
        }
    }
}

impl DrainState {
    fn fail(&mut self) {
        self.failures += 1;
        self.is_up = false;
        self.ranks.iter_mut().for_each(KeptEvents::doubt);
    }

    fn pause(&mut self) {
        self.fail();
        self.ranks.iter_mut().for_each(KeptEvents::forget);
    }
}

/// The feed of one rank.
pub struct DrainedFeed {
    drain: Arc<EventDrain>,
    rank: usize,
    changed: watch::Receiver<()>,
    is_connected: bool,
    /// As of the connection.
    failures: u64,
    /// The position of the next payload.
    position: u64,
    replay: Option<PendingReplay>,
}

#[derive(Clone, Copy)]
enum PendingReplay {
    Requested {
        id: ReplayId,
        from: EngineSeq,
        /// The first read that began after the request.
        read: u64,
    },
    Answering(ReplayId),
}

impl DrainedFeed {
    pub(super) fn new(drain: Arc<EventDrain>, rank: DpRank) -> Self {
        Self {
            rank: rank.0 as usize,
            changed: drain.changed.subscribe(),
            drain,
            is_connected: false,
            failures: 0,
            position: 0,
            replay: None,
        }
    }

    fn collect(&mut self, events: &mut Vec<EngineEvent>) {
        self.changed.mark_unchanged();
        let state = self.drain.lock();
        let Some(kept) = state.ranks.get(self.rank) else {
            return;
        };
        if self.is_connected && state.failures != self.failures {
            self.is_connected = false;
            self.replay = None;
            events.push(EngineEvent::Disconnected);
            return;
        }
        if !self.is_connected {
            if state.is_up {
                self.is_connected = true;
                self.failures = state.failures;
                // Replays bring what came before.
                self.position = kept.end();
                events.push(EngineEvent::Connected);
            }
            return;
        }
        if let Some(PendingReplay::Requested { id, from, read }) = self.replay {
            let is_proven = state.succeeded >= read && kept.is_provable();
            if !is_proven || state.other_rank.is_some() {
                return;
            }
            self.position = kept.position_of(from);
            self.replay = Some(PendingReplay::Answering(id));
        }
        while events.len() < BURST_MAX {
            let Some((seq, payload, next)) = kept.at(self.position) else {
                if let Some(PendingReplay::Answering(id)) = self.replay.take() {
                    let end = vec![END_OF_REPLAY.to_be_bytes().to_vec(), Vec::new()];
                    events.push(EngineEvent::Replay(id, end));
                }
                return;
            };
            self.position = next;
            let frames: Frames = vec![Vec::new(), seq.0.to_be_bytes().to_vec(), payload.to_vec()];
            events.push(match self.replay {
                Some(PendingReplay::Answering(id)) => EngineEvent::Replay(id, frames),
                Some(PendingReplay::Requested { .. }) | None => EngineEvent::Live(frames),
            });
        }
    }
}

impl EngineFeed for DrainedFeed {
    /// The route stays: the engine reports no other.
    fn reconnect(&mut self, _: Endpoints) {}

    fn request_replay(&mut self, id: ReplayId, from: EngineSeq) -> Result<(), ReplayNotSent> {
        if !self.is_connected {
            return Err(ReplayNotSent);
        }
        let read = self.drain.lock().begun + 1;
        self.replay = Some(PendingReplay::Requested { id, from, read });
        Ok(())
    }

    async fn receive(&mut self, events: &mut Vec<EngineEvent>) {
        loop {
            self.collect(events);
            if !events.is_empty() {
                return;
            }
            tokio::select! {
                _ = self.changed.changed() => {}
                () = self.drain.read() => {}
            }
        }
    }

    fn is_exclusive(&self) -> bool {
        true
    }

    /// Concerns all ranks: they share one reader.
    fn paused(&mut self) {
        self.drain.lock().pause();
        self.is_connected = false;
        self.replay = None;
    }
}

#[cfg(test)]
mod tests;
