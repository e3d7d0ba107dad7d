//! Prefixes that engines reported as cached: credit where the index is not complete.
//!
//! A request of which its engine reports N cached tokens proves that its first N tokens were cached
//! when it was scheduled. The index cannot know prefixes that were stored before its shim started
//! and are hit since, because hits publish no events. So a router keeps what engines report as
//! `unverified` credit of its own, beside the index's, for sources that are not `exact`.
//!
//! A reported prefix ends with the first smaller report of a request that was decided later, with a
//! new generation or a failed health check of the source, when the index credits it too (from then
//! on the index is authoritative, even if the blocks are evicted), when the source is `exact`, and
//! [`KEEP`] to twice [`KEEP`] after its last report. A request that was decided before a smaller
//! report of its source teaches nothing. Each router learns from its own requests only.
//!
//! Memory is bounded by [`PREFIXES_MAX`] prefixes, [`SOURCE_PREFIXES_MAX`] of one source, and
//! [`SAMPLES_KEPT_MAX`] hashes; at a bound the prefix that was not reported for longest is dropped.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use warmroute_proto::load::{SampledPrefix, sampled_length};

use super::prompt_tree::{PromptLeaf, PromptTree};
use super::source_table::{PerSource, SourceId};

/// Longer than the pauses of most conversations. What is wrong ends with one request.
pub const KEEP: Duration = Duration::from_secs(300);

pub const PREFIXES_MAX: usize = 16 << 10;

/// Also bounds the work of a smaller report.
pub const SOURCE_PREFIXES_MAX: usize = 1 << 10;

/// 4 MiB of hashes.
pub const SAMPLES_KEPT_MAX: u64 = 512 << 10;

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

#[derive(Clone, Debug, Default)]
pub struct ReportedPrefixes {
    sources: PerSource<SourceReports>,
    /// One ticket for each prefix, in the order of their first reports.
    order: VecDeque<ReportTicket>,
    next_serial: u64,
    samples: u64,
}

#[derive(Clone, Debug, Default)]
struct SourceReports {
    prompts: PromptTree,
    entries: BTreeMap<PromptLeaf, ReportedPrefix>,
    /// Decision time of the last smaller report.
    refuted: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct ReportedPrefix {
    /// Distinguishes it from a later entry at the same leaf.
    serial: u64,
    /// Decision time of the last request that found it.
    decided: Instant,
    until: Instant,
}

#[derive(Clone, Copy, Debug)]
struct ReportTicket {
    source: SourceId,
    leaf: PromptLeaf,
    serial: u64,
    until: Instant,
}

impl ReportedPrefixes {
    /// Takes in a report.
    pub fn report(&mut self, report: &CacheReport<'_>, now: Instant) {
        let hashes = &report.prompt.hashes;
        let known = self.sources.get_mut(report.source);
        if known.prompts.longest(hashes) > report.cached_blocks {
            let through = known.prompts.leaves_through(
                hashes,
                report.cached_blocks,
                known.entries.keys().copied(),
            );
            let is_older = |leaf: &PromptLeaf| {
                let entry = known.entries.get(leaf);
                entry.is_some_and(|entry| entry.decided <= report.decided)
            };
            let refuted: Vec<PromptLeaf> = through.into_iter().filter(is_older).collect();
            if !refuted.is_empty() {
                known.refuted = known.refuted.max(Some(report.decided));
            }
            self.drop_all(report.source, &refuted);
        }
        let known = self.sources.get_mut(report.source);
        if known
            .refuted
            .is_none_or(|refuted| refuted <= report.decided)
        {
            self.keep(report, now);
        }
    }

    /// Blocks of this prompt, from depth 0, that the source's engine reported.
    #[must_use]
    pub fn credit(&self, source: SourceId, prompt: &SampledPrefix) -> u32 {
        let known = self.sources.get(source);
        known.map_or(0, |known| known.prompts.longest(&prompt.hashes))
    }

    /// Ends reports along this prompt that are no longer than the index credits.
    pub fn counted(&mut self, source: SourceId, prompt: &SampledPrefix, credited: u32) {
        let Some(known) = self.sources.get(source) else {
            return;
        };
        if !known.entries.is_empty() {
            let leaves = known.prompts.leaves_along(&prompt.hashes, credited);
            self.drop_all(source, &leaves);
        }
    }

    /// Ends all reports of a source.
    pub fn void(&mut self, source: SourceId) {
        let Some(known) = self.sources.get(source) else {
            return;
        };
        if !known.entries.is_empty() {
            let known = self.sources.get_mut(source);
            self.samples -= known.prompts.samples();
            *known = SourceReports {
                refuted: known.refuted,
                ..SourceReports::default()
            };
        }
    }

    /// Ends reports whose time is over.
    pub fn expire(&mut self, now: Instant) {
        while self.order.front().is_some_and(|first| first.until <= now) {
            let Some(ticket) = self.order.pop_front() else {
                return;
            };
            match self.entry(&ticket).map(|entry| entry.until) {
                Some(until) if until > now => {
                    self.order.push_back(ReportTicket { until, ..ticket });
                }
                Some(_) => self.drop_all(ticket.source, &[ticket.leaf]),
                None => {}
            }
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
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn keep(&mut self, report: &CacheReport<'_>, now: Instant) {
        let cached = (0..=report.prompt.hashes.len())
            .take_while(|&samples| sampled_length(samples) <= report.cached_blocks)
            .last();
        let hashes = &report.prompt.hashes[..cached.unwrap_or(0)];
        if hashes.is_empty() {
            return;
        }
        let known = self.sources.get_mut(report.source);
        let shorter = known.prompts.leaves_along(hashes, report.cached_blocks);
        let serial = self.next_serial;
        self.next_serial += 1;
        let before = known.prompts.samples();
        let leaf = known.prompts.insert(hashes);
        let until = now + KEEP;
        let is_new = match known.entries.get_mut(&leaf) {
            Some(entry) => {
                known.prompts.remove(leaf);
                entry.decided = entry.decided.max(report.decided);
                entry.until = until;
                false
            }
            None => {
                let decided = report.decided;
                let entry = ReportedPrefix {
                    serial,
                    decided,
                    until,
                };
                known.entries.insert(leaf, entry);
                true
            }
        };
        self.samples = self.samples - before + known.prompts.samples();
        let shorter: Vec<_> = shorter.into_iter().filter(|one| *one != leaf).collect();
        self.drop_all(report.source, &shorter);
        if is_new {
            self.order.push_back(ReportTicket {
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
        if known.entries.len() > SOURCE_PREFIXES_MAX {
            let oldest = known.entries.iter().min_by_key(|(_, entry)| entry.until);
            let oldest = oldest.map(|(leaf, _)| *leaf);
            self.drop_all(source, oldest.as_slice());
        }
        while self.order.len() > PREFIXES_MAX || self.samples > SAMPLES_KEPT_MAX {
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
                    self.order.push_back(ReportTicket { until, ..ticket });
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

    fn entry(&self, ticket: &ReportTicket) -> Option<&ReportedPrefix> {
        let entry = self.sources.get(ticket.source)?.entries.get(&ticket.leaf)?;
        (entry.serial == ticket.serial).then_some(entry)
    }

    fn drop_all(&mut self, source: SourceId, leaves: &[PromptLeaf]) {
        if leaves.is_empty() {
            return;
        }
        let known = self.sources.get_mut(source);
        let before = known.prompts.samples();
        for leaf in leaves {
            if known.entries.remove(leaf).is_some() {
                known.prompts.remove(*leaf);
            }
        }
        self.samples = self.samples - before + known.prompts.samples();
    }
}

#[cfg(test)]
mod tests;
