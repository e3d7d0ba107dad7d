//! Judges who renews its lease: of all that stand still together the server is the cause, of one its
//! process.

use std::time::Duration;

use warmroute_plane::{PlaneLog, StreamRole};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{Namespace, RouterId};

use super::page::duration;
use super::shims::LISTENED_MIN;
use super::{Code, Findings, PlaneState};

/// Leases are renewed each 2 s and expire after 6 s: what stands for longer is not expired either.
const EXPIRED: Duration = Duration::from_secs(10);

pub(super) fn judge(state: &PlaneState, findings: &mut Findings) {
    if state.listened < LISTENED_MIN {
        return;
    }
    let subjects = Subjects::new(&Namespace::from(state.namespace.as_str()));
    let (before, now) = (&state.before, &state.registry);
    let shims = now.shims.keys().map(|worker| subjects.shim_key(worker));
    let indexers = now.indexers.keys().map(|id| subjects.indexer_key(id));
    let routers = now.routers.keys().map(|id| subjects.router_key(*id));
    let leases = shims.chain(indexers).chain(routers);
    let standing: Vec<bool> = leases.map(|key| now.stands(before, &key)).collect();
    let all_stand = !standing.is_empty() && standing.iter().all(|stands| *stands);
    let mut streams = state.setup.streams.iter();
    let registry = streams.find(|stream| stream.role == StreamRole::Registry);
    let written_ago = registry.and_then(|stream| stream.written_ago);
    let is_overdue = written_ago.is_some_and(|ago| ago >= EXPIRED);
    if state.setup.log == PlaneLog::JetStream && all_stand && (standing.len() > 1 || is_overdue) {
        let ago = written_ago.map_or_else(|| "an unknown time".to_owned(), duration);
        let about = format!("{} leases, the last write {ago} ago", standing.len());
        findings.add(Code::StoreRefuses, about);
        return;
    }
    let is_silent = |id: &&RouterId| now.stands(before, &subjects.router_key(**id));
    for router in now.routers.keys().filter(is_silent) {
        findings.add(Code::RouterSilent, format!("router {router}"));
    }
}
