//! The decision core behind its one lock.
//!
//! The lock is held for single synchronous calls. Messages that a call writes wait in the core's
//! ledger, in order and bounded; [`SharedCore::written`] wakes the task that sends them. A request
//! that may still be moved has a [`MoveWatch`].
//!
//! What becomes of a slot ([`SlotSink::note`]) is not applied where it is noted: the next user of
//! the lock applies it first. A request that ends waits for no decision unless many events wait, and
//! the core's memory goes to its thread once less. The core is reached through the lock only, so no
//! user sees a difference.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant as StdInstant};

use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};
use tokio_util::sync::CancellationToken;
use warmroute_proto::load::{LoadChange, LoadMessage};

use crate::lost_sources::LossBoard;
use crate::route::{
    AdmitError, Admitted, Core, IndexReply, PairThreshold, RouteRequest, SlotEvent, SlotGuard,
    SlotSink, SplitVerdict,
};

/// Between two ticks of the core's clock.
const TICK: Duration = Duration::from_millis(250);

/// Most events of slots that wait for the next user of the core. It applies them under the lock,
/// which takes about 1 µs each.
const NOTED_MAX: usize = 16;

/// Frees its slot when it is dropped.
pub(crate) type SlotHold = SlotGuard<SharedCore>;

/// The decision core, shared by all tasks.
pub struct SharedCore {
    core: Mutex<Core>,
    /// Events of slots, with their times, that are not applied yet. At most [`NOTED_MAX`], and one
    /// of each thread that is about to apply them.
    noted: Mutex<VecDeque<(SlotEvent, StdInstant)>>,
    written: Notify,
    /// No other router can exist, so that no message is urgent.
    is_alone: AtomicBool,
    /// Slots may have been freed.
    room: Notify,
    /// Requests wait for one. A wake-up costs more than freeing a slot does.
    is_room_awaited: AtomicBool,
    /// By slot. As many as the core watches.
    watches: Mutex<BTreeMap<u64, Arc<Notify>>>,
    /// Sources that requests should leave.
    losses: LossBoard,
}

/// Registration for the event that another router's earlier choice crosses a slot's choice.
pub struct MoveWatch {
    core: Arc<SharedCore>,
    slot: u64,
    until: Instant,
    crossed: Arc<Notify>,
}

/// What a [`MoveWatch`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveSignal {
    /// The slot's choice was crossed: decide again.
    Crossed,
    /// The time for moving is over.
    Expired,
}

impl SharedCore {
    #[must_use]
    pub fn new(core: Core) -> Arc<Self> {
        Arc::new(Self {
            core: Mutex::new(core),
            noted: Mutex::new(VecDeque::with_capacity(NOTED_MAX)),
            written: Notify::new(),
            is_alone: AtomicBool::new(false),
            room: Notify::new(),
            is_room_awaited: AtomicBool::new(false),
            watches: Mutex::default(),
            losses: LossBoard::default(),
        })
    }

    /// The core, for one call, after all events of slots that were noted before. Its calls are total:
    /// a panic under the lock leaves it usable.
    pub fn core(&self) -> MutexGuard<'_, Core> {
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        // Not those that are noted from here on, so that the lock is not held for them too.
        let count = self.noted().len();
        for _ in 0..count {
            let Some((event, at)) = self.noted().pop_front() else {
                break;
            };
            if let Err(error) = core.note(event, at) {
                tracing::error!(%error, "cannot account a slot's event");
            }
        }
        core
    }

    fn noted(&self) -> MutexGuard<'_, VecDeque<(SlotEvent, StdInstant)>> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses and accounts in one step. Returns a watch if the request may still be moved.
    pub fn admit(
        self: &Arc<Self>,
        ask: &RouteRequest<'_>,
        answer: Option<&IndexReply>,
    ) -> Result<(Admitted, Option<MoveWatch>), AdmitError> {
        let now = Instant::now().into_std();
        let mut core = self.core();
        let admitted = core.admit(ask, answer, now)?;
        // Under the lock, so that no message crosses the slot before it is watched.
        let until = admitted.movable_until.map(Instant::from_std);
        let watch = until.map(|until| self.watch(admitted.slot, until));
        drop(core);
        self.notify_written();
        Ok((admitted, watch))
    }

    /// Whether a request is split between two sources.
    pub fn split(
        &self,
        ask: &RouteRequest<'_>,
        answer: Option<&IndexReply>,
        threshold: PairThreshold,
    ) -> SplitVerdict {
        let now = Instant::now().into_std();
        self.core().split(ask, answer, threshold, now)
    }

    /// Decides again for a slot whose choice was crossed. `None`: it stays.
    pub fn reconsider(
        &self,
        slot: u64,
        ask: &RouteRequest<'_>,
        answer: Option<&IndexReply>,
    ) -> Option<Admitted> {
        let now = Instant::now().into_std();
        let moved = self.core().reconsider(slot, ask, answer, now);
        match moved {
            Ok(moved) => moved.inspect(|_| {
                self.notify_written();
                self.room_freed();
            }),
            Err(error) => {
                tracing::error!(%error, "cannot account a move, request stays where it is");
                None
            }
        }
    }

    /// Applies another router's message and wakes the watches of the slots that it crosses.
    pub fn apply_remote(&self, message: &LoadMessage, now: StdInstant) {
        let mut core = self.core();
        core.apply_remote(message, now);
        let crossed = core.take_crossed();
        drop(core);
        let frees = |change: &LoadChange| matches!(change, LoadChange::Free { .. });
        if message.changes.iter().any(frees) {
            self.room_freed();
        }
        if crossed.is_empty() {
            return;
        }
        let watches = self.watches();
        for watch in crossed.iter().filter_map(|slot| watches.get(slot)) {
            watch.notify_one();
        }
    }

    /// Waits until an urgent message was written; others are sent with it, or by the clock.
    /// Cancel-safe; one wake-up may stand for several messages.
    pub async fn written(&self) {
        self.written.notified().await;
    }

    /// Waits until slots may have been freed. For one task; one wake-up may stand for several slots.
    pub(crate) async fn room_changed(&self) {
        self.room.notified().await;
    }

    /// Wakes the task that waits for [`Self::room_changed`].
    pub(crate) fn room_may_be_free(&self) {
        self.room.notify_one();
    }

    /// From here on freed slots wake the task that waits for [`Self::room_changed`].
    pub(crate) fn await_room(&self) {
        self.is_room_awaited.store(true, Ordering::Relaxed);
    }

    /// No request waits for a slot.
    pub(crate) fn ignore_room(&self) {
        self.is_room_awaited.store(false, Ordering::Relaxed);
    }

    /// There is no plane by which other routers could hear of this one.
    pub(crate) fn set_alone(&self) {
        self.is_alone.store(true, Ordering::Relaxed);
    }

    /// A slot was freed. A request that begins to wait at the same time looks once more after
    /// [`Self::await_room`].
    fn room_freed(&self) {
        if self.is_room_awaited.load(Ordering::Relaxed) {
            self.room.notify_one();
        }
    }

    fn notify_written(&self) {
        if !self.is_alone.load(Ordering::Relaxed) {
            self.written.notify_one();
        }
    }

    /// The clock task: lets time pass in the core while no request does, until stopped.
    pub async fn run_clock(self: Arc<Self>, stop: CancellationToken) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                now = ticks.tick() => self.tick(now),
            }
        }
    }

    /// Lets time pass, and publishes the sources that are stalled.
    pub(crate) fn tick(&self, now: Instant) {
        let mut core = self.core();
        core.tick(now.into_std());
        let stalls = core.stalls();
        drop(core);
        self.losses.set_stalls(&stalls);
    }

    /// The losses of sources.
    #[must_use]
    pub const fn losses(&self) -> &LossBoard {
        &self.losses
    }

    fn watch(self: &Arc<Self>, slot: u64, until: Instant) -> MoveWatch {
        let crossed = Arc::new(Notify::new());
        self.watches().insert(slot, Arc::clone(&crossed));
        MoveWatch {
            core: Arc::clone(self),
            slot,
            until,
            crossed,
        }
    }

    fn watches(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Notify>>> {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MoveWatch {
    /// Waits for the crossing or for the end of the time for moving. Cancel-safe.
    pub async fn signal(&self) -> MoveSignal {
        match timeout_at(self.until, self.crossed.notified()).await {
            Ok(()) => MoveSignal::Crossed,
            Err(_) => MoveSignal::Expired,
        }
    }
}

impl Drop for MoveWatch {
    fn drop(&mut self) {
        self.core.watches().remove(&self.slot);
    }
}

impl SlotSink for SharedCore {
    fn note(&self, event: SlotEvent) {
        let now = Instant::now().into_std();
        let mut noted = self.noted();
        noted.push_back((event, now));
        let is_full = noted.len() >= NOTED_MAX;
        drop(noted);
        if is_full {
            drop(self.core());
        }
        if matches!(event, SlotEvent::End { .. }) {
            self.room_freed();
        }
        if event.is_urgent() {
            self.notify_written();
        }
    }
}

#[cfg(test)]
mod tests;
