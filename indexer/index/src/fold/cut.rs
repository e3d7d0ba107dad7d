//! The fold as a snapshot, and a snapshot as the fold.
//!
//! A cut is all of one moment, made under one read lock: tree, sources, position. What time, heartbeats
//! and the registry said is not in it: whoever adopts it starts without proof, so that every source is
//! `unknown` until its first record or heartbeat.
//!
//! A running fold that adopts an older one keeps what it knows to exist: a generation or number beyond
//! the snapshot's is awaited like one that a heartbeat announced, and asked for if it does not come.

use std::collections::BTreeMap;
use std::time::Instant;

use warmroute_proto::snapshot::{SnapshotHead, SnapshotHolding, SnapshotSource};
use warmroute_proto::{Digest, LogPosition, Source};

use super::Fold;
use super::source::{Holding, SourceFold};
use crate::snapshot::Restored;
use crate::tree::{SourceNumber, Tree, digests_of_image};

/// What a snapshot is made of.
pub struct SnapshotCut {
    pub head: SnapshotHead,
    pub image: Vec<u8>,
}

impl SnapshotCut {
    /// Computes every digest anew from the image's blocks. Not under a lock: it takes several times what
    /// the cut takes.
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

/// Why there is no snapshot now.
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

/// What a fold held before it adopted a snapshot. Large: drop it where nobody waits.
pub struct ReplacedState {
    _tree: Tree,
    sources: BTreeMap<Source, SourceFold>,
}

impl Fold {
    /// All that the log told up to now, with the image in `buffer`, which may be empty. Nothing is checked
    /// here but by [`SnapshotCut::verify`].
    pub fn cut(&self, buffer: Vec<u8>) -> Result<SnapshotCut, NoSnapshot> {
        let (Some(log), Some(at)) = (self.log, self.mark) else {
            return Err(NoSnapshot::Nothing);
        };
        let mut sources = Vec::with_capacity(self.sources.len());
        let mut numbers = Vec::with_capacity(self.sources.len());
        for (source, fold) in &self.sources {
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

    /// Takes a snapshot's place in the log, and its tree. The registry's workers stay known.
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
            sources: std::mem::take(&mut self.sources),
        };
        let mut numbers = numbers.into_iter();
        for entry in &head.sources {
            let mut fold = SourceFold::restored(entry, holding(entry, &mut numbers));
            if left_out.contains(&entry.source) {
                fold.set_aside(&mut self.tree, Holding::SetAside);
                fold.set_aside_history.went(now, entry.after.count);
                self.memory.set_aside += 1;
            }
            self.sources.insert(entry.source.clone(), fold);
        }
        for (source, known) in &former.sources {
            self.sources
                .entry(source.clone())
                .or_insert_with(SourceFold::new)
                .remember(now, known);
        }
        self.bound_memory(now);
        former
    }

    /// The next message would not be the next one: the log let some go, unread.
    #[must_use]
    pub fn would_jump(&self, position: LogPosition) -> bool {
        self.position != LogPosition(0) && position > self.position.next()
    }
}

fn holding(entry: &SnapshotSource, numbers: &mut impl Iterator<Item = SourceNumber>) -> Holding {
    match entry.holding {
        // A snapshot that was read has a number for each of them.
        SnapshotHolding::Folded => numbers.next().map_or(Holding::Diverged, Holding::Applied),
        SnapshotHolding::Diverged => Holding::Diverged,
        SnapshotHolding::Freed => Holding::Freed,
    }
}

#[cfg(test)]
mod tests;
