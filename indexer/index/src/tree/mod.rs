//! Which source holds which blocks: exact, pure, fast and small.
//!
//! Blocks that follow one another stand in a *run*; a branch is a run of its own that hangs at a
//! block of its parent run. Per run and source the tree keeps how many leading blocks the source
//! holds on the GPU, and only where it holds others too, or in other tiers, a list of pieces. One
//! table names the place of every known prefix hash.
//!
//! A source's blocks are closed towards the root: it stands in a run from its first block up to the
//! last one that it holds, or that something it holds below hangs at. So a removed block stays known
//! while the source holds something below it.
//!
//! A lookup searches the depths for the last known prefix — a prefix is known only if all before
//! it are — and then goes through the few runs on the way there from the top. It credits a source in
//! a run only if the source's blocks had no gap above it: that is how holes end a run.
//!
//! A closed source is dead at once; what it held is given back in bounded steps by
//! [`Tree::reclaim`], and its number is used again only afterwards.
//!
//! What it does not know: generations, states, time, or names of sources.

mod ahead;
mod blocks;
mod dump;
mod image;
mod lookup;
mod remove;
mod room;
mod run;
mod runs;
mod spans;
mod store;
mod table;

use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::{Change, Digest, LocalHash, PrefixHash, Tier, Tiers};

use self::ahead::Grown;
use self::blocks::{BlockArena, CHUNK};
use self::run::{Run, RunId};
use self::runs::RunArena;
use self::table::PrefixTable;

pub use ahead::{Growth, blocks_in, is_long};
pub(crate) use dump::Dump;
pub use image::{BadImage, digests_of_image};

/// A source's place in the tree. Dense, given by [`Tree::open`]; dead after [`Tree::close`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceNumber(u32);

impl SourceNumber {
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A set of tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TierMask(u8);

impl TierMask {
    pub const NONE: Self = Self(0);
    pub const ALL: Self = Self(0b111);

    #[must_use]
    pub const fn of(tier: Tier) -> Self {
        Self(1 << tier.number())
    }

    #[must_use]
    pub const fn with(self, tier: Tier) -> Self {
        Self(self.0 | Self::of(tier).0)
    }

    #[must_use]
    pub const fn without(self, tier: Tier) -> Self {
        Self(self.0 & !Self::of(tier).0)
    }

    #[must_use]
    pub const fn has(self, tier: Tier) -> bool {
        self.0 & Self::of(tier).0 != 0
    }

    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    #[must_use]
    pub const fn both(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// A change that contradicts what its source holds. The part before the contradiction is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    #[error("{prefix:?} is held on {tier} already")]
    AlreadyHeld { prefix: PrefixHash, tier: Tier },
    #[error("{prefix:?} is not held on {tier}")]
    NotHeld { prefix: PrefixHash, tier: Tier },
    #[error("nothing is known of the parent {parent:?}")]
    NoParent { parent: PrefixHash },
    #[error("{prefix:?} is the hash of another prefix, too")]
    Collision { prefix: PrefixHash },
    #[error("the source is closed")]
    Closed,
}

/// Where a block stands, or would stand next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    run: RunId,
    offset: u32,
}

impl Position {
    /// Before depth 0.
    const ROOT: Self = Self {
        run: RunId::NONE,
        offset: 0,
    };

    const fn next(self) -> Self {
        Self {
            run: self.run,
            offset: self.offset + 1,
        }
    }
}

#[derive(Default)]
struct SourceHoldings {
    life: SourceLife,
    digest: Digest,
    /// Every run that the source stands in, in no order.
    runs: Vec<RunId>,
    /// The block stored last, if it still is: the next one usually follows it.
    last: Option<Position>,
    /// Of a closed source: how many of `runs` are yet to be visited.
    unvisited: usize,
}

impl SourceHoldings {
    const fn list_bytes(&self) -> usize {
        room::heap(self.runs.capacity() * size_of::<RunId>())
    }
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum SourceLife {
    #[default]
    Free,
    Open,
    /// Dead, but not all given back yet.
    Closed,
}

/// One node of one source: a block that it holds, or holds something below of.
struct SourceNode {
    parent: Option<PrefixHash>,
    prefix: PrefixHash,
    local: LocalHash,
    tiers: TierMask,
}

/// See the module's documentation.
pub struct Tree {
    blocks: BlockArena,
    table: PrefixTable,
    runs: RunArena,
    /// The first of the runs at depth 0.
    first_root: RunId,
    sources: Vec<SourceHoldings>,
    /// Per source: all tiers if it is open, else none.
    open: Vec<TierMask>,
    free: Vec<SourceNumber>,
    closed: Vec<SourceNumber>,
    nodes: usize,
    /// Pairs of a run and a source that stands in it.
    holders: usize,
    /// What the lists of runs, holders and sources take.
    heap: usize,
    scratch: Vec<PrefixHash>,
    /// Blocks that were added ahead, in that order, and that may be held by nobody.
    grown: Vec<Grown>,
}

impl Default for Tree {
    fn default() -> Self {
        Self {
            blocks: BlockArena::default(),
            table: PrefixTable::default(),
            runs: RunArena::default(),
            first_root: RunId::NONE,
            sources: Vec::new(),
            open: Vec::new(),
            free: Vec::new(),
            closed: Vec::new(),
            nodes: 0,
            holders: 0,
            heap: 0,
            scratch: Vec::new(),
            grown: Vec::new(),
        }
    }
}

impl Tree {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A new source that holds nothing.
    pub fn open(&mut self) -> SourceNumber {
        let number = self.free.pop().unwrap_or_else(|| {
            let next = u32::try_from(self.sources.len()).unwrap_or(u32::MAX);
            debug_assert!(next < u32::MAX, "sources are few");
            self.sources.push(SourceHoldings::default());
            self.open.push(TierMask::NONE);
            SourceNumber(next)
        });
        self.sources[number.index()].life = SourceLife::Open;
        self.open[number.index()] = TierMask::ALL;
        number
    }

    /// Ends a source: at once it holds nothing. What it held is given back by [`Self::reclaim`].
    pub fn close(&mut self, number: SourceNumber) {
        if let Some(source) = self.opened(number) {
            source.life = SourceLife::Closed;
            source.digest = Digest::default();
            source.unvisited = source.runs.len();
            self.open[number.index()] = TierMask::NONE;
            self.closed.push(number);
        }
    }

    /// Applies one change of a source.
    pub fn apply(&mut self, number: SourceNumber, change: &Change) -> Result<(), ChangeError> {
        self.opened(number).ok_or(ChangeError::Closed)?;
        match change {
            Change::Stored {
                parent,
                blocks,
                tier,
            } => self.store(number, *parent, blocks, *tier),
            Change::Removed { blocks, tier } => self.remove(number, blocks, *tier),
            Change::Cleared { tier } => {
                self.clear(number, *tier);
                Ok(())
            }
        }
    }

    /// Count and sum of all pairs that the source holds.
    #[must_use]
    pub fn digest(&self, number: SourceNumber) -> Digest {
        self.sources
            .get(number.index())
            .map_or_else(Digest::default, |source| source.digest)
    }

    /// The digest, computed anew from the blocks: what [`Self::digest`] must be.
    #[must_use]
    pub fn recomputed_digest(&self, number: SourceNumber) -> Digest {
        let mut digest = Digest::default();
        for (run, at) in self.standing(number) {
            self.add_to_digest(&mut digest, run, at);
        }
        digest
    }

    /// All pairs that the source holds, in no order.
    pub fn held(&self, number: SourceNumber) -> impl Iterator<Item = (PrefixHash, Tier)> {
        self.listed(number).flat_map(move |listed| {
            Tier::ALL
                .into_iter()
                .filter(move |&tier| listed.tiers.has(tier))
                .map(move |tier| (listed.prefix, tier))
        })
    }

    /// What the source holds as changes that make an empty source equal to it, parents first.
    /// Removed ancestors are stored and removed again at the end.
    #[must_use]
    pub fn dump(&self, number: SourceNumber) -> Vec<Change> {
        Dump::of(self, number)
    }

    /// Per source of `allowed`, in that order: the run on the GPU from depth 0, then, from its end
    /// on, the run in the lower tiers, where a block counts for CPU before disk. The first block in
    /// neither ends it. A tier that is not allowed counts as holding nothing.
    #[must_use]
    pub fn lookup(
        &self,
        blocks: &[LocalHash],
        allowed: &[(SourceNumber, TierMask)],
    ) -> Vec<Tiers<u32>> {
        let chain: Vec<_> = prefix_hashes(None, blocks).collect();
        self.lookup_chain(&chain, allowed)
    }

    /// The same from prefix hashes.
    #[must_use]
    pub fn lookup_chain(
        &self,
        chain: &[PrefixHash],
        allowed: &[(SourceNumber, TierMask)],
    ) -> Vec<Tiers<u32>> {
        lookup::of_some(self, chain, allowed)
    }

    /// The same from prefix hashes and for every source at once, by its number; closed sources hold
    /// nothing. `chain` are the prefix hashes of a prompt's blocks from depth 0.
    #[must_use]
    pub fn lookup_all(&self, chain: &[PrefixHash]) -> Vec<Tiers<u32>> {
        self.lookup_all_from(chain, Vec::new())
    }

    /// The same, into memory that the caller has taken already, before it kept anybody from writing: as many
    /// defaults as it thinks that there are sources.
    #[must_use]
    pub fn lookup_all_from(
        &self,
        chain: &[PrefixHash],
        mut runs: Vec<Tiers<u32>>,
    ) -> Vec<Tiers<u32>> {
        lookup::all(self, chain, &self.open, &mut runs);
        runs
    }

    /// Distinct prefixes, those of closed sources that are not given back yet included.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    fn opened(&mut self, number: SourceNumber) -> Option<&mut SourceHoldings> {
        self.sources
            .get_mut(number.index())
            .filter(|source| source.life == SourceLife::Open)
    }

    fn run(&self, id: RunId) -> &Run {
        &self.runs[id.index()]
    }

    fn run_mut(&mut self, id: RunId) -> &mut Run {
        &mut self.runs[id.index()]
    }

    /// Changes what one holder of a run holds, and keeps count of what that takes.
    fn edit(&mut self, id: RunId, at: usize, edit: impl FnOnce(&mut Run)) {
        let run = &mut self.runs[id.index()];
        self.heap -= run.holds[at].spans.heap_bytes();
        edit(run);
        self.heap += run.holds[at].spans.heap_bytes();
    }

    /// Changes a run's lists, and keeps count of what they take.
    fn relist<T>(&mut self, id: RunId, change: impl FnOnce(&mut Run) -> T) -> T {
        let run = &mut self.runs[id.index()];
        self.heap -= run.heap_bytes();
        let changed = change(run);
        self.heap += run.heap_bytes();
        changed
    }

    fn prefix_at(&self, run: RunId, offset: u32) -> PrefixHash {
        self.blocks.prefix(self.run(run).place(offset))
    }

    /// Where a prefix stands, if any source stands there.
    fn locate(&self, prefix: PrefixHash) -> Option<Position> {
        let is_it = |place| self.blocks.prefix(place) == prefix;
        let place = self.table.find(prefix, is_it)?;
        let (run, offset) = self.blocks.owner(place);
        Some(Position { run, offset })
    }

    /// Is the block at this position there, and this one? The position may be from earlier.
    fn is_at(&self, position: Position, prefix: PrefixHash) -> bool {
        let Some(run) = self.runs.get(position.run.index()) else {
            return false;
        };
        if position.offset + 1 == run.len {
            run.tail == prefix
        } else {
            position.offset < run.len && self.blocks.prefix(run.place(position.offset)) == prefix
        }
    }

    /// The runs that an open source stands in, each with its index among the holders.
    fn standing(&self, number: SourceNumber) -> impl Iterator<Item = (&Run, usize)> {
        self.sources
            .get(number.index())
            .filter(|source| source.life == SourceLife::Open)
            .into_iter()
            .flat_map(|source| &source.runs)
            .filter_map(move |&run| {
                let run = self.run(run);
                Some((run, run.find(number).ok()?))
            })
    }

    /// The nodes of an open source.
    fn listed(&self, number: SourceNumber) -> impl Iterator<Item = SourceNode> {
        self.standing(number).flat_map(move |(run, at)| {
            let mut parent = run
                .parent
                .some()
                .map(|above| self.prefix_at(above, run.attach - 1));
            (0..run.holds[at].end).map(move |offset| {
                let place = run.place(offset);
                let prefix = self.blocks.prefix(place);
                let piece = run.pieces(at, offset).next();
                SourceNode {
                    parent: parent.replace(prefix),
                    prefix,
                    local: self.blocks.local(place),
                    tiers: piece.map_or(TierMask::NONE, |(_, _, tiers)| tiers),
                }
            })
        })
    }

    /// The prefix hashes of a range of a run, in slices.
    fn prefixes(&self, run: &Run, from: u32, to: u32) -> impl Iterator<Item = &[u64]> {
        let (from, to) = (from as usize, to as usize);
        let chunks = run.chunks.iter().enumerate();
        chunks
            .take(to.div_ceil(CHUNK))
            .skip(from / CHUNK)
            .map(move |(index, &chunk)| {
                let first = index * CHUNK;
                let (_, prefixes) = self.blocks.hashes(chunk);
                &prefixes[from.saturating_sub(first)..(to - first).min(CHUNK)]
            })
    }

    fn add_to_digest(&self, digest: &mut Digest, run: &Run, at: usize) {
        for (from, to, tiers) in run.pieces(at, 0) {
            for tier in Tier::ALL.into_iter().filter(|&tier| tiers.has(tier)) {
                for &prefix in self.prefixes(run, from, to).flatten() {
                    digest.insert(PrefixHash(prefix), tier);
                }
            }
        }
    }

    /// Are all invariants kept that the code relies on? For tests.
    #[cfg(test)]
    fn check(&self) {
        tests::check(self);
    }
}

#[cfg(test)]
mod tests;
