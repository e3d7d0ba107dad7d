//! Keys with revisions and leases. Time is an argument.

use std::collections::BTreeMap;
use std::ops::Bound;

use bytes::Bytes;
use tokio::time::Instant;

use crate::registry_watch::PresentKeys;
use crate::{PlaneError, PutIf, RegistryEntry, Revision};

#[derive(Default)]
pub(super) struct MemoryRegistry {
    keys: BTreeMap<String, LeasedEntry>,
    revision: u64,
}

struct LeasedEntry {
    entry: RegistryEntry,
    expiry: Option<Instant>,
}

impl MemoryRegistry {
    pub(super) fn get(&mut self, now: Instant, key: &str) -> Option<RegistryEntry> {
        self.expire(now);
        self.keys.get(key).map(|held| held.entry.clone())
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
        let present = self.keys.get(&key).map(|held| held.entry.revision);
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
        self.keys.insert(key, LeasedEntry { entry, expiry });
        Ok(revision)
    }

    pub(super) fn delete(
        &mut self,
        now: Instant,
        key: &str,
        revision: Revision,
    ) -> Result<(), PlaneError> {
        self.expire(now);
        match self.keys.get(key) {
            Some(held) if held.entry.revision == revision => {
                self.keys.remove(key);
                Ok(())
            }
            Some(_) | None => Err(PlaneError::Conflict),
        }
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.keys.values().filter_map(|held| held.expiry).min()
    }

    pub(super) fn expire(&mut self, now: Instant) {
        self.keys
            .retain(|_, held| held.expiry.is_none_or(|expiry| expiry > now));
    }
}

impl PresentKeys for MemoryRegistry {
    fn from(&self, prefix: &str) -> impl Iterator<Item = (&String, &RegistryEntry)> {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let keys = self.keys.range::<str, _>(from);
        keys.map(|(key, held)| (key, &held.entry))
    }

    fn has(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }
}
