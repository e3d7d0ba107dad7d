//! Dense numbers for sources, so that per-source state is a plain vector.
//!
//! Numbers are never reused: a source that returns has its old number. Grows with the number of
//! different sources ever seen, a few dozen bytes each.

use rustc_hash::FxHashMap;
use warmroute_proto::{Generation, Source, WorkerId};

/// A source's place in every per-source vector of this process. Never leaves the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceId(u32);

impl SourceId {
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One generation of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceLife {
    pub source: SourceId,
    pub generation: Generation,
}

#[derive(Clone, Debug, Default)]
pub struct SourceTable {
    ids: FxHashMap<Source, SourceId>,
    sources: Vec<Source>,
    workers: FxHashMap<WorkerId, Vec<SourceId>>,
}

impl SourceTable {
    /// Returns the source's number, a new one for an unknown source.
    pub fn intern(&mut self, source: &Source) -> SourceId {
        if let Some(&id) = self.ids.get(source) {
            return id;
        }
        let id = SourceId(u32::try_from(self.sources.len()).unwrap_or(u32::MAX));
        self.sources.push(source.clone());
        let of_worker = self.workers.entry(source.worker.clone());
        of_worker.or_default().push(id);
        self.ids.insert(source.clone(), id);
        id
    }

    #[must_use]
    pub fn id(&self, source: &Source) -> Option<SourceId> {
        self.ids.get(source).copied()
    }

    /// The numbers of a worker's sources.
    pub fn of_worker(&self, worker: &WorkerId) -> impl Iterator<Item = SourceId> {
        self.workers.get(worker).into_iter().flatten().copied()
    }

    /// Number of different sources ever seen.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.sources.len()
    }

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    #[must_use]
    pub fn source(&self, id: SourceId) -> Option<&Source> {
        self.sources.get(id.index())
    }

    /// All sources in the order of their names.
    #[must_use]
    pub fn in_order(&self) -> Vec<(&Source, SourceId)> {
        let mut all: Vec<_> = (0..)
            .map(SourceId)
            .zip(&self.sources)
            .map(|(id, source)| (source, id))
            .collect();
        all.sort_unstable();
        all
    }
}

/// A vector with one value per source; what is missing is a default.
#[derive(Clone, Debug, Default)]
pub struct PerSource<T>(Vec<T>);

impl<T: Default> PerSource<T> {
    #[must_use]
    pub fn get(&self, id: SourceId) -> Option<&T> {
        self.0.get(id.index())
    }

    pub fn get_mut(&mut self, id: SourceId) -> &mut T {
        let index = id.index();
        if self.0.len() <= index {
            self.0.resize_with(index + 1, T::default);
        }
        &mut self.0[index]
    }

    /// With memory for so many sources.
    #[must_use]
    pub fn with_capacity(sources: usize) -> Self {
        Self(Vec::with_capacity(sources))
    }

    /// The value of this source, or the default.
    #[must_use]
    pub fn of(&self, id: SourceId) -> T
    where
        T: Copy,
    {
        self.get(id).copied().unwrap_or_default()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut()
    }

    pub fn iter(&self) -> impl Iterator<Item = (SourceId, &T)> {
        (0..).map(SourceId).zip(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmroute_proto::DpRank;

    #[test]
    fn a_source_keeps_its_number() {
        let mut table = SourceTable::default();
        let source = |name: &str| Source {
            worker: name.into(),
            dp_rank: DpRank(0),
        };
        let b = table.intern(&source("b"));
        let a = table.intern(&source("a"));
        assert_ne!(a, b);
        assert_eq!(table.intern(&source("b")), b);
        assert_eq!(table.id(&source("a")), Some(a));
        assert_eq!(table.source(b), Some(&source("b")));
        let order: Vec<_> = table.in_order().into_iter().map(|(_, id)| id).collect();
        assert_eq!(order, [a, b]);
        assert_eq!(table.of_worker(&"a".into()).collect::<Vec<_>>(), [a]);
        assert_eq!(table.of_worker(&"c".into()).count(), 0);
    }
}
