//! What is wrong with a plane, and what to do: `warmroute-indexer doctor`.
//!
//! [`PlaneState`] is everything that could be read, as plain values; [`diagnose`] makes a [`Report`] of
//! it, and is pure. [`collect`] reads: streams, registry, snapshots, the last record of each source, the
//! views of all indexers, and the heartbeats of all shims for some seconds. It writes nothing; consumers
//! that a look needs are gone with it.
//!
//! It judges one moment. What may be wrong for a moment in a healthy fleet (a source that catches up) is
//! a finding only if it lasts, and what is compared is compared at equal numbers only.

pub mod collect;
mod finding;
mod indexers;
mod page;
mod registry;
mod shims;
mod snapshots;
mod sources;
mod streams;

use std::collections::BTreeMap;
use std::time::Duration;

use warmroute_plane::{LogStatus, NamespaceSetup};
use warmroute_proto::snapshot::SnapshotPointer;
use warmroute_proto::view::ViewPage;
use warmroute_proto::{Generation, Heartbeat, LogPosition, RecordNumber, Source};

pub use finding::{Code, Finding, Severity};
pub use page::Report;
pub use registry::Registry;

use crate::same_log::LogMatch;
pub(crate) use finding::Findings;

/// A state without credit is normal for as long: an image, a restart, a reconnect.
const SETTLING: Duration = Duration::from_secs(10);

/// Everything that a look could read.
#[derive(Clone, Debug, Default)]
pub struct PlaneState {
    pub namespace: String,
    pub setup: NamespaceSetup,
    /// None if there is no log.
    pub log: Option<LogStatus>,
    /// The same after the replicas said where they are: a log at work goes on during a look.
    pub log_after: Option<LogStatus>,
    /// At the beginning and at the end of the look.
    pub before: Registry,
    pub registry: Registry,
    /// None of what follows could be read without it.
    pub registry_read: bool,
    /// The newest record of each source of the registry.
    pub last_records: BTreeMap<Source, LastRecord>,
    /// By replica; why there is none.
    pub views: BTreeMap<String, Result<ViewPage, String>>,
    pub heard: BTreeMap<Source, Heard>,
    /// Heartbeats that do not speak for the source of their subject, by subject.
    pub foreign: BTreeMap<String, u64>,
    /// For how long heartbeats were listened to.
    pub listened: Duration,
    pub pointer: Option<SnapshotPointer>,
    /// Those that the pointer names, the newest first.
    pub snapshots: Vec<SnapshotSeen>,
    /// What the server refused to this look.
    pub complaint: Option<String>,
    /// This machine's clock.
    pub unix_ns: u64,
    /// How many indexers there should be, where somebody said it.
    pub indexers_expected: Option<usize>,
}

/// The newest record on a source's subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastRecord {
    pub position: LogPosition,
    pub generation: Generation,
    pub number: RecordNumber,
}

/// What a source's shim said during the look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heard {
    pub last: Heartbeat,
    pub count: u64,
    /// A lower generation came behind a higher one: somebody who was fenced off still speaks.
    pub went_back: bool,
}

/// A snapshot as it lies in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotSeen {
    pub name: String,
    pub position: LogPosition,
    pub bytes: u64,
    /// Why nobody could load it.
    pub unreadable: Option<String>,
    /// How its record stands to the log; none if it was not compared.
    pub fit: Option<LogMatch>,
    /// When the log took the first record that is not in it; none if there is none.
    pub outdated_unix_ns: Option<u64>,
}

/// What is wrong, worst first, and how the rest is.
#[must_use]
pub fn diagnose(state: &PlaneState) -> Report {
    let mut findings = Findings::default();
    let mut rest = Vec::new();
    streams::judge(state, &mut findings, &mut rest);
    if state.registry_read {
        registry::judge(state, &mut findings, &mut rest);
        indexers::judge(state, &mut findings, &mut rest);
        shims::judge(state, &mut findings, &mut rest);
        sources::judge(state, &mut findings, &mut rest);
        snapshots::judge(state, &mut findings, &mut rest);
    }
    Report {
        namespace: state.namespace.clone(),
        server: state.setup.server_version.clone(),
        findings: findings.worst_first(),
        rest,
    }
}

/// One line of what needs nobody.
type Row = (&'static str, String);

impl PlaneState {
    /// The views that came.
    fn answers(&self) -> impl Iterator<Item = (&str, &ViewPage)> {
        let views = self.views.iter();
        views.filter_map(|(id, view)| Some((id.as_str(), view.as_ref().ok()?)))
    }
}

#[cfg(test)]
mod tests;
