//! The sources with a prompt that ends at or below a node of a tree.

use crate::source_table::SourceId;

/// In the order of their ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Holders(Vec<PromptHolder>);

/// A source at a node, with at least one end or child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PromptHolder {
    source: SourceId,
    /// Its prompts that end here.
    ends: u32,
    /// Children of the node that it holds.
    children: u32,
}

/// What makes a source a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeldBy {
    End,
    Child,
}

/// Effect of a change of one holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HolderChange {
    /// It became a holder, or is none any more.
    Membership,
    /// It holds by something else too.
    Count,
}

impl Holders {
    pub(super) const fn len(&self) -> usize {
        self.0.len()
    }

    /// The highest id first, so that a vector by ids grows once.
    pub(super) fn descending(&self) -> impl Iterator<Item = SourceId> {
        self.0.iter().rev().map(|holder| holder.source)
    }

    /// Those with a prompt that ends here.
    pub(super) fn ended(&self) -> impl Iterator<Item = SourceId> {
        let ended = self.0.iter().rev().filter(|holder| holder.ends > 0);
        ended.map(|holder| holder.source)
    }

    pub(super) fn contains(&self, source: SourceId) -> bool {
        self.place_of(source).is_ok()
    }

    /// Prompts of the source that end here.
    pub(super) fn ends(&self, source: SourceId) -> u32 {
        self.get(source).map_or(0, |holder| holder.ends)
    }

    /// Whether one prompt alone makes the source a holder: if it holds no more of its child.
    pub(super) fn is_held_once(&self, source: SourceId) -> bool {
        let holder = self.get(source);
        holder.is_some_and(|holder| holder.ends + holder.children == 1)
    }

    /// The holders of a new node between this one and its parent.
    pub(super) fn above(&self) -> Self {
        let above = |holder: &PromptHolder| PromptHolder {
            source: holder.source,
            ends: 0,
            children: 1,
        };
        Self(self.0.iter().map(above).collect())
    }

    pub(super) fn enter(&mut self, source: SourceId, by: HeldBy) -> HolderChange {
        let place = self.place_of(source);
        if let Err(place) = place {
            let holder = PromptHolder {
                source,
                ends: 0,
                children: 0,
            };
            self.0.insert(place, holder);
        }
        let (Ok(at) | Err(at)) = place;
        *self.0[at].count(by) += 1;
        match place {
            Ok(_) => HolderChange::Count,
            Err(_) => HolderChange::Membership,
        }
    }

    /// Returns `None`, without a change, if the source does not hold by that.
    pub(super) fn leave(&mut self, source: SourceId, by: HeldBy) -> Option<HolderChange> {
        let place = self.place_of(source).ok()?;
        let holder = &mut self.0[place];
        let count = holder.count(by);
        *count = count.checked_sub(1)?;
        if holder.ends + holder.children > 0 {
            return Some(HolderChange::Count);
        }
        self.0.remove(place);
        Some(HolderChange::Membership)
    }

    fn get(&self, source: SourceId) -> Option<&PromptHolder> {
        Some(&self.0[self.place_of(source).ok()?])
    }

    fn place_of(&self, source: SourceId) -> Result<usize, usize> {
        self.0.binary_search_by_key(&source, |holder| holder.source)
    }
}

impl PromptHolder {
    const fn count(&mut self, by: HeldBy) -> &mut u32 {
        match by {
            HeldBy::End => &mut self.ends,
            HeldBy::Child => &mut self.children,
        }
    }
}
