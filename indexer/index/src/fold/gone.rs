//! Frees and forgets sources whose registration is gone.
//!
//! A source is gone since its worker's registration expired, or since the complete registry did not
//! list the worker (after a restart). Its blocks are freed after [`FREE_AFTER`]; its fence stays,
//! so that no old generation counts.
//!
//! The fence is forgotten after [`FORGET_AFTER`], or earlier, the longest gone first, while there
//! are more than [`GONE_MAX`]. A replica that starts from the log alone then knows no more either.
//! If an old shim is still alive, its next record is not the first of a generation, so it gets no
//! credit before it begins a new generation, whose number comes from a key that is never deleted.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use warmroute_proto::{Source, WorkerId};

use super::source::Touched;
use super::source::{Holding, SourceFold};
use super::{Fold, WorkerRegistration};

/// Age of an absence after which the blocks are freed. The fence stays. A shim that was away for
/// longer sends an image.
pub(super) const FREE_AFTER: Duration = Duration::from_secs(60);

/// The log's default retention.
const FORGET_AFTER: Duration = Duration::from_secs(86_400);

/// A few megabytes, and fewer entries than a snapshot's head may hold.
pub(super) const GONE_MAX: usize = 4096;

impl Fold {
    /// Frees and forgets sources that are long gone.
    pub(super) fn let_go(&mut self, now: Instant) {
        let mut long_gone: Vec<(Instant, &Source)> = Vec::new();
        let mut last: Option<(&WorkerId, Option<&WorkerRegistration>)> = None;
        self.sources.visit(|source, fold| {
            // The ranks of a worker follow each other.
            let worker = match last {
                Some((id, worker)) if *id == source.worker => worker,
                Some(_) | None => self.workers.get(&source.worker),
            };
            last = Some((&source.worker, worker));
            let named = worker.is_some() || !self.registry_read;
            fold.unnamed_since = match fold.unnamed_since {
                _ if named => None,
                // A source that still sends is present.
                Some(since) => Some(since.max(fold.last_sent().unwrap_or(since))),
                None => Some(now),
            };
            let gone = worker.map_or(fold.unnamed_since, |worker| worker.gone_since);
            let gone = gone.filter(|&gone| self.outage.counts(gone, now));
            let Some(gone) = gone.filter(|&gone| now.saturating_duration_since(gone) >= FREE_AFTER)
            else {
                return Touched::Nothing;
            };
            long_gone.push((gone, source));
            if fold.number().is_none() && !fold.is_set_aside() {
                return Touched::Nothing;
            }
            fold.set_aside(&mut self.tree, Holding::Freed);
            self.tree.trim();
            Touched::Standing
        });
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
            self.roster.remove(&source);
        }
        self.forget_workers(now);
    }

    /// Time since the source's worker left the registry.
    pub(super) fn gone_for(
        &self,
        source: &Source,
        fold: &SourceFold,
        now: Instant,
    ) -> Option<Duration> {
        let worker = self.workers.get(&source.worker);
        let gone = worker.map_or(fold.unnamed_since, |worker| worker.gone_since)?;
        let counts = self.outage.counts(gone, now);
        counts.then(|| now.saturating_duration_since(gone))
    }

    /// Forgets gone workers without sources.
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
            .iter()
            .map(|(source, _)| source.worker.clone())
            .collect();
        self.workers
            .retain(|id, worker| with_sources.contains(id) || !gone(worker));
    }

    /// Sources forgotten so far.
    #[must_use]
    pub const fn forgotten(&self) -> u64 {
        self.forgotten
    }
}
