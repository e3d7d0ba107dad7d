//! The decision core behind its one lock.
//!
//! The lock is held for single synchronous calls. What is written under it waits in the core's ledger,
//! in order and bounded; whoever sends it is told that there is something. A request that may still be
//! moved has a [`Watch`], which hears of it when its choice was crossed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use warmroute_proto::load::LoadMessage;
use warmroute_proto::query::Answer;

use crate::route::{Accounts, AdmitError, Admitted, Ask, Core, SlotEvent, SlotGuard};

pub(crate) type Slot = SlotGuard<Desk>;

/// Where decisions are made and slots are accounted.
pub struct Desk {
    core: Mutex<Core>,
    written: Notify,
    /// By slot. As many as the core watches.
    watches: Mutex<BTreeMap<u64, Arc<Notify>>>,
}

/// While it lives, somebody waits to hear that a slot's choice was crossed.
pub struct Watch {
    desk: Arc<Desk>,
    slot: u64,
    until: Instant,
    crossed: Arc<Notify>,
}

impl Desk {
    #[must_use]
    pub fn new(core: Core) -> Arc<Self> {
        Arc::new(Self {
            core: Mutex::new(core),
            written: Notify::new(),
            watches: Mutex::default(),
        })
    }

    /// The core, for one call. Total as it is, a panic under the lock leaves it usable.
    pub fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses and accounts in one step. With a watch if the request may still be moved.
    pub fn admit(
        self: &Arc<Self>,
        ask: &Ask<'_>,
        answer: Option<&Answer>,
    ) -> Result<(Admitted, Option<Watch>), AdmitError> {
        let now = Instant::now().into_std();
        let mut core = self.core();
        let admitted = core.admit(ask, answer, now)?;
        // Under the lock: nothing crosses it before it is watched.
        let until = admitted.movable_until.map(Instant::from_std);
        let watch = until.map(|until| self.watch(admitted.slot, until));
        drop(core);
        self.written.notify_one();
        Ok((admitted, watch))
    }

    /// Decides again for a slot whose choice was crossed. None: it stays.
    pub fn reconsider(
        &self,
        slot: u64,
        ask: &Ask<'_>,
        answer: Option<&Answer>,
    ) -> Option<Admitted> {
        let now = Instant::now().into_std();
        let moved = self.core().reconsider(slot, ask, answer, now);
        match moved {
            Ok(moved) => moved.inspect(|_| self.written.notify_one()),
            Err(error) => {
                tracing::error!(%error, "a request stays where it is, its move cannot be accounted");
                None
            }
        }
    }

    /// What another router did; the requests that it crosses hear of it.
    pub fn apply_remote(&self, message: &LoadMessage, now: std::time::Instant) {
        let mut core = self.core();
        core.apply_remote(message, now);
        let crossed = core.take_crossed();
        drop(core);
        if crossed.is_empty() {
            return;
        }
        let watches = self.watches();
        for watch in crossed.iter().filter_map(|slot| watches.get(slot)) {
            watch.notify_one();
        }
    }

    /// Waits until something urgent was written; the rest goes with it, or by the clock. Cancel-safe;
    /// several writings may be told once.
    pub async fn written(&self) {
        self.written.notified().await;
    }

    fn watch(self: &Arc<Self>, slot: u64, until: Instant) -> Watch {
        let crossed = Arc::new(Notify::new());
        self.watches().insert(slot, Arc::clone(&crossed));
        Watch {
            desk: Arc::clone(self),
            slot,
            until,
            crossed,
        }
    }

    fn watches(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Notify>>> {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch {
    /// The slot's choice was crossed. False: that cannot happen any more. Cancel-safe.
    pub async fn crossed(&self) -> bool {
        let crossed = timeout_at(self.until, self.crossed.notified()).await;
        crossed.is_ok()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.desk.watches().remove(&self.slot);
    }
}

impl Accounts for Desk {
    fn note(&self, event: SlotEvent) {
        let now = Instant::now().into_std();
        let noted = self.core().note(event, now);
        match noted {
            Ok(_) if event.is_urgent() => self.written.notify_one(),
            Ok(_) => {}
            Err(error) => tracing::error!(%error, ?event, "a slot's event is lost"),
        }
    }
}
