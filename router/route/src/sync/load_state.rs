//! Access of replication to the routing core: own messages, and the slots of all routers.

use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_proto::load::{LoadDigest, LoadMessage, OpenSlot};
use warmroute_proto::{Generation, RecordNumber, RouterId};

use crate::{Core, RouterLoad};

/// State of this router's messages at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerHead {
    pub incarnation: Generation,
    /// The last number.
    pub number: Option<RecordNumber>,
    /// Digest of own open slots as of `number`.
    pub digest: LoadDigest,
}

/// Own messages, oldest first.
#[derive(Clone, Debug)]
pub struct OutgoingMessages {
    /// Number of the first message, or the next one. Higher than requested if that one is not kept.
    pub first: RecordNumber,
    pub messages: Vec<Bytes>,
    pub head: LedgerHead,
}

/// Own open slots at one moment.
#[derive(Clone, Debug)]
pub struct SlotSnapshot {
    pub head: LedgerHead,
    pub slots: Vec<OpenSlot>,
}

/// Implementations hold their lock briefly in each call.
pub trait LoadState {
    /// Own messages from a number on: at most `bytes_max` bytes, but at least one message.
    fn messages_from(&mut self, from: RecordNumber, bytes_max: usize) -> OutgoingMessages;
    fn snapshot(&mut self) -> SlotSnapshot;
    /// Continues under another incarnation.
    fn begin(&mut self, incarnation: Generation);

    fn digest(&mut self, router: RouterId) -> LoadDigest;
    fn loads(&mut self, router: RouterId) -> Vec<RouterLoad>;
    fn apply(&mut self, message: &LoadMessage, now: Instant);
    fn release(&mut self, router: RouterId, now: Instant);
    fn restore(&mut self, router: RouterId, incarnation: Generation, slots: &[OpenSlot]);
    fn forget(&mut self, router: RouterId, now: Instant);
    /// Sets the one-way delay of a router's messages; `None` removes it.
    fn set_delay(&mut self, router: RouterId, delay: Option<Duration>);
}

impl LoadState for Core {
    fn messages_from(&mut self, from: RecordNumber, bytes_max: usize) -> OutgoingMessages {
        let head = head(self);
        let ledger = self.ledger();
        let first = from.max(ledger.first_kept()).min(ledger.next());
        let mut bytes = 0;
        let messages = ledger.kept(first).take_while(|message| {
            let alone = bytes == 0;
            // As in a frame: with its length.
            bytes += message.len() + size_of::<u64>();
            alone || bytes <= bytes_max
        });
        OutgoingMessages {
            first,
            messages: messages.cloned().collect(),
            head,
        }
    }

    fn snapshot(&mut self) -> SlotSnapshot {
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

    fn set_delay(&mut self, router: RouterId, delay: Option<Duration>) {
        self.set_delay(router, delay);
    }
}

/// The head of a core's messages.
#[must_use]
pub fn head(core: &Core) -> LedgerHead {
    let ledger = core.ledger();
    LedgerHead {
        incarnation: ledger.incarnation(),
        number: ledger.last(),
        digest: core.digest(ledger.router()),
    }
}
