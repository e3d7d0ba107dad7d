//! One replica: inputs are method calls, outputs are [`ReplicaEffect`]s.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_proto::codec::{self, Message as _};
use warmroute_proto::load::{
    ANSWER_BYTES_MAX, FRAME_BYTES_MAX, LOAD_BYTES_MAX, LoadAnswer, LoadFrame, LoadHeartbeat,
    LoadMessage, LoadRequest, LoadRequestKind, Presence,
};
use warmroute_proto::{Generation, RecordNumber, RouterId};
use xxhash_rust::xxh3::xxh3_64;

use super::counts::ReplicaCounts;
use super::load_state::{LedgerHead, LoadState, OutgoingMessages};
use super::loopback::LoopbackMonitor;
use super::outbox::{Outbox, frame};
use super::peer::{PayloadInfo, Peer, PeerContext};
use super::snapshot_cache::SnapshotCache;
use super::view::{ReplicaStatus, RouterView, StatusDetail, ViewStatus};
use super::{
    DEAD_AFTER, FENCE_KEPT, HEARTBEAT_INTERVAL, JOIN_MAX, PEERS_MAX, RECONNECT_GRACE, SERVED_MAX,
};
use crate::RouterLoad;

/// Work for the shell, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicaEffect {
    /// Broadcast.
    Publish(Bytes),
    /// Send to one router; pass the result to [`LoadReplica::answered`].
    Ask {
        peer: RouterId,
        id: AskId,
        question: Bytes,
    },
    /// Write the lease's key and pass its revision to [`LoadReplica::taken`].
    TakeIncarnation,
    /// All peers are known, or the time for joining is over.
    Ready,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AskId(u64);

/// State of the connection to the plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneLink {
    Up,
    Down,
}

/// A replica of the routers' load. Calls take the load state that they read and change.
pub struct LoadReplica {
    router: RouterId,
    started: Instant,
    own: OwnState,
    pub(super) peers: BTreeMap<RouterId, Peer>,
    snapshots: SnapshotCache,
    next_ask: u64,
    /// Questions answered in this tick.
    served: u32,
    is_listed: bool,
    is_ready: bool,
    effects: VecDeque<ReplicaEffect>,
    counts: ReplicaCounts,
}

/// Outgoing state of this replica.
struct OwnState {
    incarnation: Option<Generation>,
    wants_incarnation: bool,
    link: PlaneLink,
    loopback: LoopbackMonitor,
    outbox: Outbox,
    beat: u64,
    beat_due: Instant,
}

impl LoadReplica {
    #[must_use]
    pub fn new(router: RouterId, now: Instant) -> Self {
        let mut replica = Self {
            router,
            started: now,
            own: OwnState {
                incarnation: None,
                wants_incarnation: false,
                link: PlaneLink::Up,
                loopback: LoopbackMonitor::new(now),
                outbox: Outbox::default(),
                beat: 0,
                beat_due: now,
            },
            peers: BTreeMap::new(),
            snapshots: SnapshotCache::default(),
            next_ask: 0,
            served: 0,
            is_listed: false,
            is_ready: false,
            effects: VecDeque::new(),
            counts: ReplicaCounts::default(),
        };
        replica.want_incarnation();
        replica
    }

    /// The next effect. Take all after every call.
    pub fn effect(&mut self) -> Option<ReplicaEffect> {
        self.effects.pop_front()
    }

    #[must_use]
    pub const fn counts(&self) -> &ReplicaCounts {
        &self.counts
    }

    // --- own messages

    /// An urgent message was written to the ledger.
    pub fn wrote(&mut self, load: &mut dyn LoadState, now: Instant) {
        if self.own.outbox.wrote(now) {
            self.flush(load, now);
        }
    }

    /// When to call [`Self::send_due`].
    #[must_use]
    pub const fn due(&self) -> Option<Instant> {
        self.own.outbox.due()
    }

    /// Sends a frame if the pause is over.
    pub fn send_due(&mut self, load: &mut dyn LoadState, now: Instant) {
        if self.due().is_some_and(|due| due <= now) {
            self.flush(load, now);
        }
    }

    /// The lease was taken or rewritten ([`ReplicaEffect::TakeIncarnation`]).
    pub fn taken(&mut self, revision: Generation, load: &mut dyn LoadState, now: Instant) {
        // A recreated registry counts from 1 again. The id belongs to this process alone.
        let above = self.own.incarnation.and_then(Generation::next);
        let incarnation = above.map_or(revision, |above| revision.max(above));
        load.begin(incarnation);
        self.counts.incarnations += 1;
        self.own.incarnation = Some(incarnation);
        self.own.wants_incarnation = false;
        self.own.outbox.next = RecordNumber(0);
        self.snapshots.clear();
        self.beat(Presence::Staying, load, now);
    }

    /// The lease is lost.
    pub fn lease_lost(&mut self) {
        self.want_incarnation();
    }

    pub fn link(&mut self, link: PlaneLink, now: Instant) {
        self.own.link = link;
        match link {
            PlaneLink::Down => self.counts.deafs += u64::from(self.own.loopback.cut()),
            // Peers should receive a heartbeat soon.
            PlaneLink::Up => self.own.beat_due = now,
        }
    }

    /// Announces that this router leaves. Nothing may be written afterwards.
    pub fn leave(&mut self, load: &mut dyn LoadState, now: Instant) {
        self.beat(Presence::Leaving, load, now);
    }

    // --- what comes in

    /// Receives a broadcast, own ones included.
    pub fn receive(&mut self, payload: &Bytes, load: &mut dyn LoadState, now: Instant) {
        match codec::kind(payload) {
            Some(LoadHeartbeat::KIND) => self.receive_heartbeat(payload, load, now),
            Some(LoadFrame::KIND) if payload.len() <= 2 * FRAME_BYTES_MAX => {
                match codec::frame_messages(payload) {
                    Ok(messages) => {
                        let mut others = 0;
                        for message in messages {
                            others += u64::from(self.receive_message(message, load, now));
                        }
                        self.counts.traffic.frames_in += u64::from(others > 0);
                    }
                    Err(_) => self.counts.verdicts.malformed += 1,
                }
            }
            Some(_) | None => {
                let others = self.receive_message(payload, load, now);
                self.counts.traffic.frames_in += u64::from(others);
            }
        }
    }

    /// Takes the result of a question; `None` after a timeout.
    pub fn answered(
        &mut self,
        from: RouterId,
        id: AskId,
        answer: Option<&Bytes>,
        load: &mut dyn LoadState,
        now: Instant,
    ) {
        let Some(peer) = self.peers.get_mut(&from) else {
            return;
        };
        if peer.echo.answered(id.0, answer.is_some(), now) {
            if let Some(delay) = peer.echo.delay() {
                load.set_delay(from, Some(delay));
            }
            return;
        }
        if !peer.ask_state.answered(id.0) {
            return;
        }
        let helped = match answer.map(|answer| (answer.len(), codec::decode(answer))) {
            Some((_, Ok(LoadAnswer::Messages(messages)))) => {
                let before = peer.followed();
                for message in &messages {
                    self.take_message(message, load, now);
                }
                let Some(peer) = self.peers.get_mut(&from) else {
                    return;
                };
                self.counts.mended.by_numbers += u64::from(peer.followed() > before);
                peer.messages_answered(before)
            }
            Some((len, Ok(LoadAnswer::State(part)))) if part.router == from => {
                let collected = self.peers.values().map(Peer::collected_bytes).sum();
                self.with_peer(from, load, now, |peer, context| {
                    peer.part(part, len, collected, context)
                })
                .unwrap_or(false)
            }
            Some((_, Ok(LoadAnswer::Gone))) => {
                peer.gone();
                false
            }
            Some((_, Ok(LoadAnswer::State(_)) | Err(_))) => {
                self.counts.verdicts.malformed += 1;
                false
            }
            None => false,
        };
        if let Some(peer) = self.peers.get_mut(&from) {
            if helped {
                peer.ask_state.helped();
            } else {
                self.counts.traffic.asks_failed += 1;
                peer.ask_state.failed(now);
            }
        }
        self.ask(from, now);
    }

    /// Answers a peer's question; `None` if it gets no answer.
    pub fn serve(
        &mut self,
        question: &[u8],
        load: &mut dyn LoadState,
        now: Instant,
    ) -> Option<Bytes> {
        let Ok(ask) = codec::decode::<LoadRequest>(question) else {
            self.counts.verdicts.malformed += 1;
            return None;
        };
        if self.served >= SERVED_MAX {
            self.counts.refused.asks += 1;
            return None;
        }
        self.served += 1;
        match ask.want {
            // An echo is no sign of life: the peer's broadcasts may be lost.
            LoadRequestKind::Numbers { from, to } if to.is_some_and(|to| to < from) => {
                self.counts.traffic.echoes_in += 1;
                self.with_peer(ask.asker, load, now, |_, _| ());
            }
            LoadRequestKind::Numbers { .. }
            | LoadRequestKind::State
            | LoadRequestKind::Part { .. } => {
                self.counts.traffic.asks_in += 1;
                self.with_peer(ask.asker, load, now, |peer, _| peer.mark_alive(now));
            }
        }
        let answer = self.answer(&ask, load, now);
        codec::encode(&answer).ok().map(Bytes::from)
    }

    /// The registry lists a router.
    pub fn learn(&mut self, router: RouterId, load: &mut dyn LoadState, now: Instant) {
        self.with_peer(router, load, now, |_, _| ());
        self.ask(router, now);
    }

    /// All routers in the registry were passed to [`Self::learn`].
    pub const fn listed(&mut self) {
        self.is_listed = true;
    }

    /// Processes deadlines. Call it every [`super::TICK`].
    pub fn tick(&mut self, load: &mut dyn LoadState, now: Instant) {
        self.served = 0;
        self.snapshots.expire(now);
        self.counts.deafs += u64::from(self.own.loopback.check(now));
        if !self.own.loopback.is_isolated() {
            self.expire_silent(load, now);
        }
        if self.own.beat_due <= now {
            self.beat(Presence::Staying, load, now);
        }
        if self.own.outbox.is_stale(now) {
            self.flush(load, now);
        }
        self.send_due(load, now);
        let routers: Vec<RouterId> = self.peers.keys().copied().collect();
        for router in routers {
            self.ask(router, now);
            self.measure(router, now);
        }
        self.check_ready(now);
    }

    /// State, and views of all routers.
    #[must_use]
    pub fn snapshot(
        &self,
        load: &mut dyn LoadState,
        detail: StatusDetail,
        now: Instant,
    ) -> ReplicaStatus {
        let live = |peer: &&Peer| !peer.is_dead();
        let mut replicas = vec![self.own_view(load, detail)];
        let views = self.peers.values();
        replicas.extend(views.map(|peer| peer_view(peer, load, detail, now)));
        ReplicaStatus {
            router: self.router,
            incarnation: self.own.incarnation,
            is_ready: self.is_ready,
            is_deaf: self.own.loopback.is_isolated(),
            peers: self.peers.values().filter(live).count(),
            divergence: self.peers.values().map(Peer::divergence).max().unwrap_or(0),
            counts: self.counts,
            replicas,
        }
    }

    fn own_view(&self, load: &mut dyn LoadState, detail: StatusDetail) -> RouterView {
        // The sources may be one message newer than the head.
        let head = load.messages_from(RecordNumber(u64::MAX), 0).head;
        RouterView {
            router: self.router,
            standing: ViewStatus::Own,
            incarnation: self.own.incarnation,
            number: head.number,
            digest: head.digest.into(),
            compared: None,
            divergence: 0,
            silent_ms: 0,
            sources: sources(load, self.router, detail),
        }
    }

    fn receive_heartbeat(&mut self, payload: &[u8], load: &mut dyn LoadState, now: Instant) {
        let Ok(heartbeat) = codec::decode::<LoadHeartbeat>(payload) else {
            self.counts.verdicts.malformed += 1;
            return;
        };
        if heartbeat.router == self.router {
            self.own_heartbeat(heartbeat.beat, now);
            return;
        }
        self.counts.traffic.heartbeats_in += 1;
        self.counts.traffic.bytes_in += payload.len() as u64;
        self.with_peer(heartbeat.router, load, now, |peer, context| {
            peer.heartbeat(&heartbeat, context);
        });
        self.ask(heartbeat.router, now);
    }

    /// Returns whether the message is another router's.
    fn receive_message(&mut self, payload: &[u8], load: &mut dyn LoadState, now: Instant) -> bool {
        let from = self.take_message(payload, load, now);
        if let Some(from) = from {
            self.ask(from, now);
        }
        from.is_some()
    }

    /// Takes a message. Returns its sender if that is another router.
    fn take_message(
        &mut self,
        payload: &[u8],
        load: &mut dyn LoadState,
        now: Instant,
    ) -> Option<RouterId> {
        // Every router receives its own messages too.
        if LoadMessage::sender(payload) == Some(self.router) {
            return None;
        }
        let decoded = match payload.len() {
            0..=LOAD_BYTES_MAX => codec::decode::<LoadMessage>(payload).ok(),
            _ => None,
        };
        let Some(message) = decoded else {
            self.counts.verdicts.malformed += 1;
            return None;
        };
        self.counts.traffic.messages_in += 1;
        self.counts.traffic.bytes_in += payload.len() as u64;
        let received = PayloadInfo {
            hash: xxh3_64(payload),
            len: payload.len(),
        };
        let router = message.router;
        self.with_peer(router, load, now, |peer, context| {
            peer.message(message, received, context);
        });
        Some(router)
    }

    fn own_heartbeat(&mut self, beat: u64, now: Instant) {
        let Some(echo) = self.own.loopback.echo(beat, now) else {
            return;
        };
        let was_long = echo.silent >= DEAD_AFTER;
        if echo.ends_isolation {
            let grace = if was_long {
                RECONNECT_GRACE - DEAD_AFTER
            } else {
                Duration::ZERO
            };
            for peer in self.peers.values_mut() {
                peer.mark_alive(now + grace);
            }
        }
        if was_long {
            self.want_incarnation();
        }
    }

    fn want_incarnation(&mut self) {
        if !self.own.wants_incarnation {
            self.own.wants_incarnation = true;
            self.effects.push_back(ReplicaEffect::TakeIncarnation);
        }
    }

    /// Sends all unsent messages. Returns the head afterwards; `None` if sending is impossible.
    fn flush(&mut self, load: &mut dyn LoadState, now: Instant) -> Option<LedgerHead> {
        self.own.outbox.flushed(now);
        if self.own.link == PlaneLink::Down || self.own.incarnation.is_none() {
            return None;
        }
        let is_alone = self.peers.values().all(Peer::is_dead);
        loop {
            let OutgoingMessages {
                first,
                messages,
                head,
            } = load.messages_from(self.own.outbox.next, FRAME_BYTES_MAX);
            let next = head.number.map_or(RecordNumber(0), RecordNumber::next);
            if messages.is_empty() || is_alone {
                self.own.outbox.next = next;
                return Some(head);
            }
            let lost = first.0.saturating_sub(self.own.outbox.next.0);
            self.counts.refused.unsent += lost;
            self.own.outbox.next = RecordNumber(first.0 + messages.len() as u64);
            let Ok(frame) = frame(&messages) else {
                continue;
            };
            self.own.outbox.sent(now);
            let traffic = &mut self.counts.traffic;
            traffic.messages_out += messages.len() as u64;
            traffic.frames_out += 1;
            traffic.bytes_out += frame.len() as u64;
            self.effects.push_back(ReplicaEffect::Publish(frame));
        }
    }

    /// Sends unsent messages first, so that receivers of the heartbeat have its number.
    fn beat(&mut self, presence: Presence, load: &mut dyn LoadState, now: Instant) {
        self.own.beat_due = now + HEARTBEAT_INTERVAL;
        let Some(head) = self.flush(load, now) else {
            return;
        };
        self.own.beat += 1;
        let heartbeat = LoadHeartbeat {
            router: self.router,
            incarnation: head.incarnation,
            number: head.number,
            digest: head.digest,
            beat: self.own.beat,
            presence,
        };
        if let Ok(bytes) = codec::encode(&heartbeat) {
            self.own.loopback.beat(self.own.beat, now);
            self.counts.traffic.bytes_out += bytes.len() as u64;
            self.effects.push_back(ReplicaEffect::Publish(bytes.into()));
        }
    }

    fn answer(&mut self, ask: &LoadRequest, load: &mut dyn LoadState, now: Instant) -> LoadAnswer {
        let Some(incarnation) = self.own.incarnation else {
            return LoadAnswer::Gone;
        };
        let is_former = ask.incarnation.is_some_and(|asked| asked != incarnation);
        match ask.want {
            LoadRequestKind::State => self.first_part(load, now),
            LoadRequestKind::Part { .. } | LoadRequestKind::Numbers { .. } if is_former => {
                LoadAnswer::Gone
            }
            LoadRequestKind::Part { number, part } => {
                let part = self.snapshots.part(self.router, number, part, now);
                part.map_or(LoadAnswer::Gone, LoadAnswer::State)
            }
            LoadRequestKind::Numbers { from, to } => {
                let written = load.messages_from(from, ANSWER_BYTES_MAX / 2);
                if written.first != from {
                    return self.first_part(load, now);
                }
                let wanted = to.map_or(u64::MAX, |to| to.next().0.saturating_sub(from.0));
                let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
                let messages = written.messages.iter().take(wanted);
                LoadAnswer::Messages(messages.map(|message| message.to_vec()).collect())
            }
        }
    }

    fn first_part(&mut self, load: &mut dyn LoadState, now: Instant) -> LoadAnswer {
        let number = match self.snapshots.newest(now) {
            Some(number) => number,
            None => {
                self.counts.mended.cuts += 1;
                self.snapshots.hold(load.snapshot(), now)
            }
        };
        let part = self.snapshots.part(self.router, number, 0, now);
        part.map_or(LoadAnswer::Gone, LoadAnswer::State)
    }

    /// Asks a peer for what is missing, if a question is allowed now.
    fn ask(&mut self, router: RouterId, now: Instant) {
        let Some(peer) = self.peers.get_mut(&router) else {
            return;
        };
        if peer.ask_state.is_overdue(now) {
            self.counts.traffic.asks_failed += 1;
            peer.ask_state.failed(now);
        }
        let Some(want) = peer.want().filter(|_| peer.may_ask(now)) else {
            return;
        };
        let fence = peer.fence();
        let Some(id) = self.question(router, fence, want) else {
            return;
        };
        self.counts.traffic.asks_out += 1;
        if let Some(peer) = self.peers.get_mut(&router) {
            peer.ask_state.asked(id, now);
        }
    }

    /// Sends a due echo to a peer.
    fn measure(&mut self, router: RouterId, now: Instant) {
        let Some(peer) = self.peers.get(&router).filter(|peer| peer.echo.is_due(now)) else {
            return;
        };
        let (want, fence) = (peer.empty_want(), peer.fence());
        let Some(id) = want.and_then(|want| self.question(router, fence, want)) else {
            return;
        };
        self.counts.traffic.echoes_out += 1;
        if let Some(peer) = self.peers.get_mut(&router) {
            peer.echo.asked(id, now);
        }
    }

    fn question(
        &mut self,
        peer: RouterId,
        incarnation: Option<Generation>,
        want: LoadRequestKind,
    ) -> Option<u64> {
        let ask = LoadRequest {
            asker: self.router,
            incarnation,
            want,
        };
        let question = codec::encode(&ask).ok()?;
        self.next_ask += 1;
        self.effects.push_back(ReplicaEffect::Ask {
            peer,
            id: AskId(self.next_ask),
            question: question.into(),
        });
        Some(self.next_ask)
    }

    /// Declares silent peers dead and forgets peers that are dead for long.
    fn expire_silent(&mut self, load: &mut dyn LoadState, now: Instant) {
        let routers: Vec<RouterId> = self.peers.keys().copied().collect();
        for router in routers {
            let forgotten = self.with_peer(router, load, now, |peer, context| {
                peer.check(context);
                let silent = now.saturating_duration_since(peer.alive_at());
                peer.is_dead() && silent >= FENCE_KEPT
            });
            if forgotten == Some(true) {
                self.peers.remove(&router);
                load.forget(router, now);
            }
        }
    }

    fn check_ready(&mut self, now: Instant) {
        let is_known = self.is_listed && self.peers.values().all(Peer::is_known);
        let waited = now.saturating_duration_since(self.started);
        if !self.is_ready && (is_known || waited >= JOIN_MAX) {
            self.is_ready = true;
            self.effects.push_back(ReplicaEffect::Ready);
        }
    }

    /// Calls `work` with a peer, which is added if unknown. Returns `None` for this router and
    /// above the bound.
    fn with_peer<T>(
        &mut self,
        router: RouterId,
        load: &mut dyn LoadState,
        now: Instant,
        work: impl FnOnce(&mut Peer, &mut PeerContext<'_>) -> T,
    ) -> Option<T> {
        if router == self.router {
            return None;
        }
        if !self.peers.contains_key(&router) && !self.make_room(load, now) {
            self.counts.refused.peers += 1;
            return None;
        }
        let peer = self
            .peers
            .entry(router)
            .or_insert_with(|| Peer::new(router, now));
        let mut context = PeerContext {
            load,
            counts: &mut self.counts,
            now,
        };
        Some(work(peer, &mut context))
    }

    /// Makes room for one more peer: removes the longest dead one.
    fn make_room(&mut self, load: &mut dyn LoadState, now: Instant) -> bool {
        if self.peers.len() < PEERS_MAX {
            return true;
        }
        let dead = self.peers.values().filter(|peer| peer.is_dead());
        let Some(oldest) = dead
            .min_by_key(|peer| peer.alive_at())
            .map(|peer| peer.router)
        else {
            return false;
        };
        self.peers.remove(&oldest);
        load.forget(oldest, now);
        true
    }
}

fn sources(load: &mut dyn LoadState, router: RouterId, detail: StatusDetail) -> Vec<RouterLoad> {
    match detail {
        StatusDetail::Summary => Vec::new(),
        StatusDetail::Sources => load.loads(router),
    }
}

fn peer_view(
    peer: &Peer,
    load: &mut dyn LoadState,
    detail: StatusDetail,
    now: Instant,
) -> RouterView {
    let followed = peer.followed();
    let standing = match followed {
        Some(_) => ViewStatus::Following,
        None if peer.is_dead() => ViewStatus::Dead,
        None => ViewStatus::Fetching,
    };
    let silent = now.saturating_duration_since(peer.alive_at());
    RouterView {
        router: peer.router,
        standing,
        incarnation: peer.fence(),
        number: followed.flatten(),
        digest: load.digest(peer.router).into(),
        compared: peer.compared(),
        divergence: peer.divergence(),
        silent_ms: u64::try_from(silent.as_millis()).unwrap_or(u64::MAX),
        sources: sources(load, peer.router, detail),
    }
}
