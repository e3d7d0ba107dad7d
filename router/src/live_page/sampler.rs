//! Makes a point of history each second, and a state while there are viewers.
//!
//! Locks are held to copy, a few sources at a time. States are assembled and rendered on another
//! thread.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use warmroute_process::build;
use warmroute_proto::{DpRank, Source};

use super::history::HistoryPoint;
use super::indexers::IndexerViews;
use super::state::{LiveReplication, LiveRouter, LiveState, LiveWorker, RankParts};
use super::{LiveFeed, event};
use crate::admin::{Admin, setup_faults};
use crate::clock::unix_time;
use crate::route::SourceFigures;
use crate::sync::{ReplicaStatus, StatusDetail};

const PERIOD: Duration = Duration::from_secs(1);

/// Faults shown.
const FAULTS_MAX: usize = 6;

/// Decisions shown.
const DECISIONS: usize = 12;

/// Sources copied under one lock of the core, some ten microseconds.
const SOURCES_A_LOCK: usize = 64;

pub(crate) struct LiveSampler {
    admin: Arc<Admin>,
    feed: Arc<LiveFeed>,
}

/// What a state needs of other tasks and processes.
struct LiveInputs {
    point: HistoryPoint,
    status: Option<ReplicaStatus>,
    views: IndexerViews,
}

impl LiveSampler {
    pub(crate) fn new(admin: Arc<Admin>) -> (Self, Arc<LiveFeed>) {
        let feed = Arc::new(LiveFeed::new());
        let sampler = Self {
            admin,
            feed: Arc::clone(&feed),
        };
        (sampler, feed)
    }

    /// Runs until stopped.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            let totals = self.admin.app.core.core().traffic().clone();
            let now = u64::try_from(unix_time().as_millis()).unwrap_or(u64::MAX);
            let point = self.feed.history.push(now, totals);
            if self.feed.is_watched() {
                stop.run_until_cancelled(self.publish(point)).await;
            }
        }
    }

    async fn publish(&self, point: HistoryPoint) {
        let (status, views) = tokio::join!(
            self.admin.replicas.status(StatusDetail::Summary),
            IndexerViews::read(&self.admin.app.index, &self.admin.deployment),
        );
        let inputs = LiveInputs {
            point,
            status,
            views,
        };
        let admin = Arc::clone(&self.admin);
        let render = move || serde_json::to_string(&state(&admin, inputs));
        match tokio::task::spawn_blocking(render).await {
            Ok(Ok(state)) => {
                self.feed.states.send_replace(event("state", &state));
            }
            Ok(Err(error)) => tracing::error!(%error, "cannot render the live page's state"),
            Err(error) => tracing::error!(%error, "cannot make the live page's state"),
        }
    }
}

fn state(admin: &Admin, inputs: LiveInputs) -> LiveState {
    let app = &admin.app;
    let names = |ids: &_| app.core.core().sources(ids);
    let status = inputs.status.as_ref();
    LiveState {
        router: LiveRouter {
            id: admin.router.to_string(),
            host: build::host(),
            version: build::version(),
            phase: app.ready.phase().label(),
            waiting_requests: app.metrics.waiting().get(),
            queued_requests: app.admission.size().requests,
            queues: app
                .admission
                .statuses()
                .into_iter()
                .map(Into::into)
                .collect(),
            connections: app.metrics.connections().open.get(),
        },
        point: inputs.point,
        faults: faults(admin),
        workers: workers(admin, &inputs.views),
        decisions: app.journal.newest(DECISIONS, names),
        routers: status.map(|status| LiveReplication::of(status, admin.router)),
        indexers: inputs.views.indexers,
    }
}

fn faults(admin: &Admin) -> Vec<String> {
    let faults = setup_faults::faults(admin);
    let waiting = setup_faults::waiting(admin).into_iter();
    let waiting = waiting.map(|one| {
        let (worker, url) = (one.worker, one.url);
        format!(
            "worker {worker} at {url} waits for its engine: {}",
            one.reason
        )
    });
    let all = faults.iter().map(ToString::to_string).chain(waiting);
    let mut shown: Vec<String> = all.collect();
    let more = shown.len().saturating_sub(FAULTS_MAX);
    shown.truncate(FAULTS_MAX);
    if more > 0 {
        shown.push(format!("and {more} more: /workers has all"));
    }
    shown
}

fn workers(admin: &Admin, views: &IndexerViews) -> Vec<LiveWorker> {
    let fleet = admin.app.fleet.snapshot();
    let ranks = |worker: &crate::fleet::FleetWorker| {
        let id = worker.entry.worker.clone();
        (0..worker.entry.ranks).map(move |rank| Source {
            worker: id.clone(),
            dp_rank: DpRank(rank),
        })
    };
    let sources: Vec<Source> = fleet.iter().flat_map(ranks).collect();
    let demoted = admin.app.core.core().demoted();
    let demoted: BTreeSet<Source> = demoted.into_iter().map(|one| one.source).collect();
    let figures = figures(admin, &sources);
    let mut rows = sources.iter().zip(figures).map(|(source, figures)| {
        RankParts {
            source,
            figures,
            view: views.sources.get(source),
            is_demoted: demoted.contains(source),
        }
        .into()
    });
    let workers = fleet.into_iter().map(|worker| {
        let ranks = usize::try_from(worker.entry.ranks).unwrap_or(usize::MAX);
        let ranks = rows.by_ref().take(ranks).collect();
        let drain = admin.app.fleet.drain(&worker.entry.worker);
        LiveWorker::new(worker, drain, ranks)
    });
    workers.collect()
}

fn figures(admin: &Admin, sources: &[Source]) -> Vec<SourceFigures> {
    let now = Instant::now().into_std();
    let some = sources.chunks(SOURCES_A_LOCK).flat_map(|sources| {
        let core = admin.app.core.core();
        let figures = sources
            .iter()
            .map(|source| core.source_figures(source, now));
        figures.collect::<Vec<_>>()
    });
    some.collect()
}
