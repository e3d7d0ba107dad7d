//! A run: consecutive blocks, and what each source holds of them.
//!
//! A run is attached at any block of its parent run, so storing a branch splits nothing.

use warmroute_proto::{PrefixHash, Tier};

use super::blocks::CHUNK;
use super::heap::heap;
use super::ids::{BlockPlace, RunId};
use super::spans::Spans;
use super::{SourceNumber, TierMask};

/// Maximum blocks of a run; a longer path continues in a child run. Bounds the cost of changing
/// spans.
pub(super) const BLOCKS_MAX: u32 = 8192;

/// A holder's data for lookups: leading blocks on the GPU, times two, plus one if lower tiers may
/// continue from there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lead {
    pub(super) source: SourceNumber,
    packed: u32,
}

impl Lead {
    pub(super) const fn new(source: SourceNumber, blocks: u32, goes_on: bool) -> Self {
        Self {
            source,
            packed: (blocks << 1) | goes_on as u32,
        }
    }

    pub(super) const fn blocks(self) -> u32 {
        self.packed >> 1
    }

    pub(super) const fn goes_on(self) -> bool {
        self.packed & 1 == 1
    }
}

/// A holder's remaining data.
#[derive(Debug, Default)]
pub(super) struct Holder {
    /// Its holdings; empty if they are just its lead.
    pub(super) spans: Spans,
    /// End of the blocks that it holds, or that a descendant is attached at.
    pub(super) end: u32,
    /// Number of child runs in which the source stands.
    pub(super) children: u32,
    /// Upper bound of the attach points of those child runs.
    pub(super) pin: u32,
    /// `pin` may be too high: the child run that set it is gone.
    pub(super) pin_is_old: bool,
    /// Index of the run in the source's list.
    pub(super) slot: u32,
}

/// The fields of a lookup come first, in one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Run {
    /// The prefix hash of the last block.
    pub(super) tail: PrefixHash,
    pub(super) parent: RunId,
    /// Blocks of the parent that precede this run; zero at depth 0.
    pub(super) attach: u32,
    /// Depth of the first block.
    pub(super) start: u32,
    pub(super) len: u32,
    /// Ascending by source; `holds` is parallel to it.
    pub(super) leads: Vec<Lead>,
    pub(super) first_child: RunId,
    /// Holders whose `end` is `len`. At zero the run is too long.
    pub(super) at_tail: u32,
    pub(super) chunks: Vec<u32>,
    pub(super) holds: Vec<Holder>,
    pub(super) next_sibling: RunId,
    pub(super) previous_sibling: RunId,
}

impl Run {
    pub(super) const fn new(parent: RunId, attach: u32, start: u32) -> Self {
        Self {
            parent,
            attach,
            start,
            len: 0,
            tail: PrefixHash(0),
            chunks: Vec::new(),
            first_child: RunId::NONE,
            next_sibling: RunId::NONE,
            previous_sibling: RunId::NONE,
            at_tail: 0,
            leads: Vec::new(),
            holds: Vec::new(),
        }
    }

    /// Place of a block of the run.
    pub(super) fn place(&self, offset: u32) -> BlockPlace {
        let chunk = self.chunks[offset as usize / CHUNK];
        BlockPlace(chunk * CHUNK as u32 + offset % CHUNK as u32)
    }

    /// Bytes of the lists, without the holders' spans.
    pub(super) const fn heap_bytes(&self) -> usize {
        heap(self.chunks.capacity() * size_of::<u32>())
            + heap(self.leads.capacity() * size_of::<Lead>())
            + heap(self.holds.capacity() * size_of::<Holder>())
    }

    /// The holder's index, or its insertion point.
    pub(super) fn find(&self, source: SourceNumber) -> Result<usize, usize> {
        self.leads.binary_search_by_key(&source, |lead| lead.source)
    }

    pub(super) fn add_holder(&mut self, at: usize, source: SourceNumber, slot: u32) {
        let hold = Holder {
            slot,
            ..Holder::default()
        };
        // Most runs have one or two holders: capacity for four would dominate their memory.
        if self.leads.len() < 4 {
            self.leads.reserve_exact(1);
            self.holds.reserve_exact(1);
        }
        self.leads.insert(at, Lead::new(source, 0, false));
        self.holds.insert(at, hold);
    }

    pub(super) fn drop_holder(&mut self, at: usize) -> Holder {
        let hold = self.holds.remove(at);
        self.leads.remove(at);
        if hold.end == self.len {
            self.at_tail -= 1;
        }
        if self.leads.capacity() > 8 && self.leads.capacity() > 4 * self.leads.len() {
            self.leads.shrink_to(2 * self.leads.len());
            self.holds.shrink_to(2 * self.leads.len());
        }
        hold
    }

    /// Sets a holder's end. Keeps `at_tail` exact.
    pub(super) fn set_end(&mut self, at: usize, end: u32) {
        let hold = &mut self.holds[at];
        if hold.end == end {
            return;
        }
        self.at_tail -= u32::from(hold.end == self.len);
        self.at_tail += u32::from(end == self.len);
        hold.end = end;
    }

    /// End of the blocks that the holder holds in any tier.
    pub(super) fn held_end(&self, at: usize) -> u32 {
        if self.holds[at].spans.is_empty() {
            self.leads[at].blocks()
        } else {
            self.holds[at].spans.end()
        }
    }

    /// The first block of a range that the holder holds on `tier`.
    pub(super) fn first_with(&self, at: usize, from: u32, to: u32, tier: Tier) -> Option<u32> {
        let spans = &self.holds[at].spans;
        if spans.is_empty() {
            let held = tier == Tier::Gpu && from < self.leads[at].blocks().min(to);
            held.then_some(from)
        } else {
            spans.first_with(from, to, tier)
        }
    }

    /// The last block before `to`, which is not 0, that the holder holds on `tier`.
    pub(super) fn last_with(&self, at: usize, to: u32, tier: Tier) -> Option<u32> {
        let spans = &self.holds[at].spans;
        if !spans.is_empty() {
            return spans.last_with(to, tier);
        }
        let held = self.leads[at].blocks().min(to);
        held.checked_sub(1).filter(|_| tier == Tier::Gpu)
    }

    /// Returns true if the holder holds every block of a range on `tier`.
    pub(super) fn covers(&self, at: usize, from: u32, to: u32, tier: Tier) -> bool {
        let spans = &self.holds[at].spans;
        if spans.is_empty() {
            tier == Tier::Gpu && to <= self.leads[at].blocks()
        } else {
            spans.covers(from, to, tier)
        }
    }

    /// The holder's pieces from a block on, as (start, end, tiers).
    pub(super) fn pieces(
        &self,
        at: usize,
        from: u32,
    ) -> impl Iterator<Item = (u32, u32, TierMask)> {
        let lead = self.leads[at].blocks();
        let spans = &self.holds[at].spans;
        let plain = spans.is_empty() && from < lead;
        plain
            .then_some((from, lead, TierMask::of(Tier::Gpu)))
            .into_iter()
            .chain(spans.pieces(from))
    }

    /// Adds a range on `tier` that the holder does not hold there.
    pub(super) fn hold(&mut self, at: usize, from: u32, to: u32, tier: Tier) {
        let lead = &mut self.leads[at];
        if tier == Tier::Gpu && from == lead.blocks() && self.holds[at].spans.is_empty() {
            *lead = Lead::new(lead.source, to, false);
        } else {
            self.change_spans(at, from, to, |tiers| tiers.with(tier));
        }
        self.set_end(at, self.holds[at].end.max(to));
    }

    /// Removes a range on `tier`. Leaves `end` to the caller.
    pub(super) fn unhold(&mut self, at: usize, from: u32, to: u32, tier: Tier) {
        let lead = &mut self.leads[at];
        let plain = self.holds[at].spans.is_empty();
        if plain && (tier != Tier::Gpu || from >= lead.blocks()) {
            return;
        }
        if plain && to >= lead.blocks() {
            *lead = Lead::new(lead.source, from, false);
        } else {
            self.change_spans(at, from, to, |tiers| tiers.without(tier));
        }
    }

    /// Removes all of the holder's blocks.
    pub(super) fn unhold_all(&mut self, at: usize) {
        self.holds[at].spans = Spans::default();
        self.leads[at] = Lead::new(self.leads[at].source, 0, false);
    }

    /// Replaces the holder's blocks.
    pub(super) fn set_spans(&mut self, at: usize, spans: Spans) {
        let source = self.leads[at].source;
        let (leading, goes_on) = spans.lead();
        let plain = spans.as_leading().is_some();
        self.leads[at] = Lead::new(source, leading, goes_on);
        self.holds[at].spans = if plain { Spans::default() } else { spans };
    }

    fn change_spans(
        &mut self,
        at: usize,
        from: u32,
        to: u32,
        change: impl Fn(TierMask) -> TierMask,
    ) {
        let mut spans = std::mem::take(&mut self.holds[at].spans);
        if spans.is_empty() {
            spans = Spans::leading(self.leads[at].blocks());
        }
        spans.change(from, to, change);
        self.set_spans(at, spans);
    }
}
