//! The free places of sources, and which models reach them. Pure.
//!
//! Models may share all, some or none of their sources. A place is taken at one source, so that it
//! is not given to two models. Which source a request will choose is not known: where models share
//! only some sources, a place may turn out to be taken, and its request waits on.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::route::SourceId;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FreePlaces {
    free: BTreeMap<SourceId, u32>,
    /// `None`: the model's requests need no place, because there is no limit or no source.
    models: BTreeMap<Arc<str>, Option<Vec<SourceId>>>,
}

impl FreePlaces {
    /// Adds a model with its sources that have free places.
    pub(super) fn add(&mut self, model: Arc<str>, places: Option<Vec<(SourceId, u32)>>) {
        let sources = places.map(|places| {
            self.free.extend(places.iter().copied());
            places.into_iter().map(|(source, _)| source).collect()
        });
        self.models.insert(model, sources);
    }

    /// Whether a request of the model may be sent.
    pub(super) fn has(&self, model: &str) -> bool {
        match self.models.get(model) {
            Some(Some(sources)) => sources.iter().any(|source| self.free.contains_key(source)),
            Some(None) => true,
            None => false,
        }
    }

    /// Takes a place of the model, if there is one, where most are free.
    pub(super) fn take(&mut self, model: &str) {
        let Some(Some(sources)) = self.models.get(model) else {
            return;
        };
        let free = |source: &&SourceId| self.free.get(*source).copied();
        let Some(source) = sources.iter().max_by_key(free).copied() else {
            return;
        };
        if let Some(free) = self.free.get_mut(&source) {
            *free -= 1;
            if *free == 0 {
                self.free.remove(&source);
            }
        }
    }

    /// Takes all places of the model.
    pub(super) fn take_all(&mut self, model: &str) {
        if let Some(Some(sources)) = self.models.get(model) {
            for source in sources {
                self.free.remove(source);
            }
        }
    }
}
