//! The workers whose registration counts in an embedded router. Pure.
//!
//! A worker that was removed may still answer, and an event of its registration may still be on its
//! way: neither brings it back.

use std::collections::BTreeMap;

use warmroute_proto::WorkerId;

use super::state::FleetChange;

/// With NATS every registered worker is a member.
#[derive(Debug, Default)]
pub(super) struct FleetMembers(Option<BTreeMap<WorkerId, MemberPhase>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemberPhase {
    Serving,
    /// Gets no new requests.
    Leaving,
}

impl FleetMembers {
    pub(super) fn contains(&self, worker: &WorkerId) -> bool {
        self.0
            .as_ref()
            .is_none_or(|members| members.contains_key(worker))
    }

    pub(super) fn leaves(&self, worker: &WorkerId) -> bool {
        let phase = self.0.as_ref().and_then(|members| members.get(worker));
        phase == Some(&MemberPhase::Leaving)
    }

    pub(super) fn admit(&mut self, worker: &WorkerId) -> FleetChange {
        self.set(worker, MemberPhase::Serving)
    }

    pub(super) fn retire(&mut self, worker: &WorkerId) -> FleetChange {
        self.set(worker, MemberPhase::Leaving)
    }

    pub(super) fn remove(&mut self, worker: &WorkerId) {
        if let Some(members) = &mut self.0 {
            members.remove(worker);
        }
    }

    fn set(&mut self, worker: &WorkerId, phase: MemberPhase) -> FleetChange {
        let members = self.0.get_or_insert_default();
        members.insert(worker.clone(), phase);
        FleetChange::Published
    }
}
