//! What this router says about its own slots: counters, numbers, and the bytes.
//!
//! Every change goes out as its own numbered message and comes back decoded from the very bytes that
//! are sent: whoever applies it knows no more of it than a peer does.

use warmroute_proto::codec::{self, DecodeError, EncodeError};
use warmroute_proto::load::{LoadChange, LoadMessage, SampledPrefix};
use warmroute_proto::{Generation, RecordNumber, RouterId, Source};

/// Numbers and encodes one router's messages, within one life of it.
#[derive(Clone, Debug)]
pub struct Ledger {
    router: RouterId,
    incarnation: Generation,
    next_number: RecordNumber,
    next_counter: u64,
}

/// A change as its peers see it.
#[derive(Clone, Debug)]
pub struct Entry {
    /// To be broadcast.
    pub bytes: Vec<u8>,
    /// To be applied.
    pub message: LoadMessage,
}

#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error(transparent)]
    Decode(#[from] DecodeError),
}

impl Ledger {
    #[must_use]
    pub const fn new(router: RouterId, incarnation: Generation) -> Self {
        Self {
            router,
            incarnation,
            next_number: RecordNumber(0),
            next_counter: 0,
        }
    }

    #[must_use]
    pub const fn router(&self) -> RouterId {
        self.router
    }

    #[must_use]
    pub const fn incarnation(&self) -> Generation {
        self.incarnation
    }

    /// A new slot's counter. Never given twice, whether or not the slot is opened.
    pub const fn counter(&mut self) -> u64 {
        let counter = self.next_counter;
        self.next_counter += 1;
        counter
    }

    /// The opening of a slot, small enough for one message.
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

    /// Writes a change down. On an error nothing was numbered: neither peers nor this router know it.
    pub fn write(&mut self, change: LoadChange) -> Result<Entry, LedgerError> {
        let message = LoadMessage {
            router: self.router,
            incarnation: self.incarnation,
            number: self.next_number,
            changes: vec![change],
        };
        let bytes = codec::encode(&message)?;
        let message = codec::decode(&bytes)?;
        self.next_number = self.next_number.next();
        Ok(Entry { bytes, message })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmroute_proto::load::{LOAD_BYTES_MAX, SlotEnd};
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
