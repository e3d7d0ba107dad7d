//! The books of a desk: every call holds its lock once.

use std::sync::Arc;
use std::time::Instant;

use warmroute_proto::load::{LoadDigest, LoadMessage, OpenSlot};
use warmroute_proto::{Generation, RecordNumber, RouterId};

use crate::accounts::Desk;
use crate::route::RouterLoad;
use crate::sync::{Books, Stated, Written};

pub(super) struct DeskBooks(pub(super) Arc<Desk>);

impl Books for DeskBooks {
    fn written(&mut self, from: RecordNumber, bytes_max: usize) -> Written {
        self.0.core().written(from, bytes_max)
    }

    fn stated(&mut self) -> Stated {
        Books::stated(&mut *self.0.core())
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
        self.0.core().apply_remote(message, now);
    }

    fn release(&mut self, router: RouterId, now: Instant) {
        self.0.core().release(router, now);
    }

    fn restore(&mut self, router: RouterId, incarnation: Generation, slots: &[OpenSlot]) {
        self.0.core().restore(router, incarnation, slots);
    }

    fn forget(&mut self, router: RouterId, now: Instant) {
        self.0.core().forget(router, now);
    }
}
