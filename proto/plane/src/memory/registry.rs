//! Keys with revisions and leases. Time is an argument.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use tokio::time::Instant;

use crate::{PlaneError, PutIf, RegistryEntry, RegistryEvent, Revision};

#[derive(Default)]
pub(super) struct Registry {
    entries: BTreeMap<String, Held>,
    revision: u64,
}

struct Held {
    entry: RegistryEntry,
    expiry: Option<Instant>,
}

impl Registry {
    pub(super) fn get(&mut self, now: Instant, key: &str) -> Option<RegistryEntry> {
        self.expire(now);
        self.entries.get(key).map(|held| held.entry.clone())
    }

    pub(super) fn put(
        &mut self,
        now: Instant,
        key: String,
        value: Bytes,
        condition: PutIf,
        expiry: Option<Instant>,
    ) -> Result<Revision, PlaneError> {
        self.expire(now);
        let present = self.entries.get(&key).map(|held| held.entry.revision);
        let holds = match condition {
            PutIf::Always => true,
            PutIf::Absent => present.is_none(),
            PutIf::Revision(revision) => present == Some(revision),
        };
        if !holds {
            return Err(PlaneError::Conflict);
        }
        self.revision += 1;
        let revision = Revision(self.revision);
        let entry = RegistryEntry { value, revision };
        self.entries.insert(key, Held { entry, expiry });
        Ok(revision)
    }

    pub(super) fn delete(
        &mut self,
        now: Instant,
        key: &str,
        revision: Revision,
    ) -> Result<(), PlaneError> {
        self.expire(now);
        match self.entries.get(key) {
            Some(held) if held.entry.revision == revision => {
                self.entries.remove(key);
                Ok(())
            }
            Some(_) | None => Err(PlaneError::Conflict),
        }
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.entries.values().filter_map(|held| held.expiry).min()
    }

    fn expire(&mut self, now: Instant) {
        self.entries
            .retain(|_, held| held.expiry.is_none_or(|expiry| expiry > now));
    }
}

/// What one watcher has been told. It compares instead of queueing, so that its memory is bounded by
/// the keys that exist, however far behind it is; of several changes of a key it sees the last.
pub(super) struct Watch {
    prefix: String,
    told: BTreeMap<String, Revision>,
    pending: VecDeque<RegistryEvent>,
    current: bool,
}

impl Watch {
    pub(super) const fn new(prefix: String) -> Self {
        Self {
            prefix,
            told: BTreeMap::new(),
            pending: VecDeque::new(),
            current: false,
        }
    }

    pub(super) fn next(&mut self, now: Instant, registry: &mut Registry) -> Option<RegistryEvent> {
        if self.pending.is_empty() {
            registry.expire(now);
            self.compare(registry);
        }
        self.pending.pop_front()
    }

    fn compare(&mut self, registry: &Registry) {
        let present: BTreeMap<&String, &RegistryEntry> = registry
            .entries
            .range(self.prefix.clone()..)
            .take_while(|(key, _)| key.starts_with(&self.prefix))
            .map(|(key, held)| (key, &held.entry))
            .collect();
        let gone: BTreeSet<String> = self
            .told
            .keys()
            .filter(|key| !present.contains_key(key))
            .cloned()
            .collect();
        for key in gone {
            self.told.remove(&key);
            self.pending.push_back(RegistryEvent::Gone { key });
        }
        for (key, entry) in present {
            if self.told.insert(key.clone(), entry.revision) != Some(entry.revision) {
                self.pending.push_back(RegistryEvent::Put {
                    key: key.clone(),
                    entry: entry.clone(),
                });
            }
        }
        if !self.current {
            self.current = true;
            self.pending.push_back(RegistryEvent::Current);
        }
    }
}
