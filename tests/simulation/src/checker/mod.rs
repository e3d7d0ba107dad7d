//! Checks an index's answer about a source at the engine sequence that the answer names.
//!
//! A [`Truth`] is one rank's history: the changes of every published batch, from the mock engine's
//! `/debug/history`. [`Truth::judge`] compares an answer with the set that was held after the named
//! batch: `exact` must be that set's run, `partial` at most as long. A state without credit must
//! count nothing. Pure.

use std::collections::HashMap;
use std::fmt;

use fastrand::Rng;
use warmroute_mock_engine::{BlockName, HistoryBatch, PairChange};
use warmroute_proto::query::SourceState;
use warmroute_proto::{LocalHash, PrefixHash};

const GPU: u8 = 0;

/// Every state that one rank ever had, by engine sequence.
#[derive(Default)]
pub struct Truth {
    /// By prefix hash: the parent's prefix hash, and the local hash.
    names: HashMap<u64, (Option<u64>, u64)>,
    /// By prefix hash: the sequences at which its GPU tier became held or was removed; ascending.
    turns: HashMap<u64, Vec<(u64, bool)>>,
    known: Vec<u64>,
    next: u64,
}

/// An index's answer about one source's GPU tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    pub state: SourceState,
    pub seq: Option<u64>,
    pub blocks: u64,
}

/// A wrong claim.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Wrong {
    pub claim: Claim,
    /// The correct run at the claim's sequence.
    pub run: u64,
    pub prompt: u64,
    /// Changes of the first block in which claim and truth differ.
    pub turns: Vec<(u64, bool)>,
    /// The engine's last known batch.
    pub last: Option<u64>,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            claim,
            run,
            prompt,
            turns,
            last,
        } = self;
        write!(
            f,
            "{claim:?} of a prompt of {prompt} blocks, of which {run} were held then; the block where they \
             differ turned at {turns:?}; the engine is at {last:?}"
        )
    }
}

impl Truth {
    /// Number of the next batch.
    #[must_use]
    pub const fn next(&self) -> u64 {
        self.next
    }

    /// Applies the next batch. Ignores batches that were applied before.
    ///
    /// # Panics
    /// If batches before it are missing.
    pub fn learn(&mut self, batch: &HistoryBatch) {
        if batch.seq < self.next {
            return;
        }
        assert_eq!(batch.seq, self.next, "the history has a hole");
        self.next += 1;
        for &BlockName(prefix, parent, local) in &batch.names {
            if self.names.insert(prefix, (parent, local)).is_none() {
                self.known.push(prefix);
            }
        }
        for &PairChange(prefix, tier, is_held) in &batch.changes {
            if tier == GPU {
                self.turns
                    .entry(prefix)
                    .or_default()
                    .push((batch.seq, is_held));
            }
        }
    }

    /// Draws a prompt that is or was held. `None` before the first block.
    pub fn prompt(&self, rng: &mut Rng) -> Option<Vec<LocalHash>> {
        const RECENT: usize = 2_000;
        let oldest = if rng.bool() {
            self.known.len().saturating_sub(RECENT)
        } else {
            0
        };
        let mut at = Some(
            *self
                .known
                .get(oldest + rng.usize(..(self.known.len() - oldest).max(1)))?,
        );
        let mut blocks = Vec::new();
        while let Some((parent, local)) = at.and_then(|prefix| self.names.get(&prefix)) {
            blocks.push(LocalHash(*local));
            at = *parent;
        }
        blocks.reverse();
        Some(blocks)
    }

    /// Number of the prompt's blocks that were held, from depth 0 on, after batch `seq`. 0 without
    /// one.
    fn run(&self, prompt: &[LocalHash], seq: Option<u64>) -> u64 {
        let held = |prefix: &PrefixHash| seq.is_some_and(|seq| self.held(*prefix, seq));
        prefixes(prompt).take_while(held).count() as u64
    }

    fn held(&self, prefix: PrefixHash, seq: u64) -> bool {
        let turns = self.turns.get(&prefix.0).map_or(&[][..], Vec::as_slice);
        let behind = turns.partition_point(|&(at, _)| at <= seq);
        behind.checked_sub(1).is_some_and(|last| turns[last].1)
    }

    /// Compares a claim about this prompt with the history.
    pub fn judge(&self, prompt: &[LocalHash], claim: Claim) -> Result<(), Box<Wrong>> {
        let run = self.run(prompt, claim.seq);
        let is_true = match claim.state {
            SourceState::Exact => claim.blocks == run,
            SourceState::Partial | SourceState::Unverified => claim.blocks <= run,
            SourceState::Stale
            | SourceState::CatchingUp
            | SourceState::Unknown
            | SourceState::Absent => claim.blocks == 0,
        };
        if is_true {
            return Ok(());
        }
        let depth = usize::try_from(run.min(claim.blocks)).unwrap_or(usize::MAX);
        let differs = prefixes(prompt).nth(depth);
        let turns = differs.and_then(|prefix| self.turns.get(&prefix.0));
        Err(Box::new(Wrong {
            claim,
            run,
            prompt: prompt.len() as u64,
            turns: turns.cloned().unwrap_or_default(),
            last: self.next.checked_sub(1),
        }))
    }
}

fn prefixes(prompt: &[LocalHash]) -> impl Iterator<Item = PrefixHash> {
    warmroute_proto::hash::prefix_hashes(None, prompt)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chain of blocks 1, 2, 3 that is stored at 0. Its second block is removed at 1 and stored
    /// at 3.
    fn truth() -> (Truth, Vec<LocalHash>) {
        let prompt: Vec<LocalHash> = (1..=3).map(LocalHash).collect();
        let chain: Vec<u64> = prefixes(&prompt).map(|prefix| prefix.0).collect();
        let mut truth = Truth::default();
        let parent = |at: usize| at.checked_sub(1).map(|before| chain[before]);
        truth.learn(&HistoryBatch {
            seq: 0,
            names: (0..3)
                .map(|at| BlockName(chain[at], parent(at), prompt[at].0))
                .collect(),
            changes: chain
                .iter()
                .map(|&prefix| PairChange(prefix, GPU, true))
                .collect(),
        });
        for (seq, held) in [(1, Some(false)), (2, None), (3, Some(true))] {
            let change = held.map(|held| PairChange(chain[1], GPU, held));
            truth.learn(&HistoryBatch {
                seq,
                names: Vec::new(),
                changes: change.into_iter().collect(),
            });
        }
        (truth, prompt)
    }

    const fn claim(state: SourceState, seq: Option<u64>, blocks: u64) -> Claim {
        Claim { state, seq, blocks }
    }

    #[test]
    fn a_claim_is_compared_with_what_was_held_then() {
        let (truth, prompt) = truth();
        for (seq, run) in [
            (None, 0),
            (Some(0), 3),
            (Some(1), 1),
            (Some(2), 1),
            (Some(3), 3),
        ] {
            for blocks in 0..=4 {
                let judged = |state| truth.judge(&prompt, claim(state, seq, blocks)).is_ok();
                assert_eq!(
                    judged(SourceState::Exact),
                    blocks == run,
                    "{seq:?} {blocks}"
                );
                assert_eq!(
                    judged(SourceState::Partial),
                    blocks <= run,
                    "{seq:?} {blocks}"
                );
                assert_eq!(judged(SourceState::Stale), blocks == 0, "{seq:?} {blocks}");
            }
        }
    }

    #[test]
    fn a_wrong_claim_is_told_with_what_made_it_wrong() {
        let (truth, prompt) = truth();
        let wrong = truth
            .judge(&prompt, claim(SourceState::Exact, Some(2), 3))
            .unwrap_err();
        assert_eq!((wrong.run, wrong.last), (1, Some(3)));
        assert_eq!(wrong.turns, [(0, true), (1, false), (3, true)]);
    }

    #[test]
    fn prompts_begin_at_depth_0() {
        let (truth, prompt) = truth();
        let mut rng = Rng::with_seed(1);
        for _ in 0..20 {
            let drawn = truth.prompt(&mut rng).unwrap();
            assert_eq!(drawn, prompt[..drawn.len()]);
        }
        assert_eq!(Truth::default().prompt(&mut rng), None);
    }
}
