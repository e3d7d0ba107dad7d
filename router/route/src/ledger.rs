//! Outgoing load messages of this router: slot counters, message numbers and encoded bytes.
//!
//! Each change becomes a numbered message. This router applies the message itself, which is what its
//! peers decode.
//!
//! A ring keeps the last [`RING_BYTES_MAX`] of messages, for sending and for peers that missed
//! them. For older messages a peer fetches the open slots.

use std::collections::VecDeque;

use bytes::Bytes;
use warmroute_proto::codec::{self, EncodeError};
use warmroute_proto::load::{LOAD_BYTES_MAX, LoadChange, LoadMessage, SampledPrefix};
use warmroute_proto::{Generation, RecordNumber, RouterId, Source};

/// Two seconds of 1,000 requests a second that generate 500 tokens each.
pub const RING_BYTES_MAX: usize = 4 << 20;

/// Overhead of a kept message.
const KEPT_BYTES: usize = 64;

/// Numbers and encodes one router's messages.
#[derive(Clone, Debug)]
pub struct Ledger {
    router: RouterId,
    incarnation: Generation,
    next_number: RecordNumber,
    next_counter: u64,
    /// The messages up to `next_number`, without gaps.
    ring: VecDeque<Bytes>,
    ring_bytes: usize,
}

/// An encoded message.
#[derive(Clone, Debug)]
pub struct LedgerEntry {
    /// For the peers.
    pub bytes: Bytes,
    /// For this router.
    pub message: LoadMessage,
}

#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error("the message is longer than others take")]
    TooLong,
}

impl Ledger {
    #[must_use]
    pub const fn new(router: RouterId, incarnation: Generation) -> Self {
        Self {
            router,
            incarnation,
            next_number: RecordNumber(0),
            next_counter: 0,
            ring: VecDeque::new(),
            ring_bytes: 0,
        }
    }

    /// Begins another incarnation with `open` slots. Number 0 stands for the open slots and is no
    /// message: peers fetch them. Counters go on, because slots do.
    pub fn begin(&mut self, incarnation: Generation, open: u64) {
        self.incarnation = incarnation;
        self.next_number = RecordNumber(u64::from(open > 0));
        self.ring.clear();
        self.ring_bytes = 0;
    }

    #[must_use]
    pub const fn router(&self) -> RouterId {
        self.router
    }

    #[must_use]
    pub const fn incarnation(&self) -> Generation {
        self.incarnation
    }

    /// The last number written or used for the open slots; `None` before the first.
    #[must_use]
    pub fn last(&self) -> Option<RecordNumber> {
        self.next_number.0.checked_sub(1).map(RecordNumber)
    }

    /// The next number.
    #[must_use]
    pub const fn next(&self) -> RecordNumber {
        self.next_number
    }

    /// The oldest number kept, or `next`.
    #[must_use]
    pub fn first_kept(&self) -> RecordNumber {
        let kept = u64::try_from(self.ring.len()).unwrap_or(u64::MAX);
        RecordNumber(self.next_number.0.saturating_sub(kept))
    }

    /// Kept messages from a number on, oldest first; empty if that number is not kept.
    pub fn kept(&self, from: RecordNumber) -> impl Iterator<Item = &Bytes> {
        let skip = from.0.checked_sub(self.first_kept().0);
        let skip = skip.and_then(|skip| usize::try_from(skip).ok());
        self.ring.iter().skip(skip.unwrap_or(usize::MAX))
    }

    /// Counter of a new slot. Unique, even if the slot is never opened.
    pub const fn counter(&mut self) -> u64 {
        let counter = self.next_counter;
        self.next_counter += 1;
        counter
    }

    /// The change that opens a slot, small enough for one message.
    #[must_use]
    pub fn opening(
        counter: u64,
        source: &Source,
        prefill_tokens: u32,
        blocks: u32,
        prompt: &SampledPrefix,
    ) -> LoadChange {
        LoadChange::AddRequest {
            counter,
            source: source.clone(),
            prefill_tokens,
            blocks,
            prompt: prompt.clone().fitting(source),
        }
    }

    /// Writes one change as a message. On an error no number is used.
    pub fn write(&mut self, change: LoadChange) -> Result<LedgerEntry, LedgerError> {
        self.write_all(vec![change])
    }

    /// Writes changes as one message, so that peers apply all or none.
    pub fn write_all(&mut self, changes: Vec<LoadChange>) -> Result<LedgerEntry, LedgerError> {
        let message = LoadMessage {
            router: self.router,
            incarnation: self.incarnation,
            number: self.next_number,
            changes,
        };
        let bytes = Bytes::from(codec::encode(&message)?);
        if bytes.len() > LOAD_BYTES_MAX {
            return Err(LedgerError::TooLong);
        }
        debug_assert_eq!(codec::decode(&bytes).ok().as_ref(), Some(&message));
        self.next_number = self.next_number.next();
        self.keep(bytes.clone());
        Ok(LedgerEntry { bytes, message })
    }

    fn keep(&mut self, bytes: Bytes) {
        self.ring_bytes += bytes.len() + KEPT_BYTES;
        self.ring.push_back(bytes);
        while self.ring_bytes > RING_BYTES_MAX
            && let Some(oldest) = self.ring.pop_front()
        {
            self.ring_bytes -= oldest.len() + KEPT_BYTES;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmroute_proto::load::SlotEnd;
    use warmroute_proto::{DpRank, LocalHash};

    fn ledger() -> Ledger {
        Ledger::new(RouterId([7; 16]), Generation(3))
    }

    #[test]
    fn messages_and_slots_are_numbered_without_a_hole() {
        let mut ledger = ledger();
        for number in 0..3 {
            let counter = ledger.counter();
            assert_eq!(counter, number);
            let end = SlotEnd::Completed;
            let entry = ledger.write(LoadChange::Free { counter, end }).unwrap();
            assert_eq!(entry.message.number, RecordNumber(number));
        }
    }

    fn grow(ledger: &mut Ledger) -> Bytes {
        let change = LoadChange::Grow {
            counter: 1,
            blocks: 1,
        };
        ledger.write(change).unwrap().bytes
    }

    #[test]
    fn the_last_messages_are_kept_and_the_oldest_go() {
        let mut ledger = ledger();
        let one = grow(&mut ledger);
        assert_eq!(ledger.kept(RecordNumber(0)).collect::<Vec<_>>(), [&one]);
        assert_eq!(ledger.kept(RecordNumber(1)).count(), 0);
        let room = RING_BYTES_MAX / (one.len() + KEPT_BYTES);
        for _ in 0..room {
            grow(&mut ledger);
        }
        assert_eq!(ledger.first_kept(), RecordNumber(1));
        assert_eq!(ledger.kept(RecordNumber(0)).count(), 0);
        assert_eq!(ledger.kept(RecordNumber(1)).count(), room);
        assert_eq!(ledger.kept(RecordNumber(5)).count(), room - 4);
        assert_eq!(ledger.kept(ledger.next()).count(), 0);
    }

    #[test]
    fn another_incarnation_states_its_slots_as_number_0() {
        let mut ledger = ledger();
        let counter = ledger.counter();
        grow(&mut ledger);
        ledger.begin(Generation(9), 1);
        assert_eq!(ledger.last(), Some(RecordNumber(0)));
        assert_eq!(ledger.first_kept(), RecordNumber(1));
        assert_eq!(ledger.counter(), counter + 1);
        ledger.begin(Generation(10), 0);
        assert_eq!(ledger.last(), None);
        grow(&mut ledger);
        assert_eq!(ledger.last(), Some(RecordNumber(0)));
    }

    #[test]
    fn what_is_applied_is_what_is_sent() {
        let mut ledger = ledger();
        let change = LoadChange::MarkPrefillCompleted { counter: 5 };
        let entry = ledger.write(change).unwrap();
        assert_eq!(
            codec::decode::<LoadMessage>(&entry.bytes).unwrap(),
            entry.message
        );
    }

    #[test]
    fn an_opening_is_small_whatever_the_prompt_and_the_name() {
        let blocks: Vec<LocalHash> = (0..300_000).map(LocalHash).collect();
        let prompt = SampledPrefix::of(&blocks);
        for name in [1, 60, 253, 1000] {
            let source = Source {
                worker: "w".repeat(name).into(),
                dp_rank: DpRank(3),
            };
            let change = Ledger::opening(1, &source, u32::MAX, u32::MAX, &prompt);
            let entry = ledger().write(change).unwrap();
            assert!(entry.bytes.len() <= LOAD_BYTES_MAX, "{}", entry.bytes.len());
        }
    }
}
