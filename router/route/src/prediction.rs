//! What is expected to be cached soon, because requests that were sent there bring it.
//!
//! The sampled prompt of a slot is expected at its source from the moment it was sent, and for [`KEEP`]
//! after it completed. It ends earlier with an answer of the index that counts it already (from then
//! on the index knows better, also when the blocks go again), with a failure or an abort, with the
//! death of its router, and with a new generation of the source.
//!
//! Equal prompts at one source are one expectation. Memory is bounded by [`SAMPLES_KEPT_MAX`] hashes
//! and [`ENDED_KEPT_MAX`] ended prompts: the oldest ended ones go first, and then new prompts are not
//! expected; both are counted. Call [`Predictions::expire`] before asking.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use warmroute_proto::RouterId;
use warmroute_proto::load::{SampledPrefix, SlotEnd};

use super::prompt_tree::{PromptLeaf, PromptTree};
use super::slots::SlotKey;
use super::source_table::{PerSource, SourceId};

/// The shim polls an idle engine each second and so finds a lost tail; what the index does not know
/// after two polls is not cached.
pub const KEEP: Duration = Duration::from_secs(2);

/// 16 MiB of hashes.
pub const SAMPLES_KEPT_MAX: u64 = 2 << 20;

/// 32,000 requests a second that end, for [`KEEP`].
pub const ENDED_KEPT_MAX: usize = 64 << 10;

#[derive(Clone, Debug, Default)]
pub struct Predictions {
    sources: PerSource<SourceExpectations>,
    tickets: BTreeMap<(RouterId, u64), PredictionTicket>,
    ended: VecDeque<(Instant, PredictionTicket)>,
    next_serial: u64,
    samples: u64,
    dropped: u64,
}

#[derive(Clone, Debug, Default)]
struct SourceExpectations {
    prompts: PromptTree,
    entries: FxHashMap<PromptLeaf, ExpectedPrompt>,
}

/// One expected prompt. It holds one place in the prompts, however many requests bring it.
#[derive(Clone, Copy, Debug)]
struct ExpectedPrompt {
    /// Tells an entry from a later one at the same leaf.
    serial: u64,
    active: u32,
    until: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct PredictionTicket {
    source: SourceId,
    leaf: PromptLeaf,
    serial: u64,
}

impl Predictions {
    /// A request with this prompt was sent to the source.
    pub fn sent(
        &mut self,
        router: RouterId,
        counter: u64,
        source: SourceId,
        prompt: &SampledPrefix,
    ) {
        if prompt.hashes.is_empty() || self.tickets.contains_key(&(router, counter)) {
            return;
        }
        while self.samples >= SAMPLES_KEPT_MAX {
            if !self.drop_oldest() {
                self.dropped += 1;
                return;
            }
        }
        let serial = self.next_serial;
        self.next_serial += 1;
        let ticket = self.change(source, |expected| {
            expected.bring(source, &prompt.hashes, serial)
        });
        self.tickets.insert((router, counter), ticket);
    }

    /// The request ended.
    pub fn ended(&mut self, router: RouterId, counter: u64, end: SlotEnd, now: Instant) {
        let Some(ticket) = self.tickets.remove(&(router, counter)) else {
            return;
        };
        let until = match end {
            SlotEnd::Completed => now.checked_add(KEEP),
            SlotEnd::Failed | SlotEnd::Aborted => None,
        };
        self.change(ticket.source, |expected| expected.leave(ticket, until, now));
        if let Some(until) = until {
            self.ended.push_back((until, ticket));
            if self.ended.len() > ENDED_KEPT_MAX {
                self.drop_oldest();
            }
        }
    }

    /// All requests of this router are gone; so many of them at most are ended now. True: there are
    /// more.
    pub fn release_step(&mut self, router: RouterId, most: usize, now: Instant) -> bool {
        let open: Vec<u64> = self
            .tickets
            .range((router, 0)..=(router, u64::MAX))
            .take(most)
            .map(|((_, counter), _)| *counter)
            .collect();
        for &counter in &open {
            self.ended(router, counter, SlotEnd::Aborted, now);
        }
        open.len() == most
    }

    /// The index credits this many blocks of this prompt at the source: what is no longer than that
    /// is no expectation any more.
    pub fn counted(&mut self, source: SourceId, prompt: &SampledPrefix, credited: u32) {
        if self.is_empty(source) {
            return;
        }
        self.change(source, |expected| {
            for leaf in expected.prompts.leaves_along(&prompt.hashes, credited) {
                expected.drop_entry(leaf);
            }
        });
    }

    /// The source began a new generation.
    pub fn restarted(&mut self, source: SourceId) {
        self.change(source, |expected| *expected = SourceExpectations::default());
    }

    /// Ends what is older than [`KEEP`].
    pub fn expire(&mut self, now: Instant) {
        while self.ended.front().is_some_and(|(until, _)| *until <= now) {
            self.drop_oldest();
        }
    }

    /// The blocks from depth 0 of this prompt that are expected at the source.
    #[must_use]
    pub fn predicted(&self, source: SourceId, prompt: &SampledPrefix) -> u32 {
        self.sources
            .get(source)
            .map_or(0, |expected| expected.prompts.longest(&prompt.hashes))
    }

    /// Like [`Self::predicted`], as if the request of this slot had been aborted.
    #[must_use]
    pub fn predicted_without(
        &self,
        source: SourceId,
        prompt: &SampledPrefix,
        slot: SlotKey,
        now: Instant,
    ) -> u32 {
        let ticket = self.tickets.get(&(slot.router, slot.counter));
        let alone = ticket.filter(|ticket| {
            let expected = self.sources.get(ticket.source);
            let entry = expected.and_then(|expected| expected.entries.get(&ticket.leaf));
            ticket.source == source
                && entry.is_some_and(|entry| {
                    entry.serial == ticket.serial
                        && entry.active == 1
                        && entry.until.is_none_or(|until| until <= now)
                })
        });
        match (alone, self.sources.get(source)) {
            (Some(ticket), Some(expected)) => expected
                .prompts
                .longest_without(&prompt.hashes, ticket.leaf),
            (_, _) => self.predicted(source, prompt),
        }
    }

    #[must_use]
    pub fn is_empty(&self, source: SourceId) -> bool {
        self.sources
            .get(source)
            .is_none_or(|expected| expected.entries.is_empty())
    }

    /// Hashes kept.
    #[must_use]
    pub const fn samples(&self) -> u64 {
        self.samples
    }

    /// Prompts that were not expected, or not for as long as they should, for want of room.
    #[must_use]
    pub const fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Ends the ended prompt that is nearest to its end anyway. False if there is none.
    fn drop_oldest(&mut self) -> bool {
        let Some((until, ticket)) = self.ended.pop_front() else {
            return false;
        };
        self.change(ticket.source, |expected| expected.lapse(ticket, until));
        true
    }

    /// The one place where the kept hashes are counted.
    fn change<T>(
        &mut self,
        source: SourceId,
        change: impl FnOnce(&mut SourceExpectations) -> T,
    ) -> T {
        let expected = self.sources.get_mut(source);
        let before = expected.prompts.samples();
        let result = change(expected);
        self.samples = self.samples - before + expected.prompts.samples();
        result
    }
}

impl SourceExpectations {
    fn bring(
        &mut self,
        source: SourceId,
        hashes: &[warmroute_proto::PrefixHash],
        serial: u64,
    ) -> PredictionTicket {
        let leaf = self.prompts.insert(hashes);
        let serial = match self.entries.get_mut(&leaf) {
            Some(entry) => {
                self.prompts.remove(leaf);
                entry.active += 1;
                entry.serial
            }
            None => {
                let entry = ExpectedPrompt {
                    serial,
                    active: 1,
                    until: None,
                };
                self.entries.insert(leaf, entry);
                serial
            }
        };
        PredictionTicket {
            source,
            leaf,
            serial,
        }
    }

    fn leave(&mut self, ticket: PredictionTicket, until: Option<Instant>, now: Instant) {
        let Some(entry) = self.entry(ticket) else {
            return;
        };
        entry.active = entry.active.saturating_sub(1);
        entry.until = entry.until.max(until);
        if entry.active == 0 && entry.until.is_none_or(|until| until <= now) {
            self.drop_entry(ticket.leaf);
        }
    }

    /// A time that was granted until `until` is over.
    fn lapse(&mut self, ticket: PredictionTicket, until: Instant) {
        let Some(entry) = self.entry(ticket) else {
            return;
        };
        if entry.until.is_some_and(|latest| latest > until) {
            return;
        }
        entry.until = None;
        if entry.active == 0 {
            self.drop_entry(ticket.leaf);
        }
    }

    fn entry(&mut self, ticket: PredictionTicket) -> Option<&mut ExpectedPrompt> {
        let entry = self.entries.get_mut(&ticket.leaf)?;
        (entry.serial == ticket.serial).then_some(entry)
    }

    fn drop_entry(&mut self, leaf: PromptLeaf) {
        if self.entries.remove(&leaf).is_some() {
            self.prompts.remove(leaf);
        }
    }
}

#[cfg(test)]
mod tests;
