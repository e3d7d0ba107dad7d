//! Which source holds which blocks, in which tiers: exact, pure, fast and compact.
//!
//! ```text
//!  table: prefix hash ─▶ place           runs                                     sources
//!  ┌───────────────┐     ┌───────────────────────────────────────────┐     ┌────────────────┐
//!  │ shard 0       │     │ run 0   depth 0..300, chunks 7 2 9 …      │◀────│ 0: runs 0 1    │
//!  │  tag32 place32│─┐   │   leads: source 0 ▸300   source 1 ▸120    │◀─┐  │    digest,last │
//!  │ shard 4095    │ │   └──────┬────────────────────┬───────────────┘  └──│ 1: runs 0 2    │
//!  └───────────────┘ │    attach 300           attach 120                  └────────────────┘
//!                    │   ┌──────▼─────────────┐ ┌────▼────────────────┐
//!                    │   │ run 1  depth 300.. │ │ run 2  depth 120..  │
//!                    ▼   └────────────────────┘ └─────────────────────┘
//!  chunks of 16 blocks: 16 local hashes, 16 prefix hashes, the run and the part of it
//! ```
//!
//! - A **run** is a sequence of at most 8,192 consecutive blocks. A branch is a run of its own,
//!   attached at a block of another run; runs are never split or joined.
//! - A **lead** is the number of leading blocks of a run that a source holds on the GPU. If that is
//!   not all that it holds there, a sorted list of **spans** names the tiers of each part.
//! - **Chunks** have one size and lie in segments of 64 KiB. They can be moved: only the run's list
//!   and the table refer to them.
//! - The **table** maps every known prefix hash to its place, 8 bytes a slot: 32 bits of the hash,
//!   the rest is compared in the chunk. Its 4,096 shards grow and shrink one by one.
//! - A **source**'s blocks are closed towards the root: it stands in a run from the run's first
//!   block to the last one that it holds, or that one of its descendants is attached at. So a
//!   removed block stays known while the source holds a descendant of it.
//! - A **lookup** searches the depths for the last known prefix (a prefix is known only if all
//!   before it are), and walks the few runs on the path from the top. A source continues below a run
//!   only if it holds the run without a gap: a hole ends a run.
//! - A **closed** source is dead immediately. [`Tree::reclaim`] frees its blocks in bounded steps;
//!   its number is reused only afterwards.
//! - **The writer locks briefly.** Beside readers it first reads the memory that a long record
//!   needs, and adds its new blocks 16 at a time (`ahead`): blocks without a holder change no
//!   answer. The last turn gives them to their source.
//!
//! Invariants, and a test that fails without each:
//!
//! - the tree answers like sets of pairs, in any order of changes: `tree_is_what_sets_say`,
//!   `random_programs`; a log folded in short turns equals one folded in one turn:
//!   `turns_do_what_is_done_in_one_turn`
//! - a change that contradicts what is held is refused with its pair: `contradictions_are_named`
//! - blocks added ahead change no answer and are removed if they get no holder:
//!   `what_was_added_ahead_goes_with_what_hangs_at_it`
//! - a moved block keeps its content: `blocks_that_are_moved_stay_what_they_are`
//! - any bytes are an image or refused: `any_bytes_are_a_tree_or_refused`
//! - constant residency takes constant memory: `memory_does_not_grow_under_churn`; the estimate is
//!   the memory of the process: `estimate_is_what_the_process_takes`
//!
//! After every step the tests check links, ends, counts and every counted byte (`check` in
//! `tests.rs`). All kept memory counts, in use or free, with the allocator's overhead and an eighth
//! for fragmentation: resident memory is 1.00 to 1.13 of the sum without that eighth. The bound on
//! it is `fold::memory`, the end of gone sources `fold::gone`.
//!
//! The tree has no notion of generations, states, time or source names.

mod ahead;
mod blocks;
mod dump;
mod heap;
mod ids;
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
use warmroute_proto::roster::BlocksBefore;
use warmroute_proto::{Change, Digest, LocalHash, PrefixHash, Tier, Tiers};

use self::ahead::Grown;
use self::blocks::{BlockArena, CHUNK};
use self::ids::RunId;
use self::lookup::ChainPart;
use self::room::Trim;
use self::run::Run;
use self::runs::RunArena;
use self::table::PrefixTable;

pub use ahead::{Growth, blocks_in, is_long};
pub use dump::SourceNodes;
pub use image::{BadImage, digests_of_image};

/// Blocks of a prompt that are hashed before it is looked whether the last one is there.
const RESUME_STEP: usize = 256;

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

/// A change that contradicts its source's holdings. The part before the contradiction is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    #[error("prefix {:016x} is held on {tier} already", .prefix.0)]
    AlreadyHeld { prefix: PrefixHash, tier: Tier },
    #[error("prefix {:016x} is not held on {tier}", .prefix.0)]
    NotHeld { prefix: PrefixHash, tier: Tier },
    #[error("nothing is known of the parent {:016x}", .parent.0)]
    NoParent { parent: PrefixHash },
    #[error("prefix {:016x} is the hash of another prefix, too", .prefix.0)]
    Collision { prefix: PrefixHash },
    #[error("the source is closed")]
    Closed,
}

/// Place of a block in a run, or of the next one.
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
    /// Runs in which the source stands, unordered.
    runs: Vec<RunId>,
    /// The block stored last, which the next one usually follows. May be outdated.
    last: Option<Position>,
    /// Runs still to be visited, if the source is closed.
    unvisited: usize,
}

impl SourceHoldings {
    const fn list_bytes(&self) -> usize {
        heap::heap(self.runs.capacity() * size_of::<RunId>())
    }
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum SourceLife {
    #[default]
    Free,
    Open,
    /// Dead, but not all freed.
    Closed,
}

/// One node of one source: a block that it holds, or an ancestor of one.
struct SourceNode {
    parent: Option<PrefixHash>,
    prefix: PrefixHash,
    local: LocalHash,
    tiers: TierMask,
}

/// The tree of all sources.
pub struct Tree {
    blocks: BlockArena,
    table: PrefixTable,
    runs: RunArena,
    /// The first of the runs at depth 0.
    first_root: RunId,
    sources: Vec<SourceHoldings>,
    /// Per source: all tiers if it is open, no tier otherwise.
    open: Vec<TierMask>,
    free: Vec<SourceNumber>,
    closed: Vec<SourceNumber>,
    trim: Trim,
    nodes: usize,
    /// Number of (run, source in it) pairs.
    holders: usize,
    /// Bytes of the lists of runs, holders and sources.
    heap: usize,
    scratch: Vec<PrefixHash>,
    /// Blocks added ahead, in order of addition, possibly without a holder.
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
            trim: Trim::Off,
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

    /// Closes a source: it holds nothing from now on. [`Self::reclaim`] frees its blocks.
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

    /// Digest of all pairs that the source holds.
    #[must_use]
    pub fn digest(&self, number: SourceNumber) -> Digest {
        self.sources
            .get(number.index())
            .map_or_else(Digest::default, |source| source.digest)
    }

    /// The digest recomputed from the blocks. Equals [`Self::digest`].
    #[must_use]
    pub fn recomputed_digest(&self, number: SourceNumber) -> Digest {
        let mut digest = Digest::default();
        for (run, at) in self.standing(number) {
            self.add_to_digest(&mut digest, run, at);
        }
        digest
    }

    /// Whether the source holds a pair.
    #[must_use]
    pub fn holds(&self, number: SourceNumber, prefix: PrefixHash, tier: Tier) -> bool {
        let is_open = self.open.get(number.index()) == Some(&TierMask::ALL);
        let Some(Position { run, offset }) = self.locate(prefix).filter(|_| is_open) else {
            return false;
        };
        let run = self.run(run);
        let Ok(at) = run.find(number) else {
            return false;
        };
        let piece = run.pieces(at, offset).next();
        piece.is_some_and(|(from, to, tiers)| from <= offset && offset < to && tiers.has(tier))
    }

    /// All pairs that the source holds, unordered.
    pub fn held(&self, number: SourceNumber) -> impl Iterator<Item = (PrefixHash, Tier)> {
        self.listed(number).flat_map(move |listed| {
            Tier::ALL
                .into_iter()
                .filter(move |&tier| listed.tiers.has(tier))
                .map(move |tier| (listed.prefix, tier))
        })
    }

    /// A copy of the source's nodes.
    #[must_use]
    pub fn nodes_of(&self, number: SourceNumber) -> SourceNodes {
        SourceNodes(self.listed(number).collect())
    }

    /// [`SourceNodes::into_changes`].
    #[must_use]
    pub fn dump(&self, number: SourceNumber) -> Vec<Change> {
        self.nodes_of(number).into_changes()
    }

    /// Per source of `allowed`, in that order: the run on the GPU from depth 0, and from its end
    /// the run in the lower tiers, where a block counts for CPU before disk. The first block in
    /// neither ends it. A tier that is not allowed counts as empty.
    #[must_use]
    pub fn lookup(
        &self,
        blocks: &[LocalHash],
        allowed: &[(SourceNumber, TierMask)],
    ) -> Vec<Tiers<u32>> {
        let chain: Vec<_> = prefix_hashes(None, blocks).collect();
        self.lookup_chain(&chain, allowed)
    }

    /// [`Self::lookup`] by prefix hashes.
    #[must_use]
    pub fn lookup_chain(
        &self,
        chain: &[PrefixHash],
        allowed: &[(SourceNumber, TierMask)],
    ) -> Vec<Tiers<u32>> {
        lookup::of_some(self, chain, allowed)
    }

    /// No tier for every source, indexed by its number.
    #[must_use]
    pub fn no_tiers(&self) -> Vec<TierMask> {
        vec![TierMask::NONE; self.sources.len()]
    }

    /// [`Self::lookup`] with resume points, for every source and its allowed tiers, both indexed by
    /// its number. `chain` has the prefix hashes of `blocks`.
    #[must_use]
    pub fn lookup_credit(
        &self,
        blocks: &[LocalHash],
        chain: &[PrefixHash],
        allowed: &[TierMask],
    ) -> Vec<Tiers<u32>> {
        let mut runs = Vec::new();
        lookup::all(self, ChainPart::whole(chain), allowed, &mut runs);
        // A source has either runs or resume points.
        raise_to(&mut runs, self.resume_depths(blocks, allowed));
        runs
    }

    /// [`Self::lookup_credit`] by the last blocks of a prompt: nothing if the prompt is not known
    /// up to the block before them. `chain` has the prefix hashes of `blocks` and, first, of that
    /// block.
    #[must_use]
    pub fn lookup_deep_credit(
        &self,
        before: &BlocksBefore,
        blocks: &[LocalHash],
        chain: &[PrefixHash],
        allowed: &[TierMask],
    ) -> Vec<Tiers<u32>> {
        let depth = before.blocks as usize;
        let chain = ChainPart::at(depth.saturating_sub(1), chain);
        let mut runs = Vec::new();
        lookup::all(self, chain, allowed, &mut runs);
        // The chain of resume points has a root before the prompt's first block.
        let depths = self.resume_depths_below(before.resume, depth, blocks, allowed);
        raise_to(&mut runs, depths);
        runs
    }

    /// The number of blocks before each source's deepest resume point on the way through `blocks`,
    /// indexed by its number; 0 if there is none ([`LocalHash::RESUME_ROOT`]). Empty if no source
    /// has one.
    #[must_use]
    pub fn resume_depths(&self, blocks: &[LocalHash], allowed: &[TierMask]) -> Vec<u32> {
        let root = PrefixHash::after(None, LocalHash::RESUME_ROOT);
        self.resume_depths_below(root, 0, blocks, allowed)
    }

    /// [`Self::resume_depths`] of sources whose points reach the given prefix at this depth.
    fn resume_depths_below(
        &self,
        prefix: PrefixHash,
        depth: usize,
        blocks: &[LocalHash],
        allowed: &[TierMask],
    ) -> Vec<u32> {
        if self.locate(prefix).is_none() {
            return Vec::new();
        }
        let mut chain = vec![prefix];
        for step in blocks.chunks(RESUME_STEP) {
            chain.extend(prefix_hashes(chain.last().copied(), step));
            // Below a prefix that is not there is none: a long prompt's rest is not hashed.
            if chain.last().is_none_or(|&last| self.locate(last).is_none()) {
                break;
            }
        }
        lookup::deepest(self, ChainPart::at(depth, &chain), allowed)
    }

    /// [`Self::lookup`] by prefix hashes from depth 0, for every source, indexed by its number.
    /// Closed sources hold nothing.
    #[must_use]
    pub fn lookup_all(&self, chain: &[PrefixHash]) -> Vec<Tiers<u32>> {
        self.lookup_all_from(chain, Vec::new())
    }

    /// [`Self::lookup_all`] into memory allocated before the lock was taken: about as many defaults
    /// as there are sources.
    #[must_use]
    pub fn lookup_all_from(
        &self,
        chain: &[PrefixHash],
        mut runs: Vec<Tiers<u32>>,
    ) -> Vec<Tiers<u32>> {
        lookup::all(self, ChainPart::whole(chain), &self.open, &mut runs);
        runs
    }

    /// Distinct prefixes, including those of closed sources that are not freed yet.
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

    /// Edits one holder of a run. Keeps `heap` exact.
    fn edit(&mut self, id: RunId, at: usize, edit: impl FnOnce(&mut Run)) {
        let run = &mut self.runs[id.index()];
        self.heap -= run.holds[at].spans.heap_bytes();
        edit(run);
        self.heap += run.holds[at].spans.heap_bytes();
    }

    /// Changes a run's lists. Keeps `heap` exact.
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

    /// Position of a known prefix.
    fn locate(&self, prefix: PrefixHash) -> Option<Position> {
        let is_it = |place| self.blocks.prefix(place) == prefix;
        let place = self.table.find(prefix, is_it)?;
        let (run, offset) = self.blocks.owner(place);
        Some(Position { run, offset })
    }

    /// Returns true if the prefix is at this position, which may be outdated.
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

    /// Runs in which an open source stands, each with the source's holder index.
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

    /// Checks all invariants that the code relies on.
    #[cfg(test)]
    fn check(&self) {
        tests::check(self);
    }
}

fn raise_to(runs: &mut [Tiers<u32>], depths: Vec<u32>) {
    for (run, depth) in runs.iter_mut().zip(depths) {
        run.gpu = run.gpu.max(depth);
    }
}

#[cfg(test)]
mod tests;
