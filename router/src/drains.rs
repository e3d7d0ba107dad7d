//! Workers that an operator took out: they get no new requests, from any router, until an operator says
//! otherwise.
//!
//! The word stands in the registry, so that it does not matter which of the routers was told, and that a
//! restart forgets nothing. It has no lease and a key of its own: a shim that deregisters and comes back, or
//! an engine that moves, finds it where it was. Every word has a turn, one above the word before; what the
//! registry lost, or what came back with an older copy of it, any router that remembers puts right: the
//! higher turn wins.
//!
//! [`Words`] is pure, [`Drains`] its shell. Not here: what a drain means for decisions
//! ([`crate::route::candidates`]), and routers that take themselves out ([`crate::ready`]).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use prometheus::IntCounter;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use warmroute_plane::{Plane, PlaneError, PlaneStream, PutIf, RegistryEvent, Revision};
use warmroute_proto::registry::{DrainEntry, DrainState};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{WorkerId, codec};

use crate::clock::unix_time;
use crate::fleet::Fleet;
use crate::ready::Ready;

/// Until the plane is asked again.
const RETRY: Duration = Duration::from_millis(500);

/// Somebody else may say something about the same worker meanwhile.
const TRIES: usize = 4;

/// See the module's documentation.
pub(crate) struct Drains {
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    fleet: Arc<Fleet>,
    words: Mutex<Words>,
    is_read: AtomicBool,
}

impl Drains {
    pub(crate) fn new(plane: Arc<dyn Plane>, subjects: Subjects, fleet: Arc<Fleet>) -> Arc<Self> {
        Arc::new(Self {
            plane,
            subjects,
            fleet,
            words: Mutex::default(),
            is_read: AtomicBool::default(),
        })
    }

    /// The last word on a worker, if there ever was one.
    pub(crate) fn of(&self, worker: &WorkerId) -> Option<DrainEntry> {
        let words = self.words();
        words.0.get(worker).map(|word| word.entry.clone())
    }

    /// What was said before this router began is known.
    pub(crate) fn is_read(&self) -> bool {
        self.is_read.load(Ordering::Relaxed)
    }

    /// An operator's word, valid here and written for all others once this returns. Said twice, it is the
    /// same. After an error it may be written or not: to be said again.
    pub(crate) async fn say(&self, worker: &WorkerId, drain: DrainState) -> Result<(), PlaneError> {
        if !self.is_read() {
            self.look(worker).await?;
        }
        for _ in 0..TRIES {
            let now = unix_time().as_secs();
            let Some((entry, condition)) = self.words().next(worker, drain, now) else {
                return Ok(());
            };
            match self.write(entry, condition).await {
                Err(PlaneError::Conflict) => self.look(worker).await?,
                written => return written,
            }
        }
        Err(unavailable("others say something of the same worker"))
    }

    /// Follows what is said anywhere, until stopped. While the plane is away the last words stand.
    pub(crate) async fn follow(
        self: Arc<Self>,
        ready: Arc<Ready>,
        unread: IntCounter,
        stop: CancellationToken,
    ) {
        let follow = async {
            loop {
                match self.plane.watch(self.subjects.drain_keys()).await {
                    Ok(events) => {
                        self.listen(events, &ready, &unread).await;
                        tracing::warn!("the watch of drained workers ended, begun again");
                    }
                    Err(error) => tracing::warn!(%error, "drained workers cannot be watched"),
                }
                sleep(RETRY).await;
            }
        };
        // A write that is dropped was made or not: another router, or the next start, finds out.
        tokio::select! {
            () = stop.cancelled() => {}
            () = follow => {}
        }
    }

    async fn listen(
        &self,
        mut events: PlaneStream<RegistryEvent>,
        ready: &Ready,
        unread: &IntCounter,
    ) {
        let mut listed = Some(BTreeSet::new());
        loop {
            let lacks = self.words().lacking().next().is_some();
            let event = tokio::select! {
                event = events.next() => event,
                () = sleep(RETRY), if lacks => {
                    self.put_right().await;
                    continue;
                }
            };
            match event {
                None => return,
                Some(RegistryEvent::Put { key, entry }) => {
                    let Some(worker) = self.subjects.key_drained(&key) else {
                        continue;
                    };
                    match codec::decode::<DrainEntry>(&entry.value) {
                        Ok(word) if word.worker == worker => self.told(word, entry.revision),
                        Ok(_) | Err(_) => {
                            tracing::error!(key, "a word on a worker is unreadable: not followed");
                            unread.inc();
                        }
                    }
                    if let Some(listed) = &mut listed {
                        listed.insert(worker);
                    }
                }
                Some(RegistryEvent::Gone { key }) => {
                    if let Some(worker) = self.subjects.key_drained(&key) {
                        self.words().gone(&worker);
                    }
                }
                Some(RegistryEvent::Current) => {
                    if let Some(listed) = listed.take() {
                        self.words().gone_but(&listed);
                    }
                    self.is_read.store(true, Ordering::Relaxed);
                    ready.drains_read();
                }
            }
        }
    }

    /// Writes what the registry should have and has not.
    async fn put_right(&self) {
        let lacking: Vec<_> = self.words().lacking().collect();
        for (entry, condition) in lacking {
            let worker = entry.worker.clone();
            match self.write(entry, condition).await {
                Ok(()) => tracing::warn!(%worker, "the registry had lost the word on this worker"),
                // Somebody was first; the watch tells who.
                Err(PlaneError::Conflict) => self.words().leave(&worker),
                Err(error) => {
                    tracing::debug!(%error, "the registry lacks a word, and does not take it");
                    return;
                }
            }
        }
    }

    async fn write(&self, entry: DrainEntry, condition: PutIf) -> Result<(), PlaneError> {
        let key = self.subjects.drain_key(&entry.worker);
        let value = codec::encode(&entry).map_err(unavailable)?;
        let revision = self.plane.put(key, value.into(), condition, None).await?;
        self.told(entry, revision);
        Ok(())
    }

    /// What the registry has of a worker, instead of what was believed.
    async fn look(&self, worker: &WorkerId) -> Result<(), PlaneError> {
        match self.plane.get(self.subjects.drain_key(worker)).await? {
            Some(found) => {
                let entry = codec::decode(&found.value).map_err(unavailable)?;
                self.told(entry, found.revision);
            }
            None => self.words().gone(worker),
        }
        Ok(())
    }

    fn told(&self, entry: DrainEntry, revision: Revision) {
        let worker = entry.worker.clone();
        let mut words = self.words();
        let before = words.drain(&worker);
        words.told(entry, revision);
        let drain = words.drain(&worker);
        if drain != before {
            tracing::info!(%worker, ?drain, "an operator's word on a worker");
        }
        // Under the words' lock, so that the last word is the last.
        self.fleet.set_drain(&worker, drain);
    }

    fn words(&self) -> MutexGuard<'_, Words> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unavailable(why: impl ToString) -> PlaneError {
    PlaneError::Unavailable(why.to_string())
}

/// The last word on each worker that there ever was one on, some hundred bytes each.
#[derive(Debug, Default)]
struct Words(BTreeMap<WorkerId, Word>);

#[derive(Debug)]
struct Word {
    entry: DrainEntry,
    /// What the next write replaces.
    over: PutIf,
    /// The registry has something older, or nothing.
    is_lacking: bool,
}

impl Words {
    fn drain(&self, worker: &WorkerId) -> DrainState {
        let word = self.0.get(worker);
        word.map_or(DrainState::Serving, |word| word.entry.drain)
    }

    /// What has to be written so that this is the last word; none: it is.
    fn next(
        &self,
        worker: &WorkerId,
        drain: DrainState,
        set_unix_s: u64,
    ) -> Option<(DrainEntry, PutIf)> {
        let known = self.0.get(worker);
        let stands = known.map_or(drain == DrainState::Serving, |word| {
            word.entry.drain == drain && !word.is_lacking
        });
        if stands {
            return None;
        }
        let entry = DrainEntry {
            worker: worker.clone(),
            drain,
            turn: known.map_or(0, |word| word.entry.turn.saturating_add(1)),
            set_unix_s,
        };
        Some((entry, known.map_or(PutIf::Absent, |word| word.over)))
    }

    /// The registry has this.
    fn told(&mut self, entry: DrainEntry, revision: Revision) {
        let over = PutIf::Revision(revision);
        match self.0.get_mut(&entry.worker) {
            // Late, or an older copy: if it is late, writing over it fails.
            Some(known) if entry.turn < known.entry.turn => {
                known.over = over;
                known.is_lacking = true;
            }
            Some(_) | None => {
                let is_lacking = false;
                let word = Word {
                    entry,
                    over,
                    is_lacking,
                };
                self.0.insert(word.entry.worker.clone(), word);
            }
        }
    }

    /// The registry has nothing on this worker. Nobody takes a word back by deleting it.
    fn gone(&mut self, worker: &WorkerId) {
        if let Some(known) = self.0.get_mut(worker) {
            known.over = PutIf::Absent;
            known.is_lacking = true;
        }
    }

    /// The registry has these workers' words, and no others.
    fn gone_but(&mut self, listed: &BTreeSet<WorkerId>) {
        let known = self.0.keys().cloned().collect::<BTreeSet<_>>();
        for worker in known.difference(listed) {
            self.gone(worker);
        }
    }

    fn lacking(&self) -> impl Iterator<Item = (DrainEntry, PutIf)> {
        let lacking = self.0.values().filter(|word| word.is_lacking);
        lacking.map(|word| (word.entry.clone(), word.over))
    }

    /// What the registry has is told by others.
    fn leave(&mut self, worker: &WorkerId) {
        if let Some(known) = self.0.get_mut(worker) {
            known.is_lacking = false;
        }
    }
}
