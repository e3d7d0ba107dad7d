//! [`LoadState`] over the shared core. Every call holds the core's lock briefly: long work is done in
//! steps, and requests may take the lock between two of them.

use std::sync::Arc;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use warmroute_proto::load::{LoadDigest, LoadMessage, OpenSlot};
use warmroute_proto::{Generation, RecordNumber, RouterId};

use crate::route::{RouterLoad, SlotSnapshotBuilder};
use crate::shared_core::SharedCore;
use crate::sync::{LoadState, OutgoingMessages, SlotSnapshot, head};

pub(super) struct SharedLoadState(pub(super) Arc<SharedCore>);

impl LoadState for SharedLoadState {
    fn messages_from(&mut self, from: RecordNumber, bytes_max: usize) -> OutgoingMessages {
        self.0.core().messages_from(from, bytes_max)
    }

    fn snapshot(&mut self) -> SlotSnapshot {
        let mut builder = SlotSnapshotBuilder::default();
        loop {
            let mut core = self.0.core();
            if core.snapshot_step(&mut builder) {
                let head = head(&core);
                drop(core);
                return SlotSnapshot {
                    head,
                    slots: builder.into_slots(),
                };
            }
            drop(core);
            yield_now();
        }
    }

    fn begin(&mut self, incarnation: Generation) {
        self.0.core().begin(incarnation);
    }

    fn digest(&mut self, router: RouterId) -> LoadDigest {
        self.0.core().digest(router)
    }

    fn loads(&mut self, router: RouterId) -> Vec<RouterLoad> {
        self.0.core().loads_of(router)
    }

    fn apply(&mut self, message: &LoadMessage, now: Instant) {
        self.0.apply_remote(message, now);
    }

    fn release(&mut self, router: RouterId, now: Instant) {
        while self.0.core().release_step(router, now) {
            yield_now();
        }
    }

    fn restore(&mut self, router: RouterId, incarnation: Generation, slots: &[OpenSlot]) {
        self.0.core().restore(router, incarnation, slots);
    }

    fn forget(&mut self, router: RouterId, now: Instant) {
        self.release(router, now);
        self.0.core().forget(router, now);
    }

    fn set_delay(&mut self, router: RouterId, delay: Option<Duration>) {
        self.0.core().set_delay(router, delay);
    }
}
