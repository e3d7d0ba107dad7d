//! The compact query of routers: who holds a prompt, by numbers instead of names.
//!
//! An indexer numbers its sources in a *roster*. Numbers are dense, never change and are never
//! reused within one life of the indexer. Routers read the roster in pages of changes, at their own
//! pace. A [`HolderAnswer`] names only the sources that hold blocks of the prompt, grouped by equal
//! run and states, so that it stays small when all of them hold a common prefix.
//!
//! A query names what its sender has read of the roster, and the answer has the rows that differ
//! from it: a reader's states are those of the answer's moment. Beyond [`CHANGES_MAX`] rows it drops
//! the numbers that it does not know, and may know an older status of a source without blocks.

use bincode::{Decode, Encode};

use crate::query::{SourceState, UnknownReason};
use crate::{
    EngineSeq, Generation, LocalHash, LogPosition, PrefixHash, RecordNumber, Source,
    StreamIdentity, Tiers,
};

/// Bytes at which a page or a part of an answer ends; one more row or group may exceed it.
pub const PART_BYTES_MAX: usize = 256 << 10;

/// [`PART_BYTES_MAX`] where a message takes fewer bytes: groups and changes of an answer are
/// bounded each, and details and the row that crosses the end need room.
#[must_use]
pub const fn part_bytes_within(payload_max: usize) -> usize {
    let half = payload_max.saturating_sub(PART_ROOM) / 2;
    if half < PART_BYTES_MAX {
        half
    } else {
        PART_BYTES_MAX
    }
}

/// Bytes of an answer besides groups, and names and statuses of changes.
const PART_ROOM: usize = 4 << 10;

/// Most sources of a roster. Bounds what a reader keeps and what the sets of an answer expand to.
pub const ROSTER_MAX: u32 = 1 << 20;

/// Most details in a part of an answer.
pub const DETAILS_MAX: usize = 256;

/// Most changed rows in a part of an answer. Their names may exceed [`PART_BYTES_MAX`] by one.
pub const CHANGES_MAX: usize = 256;

/// One life of one indexer replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub struct RosterId(pub u64);

/// A source's number in a roster, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub struct RosterNumber(pub u32);

impl RosterNumber {
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Asks a replica for changes of its roster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct RosterPageRequest {
    /// The roster that `since` belongs to. A replica with another one starts at its beginning.
    pub roster: RosterId,
    /// The version of the last page; 0 before the first.
    pub since: u64,
}

/// Changed rows of a roster, in the order of their last change.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RosterPage {
    pub roster: RosterId,
    /// With this page the reader has all changes up to here.
    pub version: u64,
    pub rows: Vec<RosterRow>,
    /// Whether further changes follow.
    pub more: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RosterRow {
    pub number: RosterNumber,
    pub source: Source,
    /// `None` before the source's first record, and after the replica forgot the source.
    pub status: Option<RosterStatus>,
}

/// What a replica knows of a source besides its blocks, as of its last tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RosterStatus {
    pub generation: Generation,
    pub states: Tiers<SourceState>,
    pub reason: Option<UnknownReason>,
}

/// Asks which sources hold blocks of a prompt.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct HolderQuery {
    /// The prompt's blocks from depth 0.
    pub blocks: Vec<LocalHash>,
    /// Only sources from this number on.
    pub from: RosterNumber,
    /// What the sender has read of the roster.
    pub known: RosterPageRequest,
}

/// What precedes the blocks of a [`DeepHolderQuery`] in its prompt. Block hashes are a chain: this
/// stands for all those blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct BlocksBefore {
    pub blocks: u32,
    /// Prefix hash of the last of them.
    pub prefix: PrefixHash,
    /// Its prefix hash in the chain of resume points ([`LocalHash::RESUME_ROOT`]).
    pub resume: PrefixHash,
}

/// A query by later blocks of a prompt that does not fit into one message. The answer's runs are
/// from the prompt's first block on. It names no source if none holds the block before these or one
/// below it, and has no changes of the roster: those of the answer to the first blocks stay the
/// names and generations of all parts.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct DeepHolderQuery {
    pub before: BlocksBefore,
    /// They follow those before.
    pub blocks: Vec<LocalHash>,
    /// The first number to answer for.
    pub from: RosterNumber,
}

/// The answer to a [`HolderQuery`] or a [`DeepHolderQuery`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum HolderAnswer {
    Holders(HolderPart),
    /// The replica does not know the log yet.
    Behind,
}

/// The holders among a range of the roster, of one moment.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct HolderPart {
    pub roster: RosterId,
    pub log: StreamIdentity,
    /// Records up to here are applied.
    pub position: LogPosition,
    /// The longest runs first. A source is in at most one group; one in no group holds nothing.
    pub groups: Vec<HolderGroup>,
    /// At most [`DETAILS_MAX`], of holders of the longest runs.
    pub details: Vec<HolderDetail>,
    /// At most [`CHANGES_MAX`] rows, ascending, that are not as the query's sender has read them.
    pub changes: Vec<RosterRow>,
    /// The first number that this part does not cover; `None` if it covers all.
    pub next: Option<RosterNumber>,
}

/// Sources with equal run and states.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct HolderGroup {
    /// As in [`SourceAnswer`](crate::query::SourceAnswer).
    pub run: Tiers<u32>,
    pub states: Tiers<SourceState>,
    pub members: NumberSet,
}

/// The record up to which a holder is folded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct HolderDetail {
    pub source: RosterNumber,
    pub generation: Generation,
    pub number: Option<RecordNumber>,
    pub engine_seq: Option<EngineSeq>,
}

/// Ascending numbers as LEB128 pairs: the gap since the last one, and the length of the run of
/// consecutive numbers less one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct NumberSet(Vec<u8>);

impl NumberSet {
    #[must_use]
    pub fn from_ascending(numbers: impl IntoIterator<Item = RosterNumber>) -> Self {
        let mut set = Self::default();
        let mut end = 0;
        let mut run: Option<(u32, u32)> = None;
        for RosterNumber(number) in numbers {
            run = match run {
                Some((first, last)) if number == last.saturating_add(1) => Some((first, number)),
                _ => {
                    end = set.push_run(end, run);
                    Some((number, number))
                }
            };
        }
        set.push_run(end, run);
        set
    }

    /// The numbers, ascending. Ends early at malformed bytes.
    pub fn iter(&self) -> impl Iterator<Item = RosterNumber> {
        self.runs().flatten().map(RosterNumber)
    }

    /// Number of bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.0.len()
    }

    /// Appends a run and returns the number after it.
    fn push_run(&mut self, end: u32, run: Option<(u32, u32)>) -> u32 {
        let Some((first, last)) = run else {
            return end;
        };
        push_leb128(&mut self.0, first.saturating_sub(end));
        push_leb128(&mut self.0, last - first);
        last.saturating_add(1)
    }

    fn runs(&self) -> impl Iterator<Item = std::ops::Range<u32>> {
        let (mut rest, mut end) = (self.0.as_slice(), 0_u32);
        std::iter::from_fn(move || {
            let first = end.checked_add(take_leb128(&mut rest)?)?;
            let after = first.checked_add(take_leb128(&mut rest)?)?.checked_add(1)?;
            end = after;
            Some(first..after)
        })
    }

    /// Count of the numbers if the bytes are well-formed.
    fn checked_count(&self) -> Option<u64> {
        let mut bytes = 0;
        let mut count = 0;
        let mut end = 0;
        for run in self.runs() {
            bytes += leb128_bytes(run.start - end) + leb128_bytes(run.end - run.start - 1);
            count += u64::from(run.end - run.start);
            end = run.end;
        }
        (bytes == self.0.len() && end <= ROSTER_MAX).then_some(count)
    }
}

impl HolderAnswer {
    /// Why the answer cannot come from an honest indexer.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        let Self::Holders(part) = self else {
            return None;
        };
        let mut members = 0;
        for group in &part.groups {
            match group.members.checked_count() {
                Some(count) => members += count,
                None => return Some("a malformed set of numbers"),
            }
        }
        (members > u64::from(ROSTER_MAX)).then_some("more holders than a roster has")
    }
}

fn push_leb128(bytes: &mut Vec<u8>, value: u32) {
    let mut rest = value;
    while rest >= 0x80 {
        bytes.push((rest & 0x7F) as u8 | 0x80);
        rest >>= 7;
    }
    bytes.push(rest as u8);
}

fn take_leb128(bytes: &mut &[u8]) -> Option<u32> {
    let mut value = 0_u64;
    for shift in (0..35).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7F) << shift;
        if byte & 0x80 == 0 {
            return u32::try_from(value).ok();
        }
    }
    None
}

const fn leb128_bytes(value: u32) -> usize {
    match value {
        0..0x80 => 1,
        0x80..0x4000 => 2,
        0x4000..0x20_0000 => 3,
        0x20_0000..0x1000_0000 => 4,
        _ => 5,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn numbers(set: &NumberSet) -> Vec<u32> {
        set.iter().map(|number| number.0).collect()
    }

    proptest! {
        #[test]
        fn a_set_is_what_it_was_made_of(
            wanted in prop::collection::btree_set(0..ROSTER_MAX, 0..200),
            runs in prop::collection::vec((0..ROSTER_MAX / 2, 0..300_u32), 0..4),
        ) {
            let mut wanted = wanted;
            wanted.extend(runs.into_iter().flat_map(|(first, len)| first..first + len));
            let set = NumberSet::from_ascending(wanted.iter().copied().map(RosterNumber));
            prop_assert_eq!(set.checked_count(), Some(wanted.len() as u64));
            prop_assert_eq!(numbers(&set), wanted.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn any_bytes_are_a_bounded_set_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let set = NumberSet(bytes);
            if let Some(count) = set.checked_count() {
                prop_assert!(count <= u64::from(ROSTER_MAX));
                prop_assert_eq!(NumberSet::from_ascending(set.iter()).iter().count() as u64, count);
            }
        }
    }

    #[test]
    fn all_sources_are_one_run() {
        let all = NumberSet::from_ascending((0..8000).map(RosterNumber));
        assert_eq!(all.bytes(), 3);
    }
}
