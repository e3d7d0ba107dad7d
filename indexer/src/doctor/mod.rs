//! `warmroute-indexer doctor`: diagnoses a whole plane.
//!
//! [`PlaneState`] is everything that was read, as plain values; the pure [`diagnose`] makes a
//! [`Report`] of it. [`collect`] reads streams, registry, snapshots, the last record of each
//! source, the views of all indexers, and some seconds of all shims' heartbeats. It writes nothing;
//! its consumers end with it. A read that fails is a finding, and the rest is read.
//!
//! A report is of one moment. Transient conditions of a healthy fleet (a source that catches up)
//! are findings only if they last, and digests are compared at equal numbers only.

pub mod collect;
mod finding;
mod indexers;
mod leases;
mod page;
mod probe;
mod refused;
mod registry;
mod routers;
mod shims;
mod snapshots;
mod sources;
mod streams;

use std::collections::BTreeMap;
use std::time::Duration;

use warmroute_plane::{LogStatus, NamespaceSetup, PlaneLog};
use warmroute_proto::view::{ReplicaFaults, ViewPage};
use warmroute_proto::{Generation, Heartbeat, LogPosition, RecordNumber, Source};

pub use finding::{Code, Finding, Severity};
pub use page::Report;
pub use probe::{EngineProbe, ProbeOutcome};
pub use refused::{MonitorAnswers, RefusedClient, refused_clients};
pub use registry::Registry;

use crate::same_log::LogMatch;
pub(crate) use finding::Findings;

/// Normal duration of a state without credit: an image, a restart, a reconnect.
const SETTLING: Duration = Duration::from_secs(10);

/// Everything that was read of a plane.
#[derive(Clone, Debug, Default)]
pub struct PlaneState {
    pub namespace: String,
    pub setup: NamespaceSetup,
    /// `None` if there is no log.
    pub log: Option<LogStatus>,
    /// Status of the log after the views were read: it grows in between.
    pub log_after: Option<LogStatus>,
    /// Registry at the start of reading; `registry` is of the end.
    pub before: Registry,
    pub registry: Registry,
    /// False if the registry was unreadable, so that the fields below are empty.
    pub registry_read: bool,
    /// What could not be read, and why.
    pub unread: Vec<String>,
    /// The newest record of each source of the registry.
    pub last_records: BTreeMap<Source, LastRecord>,
    /// View of each replica, or why there is none.
    pub views: BTreeMap<String, Result<ViewPage, String>>,
    /// Faults of each replica whose version reports them.
    pub faults: BTreeMap<String, ReplicaFaults>,
    pub heartbeats: BTreeMap<Source, ShimHeartbeats>,
    /// Number of heartbeats whose payload names another source than their subject, by subject.
    pub foreign: BTreeMap<String, u64>,
    /// Time for which heartbeats were collected, between the two readings of the registry.
    pub listened: Duration,
    /// Snapshots that the pointer names, the newest first.
    pub snapshots: Vec<SnapshotSeen>,
    /// The last operation that the server refused.
    pub complaint: Option<String>,
    /// Probes of engines, if any were asked for.
    pub probes: Option<Vec<EngineProbe>>,
    /// What the servers' monitoring ports answered, if they were asked.
    pub monitors: Option<MonitorAnswers>,
    /// Local clock.
    pub unix_ns: u64,
    pub expected: Expected,
}

/// How many processes the operator expects, where given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    pub indexers: Option<usize>,
    pub routers: Option<usize>,
    pub workers: Option<usize>,
}

/// The newest record on a source's subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastRecord {
    pub position: LogPosition,
    pub generation: Generation,
    pub number: RecordNumber,
}

/// Heartbeats of a source's shim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShimHeartbeats {
    pub last: Heartbeat,
    pub count: u64,
    /// A lower generation came after a higher one: a fenced-off shim still sends.
    pub went_back: bool,
}

/// A stored snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotSeen {
    pub name: String,
    pub position: LogPosition,
    pub bytes: u64,
    /// Why it cannot be loaded.
    pub unreadable: Option<String>,
    /// Comparison of its record with the log; `None` if not compared.
    pub fit: Option<LogMatch>,
    /// Store time of the first record after it; `None` without one.
    pub outdated_unix_ns: Option<u64>,
}

/// Diagnoses a plane: findings, worst first, and status lines.
#[must_use]
pub fn diagnose(state: &PlaneState) -> Report {
    let mut findings = Findings::default();
    let mut rest = Vec::new();
    streams::judge(state, &mut findings, &mut rest);
    refused::judge(state, &mut findings, &mut rest);
    if state.setup.log == PlaneLog::None {
        rest.push(("log", "each indexer's own, no snapshots".to_owned()));
    }
    for unread in &state.unread {
        findings.add(Code::PlaneUnread, unread);
    }
    if state.registry_read {
        leases::judge(state, &mut findings);
        registry::judge(state, &mut findings, &mut rest);
        routers::judge(state, &mut findings);
        indexers::judge(state, &mut findings, &mut rest);
        shims::judge(state, &mut findings, &mut rest);
        sources::judge(state, &mut findings, &mut rest);
        match state.setup.log {
            PlaneLog::JetStream => snapshots::judge(state, &mut findings, &mut rest),
            PlaneLog::None => {}
        }
        probe::judge(state, &mut findings, &mut rest);
    }
    Report {
        namespace: state.namespace.clone(),
        server: state.setup.server_version.clone(),
        findings: findings.worst_first(),
        rest,
    }
}

/// The report where no server could be reached.
#[must_use]
pub fn unreachable(namespace: &str, why: &str) -> Report {
    let mut findings = Findings::default();
    findings.add(Code::NatsUnreachable, why);
    Report {
        namespace: namespace.to_owned(),
        server: "(not reached)".to_owned(),
        findings: findings.worst_first(),
        rest: Vec::new(),
    }
}

/// A status line: name and text.
type StatusLine = (&'static str, String);

impl PlaneState {
    /// The views that were read.
    fn answers(&self) -> impl Iterator<Item = (&str, &ViewPage)> {
        let views = self.views.iter();
        views.filter_map(|(id, view)| Some((id.as_str(), view.as_ref().ok()?)))
    }
}

#[cfg(test)]
mod tests;
