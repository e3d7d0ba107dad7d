//! Reads the indexers' views over the plane: how far each is, and one replica's view of all
//! sources.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use serde::Serialize;
use tokio::time::Instant;
use warmroute_plane::PlaneError;
use warmroute_proto::view::{PAGE_SOURCES_MAX, SourceView, ViewPage, ViewPageRequest};
use warmroute_proto::{LogPosition, Source, codec};

use crate::deployment::Deployment;
use crate::index_client::{IndexClient, IndexError};

/// Replicas asked, and how many of them at a time.
const INDEXERS_MAX: usize = 64;
const ASKED_AT_A_TIME: usize = 16;

const PAGE_DEADLINE: Duration = Duration::from_millis(300);

/// Further pages of a view are not read: 16,000 sources.
const PAGES_MAX: usize = 8;

/// One indexer replica.
#[derive(Clone, Debug, Serialize)]
pub(super) struct LiveIndexer {
    /// `None`: the one in this process, which is not registered.
    pub id: Option<Arc<str>>,
    /// Queries are sent to other replicas first, because it answered late.
    pub is_suspect: bool,
    /// `None` if it did not answer.
    pub view: Option<LiveIndexerView>,
}

/// An indexer's own figures.
#[derive(Clone, Debug, Serialize)]
pub(super) struct LiveIndexerView {
    pub version: String,
    pub ready: bool,
    pub position: LogPosition,
    pub lag_messages: u64,
    /// Time since the log was applied to its end; `None` if its end is unknown.
    pub lag_ms: Option<u64>,
}

/// All replicas, and the sources as the most advanced one holds them.
#[derive(Clone, Debug, Default)]
pub(super) struct IndexerViews {
    pub indexers: Vec<LiveIndexer>,
    pub sources: BTreeMap<Source, SourceView>,
}

impl IndexerViews {
    pub(super) async fn read(index: &IndexClient, deployment: &Deployment) -> Self {
        let now = Instant::now().into_std();
        let known = index.indexers().suspects(now);
        let mut asked: Vec<(Option<Arc<str>>, bool)> = known
            .into_iter()
            .take(INDEXERS_MAX)
            .map(|(id, is_suspect)| (Some(id), is_suspect))
            .collect();
        if let Deployment::Embedded(_) = deployment {
            asked.push((None, false));
        }
        let reads = asked.into_iter().map(async |(id, is_suspect)| {
            let page = page(index, id.as_deref(), None, 1).await;
            let view = page.ok().map(LiveIndexerView::of);
            LiveIndexer {
                id,
                is_suspect,
                view,
            }
        });
        let indexers: Vec<LiveIndexer> = stream::iter(reads)
            .buffered(ASKED_AT_A_TIME)
            .collect()
            .await;
        let progress = |indexer: &&LiveIndexer| {
            let view = indexer.view.as_ref();
            view.map(|view| (view.ready, view.position))
        };
        let best = indexers.iter().max_by_key(progress);
        let sources = match best.filter(|best| best.view.is_some()) {
            Some(best) => sources(index, best.id.as_deref()).await,
            None => BTreeMap::new(),
        };
        Self { indexers, sources }
    }
}

impl LiveIndexerView {
    fn of(page: ViewPage) -> Self {
        Self {
            version: page.version,
            ready: page.ready,
            position: page.position,
            lag_messages: page.lag_messages,
            lag_ms: page.lag_ms,
        }
    }
}

/// What was read before a page failed.
async fn sources(index: &IndexClient, id: Option<&str>) -> BTreeMap<Source, SourceView> {
    let (mut sources, mut after) = (BTreeMap::new(), None);
    for _ in 0..PAGES_MAX {
        let Ok(page) = page(index, id, after, PAGE_SOURCES_MAX).await else {
            break;
        };
        after = page.sources.last().map(|last| last.source.clone());
        let rows = page.sources.into_iter();
        sources.extend(rows.map(|row| (row.source.clone(), row)));
        if !page.more {
            break;
        }
    }
    sources
}

async fn page(
    index: &IndexClient,
    id: Option<&str>,
    after: Option<Source>,
    sources_max: u32,
) -> Result<ViewPage, IndexError> {
    let request = ViewPageRequest { after, sources_max };
    let request = Bytes::from(codec::encode(&request)?);
    let subject = match id {
        Some(id) => index.subjects.query_at(id),
        None => index.subjects.query(),
    };
    let page = index.plane.request(subject, request, PAGE_DEADLINE);
    // A plane that is down may hold requests back.
    let page = tokio::time::timeout(PAGE_DEADLINE, page).await;
    let page = page.map_err(|_| PlaneError::Unavailable("no answer in time".to_owned()))??;
    Ok(codec::decode(&page)?)
}
