//! Prompts that the routers sent to a source and that its cache probably still holds.
//!
//! The fallback where the index says nothing: engines without events, no indexer that answers, and
//! prompts whose tokens the router does not know. All routers of a fleet know the same prompts,
//! since `AddRequest` and `Free` carry them.
//!
//! An engine evicts its least recently used blocks. So a source's prompts are kept until their
//! distinct blocks exceed its cache, the oldest first. Blocks of answers are not known and not
//! counted: the estimate is too high for long answers. An engine's report of fewer cached tokens
//! ends what it refutes, at the router that received it ([`super::prefix_table`]).
//!
//! Nothing is kept where the index answers: a source's prompts are kept until the first decision
//! that does not need them, and for [`NEEDED`] after one that does.

use std::time::{Duration, Instant};

use warmroute_proto::PrefixHash;
use warmroute_proto::load::SampledPrefix;

use super::prefix_table::{CacheReport, PrefixLimits, PrefixTable};
use super::prompt_tree::HeldBlocks;
use super::source_table::{PerSource, SourceId};

/// How long a source's prompts are kept after a decision needed them.
pub const NEEDED: Duration = Duration::from_secs(600);

/// Blocks of a cache whose size the engine does not report: 131,072 tokens in blocks of 16.
pub const ASSUMED_BLOCKS: u64 = 8 << 10;

/// 16 MiB of hashes.
const LIMITS: PrefixLimits = PrefixLimits {
    keep: Duration::from_secs(1800),
    prefixes: 256 << 10,
    source_prefixes: 4 << 10,
    samples: 2 << 20,
};

#[derive(Clone, Debug)]
pub struct SentPrompts {
    table: PrefixTable,
    sources: PerSource<SentTo>,
}

#[derive(Clone, Copy, Debug, Default)]
struct SentTo {
    /// `None` before the first decision.
    needed_until: Option<Instant>,
    /// Blocks of the source's cache, if reported.
    capacity: Option<u64>,
}

impl Default for SentPrompts {
    fn default() -> Self {
        Self {
            table: PrefixTable::new(LIMITS),
            sources: PerSource::default(),
        }
    }
}

impl SentPrompts {
    /// Sets the number of blocks that a source's cache holds.
    pub fn set_capacity(&mut self, source: SourceId, blocks: Option<u64>) {
        self.sources.get_mut(source).capacity = blocks;
    }

    /// A decision does not need this source's prompts: the index answers.
    pub fn not_needed(&mut self, source: SourceId, now: Instant) {
        self.sources.get_mut(source).needed_until.get_or_insert(now);
    }

    /// A decision needs this source's prompts.
    pub fn needed(&mut self, source: SourceId, now: Instant) {
        self.sources.get_mut(source).needed_until = now.checked_add(NEEDED);
    }

    #[must_use]
    pub fn is_needed(&self, source: SourceId, now: Instant) -> bool {
        let until = self
            .sources
            .get(source)
            .and_then(|known| known.needed_until);
        until.is_none_or(|until| now < until)
    }

    /// A request with this prompt completed at the source.
    pub fn completed(&mut self, source: SourceId, hashes: Vec<PrefixHash>, now: Instant) {
        let report = CacheReport {
            source,
            prompt: &SampledPrefix { hashes },
            cached_blocks: u32::MAX,
            decided: now,
        };
        self.table.report(&report, now);
        let capacity = self.sources.get(source).and_then(|known| known.capacity);
        let capacity = capacity.unwrap_or(ASSUMED_BLOCKS);
        self.table.shrink(source, capacity);
    }

    /// Blocks of this prompt, from depth 0, that each source probably holds.
    #[must_use]
    pub fn held(&self, prompt: &SampledPrefix) -> HeldBlocks {
        self.table.held(prompt)
    }

    /// Ends what an engine's report refutes.
    pub fn refute(&mut self, report: &CacheReport<'_>) {
        self.table.refute(report);
    }

    /// Ends all prompts of a source, whose engine may have restarted.
    pub fn void(&mut self, source: SourceId) {
        self.table.void(source);
    }

    pub fn expire(&mut self, now: Instant) {
        self.table.expire(now);
    }

    /// Number of prompts kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    use crate::testing::{sampled, source_id, start};

    #[test]
    fn a_completed_prompt_is_expected_until_newer_ones_fill_the_cache() {
        let (source, now) = (source_id(), start());
        let mut sent = SentPrompts::default();
        sent.set_capacity(source, Some(20));
        let (one, two, three) = (sampled(0..10), sampled(100..110), sampled(200..205));
        for (second, asked) in [&one, &two, &one, &three].into_iter().enumerate() {
            let now = now + Duration::from_secs(second as u64);
            sent.completed(source, asked.hashes.clone(), now);
        }
        let held = [&one, &two, &three].map(|asked| sent.held(asked).of(source));
        assert_eq!(held, [10, 0, 5], "the second was used longest ago");
    }

    #[test]
    fn prompts_are_kept_for_a_while_after_a_decision_needed_them() {
        let (source, now) = (source_id(), start());
        let mut sent = SentPrompts::default();
        assert!(sent.is_needed(source, now), "no decision yet");
        sent.not_needed(source, now);
        assert!(!sent.is_needed(source, now));
        sent.needed(source, now);
        sent.not_needed(source, now);
        assert!(sent.is_needed(source, now + NEEDED / 2));
        assert!(!sent.is_needed(source, now + NEEDED));
    }

    #[test]
    fn a_report_of_nothing_cached_ends_what_is_expected() {
        let (source, now) = (source_id(), start());
        let mut sent = SentPrompts::default();
        let asked = sampled(0..10);
        sent.completed(source, asked.hashes.clone(), now);
        let report = CacheReport {
            source,
            prompt: &asked,
            cached_blocks: 0,
            decided: now + Duration::from_secs(1),
        };
        sent.refute(&report);
        assert_eq!(sent.held(&asked).of(source), 0);
        assert!(sent.is_empty());
    }

    proptest! {
        /// Distinct blocks never exceed the capacity, and the newest prompt that fits is whole.
        #[test]
        fn a_source_keeps_no_more_than_its_cache(
            capacity in 4_u32..40,
            prompts in prop::collection::vec((0_u64..4, 1_u64..12), 1..60),
        ) {
            let (source, now) = (source_id(), start());
            let mut sent = SentPrompts::default();
            sent.set_capacity(source, Some(capacity.into()));
            for (second, (root, length)) in prompts.into_iter().enumerate() {
                let asked = sampled((0..length).map(|depth| root * 100 + depth));
                let now = now + Duration::from_secs(second as u64);
                sent.completed(source, asked.hashes.clone(), now);
                let all: u32 = (0..4)
                    .map(|root| sampled((0..12).map(|depth| root * 100 + depth)))
                    .map(|whole| sent.held(&whole).of(source))
                    .sum();
                prop_assert!(all <= capacity, "{all} of {capacity}");
                if length <= capacity.into() {
                    prop_assert_eq!(u64::from(sent.held(&asked).of(source)), length);
                }
            }
        }
    }
}
