//! Sources that are gone: what they held is given back, and in the end they are forgotten.
//!
//! A source is gone while its worker's registration is: since it went, or since the registry, read from
//! start to end, did not name the worker at all, as it does not after a restart. What it held is freed
//! after [`FREE_AFTER`]; its fence stays, so that nothing of an old generation counts.
//!
//! A fence guards against records of older generations behind those of newer ones. It is forgotten after
//! [`FORGET_AFTER`], and sooner, the longest gone first, if there are more than [`GONE_MAX`]: by then a
//! replica that starts with the log alone knows no more, either. Should an old shim speak after all, it
//! goes on at a number that is not the first, and gets no credit before it began a new generation, whose
//! number it takes from the key that is never deleted.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use warmroute_proto::{Source, WorkerId};

use super::source::Holding;
use super::{Fold, WorkerRegistration};

/// What a source holds is given back when its shim has been gone this long. Its fence stays.
pub(super) const FREE_AFTER: Duration = Duration::from_secs(600);

/// What a log keeps by default.
const FORGET_AFTER: Duration = Duration::from_secs(86_400);

/// Some megabytes, and less than a snapshot's head may hold.
pub(super) const GONE_MAX: usize = 4096;

impl Fold {
    /// Frees and forgets what has been gone for long.
    pub(super) fn let_go(&mut self, now: Instant) {
        let mut long_gone: Vec<(Instant, &Source)> = Vec::new();
        for (source, fold) in &mut self.sources {
            let worker = self.workers.get(&source.worker);
            let named = worker.is_some() || !self.registry_read;
            fold.unnamed_since = match fold.unnamed_since {
                _ if named => None,
                // Who still speaks is there.
                Some(since) => Some(since.max(fold.last_sent().unwrap_or(since))),
                None => Some(now),
            };
            let gone = worker.map_or(fold.unnamed_since, |worker| worker.gone_since);
            let gone = gone.filter(|&gone| self.outage.counts(gone, now));
            let Some(gone) = gone.filter(|&gone| now.saturating_duration_since(gone) >= FREE_AFTER)
            else {
                continue;
            };
            if fold.number().is_some() || fold.is_set_aside() {
                fold.set_aside(&mut self.tree, Holding::Freed);
            }
            long_gone.push((gone, source));
        }
        let too_many = long_gone.len().saturating_sub(GONE_MAX);
        if too_many > 0 {
            long_gone.sort();
        }
        let old = |gone: Instant| now.saturating_duration_since(gone) >= FORGET_AFTER;
        let forgotten: Vec<Source> = long_gone
            .into_iter()
            .enumerate()
            .filter(|&(at, (gone, _))| at < too_many || old(gone))
            .map(|(_, (_, source))| source.clone())
            .collect();
        self.forgotten += forgotten.len() as u64;
        for source in forgotten {
            self.sources.remove(&source);
        }
        self.forget_workers(now);
    }

    /// Workers without a source go like sources.
    fn forget_workers(&mut self, now: Instant) {
        let gone = |worker: &WorkerRegistration| {
            let gone = worker
                .gone_since
                .filter(|&gone| self.outage.counts(gone, now));
            gone.is_some_and(|gone| now.saturating_duration_since(gone) >= FREE_AFTER)
        };
        if !self.workers.values().any(gone) {
            return;
        }
        let with_sources: BTreeSet<WorkerId> = self
            .sources
            .keys()
            .map(|source| source.worker.clone())
            .collect();
        self.workers
            .retain(|id, worker| with_sources.contains(id) || !gone(worker));
    }

    /// Sources that were forgotten so far.
    #[must_use]
    pub const fn forgotten(&self) -> u64 {
        self.forgotten
    }
}
