//! The task by which every process has the whole registry and one clock.
//!
//! Every process receives every write. A process that joins, or was cut off, first reads the
//! registry of another one by pages. Beacons compare digests: a process that differs twice in a row
//! from another one reads its pages.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use warmroute_proto::peers::PeerBeacon;

use super::registry::Merged;
use super::*;

/// How often leases, appends and beacons are looked at.
const TICK: Duration = Duration::from_millis(100);

/// Between two beacons of a process, and more among many: at most a hundred arrive in a second.
const BEACON: Duration = Duration::from_secs(1);
const BEACON_PER_PEER: Duration = Duration::from_millis(10);

/// A process without a beacon for three of its periods has ended.
const BEACONS_LOST: u32 = 3;

/// Most processes that are remembered.
const PEERS_MAX: usize = 1 << 14;

/// Beacons in a row that differ, after which the sender's pages are read.
const DIFFERENCES_MAX: u32 = 2;

/// After which this process answers others that join: then it has what others lack.
const SERVES_AFTER: Duration = Duration::from_secs(3);

const PAGE_BYTES_MAX: usize = 256 << 10;
const PAGE_DEADLINE: Duration = Duration::from_secs(1);
const PAGE_RETRY: Duration = Duration::from_millis(100);
/// Times that no process serves pages, after which there is no other one.
const UNSERVED_MAX: u32 = 3;
/// Silence of others, while a question for their pages has no answer, after which there are none
/// that run.
const OTHERS_SILENT: Duration = Duration::from_secs(3);
/// A read that brought nothing is not tried again earlier: two registries at their bounds differ.
const IDLE_READ_PAUSE: Duration = Duration::from_secs(30);

const RETRY: Duration = Duration::from_millis(500);

/// Reads of pages in progress. Ends by itself.
type Sync = PlaneFuture<'static, ()>;

/// What the task receives.
struct Inbox {
    writes: PlaneStream<Broadcast>,
    beacons: PlaneStream<Broadcast>,
    requests: PlaneStream<ServiceRequest>,
    /// Requests of processes that join, once this one serves them.
    joiners: Option<PlaneStream<ServiceRequest>>,
}

#[derive(Clone, Copy)]
struct Peer {
    seen: Instant,
    differences: u32,
}

struct Gossip<B> {
    shared: Arc<CoreShared<B>>,
    peers: BTreeMap<PeerId, Peer>,
    beacon_due: Instant,
    /// When this process first had the registry.
    joined: Option<Instant>,
    sync: Option<Sync>,
    /// Writes that were taken in when the read of pages began.
    applied_before: u64,
    /// No pages are read before, unless this process joins.
    reads_from: Instant,
}

/// Runs until the connection ends for good.
pub(super) async fn run<B: Bus>(shared: Arc<CoreShared<B>>) {
    let mut inbox = loop {
        match open(&shared).await {
            Ok(inbox) => break inbox,
            Err(error) => {
                tracing::warn!(%error, "the registry cannot be followed yet");
                sleep(RETRY).await;
            }
        }
    };
    let mut gossip = Gossip {
        peers: BTreeMap::new(),
        beacon_due: Instant::now(),
        joined: None,
        sync: None,
        applied_before: 0,
        reads_from: Instant::now(),
        shared,
    };
    gossip.serve(&mut inbox).await;
    gossip.shared.state().standing = Standing::Joining;
    tracing::error!("the registry's messages have ended");
}

async fn open<B: Bus>(shared: &CoreShared<B>) -> Result<Inbox, PlaneError> {
    let CoreShared { bus, subjects, .. } = shared;
    Ok(Inbox {
        writes: bus.subscribe(subjects.all_registry_writes()).await?,
        beacons: bus.subscribe(subjects.beacons()).await?,
        requests: bus.serve(subjects.registry_pages_of(shared.peer)).await?,
        joiners: None,
    })
}

impl<B: Bus> Gossip<B> {
    async fn serve(&mut self, inbox: &mut Inbox) {
        let mut connection = self.shared.bus.connection();
        connection.mark_changed();
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                // The rare inputs first. Messages before the tick: it expires what they renew.
                biased;
                Ok(()) = connection.changed() => {
                    let is = *connection.borrow_and_update();
                    // It must not answer its own question.
                    inbox.joiners = None;
                    self.see_connection(is);
                }
                () = ended(&mut self.sync) => self.read_ended(),
                Some(request) = next(&mut inbox.joiners) => self.answer(request),
                request = inbox.requests.next() => match request {
                    Some(request) => self.answer(request),
                    None => return,
                },
                // Writes before the beacons that follow them.
                write = inbox.writes.next() => match write {
                    Some(write) => self.shared.written(&write),
                    None => return,
                },
                beacon = inbox.beacons.next() => match beacon {
                    Some(beacon) => self.beacon(&beacon),
                    None => return,
                },
                _ = ticks.tick() => self.tick(inbox).await,
            }
        }
    }

    fn see_connection(&mut self, connection: Connection) {
        let state = &mut *self.shared.state();
        // `Up` may hide a short disconnect.
        state.appends.clear();
        state.standing = Standing::Joining;
        state.registry.hold_leases();
        self.sync = match connection {
            Connection::Up => Some(Box::pin(join(Arc::clone(&self.shared)))),
            Connection::Down => None,
        };
        self.beacon_due = Instant::now();
        self.joined = None;
    }

    fn read_ended(&mut self) {
        self.sync = None;
        let applied = self.shared.state().applied;
        if applied == self.applied_before {
            self.reads_from = Instant::now() + IDLE_READ_PAUSE;
        }
    }

    async fn tick(&mut self, inbox: &mut Inbox) {
        let now = Instant::now();
        {
            let state = &mut *self.shared.state();
            state.registry.expire(now);
            state.appends.expire(now);
            match state.standing {
                Standing::Joining => {}
                Standing::Joined | Standing::Serving => {
                    self.joined.get_or_insert(now);
                }
            }
        }
        let is_old = |since: Instant| now.saturating_duration_since(since) >= SERVES_AFTER;
        if inbox.joiners.is_none() && self.joined.is_some_and(is_old) {
            let pages = self.shared.subjects.registry_pages();
            inbox.joiners = self.shared.bus.serve(pages).await.ok();
        }
        if inbox.joiners.is_some() {
            let standing = &mut self.shared.state().standing;
            if *standing == Standing::Joined {
                *standing = Standing::Serving;
            }
        }
        if self.beacon_due <= now && self.shared.check_joined().is_ok() {
            let period = self.period();
            self.beacon_due = now + period;
            self.peers
                .retain(|_, peer| now.saturating_duration_since(peer.seen) < period * BEACONS_LOST);
            let beacon = {
                let state = &mut *self.shared.state();
                PeerBeacon {
                    peer: self.shared.peer,
                    unix_ns: state.clock.unix_ns(now),
                    registry: state.registry.digest(),
                }
            };
            let subject = self.shared.subjects.beacons();
            // The next one is due in a second.
            drop(self.shared.publish(subject, &beacon).await);
        }
    }

    fn period(&self) -> Duration {
        let peers = u32::try_from(self.peers.len()).unwrap_or(u32::MAX);
        BEACON.max(BEACON_PER_PEER.saturating_mul(peers))
    }

    fn beacon(&mut self, message: &Broadcast) {
        let Ok(beacon) = codec::decode::<PeerBeacon>(&message.payload) else {
            return;
        };
        let now = Instant::now();
        let state = &mut *self.shared.state();
        state.heard = Some(now);
        if beacon.peer == self.shared.peer {
            return;
        }
        state.other = Some((beacon.peer, now));
        state.observe_clock(now, beacon.unix_ns);
        let is_equal = state.registry.digest() == beacon.registry;
        if !self.peers.contains_key(&beacon.peer) && self.peers.len() >= PEERS_MAX {
            return;
        }
        let peer = self.peers.entry(beacon.peer).or_insert(Peer {
            seen: now,
            differences: 0,
        });
        peer.seen = now;
        peer.differences = if is_equal { 0 } else { peer.differences + 1 };
        let may_read =
            self.sync.is_none() && state.standing != Standing::Joining && self.reads_from <= now;
        if may_read && peer.differences >= DIFFERENCES_MAX {
            peer.differences = 0;
            self.applied_before = state.applied;
            let shared = Arc::clone(&self.shared);
            self.sync = Some(Box::pin(async move {
                shared.read_pages(Pages::Of(beacon.peer)).await.map(drop)
            }));
        }
    }

    fn answer(&self, request: ServiceRequest) {
        let Ok(RegistryPageRequest { after }) = codec::decode(&request.payload) else {
            return;
        };
        let now = Instant::now();
        let bytes_max = PAGE_BYTES_MAX.min(self.shared.bus.payload_max() / 2);
        let page = {
            let state = &mut *self.shared.state();
            let (writes, more) = state.registry.page(now, &after, bytes_max);
            RegistryPage {
                unix_ns: state.clock.unix_ns(now),
                writes,
                more,
            }
        };
        if let Ok(page) = codec::encode(&page) {
            request.reply.send(Bytes::from(page));
        }
    }
}

/// The process that pages are read of.
#[derive(Clone, Copy)]
enum Pages {
    /// Those of any process that has the registry.
    OfAny,
    Of(PeerId),
}

/// What became of a read of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PagesRead {
    Whole,
    /// No process serves them.
    Unserved,
}

/// Reads the registry of another process. Without one that runs, this process is the first.
///
/// Any process may get the question, also one that stands still. So no answer is no proof: those
/// that send beacons are asked by name.
async fn join<B: Bus>(shared: Arc<CoreShared<B>>) -> Result<(), PlaneError> {
    let began = Instant::now();
    let mut unserved = 0;
    while unserved < UNSERVED_MAX {
        let read = shared.read_pages(Pages::OfAny).await;
        if let Ok(PagesRead::Whole) = read {
            break;
        }
        let other = shared.other(OTHERS_SILENT);
        if let Some(other) = other
            && let Ok(PagesRead::Whole) = shared.read_pages(Pages::Of(other)).await
        {
            break;
        }
        match read {
            Ok(PagesRead::Whole | PagesRead::Unserved) => unserved += 1,
            Err(error) if other.is_none() && began.elapsed() >= OTHERS_SILENT => {
                tracing::warn!(%error, "no other process answers: this one is the first");
                break;
            }
            Err(_) => {}
        }
        sleep(PAGE_RETRY).await;
    }
    {
        let state = &mut *shared.state();
        state.registry.run_leases(Instant::now());
        state.standing = Standing::Joined;
        // The own beacon is on its way.
        state.heard = Some(Instant::now());
    }
    shared.registry_changed.notify_waiters();
    Ok(())
}

impl<B: Bus> CoreShared<B> {
    /// A process whose beacon came within this time.
    pub(super) fn other(&self, within: Duration) -> Option<PeerId> {
        let other = self.state().other;
        let recent = other.filter(|(_, seen)| seen.elapsed() <= within);
        recent.map(|(peer, _)| peer)
    }

    async fn read_pages(&self, of: Pages) -> Result<PagesRead, PlaneError> {
        let subject = match of {
            Pages::OfAny => self.subjects.registry_pages(),
            Pages::Of(peer) => self.subjects.registry_pages_of(peer),
        };
        let mut after = String::new();
        loop {
            let asked = Instant::now();
            let page = self.page(subject.clone(), after.clone(), PAGE_DEADLINE);
            let Some(page) = page.await? else {
                return Ok(PagesRead::Unserved);
            };
            let last = page.writes.last().map(|write| write.key.clone());
            self.take_clock(asked, page.unix_ns);
            self.take_page(page.writes);
            match last {
                // Keys ascend, so that a page that repeats ends the read.
                Some(last) if page.more && last > after => after = last,
                Some(_) | None => return Ok(PagesRead::Whole),
            }
        }
    }

    /// A process that joins may be ahead of the others by the time that the answer took, and not
    /// behind them: what it reads would seem younger than it is. One that had joined before has the
    /// common clock, which is never set back.
    fn take_clock(&self, asked: Instant, unix_ns: u64) {
        let now = Instant::now();
        let state = &mut *self.state();
        match state.clock_source {
            ClockSource::Own => {
                state.clock_source = ClockSource::Others;
                state.clock.join(asked, unix_ns);
            }
            ClockSource::Others => state.observe_clock(now, unix_ns),
        }
    }

    fn take_page(&self, writes: Vec<RegistryWrite>) {
        let now = Instant::now();
        let state = &mut *self.state();
        for write in writes {
            self.merge(state, now, write);
        }
        self.registry_changed.notify_waiters();
    }

    /// Takes in a broadcast write. The subject says which key its sender may write.
    fn written(&self, message: &Broadcast) {
        let Ok(write) = codec::decode::<RegistryWrite>(&message.payload) else {
            return;
        };
        if self.subjects.written_key(&message.subject).as_ref() != Some(&write.key) {
            return;
        }
        self.merge(&mut self.state(), Instant::now(), write);
        self.registry_changed.notify_waiters();
    }

    fn merge(&self, state: &mut CoreState, now: Instant, write: RegistryWrite) {
        let key = write.key.clone();
        match state.registry.merge(now, write) {
            Merged::Applied => state.applied += 1,
            Merged::Known => {}
            Merged::Refused => tracing::debug!(key, "a registry entry exceeds a bound"),
        }
    }
}

async fn ended(sync: &mut Option<Sync>) {
    match sync {
        Some(sync) => drop(sync.await),
        None => std::future::pending().await,
    }
}

async fn next<T>(stream: &mut Option<PlaneStream<T>>) -> Option<T> {
    match stream {
        Some(stream) => stream.next().await,
        None => std::future::pending().await,
    }
}
