//! What the sync core needs of the decision core: one's own messages, everybody's slots.

use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_proto::load::{LoadDigest, LoadMessage, OpenSlot};
use warmroute_proto::{Generation, RecordNumber, RouterId};

use crate::{Core, RouterLoad};

/// How this router stands, all of one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerHead {
    pub incarnation: Generation,
    /// The last number written.
    pub number: Option<RecordNumber>,
    /// OwnState open slots as of it.
    pub digest: LoadDigest,
}

/// OwnState messages, oldest first.
#[derive(Clone, Debug)]
pub struct OutgoingMessages {
    /// The number of the first of them, or the next one to be written. Above what was asked for if
    /// that is not kept.
    pub first: RecordNumber,
    pub messages: Vec<Bytes>,
    pub head: LedgerHead,
}

/// OwnState open slots, all of one moment.
#[derive(Clone, Debug)]
pub struct SlotSnapshot {
    pub head: LedgerHead,
    pub slots: Vec<OpenSlot>,
}

/// Each call holds whatever lock there is for short times only.
pub trait LoadState {
    /// OwnState messages from a number on, at least one if there is one, else at most so many bytes.
    fn written(&mut self, from: RecordNumber, bytes_max: usize) -> OutgoingMessages;
    fn stated(&mut self) -> SlotSnapshot;
    /// Goes on under another incarnation.
    fn begin(&mut self, incarnation: Generation);

    fn digest(&mut self, router: RouterId) -> LoadDigest;
    fn loads(&mut self, router: RouterId) -> Vec<RouterLoad>;
    fn apply(&mut self, message: &LoadMessage, now: Instant);
    fn release(&mut self, router: RouterId, now: Instant);
    fn restore(&mut self, router: RouterId, incarnation: Generation, slots: &[OpenSlot]);
    fn forget(&mut self, router: RouterId, now: Instant);
    /// How long this router's messages are on their way; none: it is gone.
    fn delay(&mut self, router: RouterId, delay: Option<Duration>);
}

impl LoadState for Core {
    fn written(&mut self, from: RecordNumber, bytes_max: usize) -> OutgoingMessages {
        let head = head(self);
        let ledger = self.ledger();
        let first = from.max(ledger.first_kept()).min(ledger.next());
        let mut bytes = 0;
        let messages = ledger.kept(first).take_while(|message| {
            let alone = bytes == 0;
            // As a frame counts: with its length before it.
            bytes += message.len() + size_of::<u64>();
            alone || bytes <= bytes_max
        });
        OutgoingMessages {
            first,
            messages: messages.cloned().collect(),
            head,
        }
    }

    fn stated(&mut self) -> SlotSnapshot {
        SlotSnapshot {
            head: head(self),
            slots: self.own_slots(),
        }
    }

    fn begin(&mut self, incarnation: Generation) {
        Self::begin(self, incarnation);
    }

    fn digest(&mut self, router: RouterId) -> LoadDigest {
        Self::digest(self, router)
    }

    fn loads(&mut self, router: RouterId) -> Vec<RouterLoad> {
        self.loads_of(router)
    }

    fn apply(&mut self, message: &LoadMessage, now: Instant) {
        self.apply_remote(message, now);
    }

    fn release(&mut self, router: RouterId, now: Instant) {
        Self::release(self, router, now);
    }

    fn restore(&mut self, router: RouterId, incarnation: Generation, slots: &[OpenSlot]) {
        Self::restore(self, router, incarnation, slots);
    }

    fn forget(&mut self, router: RouterId, now: Instant) {
        Self::forget(self, router, now);
    }

    fn delay(&mut self, router: RouterId, delay: Option<Duration>) {
        self.set_delay(router, delay);
    }
}

/// How a core's router stands now.
#[must_use]
pub fn head(core: &Core) -> LedgerHead {
    let ledger = core.ledger();
    LedgerHead {
        incarnation: ledger.incarnation(),
        number: ledger.last(),
        digest: core.digest(ledger.router()),
    }
}
