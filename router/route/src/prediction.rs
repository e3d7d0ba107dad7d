//! Prompts that will soon be cached at a source because requests with them were sent there.
//!
//! The sampled prompt of a slot is expected at its source from sending until [`KEEP`] after its
//! completion. The expectation ends earlier when an answer of the index credits the prompt (from
//! then on the index is authoritative, even if the blocks are evicted), on failure or abort, on the
//! death of its router, and on a new generation of the source.
//!
//! Equal prompts at one source are one expectation. Memory is bounded by [`SAMPLES_KEPT_MAX`]
//! hashes and [`ENDED_KEPT_MAX`] ended prompts. At the bound the oldest ended prompts are dropped
//! first, then new prompts; both are counted. Call [`Predictions::expire`] before reading.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use warmroute_proto::load::{SampledPrefix, SlotEnd};
use warmroute_proto::{PrefixHash, RouterId};

use super::prompt_tree::{PromptLeaf, PromptTree};
use super::slots::SlotKey;
use super::source_table::{PerSource, SourceId};

/// The shim polls an idle engine each second and finds a lost tail. Blocks that the index does not
/// credit after two polls are not cached.
pub const KEEP: Duration = Duration::from_secs(2);

/// 16 MiB of hashes.
pub const SAMPLES_KEPT_MAX: u64 = 2 << 20;

/// Enough for 32,000 ended requests a second.
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

/// One expected prompt. It is in the tree once, for any number of requests.
#[derive(Clone, Copy, Debug)]
struct ExpectedPrompt {
    /// Distinguishes it from a later entry at the same leaf.
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
    /// Registers a request with this prompt at the source.
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

    /// The sampled prompt of an open request, as long as it is expected.
    #[must_use]
    pub fn prompt(&self, router: RouterId, counter: u64) -> Vec<PrefixHash> {
        let Some(ticket) = self.tickets.get(&(router, counter)) else {
            return Vec::new();
        };
        let expected = self.sources.get(ticket.source);
        let expected = expected.filter(|expected| {
            let entry = expected.entries.get(&ticket.leaf);
            entry.is_some_and(|entry| entry.serial == ticket.serial)
        });
        expected.map_or_else(Vec::new, |expected| expected.prompts.prompt(ticket.leaf))
    }

    /// Registers the end of a request.
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

    /// Aborts at most `most` requests of this router. Returns true while more may remain.
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

    /// Ends expectations along this prompt that are no longer than the index credits.
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

    /// Ends all expectations of a source, which began a new generation.
    pub fn restarted(&mut self, source: SourceId) {
        self.change(source, |expected| *expected = SourceExpectations::default());
    }

    /// Ends expectations whose time is over.
    pub fn expire(&mut self, now: Instant) {
        while self.ended.front().is_some_and(|(until, _)| *until <= now) {
            self.drop_oldest();
        }
    }

    /// Blocks of this prompt, from depth 0, that are expected at the source.
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

    /// Number of hashes kept.
    #[must_use]
    pub const fn samples(&self) -> u64 {
        self.samples
    }

    /// Prompts that were dropped at a memory bound.
    #[must_use]
    pub const fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Ends the expectation that expires first. Returns false if there is none.
    fn drop_oldest(&mut self) -> bool {
        let Some((until, ticket)) = self.ended.pop_front() else {
            return false;
        };
        self.change(ticket.source, |expected| expected.lapse(ticket, until));
        true
    }

    /// Changes a source's expectations and the number of kept hashes with them.
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
    fn bring(&mut self, source: SourceId, hashes: &[PrefixHash], serial: u64) -> PredictionTicket {
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

    /// Ends the time that was granted until `until`.
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
