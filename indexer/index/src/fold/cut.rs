//! The fold as a snapshot, and a snapshot as the fold.
//!
//! A cut is consistent: tree, sources and position of one moment, made under one read lock. Clock,
//! heartbeats and registry are not part of it: after adopting a snapshot every source is `unknown`
//! until its first record or heartbeat.
//!
//! A running fold that adopts an older snapshot keeps what it knows to exist: a generation or
//! number beyond the snapshot's is awaited as if a heartbeat had announced it, and requested if it
//! is overdue.

use std::collections::BTreeMap;
use std::time::Instant;

use warmroute_proto::snapshot::{SnapshotHead, SnapshotHolding, SnapshotSource};
use warmroute_proto::{Digest, LogPosition, Source};

use super::Fold;
use super::source::{Holding, SourceFold};
use crate::snapshot::Restored;
use crate::tree::{SourceNumber, Tree, digests_of_image};

/// Content of a snapshot.
pub struct SnapshotCut {
    pub head: SnapshotHead,
    pub image: Vec<u8>,
}

impl SnapshotCut {
    /// Recomputes every digest from the image's blocks. Takes several times as long as the cut:
    /// call it without the lock.
    pub fn verify(&self) -> Result<(), NoSnapshot> {
        let is_folded = |entry: &&SnapshotSource| entry.holding == SnapshotHolding::Folded;
        let mut folded = self.head.sources.iter().filter(is_folded);
        let digests = digests_of_image(&self.image).unwrap_or_default();
        let right = |(entry, digest): (&SnapshotSource, &Digest)| entry.after == *digest;
        let mut pairs = folded.by_ref().zip(&digests);
        let wrong = pairs.find(|&pair| !right(pair)).map(|(entry, _)| entry);
        match wrong.or_else(|| folded.next()) {
            Some(entry) => Err(NoSnapshot::Mismatch(entry.source.clone())),
            None => Ok(()),
        }
    }
}

/// Why no snapshot can be made now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSnapshot {
    #[error("no record was read yet")]
    Nothing,
    #[error("a source is set aside for want of memory")]
    SetAside,
    #[error("a source diverged, and is about to be looked for in an older snapshot")]
    Diverged,
    #[error("the digest of {0} is not that of its blocks")]
    Mismatch(Source),
}

/// State replaced by an adopted snapshot. Dropping it takes long: do it without the lock.
pub struct ReplacedState {
    _tree: Tree,
    sources: BTreeMap<Source, SourceFold>,
}

impl Fold {
    /// The fold as of now, with the image in `buffer`, whose content is replaced. Unchecked: call
    /// [`SnapshotCut::verify`].
    pub fn cut(&self, buffer: Vec<u8>) -> Result<SnapshotCut, NoSnapshot> {
        let (Some(log), Some(at)) = (self.log, self.mark) else {
            return Err(NoSnapshot::Nothing);
        };
        let mut sources = Vec::with_capacity(self.sources.len());
        let mut numbers = Vec::with_capacity(self.sources.len());
        for (source, fold) in self.sources.iter() {
            if fold.is_set_aside() {
                return Err(NoSnapshot::SetAside);
            }
            if self.reloads.is_some() && fold.wants_reload() {
                return Err(NoSnapshot::Diverged);
            }
            let number = fold.number();
            let after = number.map_or_else(Digest::default, |number| self.tree.digest(number));
            if let Some(entry) = fold.entry(source, after) {
                numbers.extend(number);
                sources.push(entry);
            }
        }
        let image = self.tree.image_in(&numbers, buffer);
        let head = SnapshotHead {
            log,
            at,
            sources,
            image_bytes: image.len() as u64,
        };
        Ok(SnapshotCut { head, image })
    }

    /// Replaces tree, sources and position by a snapshot's. Keeps the registered workers.
    pub fn adopt(&mut self, now: Instant, restored: Restored) -> ReplacedState {
        let Restored {
            head,
            tree,
            numbers,
            left_out,
        } = restored;
        if self.log != Some(head.log) {
            self.ends.clear();
        }
        self.log = Some(head.log);
        self.position = head.at.position;
        self.mark = Some(head.at);
        let former = ReplacedState {
            _tree: std::mem::replace(&mut self.tree, tree),
            sources: self.sources.take(),
        };
        let mut numbers = numbers.into_iter();
        for entry in &head.sources {
            let mut fold = SourceFold::restored(entry, holding(entry, &mut numbers), self.position);
            if left_out.contains(&entry.source) {
                fold.set_aside(&mut self.tree, Holding::SetAside);
                fold.set_aside_history.went(now, entry.after.count);
                self.memory.set_aside += 1;
            }
            self.sources.insert(entry.source.clone(), fold);
        }
        for (source, known) in &former.sources {
            let (fold, _) = self.sources.entry(source);
            fold.remember(now, known);
        }
        self.bound_memory(now);
        former
    }

    /// Returns true if a message at this position would skip unread positions.
    #[must_use]
    pub fn would_jump(&self, position: LogPosition) -> bool {
        self.position != LogPosition(0) && position > self.position.next()
    }
}

fn holding(entry: &SnapshotSource, numbers: &mut impl Iterator<Item = SourceNumber>) -> Holding {
    match entry.holding {
        // A snapshot that was read has a number for each folded source.
        SnapshotHolding::Folded => numbers.next().map_or(Holding::Diverged, Holding::Applied),
        SnapshotHolding::Diverged => Holding::Diverged,
        SnapshotHolding::Freed => Holding::Freed,
    }
}

#[cfg(test)]
mod tests;
