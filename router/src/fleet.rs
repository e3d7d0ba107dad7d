//! Who the workers are: what the registry last said of each, what the router's own checks say of its
//! health, and whether it passed the checks of its registration.
//!
//! Knowledge outlives its source: a lapsed lease or a plane that is away removes nobody who answers.
//! A worker goes when the registry no longer has it and it has not answered for [`FORGET_AFTER`], or another
//! one is registered at its address. Once the registry does not vouch for it, whoever answers at its address
//! has to be what it was: addresses are given again.
//!
//! Every change is told to the decision core; models and their trust are published as an immutable
//! [`View`], which a request reads without waiting for anybody.

mod checks;
mod view;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::Notify;
use tokio::time::Instant;
use warmroute_proto::registry::{DrainState, WorkerEntry};
use warmroute_proto::{BlockSize, WorkerId};

use crate::health::{Health, Sight, Turn};
use crate::route;
use crate::shared_core::SharedCore;

pub(crate) use checks::{Check, Checks};
pub(crate) use view::{ModelView, View};

/// Longer than any restart of a shim or an engine that loads a large model from a slow disk.
const FORGET_AFTER: Duration = Duration::from_secs(600);

/// One worker as the router knows it.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub entry: WorkerEntry,
    /// The registry has it now.
    pub registered: bool,
    pub health: Health,
    pub checks: Checks,
    /// Grows when the worker is new, came back or changed: what was learned before is void.
    pub life: u64,
    last_seen: Instant,
}

/// See the module's documentation.
pub(crate) struct Fleet {
    desk: Arc<SharedCore>,
    /// What the operator says all blocks are.
    block_size: Option<BlockSize>,
    members: Mutex<BTreeMap<WorkerId, Member>>,
    /// Workers that an operator took out, whether they are here or not. Locked under the members.
    drained: Mutex<BTreeSet<WorkerId>>,
    view: RwLock<Arc<View>>,
    /// A worker came, came back or changed: its registration is to be checked.
    to_register: Notify,
    /// A worker came or changed: its health is to be looked at.
    to_look_at: Notify,
}

/// One worker to look at.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Address {
    pub worker: WorkerId,
    pub url: String,
    /// The models that whoever answers must list; none where the registry vouches for it.
    pub must_list: Vec<String>,
}

impl Fleet {
    pub(crate) fn new(desk: Arc<SharedCore>, block_size: Option<BlockSize>) -> Arc<Self> {
        Arc::new(Self {
            desk,
            block_size,
            members: Mutex::default(),
            drained: Mutex::default(),
            view: RwLock::default(),
            to_register: Notify::new(),
            to_look_at: Notify::new(),
        })
    }

    /// The registry has this worker, as new or as changed.
    pub(crate) fn put(&self, entry: WorkerEntry, now: Instant) {
        let mut members = self.members();
        let worker = entry.worker.clone();
        match members.get_mut(&worker) {
            // A lease renewed: nothing new.
            Some(member) if member.entry == entry && member.registered => return,
            Some(member) if member.entry == entry => member.registered = true,
            Some(member) => {
                tracing::info!(%worker, url = entry.url, "worker changed");
                if member.entry.url != entry.url {
                    member.health = Health::default();
                }
                member.entry = entry;
                member.registered = true;
                member.start_anew();
            }
            None => {
                tracing::info!(
                    %worker, url = entry.url, models = ?entry.models, ranks = entry.ranks,
                    "worker registered"
                );
                members.insert(worker, Member::new(entry, now));
            }
        }
        displace(&mut members);
        self.publish(&members);
        self.to_register.notify_one();
        self.to_look_at.notify_one();
    }

    /// The registry no longer has this worker.
    pub(crate) fn gone(&self, worker: &WorkerId) {
        let mut members = self.members();
        let Some(member) = members.get_mut(worker) else {
            return;
        };
        member.registered = false;
        tracing::info!(%worker, "worker left the registry, kept while it answers");
        if displace(&mut members) {
            self.publish(&members);
        }
    }

    /// Somebody saw this of a worker, at this address: what is seen where it was before tells nothing of
    /// where it is.
    pub(crate) fn see(&self, worker: &WorkerId, url: &str, sight: Sight, now: Instant) {
        let mut members = self.members();
        let known = members.get_mut(worker);
        let Some(member) = known.filter(|member| member.entry.url == url) else {
            return;
        };
        if sight == Sight::CheckPassed {
            member.last_seen = now;
        }
        let turn = member.health.see(sight);
        match turn {
            Turn::Up => {
                member.start_anew();
                tracing::info!(%worker, "worker is healthy");
            }
            Turn::Down => tracing::warn!(%worker, ?sight, "worker is unhealthy, left out"),
            Turn::None if member.is_forgotten(now) => {
                tracing::info!(%worker, "worker forgotten");
                members.remove(worker);
            }
            Turn::None => return,
        }
        self.publish(&members);
        self.to_register.notify_one();
    }

    /// An operator's word, which outlives the worker's registration.
    pub(crate) fn set_drain(&self, worker: &WorkerId, drain: DrainState) {
        let members = self.members();
        let is_news = {
            let mut drained = self.drained();
            match drain {
                DrainState::Draining => drained.insert(worker.clone()),
                DrainState::Serving => drained.remove(worker),
            }
        };
        if is_news {
            self.publish(&members);
        }
    }

    /// The result of checking a worker's registration, if it is still that life's.
    pub(crate) fn checked(&self, worker: &WorkerId, life: u64, checks: Checks) {
        let mut members = self.members();
        if let Some(member) = members.get_mut(worker).filter(|member| member.life == life) {
            member.checks = checks;
            self.publish(&members);
        }
    }

    /// Waits until a registration is to be checked. For one waiter.
    pub(crate) async fn changed_for_register(&self) {
        self.to_register.notified().await;
    }

    /// Waits until a worker's health is to be looked at. For one waiter.
    pub(crate) async fn changed_for_health(&self) {
        self.to_look_at.notified().await;
    }

    /// Usable workers whose registration is not checked yet, though it says what they serve.
    pub(crate) fn unchecked(&self) -> Vec<Member> {
        let members = self.members();
        let open = |member: &&Member| member.serves() && !member.checks.complete();
        members.values().filter(open).cloned().collect()
    }

    /// Some worker is usable, and none that is waits to be checked.
    pub(crate) fn is_settled(&self) -> bool {
        self.view().usable && self.unchecked().is_empty()
    }

    pub(crate) fn addresses(&self) -> Vec<Address> {
        let members = self.members();
        let address = |member: &Member| Address {
            worker: member.entry.worker.clone(),
            url: member.entry.url.clone(),
            must_list: match member.registered {
                true => Vec::new(),
                false => member.entry.models.clone(),
            },
        };
        members.values().map(address).collect()
    }

    pub(crate) fn contains(&self, worker: &WorkerId) -> bool {
        self.members().contains_key(worker)
    }

    pub(crate) fn ranks(&self, worker: &WorkerId) -> u32 {
        let members = self.members();
        members.get(worker).map_or(0, |member| member.entry.ranks)
    }

    pub(crate) fn snapshot(&self) -> Vec<Member> {
        self.members().values().cloned().collect()
    }

    pub(crate) fn view(&self) -> Arc<View> {
        let view = self.view.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&view)
    }

    fn members(&self) -> MutexGuard<'_, BTreeMap<WorkerId, Member>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn drained(&self) -> MutexGuard<'_, BTreeSet<WorkerId>> {
        self.drained.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the core and the requests. Under the members' lock, so that the last word is the last.
    fn publish(&self, members: &BTreeMap<WorkerId, Member>) {
        let entries: Vec<WorkerEntry> = members
            .values()
            .map(|member| member.entry.clone())
            .collect();
        let drained = self.drained();
        let mut core = self.desk.core();
        core.set_workers(&entries);
        for member in members.values() {
            let drain = if drained.contains(&member.entry.worker) {
                DrainState::Draining
            } else {
                DrainState::Serving
            };
            core.set_drain(&member.entry.worker, drain);
            let health = match member.health {
                Health::Healthy { .. } => route::Health::Healthy,
                Health::Unchecked => route::Health::Unknown,
                Health::Unhealthy => route::Health::Unhealthy,
            };
            core.set_health(&member.entry.worker, health);
        }
        drop(core);
        let view = Arc::new(View::of(members.values(), self.block_size));
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = view;
    }
}

/// One engine stands at an address: where a registered worker has it, one that is registered no more is gone.
/// Says whether any was.
fn displace(members: &mut BTreeMap<WorkerId, Member>) -> bool {
    let registered = members.values().filter(|member| member.registered);
    let taken: BTreeSet<String> = registered.map(|member| member.entry.url.clone()).collect();
    let before = members.len();
    members.retain(|worker, member| {
        let stays = member.registered || !taken.contains(&member.entry.url);
        if !stays {
            tracing::info!(%worker, "worker forgotten: another one has its address");
        }
        stays
    });
    members.len() < before
}

impl Member {
    fn new(entry: WorkerEntry, now: Instant) -> Self {
        Self {
            entry,
            registered: true,
            health: Health::default(),
            checks: Checks::default(),
            life: 0,
            last_seen: now,
        }
    }

    /// A worker may be registered before its engine told its models.
    const fn serves(&self) -> bool {
        self.health.usable() && !self.entry.models.is_empty()
    }

    fn start_anew(&mut self) {
        self.life += 1;
        self.checks = Checks::default();
    }

    fn is_forgotten(&self, now: Instant) -> bool {
        !self.registered
            && !self.health.usable()
            && now.duration_since(self.last_seen) > FORGET_AFTER
    }
}
