//! Prefixes that a router expects in caches which the index does not show completely.
//!
//! There are two tables. One holds what engines *reported*: a request of which its engine reports N
//! cached tokens proves that its first N tokens were cached when it was scheduled. The index cannot
//! know prefixes that were stored before its shim started and are hit since, because hits publish no
//! events. The other holds what was *sent* ([`super::sent`]).
//!
//! A prefix ends with the first smaller report of a request that was decided later, with a new
//! generation or a failed health check of its source, when the index credits it too (from then on
//! the index is authoritative, even if the blocks are evicted), and `keep` to twice `keep` after its
//! last report. A request that was decided before a smaller report of its source adds nothing.
//!
//! Memory is bounded by [`PrefixLimits`]; at a bound the prefix that was not reported for longest is
//! dropped.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use warmroute_proto::load::{SampledPrefix, sampled_length};

use super::prompt_tree::{HeldBlocks, PromptLeaf, PromptTree};
use super::source_table::{PerSource, SourceId};

/// Bounds of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixLimits {
    /// From a prefix's last report to its end.
    pub keep: Duration,
    pub prefixes: usize,
    /// Prefixes of one source. Also bounds the work of a smaller report.
    pub source_prefixes: usize,
    /// Hashes of all sources, 8 bytes each.
    pub samples: u64,
}

impl PrefixLimits {
    /// For what engines reported: 4 MiB of hashes, and longer than the pauses of most
    /// conversations. What is wrong ends with one request.
    pub const REPORTED: Self = Self {
        keep: Duration::from_secs(300),
        prefixes: 16 << 10,
        source_prefixes: 1 << 10,
        samples: 512 << 10,
    };
}

/// Prefixes with newer reports that are passed over in one search for the oldest.
const PASSED_OVER_MAX: usize = 16;

/// An engine's report about one request.
#[derive(Clone, Copy, Debug)]
pub struct CacheReport<'a> {
    pub source: SourceId,
    pub prompt: &'a SampledPrefix,
    /// Whole blocks from depth 0 that were cached.
    pub cached_blocks: u32,
    /// Not later than the request's scheduling.
    pub decided: Instant,
}

#[derive(Clone, Debug)]
pub struct PrefixTable {
    limits: PrefixLimits,
    prompts: PromptTree,
    sources: PerSource<SourcePrefixes>,
    /// One ticket for each prefix, in the order of their first reports.
    order: VecDeque<PrefixTicket>,
    next_serial: u64,
}

#[derive(Clone, Debug, Default)]
struct SourcePrefixes {
    entries: BTreeMap<PromptLeaf, PrefixEntry>,
    /// The entries in the order of their last reports.
    by_until: BTreeSet<(Instant, PromptLeaf)>,
    /// Decision time of the last smaller report.
    refuted: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct PrefixEntry {
    /// Distinguishes it from a later entry at the same leaf.
    serial: u64,
    /// Decision time of the last request that found it.
    decided: Instant,
    until: Instant,
}

#[derive(Clone, Copy, Debug)]
struct PrefixTicket {
    source: SourceId,
    leaf: PromptLeaf,
    serial: u64,
    until: Instant,
}

impl PrefixTable {
    #[must_use]
    pub fn new(limits: PrefixLimits) -> Self {
        Self {
            limits,
            prompts: PromptTree::default(),
            sources: PerSource::default(),
            order: VecDeque::new(),
            next_serial: 0,
        }
    }

    /// Processes a report: ends what it refutes, and keeps what it proves.
    pub fn report(&mut self, report: &CacheReport<'_>, now: Instant) {
        self.refute(report);
        let known = self.sources.get(report.source);
        let refuted = known.and_then(|known| known.refuted);
        if refuted.is_none_or(|refuted| refuted <= report.decided) {
            self.keep(report, now);
        }
    }

    /// Ends the prefixes of which the report says that they were not cached.
    pub fn refute(&mut self, report: &CacheReport<'_>) {
        let hashes = &report.prompt.hashes;
        let Some(known) = self.sources.get(report.source) else {
            return;
        };
        if self.prompts.longest(report.source, hashes) <= report.cached_blocks {
            return;
        }
        let entries = known.entries.keys().copied();
        let through = self
            .prompts
            .leaves_through(hashes, report.cached_blocks, entries);
        let is_older = |leaf: &PromptLeaf| {
            let entry = known.entries.get(leaf);
            entry.is_some_and(|entry| entry.decided <= report.decided)
        };
        let refuted: Vec<PromptLeaf> = through.into_iter().filter(is_older).collect();
        if !refuted.is_empty() {
            let known = self.sources.get_mut(report.source);
            known.refuted = known.refuted.max(Some(report.decided));
        }
        self.drop_all(report.source, &refuted);
    }

    /// Blocks of this prompt, from depth 0, that each source is expected to hold.
    #[must_use]
    pub fn held(&self, prompt: &SampledPrefix) -> HeldBlocks {
        self.prompts.held(&prompt.hashes)
    }

    /// Ends prefixes along this prompt that are no longer than the index credits.
    pub fn counted(&mut self, source: SourceId, prompt: &SampledPrefix, credited: u32) {
        let Some(known) = self.sources.get(source) else {
            return;
        };
        if !known.entries.is_empty() {
            let leaves = self.prompts.leaves_along(source, &prompt.hashes, credited);
            self.drop_all(source, &leaves);
        }
    }

    /// Ends all prefixes of a source.
    pub fn void(&mut self, source: SourceId) {
        let Some(known) = self.sources.get(source) else {
            return;
        };
        if !known.entries.is_empty() {
            let known = self.sources.get_mut(source);
            known.by_until.clear();
            for (leaf, _) in std::mem::take(&mut known.entries) {
                self.prompts.remove(source, leaf);
            }
        }
    }

    /// Ends prefixes whose time is over.
    pub fn expire(&mut self, now: Instant) {
        while self.order.front().is_some_and(|first| first.until <= now) {
            let Some(ticket) = self.order.pop_front() else {
                return;
            };
            match self.entry(&ticket).map(|entry| entry.until) {
                Some(until) if until > now => {
                    self.order.push_back(PrefixTicket { until, ..ticket });
                }
                Some(_) => self.drop_all(ticket.source, &[ticket.leaf]),
                None => {}
            }
        }
    }

    /// Drops the oldest prefixes of a source until the others have at most so many distinct blocks.
    pub fn shrink(&mut self, source: SourceId, blocks_max: u64) {
        while let Some(known) = self.sources.get(source)
            && self.prompts.blocks(source) > blocks_max
            && let Some((_, oldest)) = known.by_until.first().copied()
        {
            self.drop_all(source, &[oldest]);
        }
    }

    /// Number of prefixes kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sources
            .iter()
            .map(|(_, known)| known.entries.len())
            .sum()
    }

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.prompts.samples() == 0
    }

    /// Keeps what the report proves.
    fn keep(&mut self, report: &CacheReport<'_>, now: Instant) {
        let cached = (0..=report.prompt.hashes.len())
            .take_while(|&samples| sampled_length(samples) <= report.cached_blocks)
            .last();
        let hashes = &report.prompt.hashes[..cached.unwrap_or(0)];
        if hashes.is_empty() {
            return;
        }
        let known = self.sources.get_mut(report.source);
        let shorter = (self.prompts).leaves_along(report.source, hashes, report.cached_blocks);
        let serial = self.next_serial;
        self.next_serial += 1;
        let leaf = self.prompts.insert(report.source, hashes);
        let until = now + self.limits.keep;
        let is_new = match known.entries.get_mut(&leaf) {
            Some(entry) => {
                self.prompts.remove(report.source, leaf);
                known.by_until.remove(&(entry.until, leaf));
                entry.decided = entry.decided.max(report.decided);
                entry.until = until;
                false
            }
            None => {
                let decided = report.decided;
                let entry = PrefixEntry {
                    serial,
                    decided,
                    until,
                };
                known.entries.insert(leaf, entry);
                true
            }
        };
        known.by_until.insert((until, leaf));
        let shorter: Vec<_> = shorter.into_iter().filter(|one| *one != leaf).collect();
        self.drop_all(report.source, &shorter);
        if is_new {
            self.order.push_back(PrefixTicket {
                source: report.source,
                leaf,
                serial,
                until,
            });
            self.bound(report.source);
        }
    }

    fn bound(&mut self, source: SourceId) {
        let known = self.sources.get_mut(source);
        if known.entries.len() > self.limits.source_prefixes
            && let Some((_, oldest)) = known.by_until.first().copied()
        {
            self.drop_all(source, &[oldest]);
        }
        while self.order.len() > self.limits.prefixes
            || self.prompts.samples() > self.limits.samples
        {
            if !self.drop_oldest() {
                return;
            }
        }
    }

    /// Drops the prefix whose turn it is, or one of the next if that has a newer report. Returns
    /// false if there is none.
    fn drop_oldest(&mut self) -> bool {
        for _ in 0..PASSED_OVER_MAX {
            let Some(ticket) = self.order.pop_front() else {
                return false;
            };
            match self.entry(&ticket).map(|entry| entry.until) {
                Some(until) if until > ticket.until => {
                    self.order.push_back(PrefixTicket { until, ..ticket });
                }
                Some(_) => {
                    self.drop_all(ticket.source, &[ticket.leaf]);
                    return true;
                }
                None => return true,
            }
        }
        let Some(ticket) = self.order.pop_front() else {
            return false;
        };
        if self.entry(&ticket).is_some() {
            self.drop_all(ticket.source, &[ticket.leaf]);
        }
        true
    }

    fn entry(&self, ticket: &PrefixTicket) -> Option<&PrefixEntry> {
        let entry = self.sources.get(ticket.source)?.entries.get(&ticket.leaf)?;
        (entry.serial == ticket.serial).then_some(entry)
    }

    fn drop_all(&mut self, source: SourceId, leaves: &[PromptLeaf]) {
        if leaves.is_empty() {
            return;
        }
        let known = self.sources.get_mut(source);
        for leaf in leaves {
            if let Some(entry) = known.entries.remove(leaf) {
                known.by_until.remove(&(entry.until, *leaf));
                self.prompts.remove(source, *leaf);
            }
        }
    }
}

#[cfg(test)]
mod tests;
