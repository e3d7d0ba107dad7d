//! A router's lease as the world has it: `replication::lease` without tasks.

use std::time::Duration;

use bytes::Bytes;
use warmroute_plane::{PutIf, Revision};
use warmroute_proto::load::RouterEntry;
use warmroute_proto::{Generation, RouterId, codec};

use super::World;
use super::host::{Then, Timer};
use super::plane::{Op, Reply};
use super::router::RouterRun;

const TTL: Duration = Duration::from_secs(6);
const RENEW: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(500);
const DEADLINE: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug)]
pub(super) enum LeaseThen {
    Acquired,
    AcquireFound,
    /// `None` on the second try.
    Renewed(Option<Revision>),
    RenewFound(Revision),
}

/// A router's lease, renewed by timers of the world.
pub(super) struct Keeper {
    key: String,
    value: Bytes,
    lease: Option<Revision>,
    is_writing: bool,
    /// Only the timer set last counts.
    timers: u64,
    is_wanted: bool,
}

impl Keeper {
    pub(super) fn new(key: String, router: RouterId) -> Self {
        let entry = RouterEntry {
            router,
            version: "0".to_owned(),
        };
        Self {
            key,
            value: codec::encode(&entry).unwrap().into(),
            lease: None,
            is_writing: false,
            timers: 0,
            is_wanted: false,
        }
    }
}

impl World {
    pub(super) fn want_lease(&mut self, host: usize, keeper: &mut Keeper) {
        keeper.is_wanted = true;
        self.write_lease_after(host, keeper, Duration::ZERO);
    }

    fn write_lease_after(&mut self, host: usize, keeper: &mut Keeper, after: Duration) {
        keeper.timers += 1;
        self.timer(host, after, Timer::Lease(keeper.timers));
    }

    pub(super) fn lease_due(&mut self, host: usize, keeper: &mut Keeper, timer: u64) {
        if timer == keeper.timers && !std::mem::replace(&mut keeper.is_writing, true) {
            match keeper.lease.take() {
                Some(lease) => {
                    let then = LeaseThen::Renewed(Some(lease));
                    self.put_router(host, keeper, PutIf::Revision(lease), then);
                }
                None => self.put_router(host, keeper, PutIf::Absent, LeaseThen::Acquired),
            }
        }
    }

    fn put_router(&mut self, host: usize, keeper: &Keeper, condition: PutIf, then: LeaseThen) {
        let op = Op::Put {
            key: keeper.key.clone(),
            value: keeper.value.clone(),
            condition,
            lease: Some(TTL),
        };
        self.call(host, op, Then::Lease(then), DEADLINE);
    }

    pub(super) fn lease_then(
        &mut self,
        host: usize,
        run: &mut RouterRun,
        then: LeaseThen,
        reply: Reply,
    ) {
        let keeper = &mut run.lease;
        match (then, reply) {
            (LeaseThen::Acquired | LeaseThen::Renewed(_), Reply::Revision(revision)) => {
                keeper.lease = Some(revision);
                keeper.is_writing = false;
                self.write_lease_after(host, keeper, RENEW);
                if std::mem::take(&mut keeper.is_wanted) {
                    self.note(|| format!("router at {host}: incarnation {revision:?}"));
                    let now = self.local(host);
                    run.replica
                        .taken(Generation(revision.0), &mut run.core, now);
                }
            }
            (LeaseThen::Acquired, Reply::Conflict) => {
                let op = Op::Get(keeper.key.clone());
                self.call(host, op, Then::Lease(LeaseThen::AcquireFound), DEADLINE);
            }
            (LeaseThen::Renewed(Some(lease)), Reply::Conflict) => {
                let op = Op::Get(keeper.key.clone());
                let then = Then::Lease(LeaseThen::RenewFound(lease));
                self.call(host, op, then, DEADLINE);
            }
            (LeaseThen::AcquireFound | LeaseThen::RenewFound(_), Reply::Entry(Some(entry)))
                if entry.value == keeper.value =>
            {
                let condition = PutIf::Revision(entry.revision);
                self.put_router(host, keeper, condition, LeaseThen::Renewed(None));
            }
            (LeaseThen::Renewed(None), Reply::Conflict)
            | (LeaseThen::RenewFound(_), Reply::Entry(_)) => {
                keeper.is_writing = false;
                self.write_lease_after(host, keeper, Duration::ZERO);
                run.replica.lease_lost();
            }
            (then, _) => {
                // Unknown: an earlier lease may still be ours.
                keeper.lease = match then {
                    LeaseThen::Renewed(lease) => lease,
                    LeaseThen::RenewFound(lease) => Some(lease),
                    LeaseThen::Acquired | LeaseThen::AcquireFound => None,
                };
                keeper.is_writing = false;
                self.write_lease_after(host, keeper, RETRY);
            }
        }
    }
}
