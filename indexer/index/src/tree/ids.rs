//! Numbers of runs and addresses of blocks.

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RunId(pub(super) u32);

impl RunId {
    /// No run: the parent of runs at depth 0, and the end of a list.
    pub(super) const NONE: Self = Self(u32::MAX);

    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }

    pub(super) fn some(self) -> Option<Self> {
        (self != Self::NONE).then_some(self)
    }
}

/// A block's address: chunk number times 16, plus the index in the chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockPlace(pub(super) u32);
