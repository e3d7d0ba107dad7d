//! The blocks of a run that a source holds, by tier, if more than leading blocks on the GPU.

use warmroute_proto::{Tier, Tiers};

use super::TierMask;
use super::heap::heap;

/// Pieces of equal tiers from the run's first block on, each as its end times 8 plus its tiers.
/// Neighbours differ, and the last piece has a tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Spans(Vec<u32>);

const fn span(end: u32, tiers: TierMask) -> u32 {
    (end << 3) | tiers.0 as u32
}

const fn end_of(span: u32) -> u32 {
    span >> 3
}

const fn tiers_of(span: u32) -> TierMask {
    TierMask((span & 0b111) as u8)
}

impl Spans {
    /// Leading blocks on the GPU only.
    pub(super) fn leading(blocks: u32) -> Self {
        let mut spans = Self::default();
        spans.change(0, blocks, |tiers| tiers.with(Tier::Gpu));
        spans
    }

    /// The number of leading blocks on the GPU, if there is nothing else.
    pub(super) fn as_leading(&self) -> Option<u32> {
        match self.0[..] {
            [] => Some(0),
            [only] if tiers_of(only) == TierMask::of(Tier::Gpu) => Some(end_of(only)),
            _ => None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// End of the held blocks.
    pub(super) fn end(&self) -> u32 {
        self.0.last().map_or(0, |&last| end_of(last))
    }

    pub(super) const fn heap_bytes(&self) -> usize {
        heap(self.0.capacity() * size_of::<u32>())
    }

    /// Pieces after `from` as (start, end, tiers), including those without a tier.
    pub(super) fn pieces(&self, from: u32) -> impl Iterator<Item = (u32, u32, TierMask)> {
        let first = self.0.partition_point(|&span| end_of(span) <= from);
        self.0[first..].iter().scan(from, |start, &span| {
            let piece = (*start, end_of(span), tiers_of(span));
            *start = end_of(span);
            Some(piece)
        })
    }

    /// The first block of a range that is held on `tier`.
    pub(super) fn first_with(&self, from: u32, to: u32, tier: Tier) -> Option<u32> {
        self.pieces(from)
            .take_while(|&(start, _, _)| start < to)
            .find(|&(_, _, tiers)| tiers.has(tier))
            .map(|(start, _, _)| start)
    }

    /// The last block before `to` that is held on `tier`.
    pub(super) fn last_with(&self, to: u32, tier: Tier) -> Option<u32> {
        let pieces = self.0.partition_point(|&span| end_of(span) < to) + 1;
        let pieces = &self.0[..pieces.min(self.0.len())];
        let at = pieces.iter().rposition(|&span| tiers_of(span).has(tier))?;
        Some(end_of(pieces[at]).min(to) - 1)
    }

    /// Returns true if every block of a range is held on `tier`.
    pub(super) fn covers(&self, from: u32, to: u32, tier: Tier) -> bool {
        self.end() >= to
            && self
                .pieces(from)
                .take_while(|&(start, _, _)| start < to)
                .all(|(_, _, tiers)| tiers.has(tier))
    }

    /// Number of leading blocks on the GPU, and whether lower tiers hold the next one.
    pub(super) fn lead(&self) -> (u32, bool) {
        let mut lead = 0;
        for &span in &self.0 {
            if !tiers_of(span).has(Tier::Gpu) {
                return (lead, !tiers_of(span).is_empty());
            }
            lead = end_of(span);
        }
        (lead, false)
    }

    /// Changes the tiers of all blocks of a range.
    pub(super) fn change(&mut self, from: u32, to: u32, tiers: impl Fn(TierMask) -> TierMask) {
        if from >= to {
            return;
        }
        // Includes one piece on either side, which may merge with the range's.
        let inner = self.0.partition_point(|&span| end_of(span) <= from);
        let first = inner.saturating_sub(1);
        let last = self.0.partition_point(|&span| end_of(span) < to);
        let last = (last + 2).min(self.0.len());
        let begin = first
            .checked_sub(1)
            .map_or(0, |before| end_of(self.0[before]));
        let mut new = Pieces::default();
        let mut start = begin;
        for &span in &self.0[first..last] {
            let (end, old) = (end_of(span), tiers_of(span));
            new.push(end.min(from), start, old);
            new.push(end.min(to), start.max(from), tiers(old));
            new.push(end, start.max(to), old);
            start = end;
        }
        if last == self.0.len() && start < to {
            new.push(from, start, TierMask::NONE);
            new.push(to, start.max(from), tiers(TierMask::NONE));
        }
        self.0.splice(first..last, new.0);
        while self.0.last().is_some_and(|&last| tiers_of(last).is_empty()) {
            self.0.pop();
        }
    }

    /// Appends a decoded piece. Returns false if it breaks the order of pieces.
    pub(super) fn push(&mut self, end: u32, tiers: TierMask) -> bool {
        let last = self.0.last().copied();
        let grows = end > last.map_or(0, end_of);
        let differs = last.is_none_or(|last| tiers_of(last) != tiers);
        self.0.push(span(end, tiers));
        grows && differs
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Builder of pieces that merges equal neighbours.
#[derive(Default)]
struct Pieces(Vec<u32>);

impl Pieces {
    fn push(&mut self, end: u32, start: u32, tiers: TierMask) {
        if start >= end {
            return;
        }
        match self.0.last_mut() {
            Some(last) if tiers_of(*last) == tiers => *last = span(end, tiers),
            Some(_) | None => self.0.push(span(end, tiers)),
        }
    }
}

/// Progress of one source's walk along a prompt.
#[derive(Clone, Copy, Default)]
pub(super) struct RunWalk {
    pub(super) run: Tiers<u32>,
}

impl RunWalk {
    /// Counts `blocks` blocks held in `tiers` at the walk's end. Returns false if the walk ends.
    /// After a lower tier was needed, GPU blocks no longer count as such.
    pub(super) const fn step(&mut self, blocks: u32, tiers: TierMask) -> bool {
        if tiers.has(Tier::Gpu) && self.run.cpu + self.run.disk == 0 {
            self.run.gpu += blocks;
        } else if tiers.has(Tier::Cpu) {
            self.run.cpu += blocks;
        } else if tiers.has(Tier::Disk) {
            self.run.disk += blocks;
        } else {
            return false;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tiers_at(spans: &Spans, block: u32) -> TierMask {
        spans
            .pieces(block)
            .next()
            .map_or(TierMask::NONE, |(_, _, tiers)| tiers)
    }

    proptest! {
        #[test]
        fn spans_are_an_array_of_tiers(
            steps in prop::collection::vec((0..24_u32, 1..24_u32, 0..3_usize, any::<bool>()), 0..60)
        ) {
            let mut spans = Spans::default();
            let mut model = [TierMask::NONE; 48];
            for (from, length, tier, add) in steps {
                let (to, tier) = (from + length, Tier::ALL[tier]);
                let held = |block: &TierMask| block.has(tier);
                let range = &model[from as usize..to as usize];
                let first = range.iter().position(held).map(|at| from + at as u32);
                prop_assert_eq!(spans.first_with(from, to, tier), first);
                let last = model[..to as usize].iter().rposition(held).map(|at| at as u32);
                prop_assert_eq!(spans.last_with(to, tier), last);
                prop_assert_eq!(spans.covers(from, to, tier), range.iter().all(held));
                let change = |tiers: TierMask| match add {
                    true => tiers.with(tier),
                    false => tiers.without(tier),
                };
                spans.change(from, to, change);
                model[from as usize..to as usize].iter_mut().for_each(|at| *at = change(*at));
                for (block, &tiers) in (0..).zip(&model) {
                    prop_assert_eq!(tiers_at(&spans, block), tiers);
                }
                let held = model.iter().rposition(|tiers| !tiers.is_empty());
                prop_assert_eq!(spans.end(), held.map_or(0, |last| last as u32 + 1));
                let gpu = |tiers: &&TierMask| tiers.has(Tier::Gpu);
                let lead = model.iter().take_while(gpu).count();
                prop_assert_eq!(spans.lead(), (lead as u32, !model[lead].is_empty()));
                for pair in spans.0.windows(2) {
                    prop_assert!(end_of(pair[0]) < end_of(pair[1]));
                    prop_assert_ne!(tiers_of(pair[0]), tiers_of(pair[1]));
                }
                let plain = Spans::leading(lead as u32) == spans;
                prop_assert_eq!(spans.as_leading().is_some(), plain);
            }
        }
    }
}
