//! Judges the shims: heartbeats, leases, and duplicates.

use std::time::Duration;

use warmroute_proto::subject::Subjects;
use warmroute_proto::{EngineHealth, Namespace, WorkerId};

use super::page::duration;
use super::{Code, Findings, PlaneState, StatusLine, registry::sources};

/// Minimum listening time to call a shim silent: heartbeats come each second.
pub(super) const LISTENED_MIN: Duration = Duration::from_millis(2500);

pub(super) fn judge(state: &PlaneState, findings: &mut Findings, rest: &mut Vec<StatusLine>) {
    let registry = &state.registry;
    let subjects = Subjects::new(&Namespace::from(state.namespace.as_str()));
    for (worker, entry) in &registry.workers {
        // A worker that registered in between may have sent no heartbeat.
        let was_there = state.before.workers.contains_key(worker);
        for source in sources(entry).filter(|_| was_there && state.listened >= LISTENED_MIN) {
            if !state.heartbeats.contains_key(&source) {
                let key = subjects.shim_key(worker);
                let is_alive = registry.shims.contains_key(worker)
                    && state.before.shims.contains_key(worker)
                    && !registry.stands(&state.before, &key);
                let lives = match is_alive {
                    true => ", but it renews its lease: it may lack a permission for heartbeats",
                    false => "",
                };
                let listened = duration(state.listened);
                let about = format!("{source}: nothing within {listened}{lives}");
                findings.add(Code::ShimSilent, about);
            }
        }
    }
    for (source, heard) in &state.heartbeats {
        let worker = &source.worker;
        let held = [&state.before, registry].map(|then| then.shims.contains_key(worker));
        if held == [false, false] {
            findings.add(Code::ShimWithoutLease, worker.to_string());
        }
        if heard.went_back {
            let about = format!("{worker}: an older generation of {source} sent after a newer one");
            findings.add(Code::TwoShims, about);
        }
        if heard.last.health == EngineHealth::Unhealthy {
            findings.add(Code::EngineUnhealthy, worker.to_string());
        }
    }
    for (subject, count) in &state.foreign {
        findings.add(Code::ForeignHeartbeats, format!("{subject}: {count}"));
    }
    for worker in changed_hands(state) {
        let about = format!("{worker}: its lock changed hands while doctor ran");
        findings.add(Code::TwoShims, about);
    }
    let heartbeats: u64 = state.heartbeats.values().map(|heard| heard.count).sum();
    let text = format!(
        "{heartbeats} heartbeats of {} sources within {}",
        state.heartbeats.len(),
        duration(state.listened)
    );
    rest.push(("shims", text));
}

/// Workers whose lock moved to another process without a gap.
fn changed_hands(state: &PlaneState) -> impl Iterator<Item = &WorkerId> {
    let now = &state.registry.shims;
    let changed = |(worker, before): &(&WorkerId, &warmroute_proto::registry::ShimEntry)| {
        now.get(*worker)
            .is_some_and(|now| now.instance != before.instance)
    };
    let shims = state.before.shims.iter();
    shims.filter(changed).map(|(worker, _)| worker)
}
