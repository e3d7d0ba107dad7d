//! The decision core behind its one lock.
//!
//! The lock is held for single synchronous calls. What is written under it waits in the core's ledger,
//! in order and bounded; whoever sends it is told that there is something.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::Instant;
use warmroute_proto::query::Answer;

use crate::route::{Accounts, AdmitError, Admitted, Ask, Core, SlotEvent, SlotGuard};

pub(crate) type Slot = SlotGuard<Desk>;

/// Where decisions are made and slots are accounted.
pub struct Desk {
    core: Mutex<Core>,
    written: Notify,
}

impl Desk {
    #[must_use]
    pub fn new(core: Core) -> Arc<Self> {
        Arc::new(Self {
            core: Mutex::new(core),
            written: Notify::new(),
        })
    }

    /// The core, for one call. Total as it is, a panic under the lock leaves it usable.
    pub fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses and accounts in one step.
    pub fn admit(&self, ask: &Ask<'_>, answer: Option<&Answer>) -> Result<Admitted, AdmitError> {
        let now = Instant::now().into_std();
        let admitted = self.core().admit(ask, answer, now)?;
        self.written.notify_one();
        Ok(admitted)
    }

    /// Waits until something urgent was written; the rest goes with it, or by the clock. Cancel-safe;
    /// several writings may be told once.
    pub async fn written(&self) {
        self.written.notified().await;
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
