//! Rosters of the indexer replicas, read in the background.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use warmroute_proto::codec;
use warmroute_proto::roster::RosterPage;

use super::{IndexClient, IndexError};
use crate::route::{BadRosterPage, ReplicaRoster};

/// Interval of reading changes. An indexer collects them twice a second.
const POLL: Duration = Duration::from_millis(250);

/// Shortest interval, for sources that an answer named and no roster.
const POLL_MIN: Duration = Duration::from_millis(10);

/// Deadline of one page.
const PAGE_DEADLINE: Duration = Duration::from_millis(500);

/// Interval for a replica that does not answer.
const RETRY: Duration = Duration::from_secs(5);

/// The completely read rosters, by replica.
#[derive(Default)]
pub(crate) struct IndexerRosters {
    rosters: Mutex<BTreeMap<Arc<str>, Arc<ReplicaRoster>>>,
    changed: Notify,
}

#[derive(Debug, thiserror::Error)]
enum RosterError {
    #[error(transparent)]
    Index(#[from] IndexError),
    #[error(transparent)]
    Bad(#[from] BadRosterPage),
}

impl IndexerRosters {
    pub(crate) fn get(&self, id: &Arc<str>) -> Option<Arc<ReplicaRoster>> {
        self.rosters().get(id).cloned()
    }

    /// The rosters are to be read soon.
    pub(crate) fn changed(&self) {
        self.changed.notify_one();
    }

    pub(crate) fn forget(&self, id: &Arc<str>) {
        self.rosters().remove(id);
    }

    fn rosters(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Arc<ReplicaRoster>>> {
        self.rosters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IndexClient {
    /// Reads the rosters of all replicas until stopped.
    pub async fn follow_rosters(self, stop: CancellationToken) {
        let mut not_before: BTreeMap<Arc<str>, Instant> = BTreeMap::new();
        let follow = async {
            loop {
                let now = Instant::now();
                let ids = self.indexers().ids();
                self.rosters.rosters().retain(|id, _| ids.contains(id));
                not_before.retain(|id, at| ids.contains(id) && now < *at);
                let due = ids.iter().filter(|id| !not_before.contains_key(*id));
                let read = join_all(due.map(async |id| (id, self.read_roster(id).await)));
                for (id, outcome) in read.await {
                    let Err(error) = outcome else {
                        continue;
                    };
                    tracing::debug!(indexer = &**id, %error, "roster not read");
                    if self.rosters.get(id).is_none() {
                        not_before.insert(Arc::clone(id), Instant::now() + RETRY);
                    }
                }
                sleep(POLL_MIN).await;
                tokio::select! {
                    biased;
                    () = self.rosters.changed.notified() => {}
                    () = sleep(POLL) => {}
                }
            }
        };
        stop.run_until_cancelled(follow).await;
    }

    async fn read_roster(&self, id: &Arc<str>) -> Result<(), RosterError> {
        let mut roster = self.rosters.get(id).unwrap_or_default();
        loop {
            let request = codec::encode(&roster.next_request()).map_err(IndexError::from)?;
            let subject = self.subjects.query_at(id);
            let page = self
                .plane
                .request(subject, Bytes::from(request), PAGE_DEADLINE);
            let page = page.await.map_err(IndexError::from)?;
            let page: RosterPage = codec::decode(&page).map_err(IndexError::from)?;
            let (more, is_news) = (page.more, !page.rows.is_empty());
            let is_other = page.roster != roster.next_request().roster;
            if is_news || is_other {
                Arc::make_mut(&mut roster).take(page)?;
            }
            if !more {
                break;
            }
        }
        self.rosters.rosters().insert(Arc::clone(id), roster);
        Ok(())
    }
}
