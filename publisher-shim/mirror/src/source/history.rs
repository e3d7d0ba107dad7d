//! Hashes of the last batches applied: distinguish a duplicate from a batch of another life.

use std::collections::VecDeque;

use warmroute_proto::EngineSeq;
use xxhash_rust::xxh3::xxh3_64;

/// Number of batches that a live duplicate is recognised among. A replay settles older ones.
const LEN_MAX: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchMatch {
    Same,
    Different,
    TooOld,
}

/// Hashes of consecutive batches, the newest at the back.
#[derive(Debug)]
pub(super) struct BatchHistory {
    hashes: VecDeque<u64>,
    last: Option<EngineSeq>,
}

impl BatchHistory {
    pub(super) const fn new() -> Self {
        Self {
            hashes: VecDeque::new(),
            last: None,
        }
    }

    pub(super) const fn last(&self) -> Option<EngineSeq> {
        self.last
    }

    pub(super) fn last_hash(&self) -> Option<u64> {
        self.hashes.back().copied()
    }

    /// Restarts with one batch, by its hash.
    pub(super) fn restart_at(&mut self, seq: EngineSeq, hash: u64) {
        self.hashes.clear();
        self.hashes.push_back(hash);
        self.last = Some(seq);
    }

    pub(super) fn clear(&mut self) {
        self.hashes.clear();
        self.last = None;
    }

    /// Adds the batch behind the last one, or the first one.
    pub(super) fn push(&mut self, seq: EngineSeq, payload: &[u8]) {
        if self.hashes.len() == LEN_MAX {
            self.hashes.pop_front();
        }
        self.hashes.push_back(xxh3_64(payload));
        self.last = Some(seq);
    }

    /// Compares a payload with the batch of the same number, which is not above the last.
    pub(super) fn compare(&self, seq: EngineSeq, payload: &[u8]) -> BatchMatch {
        let hash = self
            .last
            .and_then(|last| last.0.checked_sub(seq.0))
            .and_then(|back| usize::try_from(back).ok())
            .and_then(|back| self.hashes.len().checked_sub(back.checked_add(1)?))
            .and_then(|index| self.hashes.get(index));
        match hash {
            Some(&hash) if hash == xxh3_64(payload) => BatchMatch::Same,
            Some(_) => BatchMatch::Different,
            None => BatchMatch::TooOld,
        }
    }
}
