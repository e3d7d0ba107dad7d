//! Watches registry keys across reconnects and server restarts.
//!
//! Whenever its consumer breaks, a watch lists all keys again and reports the difference: a key
//! that expired during an outage, or a bucket that was lost, is reported like any other change.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use tokio::sync::watch;
use tokio::time::sleep;

use super::core::NatsCore;
use super::link::count;
use super::pull::{BATCH_MAX, Delivery, Pull, Pulled, Start};
use super::registry::is_end;
use crate::registry_watch::RegistryImage;
use crate::{PlaneError, PlaneStream, RegistryEntry, RegistryEvent, Revision};

/// Delay before a consumer that could not be created is tried again.
const REOPEN_DELAY: Duration = Duration::from_millis(200);

struct BucketWatch {
    core: Arc<NatsCore>,
    /// Keys that do not begin with it are skipped.
    prefix: String,
    key_prefix: String,
    filter: String,
    pull: Option<Pull>,
    epochs: watch::Receiver<u64>,
    image: RegistryImage,
}

pub(super) async fn watch(
    core: Arc<NatsCore>,
    prefix: String,
) -> Result<PlaneStream<RegistryEvent>, PlaneError> {
    let key_prefix = core.layout.key_prefix();
    // Subjects are filtered by whole tokens; the rest of the prefix is compared here.
    let tokens = prefix.rfind('.').map_or("", |dot| &prefix[..=dot]);
    let mut watch = BucketWatch {
        filter: format!("{key_prefix}{tokens}>"),
        prefix,
        key_prefix,
        pull: None,
        epochs: core.link.epochs(),
        image: RegistryImage::default(),
        core,
    };
    watch.open().await?;
    Ok(Box::pin(stream::unfold(watch, |mut watch| async move {
        let event = watch.next().await;
        Some((event, watch))
    })))
}

impl BucketWatch {
    async fn next(&mut self) -> RegistryEvent {
        loop {
            if let Some(event) = self.image.next() {
                return event;
            }
            if self.epochs.has_changed().unwrap_or(false) {
                self.pull = None;
            }
            let Some(pull) = self.pull.as_mut() else {
                if self.open().await.is_err() {
                    sleep(REOPEN_DELAY).await;
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
                // The last key of a listing may have been deleted while it was read.
                Pulled::Idle => self.image.end_listing(),
                Pulled::Broken => self.pull = None,
            }
        }
    }

    async fn open(&mut self) -> Result<(), PlaneError> {
        self.epochs.borrow_and_update();
        let bucket = self.core.layout.registry();
        let filter = Some(self.filter.as_str());
        let pull = Pull::open(&self.core, bucket, filter, Start::LastPerSubject, BATCH_MAX).await?;
        count(&self.core.link.counters.watches_reopened);
        self.image.begin_listing();
        if pull.pending_at_start == 0 {
            self.image.end_listing();
        }
        self.pull = Some(pull);
        Ok(())
    }

    fn take(&mut self, delivery: Delivery) {
        let key = delivery.subject.strip_prefix(&self.key_prefix);
        if let Some(key) = key.filter(|key| key.starts_with(&self.prefix)) {
            if is_end(delivery.headers.as_ref()) {
                self.image.remove(key);
            } else {
                let entry = RegistryEntry {
                    value: delivery.payload,
                    revision: Revision(delivery.sequence),
                };
                self.image.put(key.to_owned(), entry);
            }
        }
        if delivery.pending == 0 {
            self.image.end_listing();
        }
    }
}
