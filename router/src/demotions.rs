//! Shows the sources that this router demoted to operators' tools: an entry of the registry that
//! expires with this router. Nothing decides by it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use warmroute_plane::{Plane, PlaneError, PutIf, Revision};
use warmroute_proto::registry::{DEMOTIONS_SHOWN_MAX, DemotedSource, DemotionEntry};
use warmroute_proto::{RouterId, codec};

use crate::shared_core::SharedCore;

const PERIOD: Duration = Duration::from_secs(2);

/// Periods after which an unchanged entry is written again.
const REFRESH: u32 = 5;

/// Three refreshes.
const LEASE: Duration = Duration::from_secs(30);

/// Writes the entry.
pub(crate) struct DemotionWriter {
    pub router: RouterId,
    pub key: String,
    pub core: Arc<SharedCore>,
    pub plane: Arc<dyn Plane>,
}

/// The entry as it was written last.
#[derive(Default)]
struct WrittenEntry {
    sources: Vec<DemotedSource>,
    revision: Option<Revision>,
    age: u32,
}

impl DemotionWriter {
    /// Compares each [`PERIOD`], until stopped.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut written = WrittenEntry::default();
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            let write = stop.run_until_cancelled(self.write(&mut written)).await;
            if let Some(Err(error)) = write {
                tracing::debug!(%error, "demoted sources cannot be shown to other tools");
            }
        }
        // The entry expires.
    }

    async fn write(&self, written: &mut WrittenEntry) -> Result<(), PlaneError> {
        let demoted = self.core.core().demoted();
        written.age += 1;
        if written.sources == demoted && (demoted.is_empty() || written.age < REFRESH) {
            return Ok(());
        }
        if demoted.is_empty() {
            if let Some(revision) = written.revision.take() {
                self.plane.delete(self.key.clone(), revision).await?;
            }
        } else {
            let entry = DemotionEntry {
                router: self.router,
                total: u32::try_from(demoted.len()).unwrap_or(u32::MAX),
                sources: demoted.iter().take(DEMOTIONS_SHOWN_MAX).cloned().collect(),
            };
            let value = codec::encode(&entry).unwrap_or_default().into();
            let put = self
                .plane
                .put(self.key.clone(), value, PutIf::Always, Some(LEASE));
            written.revision = Some(put.await?);
        }
        (written.sources, written.age) = (demoted, 0);
        Ok(())
    }
}
