//! Following registry keys: the present ones first, then changes, however often the source of the
//! changes breaks.
//!
//! [`RegistryImage`] is pure: it compares each new listing with what its reader already has.
//! [`RegistryWatch`] subscribes, and subscribes again whenever a plane's watch fails or ends.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::StreamExt as _;
use tokio::time::{Instant, sleep_until};

use crate::{Plane, PlaneError, PlaneStream, RETRY_DELAY, RegistryEntry, RegistryEvent, Revision};

/// All keys with a prefix, followed until it is dropped.
pub struct RegistryWatch {
    plane: Arc<dyn Plane>,
    prefix: String,
    image: RegistryImage,
    state: WatchState,
}

enum WatchState {
    Closed { retry_at: Instant },
    Opening(OpeningWatch),
    Open(PlaneStream<RegistryEvent>),
}

type OpeningWatch =
    Pin<Box<dyn Future<Output = Result<PlaneStream<RegistryEvent>, PlaneError>> + Send>>;

impl RegistryWatch {
    /// A watch of this prefix that subscribes at the first [`RegistryWatch::next`].
    #[must_use]
    pub fn new(plane: Arc<dyn Plane>, prefix: String) -> Self {
        Self {
            plane,
            prefix,
            image: RegistryImage::default(),
            state: WatchState::Closed {
                retry_at: Instant::now(),
            },
        }
    }

    /// The next event. [`RegistryEvent::Current`] comes once, after the first listing; a further
    /// subscription brings only what differs. Cancel-safe.
    pub async fn next(&mut self) -> RegistryEvent {
        loop {
            if let Some(event) = self.image.next() {
                return event;
            }
            match &mut self.state {
                WatchState::Closed { retry_at } => {
                    sleep_until(*retry_at).await;
                    let (plane, prefix) = (Arc::clone(&self.plane), self.prefix.clone());
                    let opening = async move { plane.watch(prefix).await };
                    self.state = WatchState::Opening(Box::pin(opening));
                }
                WatchState::Opening(opening) => match opening.await {
                    Ok(events) => {
                        self.image.begin_listing();
                        self.state = WatchState::Open(events);
                    }
                    Err(error) => {
                        tracing::debug!(%error, prefix = self.prefix, "registry watch failed");
                        self.close();
                    }
                },
                WatchState::Open(events) => match events.next().await {
                    Some(event) => self.image.apply(event),
                    None => {
                        tracing::warn!(prefix = self.prefix, "registry watch ended, opening again");
                        self.close();
                    }
                },
            }
        }
    }

    /// The keys that were reported and not removed.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.image.keys.keys().map(String::as_str)
    }

    fn close(&mut self) {
        self.state = WatchState::Closed {
            retry_at: Instant::now() + RETRY_DELAY,
        };
    }
}

/// The keys that a reader of events has, and the events that it has still to read. Bounded by the
/// keys that exist: of several changes of a key that are listed together the last counts.
#[derive(Default)]
pub(crate) struct RegistryImage {
    keys: BTreeMap<String, Revision>,
    /// The keys of the listing being read; `None` outside a listing.
    listed: Option<BTreeSet<String>>,
    is_current: bool,
    events: VecDeque<RegistryEvent>,
}

impl RegistryImage {
    pub(crate) fn next(&mut self) -> Option<RegistryEvent> {
        self.events.pop_front()
    }

    /// From here on every present key is put, until [`RegistryImage::end_listing`].
    pub(crate) fn begin_listing(&mut self) {
        self.listed = Some(BTreeSet::new());
    }

    pub(crate) fn apply(&mut self, event: RegistryEvent) {
        match event {
            RegistryEvent::Put { key, entry } => self.put(key, entry),
            RegistryEvent::Gone { key } => self.remove(&key),
            RegistryEvent::Current => self.end_listing(),
        }
    }

    pub(crate) fn put(&mut self, key: String, entry: RegistryEntry) {
        if let Some(listed) = &mut self.listed {
            listed.insert(key.clone());
        }
        if self.keys.insert(key.clone(), entry.revision) != Some(entry.revision) {
            self.events.push_back(RegistryEvent::Put { key, entry });
        }
    }

    pub(crate) fn remove(&mut self, key: &str) {
        if let Some(listed) = &mut self.listed {
            listed.remove(key);
        }
        if let Some((key, _)) = self.keys.remove_entry(key) {
            self.events.push_back(RegistryEvent::Gone { key });
        }
    }

    /// Queues what differs from the present keys with this prefix. Copies nothing else.
    fn compare(&mut self, prefix: &str, registry: &impl PresentKeys) {
        let present = registry.from(prefix);
        for (key, entry) in present.take_while(|(key, _)| key.starts_with(prefix)) {
            if self.keys.get(key) != Some(&entry.revision) {
                self.put(key.clone(), entry.clone());
            }
        }
        let keys = self.keys.keys();
        let gone: Vec<String> = keys.filter(|&key| !registry.has(key)).cloned().collect();
        for key in gone {
            self.remove(&key);
        }
        if !self.is_current {
            self.is_current = true;
            self.events.push_back(RegistryEvent::Current);
        }
    }

    /// Removes the keys that the listing lacks. Does nothing outside a listing.
    pub(crate) fn end_listing(&mut self) {
        let Some(listed) = self.listed.take() else {
            return;
        };
        let keys = self.keys.keys();
        let missing: Vec<String> = keys.filter(|&key| !listed.contains(key)).cloned().collect();
        for key in missing {
            self.remove(&key);
        }
        if !self.is_current {
            self.is_current = true;
            self.events.push_back(RegistryEvent::Current);
        }
    }
}

/// The keys of a registry in memory.
pub(crate) trait PresentKeys {
    /// The keys from this one on, in order.
    fn from(&self, prefix: &str) -> impl Iterator<Item = (&String, &RegistryEntry)>;

    fn has(&self, key: &str) -> bool;
}

/// One watcher's position in a registry in memory. It compares instead of queueing: its memory is
/// bounded by the keys that exist, however far behind it is.
pub(crate) struct KeyWatch {
    prefix: String,
    image: RegistryImage,
}

impl KeyWatch {
    pub(crate) fn new(prefix: String) -> Self {
        let image = RegistryImage::default();
        Self { prefix, image }
    }

    pub(crate) fn next(&mut self, registry: &impl PresentKeys) -> Option<RegistryEvent> {
        self.image.next().or_else(|| {
            self.image.compare(&self.prefix, registry);
            self.image.next()
        })
    }
}

#[cfg(test)]
mod tests;
