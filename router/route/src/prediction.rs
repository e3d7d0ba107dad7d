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

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use warmroute_proto::load::{SampledPrefix, SlotEnd};
use warmroute_proto::{PrefixHash, RouterId};

use super::prompt_tree::{HeldBlocks, PromptLeaf, PromptTree};
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
    prompts: PromptTree,
    sources: PerSource<FxHashMap<PromptLeaf, ExpectedPrompt>>,
    tickets: BTreeMap<(RouterId, u64), PredictionTicket>,
    ended: VecDeque<(Instant, PredictionTicket)>,
    next_serial: u64,
    dropped: u64,
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
        while self.samples() >= SAMPLES_KEPT_MAX {
            if !self.drop_oldest() {
                self.dropped += 1;
                return;
            }
        }
        let serial = self.next_serial;
        self.next_serial += 1;
        let ticket = self.bring(source, &prompt.hashes, serial);
        self.tickets.insert((router, counter), ticket);
    }

    /// The sampled prompt of an open request, as long as it is expected.
    #[must_use]
    pub fn prompt(&self, router: RouterId, counter: u64) -> Vec<PrefixHash> {
        let ticket = self.tickets.get(&(router, counter));
        let expected = ticket.filter(|ticket| self.entry(ticket).is_some());
        expected.map_or_else(Vec::new, |ticket| self.prompts.prompt(ticket.leaf))
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
        self.leave(ticket, until, now);
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

    /// The sources where [`Self::counted`] may end an expectation along this prompt.
    #[must_use]
    pub fn countable(&self, prompt: &SampledPrefix) -> PerSource<bool> {
        self.prompts.with_beginnings(&prompt.hashes)
    }

    /// Ends expectations along this prompt that are no longer than the index credits.
    pub fn counted(&mut self, source: SourceId, prompt: &SampledPrefix, credited: u32) {
        if self.is_empty(source) {
            return;
        }
        let leaves = self.prompts.leaves_along(source, &prompt.hashes, credited);
        for leaf in leaves {
            self.drop_entry(source, leaf);
        }
    }

    /// Ends all expectations of a source, which began a new generation.
    pub fn restarted(&mut self, source: SourceId) {
        for (leaf, _) in std::mem::take(self.sources.get_mut(source)) {
            self.prompts.remove(source, leaf);
        }
    }

    /// Ends expectations whose time is over.
    pub fn expire(&mut self, now: Instant) {
        while self.ended.front().is_some_and(|(until, _)| *until <= now) {
            self.drop_oldest();
        }
    }

    /// Blocks of this prompt, from depth 0, that are expected at each source, as if the request of
    /// the slot `except` had been aborted.
    #[must_use]
    pub fn predicted(
        &self,
        prompt: &SampledPrefix,
        except: Option<SlotKey>,
        now: Instant,
    ) -> HeldBlocks {
        let mut predicted = self.prompts.held(&prompt.hashes);
        if let Some(ticket) = except.and_then(|slot| self.only_of(slot, now)) {
            let PredictionTicket { source, leaf, .. } = *ticket;
            let rest = (self.prompts).longest_without(source, &prompt.hashes, leaf);
            *predicted.get_mut(source) = rest;
        }
        predicted
    }

    /// The expectation that would end with this slot's request.
    fn only_of(&self, slot: SlotKey, now: Instant) -> Option<&PredictionTicket> {
        let ticket = self.tickets.get(&(slot.router, slot.counter))?;
        let entry = self.entry(ticket)?;
        let is_over = entry.until.is_none_or(|until| until <= now);
        (entry.active == 1 && is_over).then_some(ticket)
    }

    #[must_use]
    pub fn is_empty(&self, source: SourceId) -> bool {
        self.sources.get(source).is_none_or(FxHashMap::is_empty)
    }

    /// Number of hashes kept.
    #[must_use]
    pub const fn samples(&self) -> u64 {
        self.prompts.samples()
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
        self.lapse(ticket, until);
        true
    }

    fn bring(&mut self, source: SourceId, hashes: &[PrefixHash], serial: u64) -> PredictionTicket {
        let leaf = self.prompts.insert(source, hashes);
        let serial = match self.sources.get_mut(source).entry(leaf) {
            Entry::Occupied(mut known) => {
                self.prompts.remove(source, leaf);
                let entry = known.get_mut();
                entry.active += 1;
                entry.serial
            }
            Entry::Vacant(place) => {
                place.insert(ExpectedPrompt {
                    serial,
                    active: 1,
                    until: None,
                });
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
        let Some(entry) = self.entry_mut(&ticket) else {
            return;
        };
        entry.active = entry.active.saturating_sub(1);
        entry.until = entry.until.max(until);
        if entry.active == 0 && entry.until.is_none_or(|until| until <= now) {
            self.drop_entry(ticket.source, ticket.leaf);
        }
    }

    /// Ends the time that was granted until `until`.
    fn lapse(&mut self, ticket: PredictionTicket, until: Instant) {
        let Some(entry) = self.entry_mut(&ticket) else {
            return;
        };
        if entry.until.is_some_and(|latest| latest > until) {
            return;
        }
        entry.until = None;
        if entry.active == 0 {
            self.drop_entry(ticket.source, ticket.leaf);
        }
    }

    fn entry(&self, ticket: &PredictionTicket) -> Option<&ExpectedPrompt> {
        let entry = self.sources.get(ticket.source)?.get(&ticket.leaf)?;
        (entry.serial == ticket.serial).then_some(entry)
    }

    fn entry_mut(&mut self, ticket: &PredictionTicket) -> Option<&mut ExpectedPrompt> {
        let entries = self.sources.get_mut(ticket.source);
        let entry = entries.get_mut(&ticket.leaf)?;
        (entry.serial == ticket.serial).then_some(entry)
    }

    fn drop_entry(&mut self, source: SourceId, leaf: PromptLeaf) {
        if self.sources.get_mut(source).remove(&leaf).is_some() {
            self.prompts.remove(source, leaf);
        }
    }
}

#[cfg(test)]
mod tests;
