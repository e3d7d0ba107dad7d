//! Following keys: what is there, then what changes, across everything that happens to the server.
//!
//! A watch holds what it has told. Whenever its consumer breaks it lists all keys again and tells the
//! difference: a key that ended while nobody looked, or a bucket that was lost, is told like any
//! other change.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use tokio::sync::watch;
use tokio::time::sleep;

use super::core::Core;
use super::link::count;
use super::pull::{Delivery, Pull, Pulled, Start};
use super::registry::is_end;
use crate::{PlaneError, PlaneStream, RegistryEntry, RegistryEvent, Revision};

const RETRY: Duration = Duration::from_millis(200);

struct Watch {
    core: Arc<Core>,
    key_prefix: String,
    filter: String,
    pull: Option<Pull>,
    epochs: watch::Receiver<u64>,
    told: Told,
}

pub(super) async fn watch(
    core: Arc<Core>,
    prefix: String,
) -> Result<PlaneStream<RegistryEvent>, PlaneError> {
    let key_prefix = core.layout.key_prefix();
    // Subjects are filtered by whole tokens; the rest of the prefix is compared here.
    let tokens = prefix.rfind('.').map_or("", |dot| &prefix[..=dot]);
    let mut watch = Watch {
        filter: format!("{key_prefix}{tokens}>"),
        key_prefix,
        pull: None,
        epochs: core.link.epochs(),
        told: Told::new(prefix),
        core,
    };
    watch.open().await?;
    Ok(Box::pin(stream::unfold(watch, |mut watch| async move {
        let event = watch.next().await;
        Some((event, watch))
    })))
}

impl Watch {
    async fn next(&mut self) -> RegistryEvent {
        loop {
            if let Some(event) = self.told.events.pop_front() {
                return event;
            }
            if self.epochs.has_changed().unwrap_or(false) {
                self.pull = None;
            }
            let Some(pull) = self.pull.as_mut() else {
                if self.open().await.is_err() {
                    sleep(RETRY).await;
                }
                continue;
            };
            let pulled = tokio::select! {
                biased;
                _ = self.epochs.changed() => Pulled::Broken,
                pulled = pull.next() => pulled,
            };
            match pulled {
                Pulled::Message(delivery) => self.take(delivery),
                // Nothing more to come: the last of the list may have gone while it was read.
                Pulled::Idle => self.told.listed(),
                Pulled::Broken => self.pull = None,
            }
        }
    }

    async fn open(&mut self) -> Result<(), PlaneError> {
        self.epochs.borrow_and_update();
        let bucket = self.core.layout.registry();
        let filter = Some(self.filter.as_str());
        let pull = Pull::open(&self.core, bucket, filter, Start::LastPerSubject).await?;
        count(&self.core.link.counters.watches_reopened);
        self.told.list();
        if pull.pending_at_start == 0 {
            self.told.listed();
        }
        self.pull = Some(pull);
        Ok(())
    }

    fn take(&mut self, delivery: Delivery) {
        if let Some(key) = delivery.subject.strip_prefix(&self.key_prefix) {
            if is_end(delivery.headers.as_ref()) {
                self.told.gone(key);
            } else {
                let entry = RegistryEntry {
                    value: delivery.payload,
                    revision: Revision(delivery.sequence),
                };
                self.told.put(key, entry);
            }
        }
        if delivery.pending == 0 {
            self.told.listed();
        }
    }
}

/// What the watcher knows, and what it will be told next. Bounded by the keys that exist.
struct Told {
    prefix: String,
    keys: BTreeMap<String, Revision>,
    /// The keys of the list that is being read.
    listing: Option<BTreeSet<String>>,
    current: bool,
    events: VecDeque<RegistryEvent>,
}

impl Told {
    const fn new(prefix: String) -> Self {
        Self {
            prefix,
            keys: BTreeMap::new(),
            listing: None,
            current: false,
            events: VecDeque::new(),
        }
    }

    fn list(&mut self) {
        self.listing = Some(BTreeSet::new());
    }

    fn put(&mut self, key: &str, entry: RegistryEntry) {
        if !key.starts_with(&self.prefix) {
            return;
        }
        if let Some(listing) = &mut self.listing {
            listing.insert(key.to_owned());
        }
        if self.keys.insert(key.to_owned(), entry.revision) != Some(entry.revision) {
            let key = key.to_owned();
            self.events.push_back(RegistryEvent::Put { key, entry });
        }
    }

    fn gone(&mut self, key: &str) {
        if let Some(listing) = &mut self.listing {
            listing.remove(key);
        }
        if self.keys.remove(key).is_some() {
            let key = key.to_owned();
            self.events.push_back(RegistryEvent::Gone { key });
        }
    }

    /// The list is complete: what it does not have is gone.
    fn listed(&mut self) {
        let Some(listing) = self.listing.take() else {
            return;
        };
        let missing: Vec<String> = self
            .keys
            .keys()
            .filter(|key| !listing.contains(*key))
            .cloned()
            .collect();
        for key in missing {
            self.gone(&key);
        }
        if !self.current {
            self.current = true;
            self.events.push_back(RegistryEvent::Current);
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn entry(revision: u64) -> RegistryEntry {
        RegistryEntry {
            value: Bytes::new(),
            revision: Revision(revision),
        }
    }

    fn told(told: &mut Told) -> Vec<String> {
        let word = |event| match event {
            RegistryEvent::Put { key, entry } => format!("{key}={}", entry.revision.0),
            RegistryEvent::Gone { key } => format!("{key} gone"),
            RegistryEvent::Current => "current".to_owned(),
        };
        told.events.drain(..).map(word).collect()
    }

    #[test]
    fn a_list_that_is_read_again_tells_the_difference() {
        let mut watch = Told::new("a.".to_owned());
        watch.list();
        watch.put("a.x", entry(1));
        watch.put("b.x", entry(2));
        watch.put("a.y", entry(3));
        watch.listed();
        assert_eq!(told(&mut watch), ["a.x=1", "a.y=3", "current"]);
        watch.put("a.z", entry(4));
        watch.gone("a.w");
        watch.list();
        watch.put("a.x", entry(1));
        watch.put("a.z", entry(7));
        watch.listed();
        assert_eq!(told(&mut watch), ["a.z=4", "a.z=7", "a.y gone"]);
        watch.list();
        watch.listed();
        watch.listed();
        assert_eq!(told(&mut watch), ["a.x gone", "a.z gone"]);
    }
}
