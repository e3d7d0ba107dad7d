//! Splits changes into records below the log's size limit, each with the digest after it.

use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::{Change, Digest, LocalHash, PrefixHash, Tier, Tiers};

/// Upper bound of a record's bytes beside its source's name and its changes.
const RECORD_HEAD_BYTES: usize = 128;
/// Upper bound of a change's bytes beside its hashes.
const CHANGE_HEAD_BYTES: usize = 40;
const HASH_BYTES: usize = 8;

/// The changes of one record, and the digest after them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RecordPart {
    pub(super) changes: Vec<Change>,
    pub(super) after: Digest,
}

/// Upper bound of a change's bytes in a record.
pub(super) const fn change_bytes(change: &Change) -> usize {
    CHANGE_HEAD_BYTES
        + match change {
            Change::Stored { blocks, .. } => blocks.len() * HASH_BYTES,
            Change::Removed { blocks, .. } => blocks.len() * HASH_BYTES,
            Change::Cleared { .. } => 0,
        }
}

/// Splits changes into parts of at most `bytes_max` bytes beside the source's name, and folds them into
/// `digests`. Returns at least one part, even without changes.
pub(super) fn split(
    changes: Vec<Change>,
    bytes_max: usize,
    digests: &mut Tiers<Digest>,
) -> Vec<RecordPart> {
    let room = bytes_max.saturating_sub(RECORD_HEAD_BYTES);
    let mut splitter = Splitter {
        room: room.max(CHANGE_HEAD_BYTES + HASH_BYTES),
        used: 0,
        changes: Vec::new(),
        parts: Vec::new(),
        digests,
    };
    for change in changes {
        splitter.add(change);
    }
    splitter.cut();
    splitter.parts
}

struct Splitter<'a> {
    room: usize,
    used: usize,
    changes: Vec<Change>,
    parts: Vec<RecordPart>,
    digests: &'a mut Tiers<Digest>,
}

impl Splitter<'_> {
    fn add(&mut self, change: Change) {
        match change {
            Change::Stored {
                parent,
                blocks,
                tier,
            } => self.stored(parent, &blocks, tier),
            Change::Removed { blocks, tier } => self.removed(&blocks, tier),
            Change::Cleared { tier } => {
                self.hashes_that_fit(0);
                *self.digests.get_mut(tier) = Digest::default();
                self.push(Change::Cleared { tier }, 0);
            }
        }
    }

    fn stored(&mut self, mut parent: Option<PrefixHash>, mut rest: &[LocalHash], tier: Tier) {
        while !rest.is_empty() {
            let (now, later) = rest.split_at(self.hashes_that_fit(rest.len()));
            let digest = self.digests.get_mut(tier);
            let mut last = parent;
            for prefix in prefix_hashes(parent, now) {
                digest.insert(prefix, tier);
                last = Some(prefix);
            }
            let change = Change::Stored {
                parent,
                blocks: now.to_vec(),
                tier,
            };
            self.push(change, now.len());
            parent = last;
            rest = later;
        }
    }

    fn removed(&mut self, mut rest: &[PrefixHash], tier: Tier) {
        while !rest.is_empty() {
            let (now, later) = rest.split_at(self.hashes_that_fit(rest.len()));
            let digest = self.digests.get_mut(tier);
            for &prefix in now {
                digest.remove(prefix, tier);
            }
            let change = Change::Removed {
                blocks: now.to_vec(),
                tier,
            };
            self.push(change, now.len());
            rest = later;
        }
    }

    /// The number of `wanted` hashes that fit into the present part, which is cut if none does.
    fn hashes_that_fit(&mut self, wanted: usize) -> usize {
        let least = CHANGE_HEAD_BYTES + HASH_BYTES;
        if self.used + least > self.room {
            self.cut();
        }
        let room = self.room - self.used - CHANGE_HEAD_BYTES;
        wanted.min(room / HASH_BYTES)
    }

    fn push(&mut self, change: Change, hashes: usize) {
        self.used += CHANGE_HEAD_BYTES + hashes * HASH_BYTES;
        self.changes.push(change);
    }

    fn cut(&mut self) {
        if self.changes.is_empty() && !self.parts.is_empty() {
            return;
        }
        self.used = 0;
        self.parts.push(RecordPart {
            changes: std::mem::take(&mut self.changes),
            after: crate::mirror::total(self.digests),
        });
    }
}
