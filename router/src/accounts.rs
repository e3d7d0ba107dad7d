//! The decision core behind its one lock, and the way of its messages to the other routers.
//!
//! The lock is held for single synchronous calls. Messages go through a bounded queue to a task that
//! publishes them in order; when it is full they are dropped and counted, which is what broadcast is:
//! lossy, with sequence numbers that show it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use prometheus::IntCounter;
use tokio::sync::mpsc;
use tokio::time::Instant;
use warmroute_proto::bus::Plane;

use crate::route::{Accounts, Core, SlotEvent, SlotGuard};

/// Load messages that wait to be published.
const OUTBOX_MAX: usize = 4096;

pub(crate) type Slot = SlotGuard<Desk>;

/// Where decisions are made and slots are accounted.
pub(crate) struct Desk {
    core: Mutex<Core>,
    outbox: mpsc::Sender<Bytes>,
    dropped: IntCounter,
}

/// The other end of the desk's queue.
pub(crate) struct Outbox(mpsc::Receiver<Bytes>);

impl Desk {
    pub(crate) fn new(core: Core, dropped: IntCounter) -> (Arc<Self>, Outbox) {
        let (outbox, messages) = mpsc::channel(OUTBOX_MAX);
        let desk = Self {
            core: Mutex::new(core),
            outbox,
            dropped,
        };
        (Arc::new(desk), Outbox(messages))
    }

    /// The core, for one call. Total as it is, a panic under the lock leaves it usable.
    pub(crate) fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn publish(&self, message: Bytes) {
        if self.outbox.try_send(message).is_err() {
            self.dropped.inc();
        }
    }
}

impl Accounts for Desk {
    fn note(&self, event: SlotEvent) {
        let now = Instant::now().into_std();
        let noted = self.core().note(event, now);
        match noted {
            Ok(message) => self.publish(message.into()),
            Err(error) => tracing::error!(%error, ?event, "a slot's event is lost"),
        }
    }
}

impl Outbox {
    /// Publishes until every desk is gone.
    pub(crate) async fn run(mut self, plane: Arc<dyn Plane>, subject: String) {
        while let Some(message) = self.0.recv().await {
            if let Err(error) = plane.publish(subject.clone(), message).await {
                tracing::debug!(%error, "a load message was not published");
            }
        }
    }
}
