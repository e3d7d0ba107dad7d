//! One data-parallel rank in real time: the engine model, its publisher and its clients.
//!
//! A step is computed when it begins and becomes visible when its time is over: first its events,
//! then its tokens, then the pending snapshots.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use serde::Deserialize;
use serde_json::Value;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{trace, warn};
use warmroute_sim::sim::{
    CacheEvent, CachedTokens, EngineConfig, EngineHash, EngineLoad, EngineModel, EngineRequest,
    EngineTotals, GroupKind, HeldPrefix, Medium, RequestId, StepOutcome,
};

use crate::error::Error;
use crate::history::{History, Pairs};
use crate::lmcache::Chunks;
use crate::publisher::{Delivery, Publisher};
use crate::sglang;
use crate::trtllm::EventQueue;
use crate::wire::Encoder;

pub(crate) struct Rank {
    pub(crate) number: u32,
    pub(crate) publisher: Publisher,
    encoder: Encoder,
    state: Mutex<State>,
    wake: Notify,
}

/// In which form a rank publishes.
pub(crate) enum RankForm {
    Vllm,
    Sglang,
    Lmcache(Chunks),
    Trtllm(EventQueue),
}

struct State {
    form: RankForm,
    engine: EngineModel,
    clients: BTreeMap<RequestId, mpsc::Sender<Output>>,
    counters: Counters,
    published: Published,
    pairs: Pairs,
    /// `None` without `--history`.
    history: Option<History>,
    faults: Faults,
    stopped: bool,
    asleep: bool,
    /// A step has begun and is not visible yet.
    in_flight: bool,
    askers: Vec<oneshot::Sender<Snapshot>>,
}

/// Output to a client, in this order: one `Admitted`, tokens, `Finished`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    Admitted(CachedTokens),
    Token(u32),
    Finished,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) started: u64,
    pub(crate) finished: u64,
    /// The client disconnected before the end.
    pub(crate) aborted: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Published {
    next: u64,
    pub(crate) last: Option<u64>,
    /// The last batch that changed the set of held (prefix, tier) pairs.
    pub(crate) last_change: Option<u64>,
    /// Pairs that became held, over all batches.
    pub(crate) stored: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Faults {
    /// Number of further batches that are kept for replays but not sent.
    pub(crate) drop_batches: u64,
    /// Accepts requests, but does not step.
    pub(crate) hang: bool,
    /// Clears its cache without publishing it.
    pub(crate) mute_clears: bool,
    /// Events of the CPU tier are not published.
    pub(crate) mute_cpu: bool,
    /// Factor of the time of every step.
    pub(crate) slowdown: u32,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            drop_batches: 0,
            hang: false,
            mute_clears: false,
            mute_cpu: false,
            slowdown: 1,
        }
    }
}

/// A message that no known vLLM sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StrangeMessage {
    /// A batch of one event whose type is unknown.
    UnknownEvent,
    /// A batch that removes a block that was never stored.
    UnknownRemoval,
    /// A batch that names a KV group whose kind is unknown.
    UnknownKind,
    /// A numbered payload that is no batch.
    UnreadablePayload,
    /// An empty batch without a sequence number.
    TwoFrames,
}

/// The cache as of the last published batch.
pub(crate) struct Snapshot {
    pub(crate) published: Published,
    pub(crate) held: Vec<HeldPrefix>,
}

/// A request in the engine. Aborts it when dropped before its end.
pub(crate) struct Generation {
    rank: Arc<Rank>,
    id: RequestId,
    outputs: mpsc::Receiver<Output>,
    pub(crate) prompt_tokens: usize,
    max_tokens: usize,
    ended: bool,
}

impl Rank {
    pub(crate) fn new(
        config: EngineConfig,
        form: RankForm,
        publisher: Publisher,
        encoder: Encoder,
        history: Option<History>,
    ) -> Self {
        let main = config
            .groups
            .iter()
            .position(|&kind| kind == GroupKind::FullAttention);
        let state = State {
            form,
            pairs: Pairs::new(main.and_then(|at| u32::try_from(at).ok()).unwrap_or(0)),
            history,
            engine: EngineModel::new(config),
            clients: BTreeMap::new(),
            counters: Counters::default(),
            published: Published::default(),
            faults: Faults::default(),
            stopped: false,
            asleep: false,
            in_flight: false,
            askers: Vec::new(),
        };
        Self {
            number: encoder.rank,
            publisher,
            encoder,
            state: Mutex::new(state),
            wake: Notify::new(),
        }
    }

    /// Steps until cancelled, then closes all clients and the ports.
    pub(crate) async fn run(self: Arc<Self>, stop: CancellationToken) {
        self.step_until(stop).await;
        let mut state = self.lock();
        state.stopped = true;
        state.clients.clear();
        state.askers.clear();
        drop(state);
        self.publisher.stop();
    }

    async fn step_until(&self, stop: CancellationToken) {
        let mut due = Instant::now();
        loop {
            let Some(outcome) = self.begin_step() else {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = self.wake.notified() => {}
                }
                // Idle time does not count as debt.
                due = Instant::now();
                continue;
            };
            due += outcome.duration;
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep_until(due) => {}
            }
            self.finish_step(&outcome);
            tokio::task::yield_now().await;
        }
    }

    pub(crate) fn submit(self: &Arc<Self>, request: EngineRequest) -> Result<Generation, Error> {
        let (prompt_tokens, max_tokens) = (request.prompt.len(), request.max_tokens);
        // Capacity for all outputs of the request: a slow client never blocks a step.
        let (sender, outputs) =
            mpsc::channel(max_tokens.saturating_add(2).min(Semaphore::MAX_PERMITS));
        let mut state = self.lock();
        if state.stopped {
            return Err(Error::stopped());
        }
        let id = state.engine.submit(request)?;
        state.clients.insert(id, sender);
        state.counters.started += 1;
        drop(state);
        self.wake.notify_one();
        Ok(Generation {
            rank: Arc::clone(self),
            id,
            outputs,
            prompt_tokens,
            max_tokens,
            ended: false,
        })
    }

    pub(crate) fn reset_prefix_cache(&self) -> bool {
        self.lock().engine.reset_prefix_cache()
    }

    /// As SGLang does it: refused while there are requests, and published immediately.
    pub(crate) fn flush_cache(&self) -> bool {
        let mut state = self.lock();
        if state.in_flight || state.engine.has_requests() || !state.engine.reset_prefix_cache() {
            return false;
        }
        // The engine model publishes a second one with its next step, before that step's blocks.
        self.publish(&mut state, &[CacheEvent::Cleared]);
        true
    }

    /// Aborts all requests and steps no more until it is woken. Takes requests.
    pub(crate) fn sleep(&self) {
        let mut state = self.lock();
        state.asleep = true;
        for id in std::mem::take(&mut state.clients).into_keys() {
            state.engine.abort(id);
            state.counters.aborted += 1;
        }
    }

    pub(crate) fn wake_up(&self) {
        self.lock().asleep = false;
        self.wake.notify_one();
    }

    pub(crate) fn is_asleep(&self) -> bool {
        self.lock().asleep
    }

    pub(crate) fn set_faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.lock().faults);
        self.wake.notify_one();
    }

    pub(crate) fn load(&self) -> EngineLoad {
        self.lock().engine.load()
    }

    pub(crate) fn totals(&self) -> EngineTotals {
        self.lock().engine.totals()
    }

    pub(crate) fn published(&self) -> Published {
        self.lock().published
    }

    pub(crate) fn counters(&self) -> (Counters, usize) {
        let state = self.lock();
        (state.counters, state.clients.len())
    }

    /// The cache between two steps. It equals the published state, except after a reset.
    pub(crate) async fn snapshot(&self) -> Option<Snapshot> {
        let answer = {
            let mut state = self.lock();
            if state.stopped {
                return None;
            }
            if !state.in_flight {
                return Some(state.snapshot());
            }
            let (asker, answer) = oneshot::channel();
            state.askers.push(asker);
            answer
        };
        answer.await.ok()
    }

    /// Runs `look` on the published batches. Returns `None` without a history.
    pub(crate) fn with_history<T>(&self, look: impl FnOnce(&History) -> T) -> Option<T> {
        self.lock().history.as_ref().map(look)
    }

    fn begin_step(&self) -> Option<StepOutcome> {
        let mut state = self.lock();
        if state.faults.hang || state.asleep || !state.engine.has_requests() {
            return None;
        }
        state.in_flight = true;
        let mut outcome = state.engine.step();
        outcome.duration *= state.faults.slowdown;
        Some(outcome)
    }

    fn finish_step(&self, outcome: &StepOutcome) {
        let mut state = self.lock();
        state.in_flight = false;
        self.publish(&mut state, &outcome.events);
        state.deliver(outcome);
        for asker in std::mem::take(&mut state.askers) {
            // The receiver may have given up.
            drop(asker.send(state.snapshot()));
        }
    }

    fn publish(&self, state: &mut State, events: &[CacheEvent]) {
        let mut audible = Cow::Borrowed(events);
        if state.faults.mute_clears {
            audible
                .to_mut()
                .retain(|event| !matches!(event, CacheEvent::Cleared));
        }
        if state.faults.mute_cpu {
            audible.to_mut().retain(|event| !is_of_cpu(event));
        }
        let events = match &mut state.form {
            RankForm::Lmcache(chunks) => chunks.rewrite(&audible),
            RankForm::Trtllm(queue) => queue.one_level(&audible),
            RankForm::Vllm | RankForm::Sglang => audible.into_owned(),
        };
        if events.is_empty() {
            return;
        }
        let sequence = state.published.next;
        state.published.next += 1;
        let encoded = match &mut state.form {
            RankForm::Vllm | RankForm::Lmcache(_) => self.encoder.encode(unix_seconds(), &events),
            RankForm::Sglang => sglang::payload(self.number, unix_seconds(), &events),
            RankForm::Trtllm(queue) => {
                let is_lost = state.faults.drop_batches > 0;
                state.faults.drop_batches = state.faults.drop_batches.saturating_sub(1);
                let last = queue.publish(&events, is_lost);
                state.published.next = last + 1;
                return state.note(last, &events);
            }
        };
        let payload = match encoded {
            Ok(payload) => payload,
            Err(error) => {
                warn!(%error, "a batch cannot be encoded");
                return;
            }
        };
        let delivery = match state.faults.drop_batches.checked_sub(1) {
            Some(left) => {
                state.faults.drop_batches = left;
                Delivery::ReplayOnly
            }
            None => Delivery::Live,
        };
        // The history is complete before a reader can see the batch.
        state.note(sequence, &events);
        self.publisher.publish(sequence, &payload, delivery);
    }

    /// The events that no earlier read took. Empty in other forms than TensorRT-LLM's.
    pub(crate) fn drain_events(&self) -> Vec<Value> {
        match &mut self.lock().form {
            RankForm::Trtllm(queue) => queue.drain(),
            RankForm::Vllm | RankForm::Sglang | RankForm::Lmcache(_) => Vec::new(),
        }
    }

    pub(crate) fn publish_strange(&self, message: StrangeMessage) {
        let encoded = match message {
            StrangeMessage::UnknownEvent => self.encoder.unknown_event(unix_seconds()),
            StrangeMessage::UnknownRemoval => self.encoder.encode(
                unix_seconds(),
                &[CacheEvent::Removed {
                    hash: EngineHash(u64::MAX),
                    medium: Medium::Gpu,
                    group: 0,
                }],
            ),
            StrangeMessage::UnknownKind => self.encoder.unknown_kind(unix_seconds()),
            // MessagePack never uses this byte.
            StrangeMessage::UnreadablePayload => Ok(vec![0xC1]),
            StrangeMessage::TwoFrames => self.encoder.encode(unix_seconds(), &[]),
        };
        let payload = match encoded {
            Ok(payload) => payload,
            Err(error) => {
                warn!(%error, "a message cannot be encoded");
                return;
            }
        };
        let mut state = self.lock();
        if message == StrangeMessage::TwoFrames {
            self.publisher.publish_unnumbered(&payload);
            return;
        }
        let sequence = state.published.next;
        state.published.next += 1;
        state.published.last = Some(sequence);
        self.publisher.publish(sequence, &payload, Delivery::Live);
    }

    fn abort(&self, id: RequestId) {
        let mut state = self.lock();
        if state.clients.remove(&id).is_some() {
            state.engine.abort(id);
            state.counters.aborted += 1;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const fn is_of_cpu(event: &CacheEvent) -> bool {
    match event {
        CacheEvent::Stored(stored) => matches!(stored.medium, Medium::Cpu),
        CacheEvent::Removed { medium, .. } => matches!(medium, Medium::Cpu),
        CacheEvent::Cleared => false,
    }
}

impl State {
    /// Records the events of a batch.
    fn note(&mut self, sequence: u64, events: &[CacheEvent]) {
        let changes = self.pairs.apply(events);
        if let Some(history) = &mut self.history {
            history.record(sequence, events, self.pairs.main_group(), &changes);
        }
        self.published.last = Some(sequence);
        self.published.stored += changes.iter().filter(|(_, is_held)| *is_held).count() as u64;
        if !changes.is_empty() {
            self.published.last_change = Some(sequence);
        }
    }

    fn deliver(&mut self, outcome: &StepOutcome) {
        for admitted in &outcome.admitted {
            self.give(admitted.id, Output::Admitted(admitted.cached));
        }
        for produced in &outcome.produced {
            self.give(produced.id, Output::Token(produced.token));
        }
        for finished in &outcome.finished {
            self.give(finished.id, Output::Finished);
            if self.clients.remove(&finished.id).is_some() {
                self.counters.finished += 1;
            }
        }
    }

    fn give(&self, id: RequestId, output: Output) {
        let Some(client) = self.clients.get(&id) else {
            return;
        };
        if client.try_send(output).is_err() {
            trace!(id = id.0, "a client is gone and about to abort its request");
        }
    }

    fn snapshot(&self) -> Snapshot {
        let mut held = self.engine.held();
        if matches!(self.form, RankForm::Trtllm(_)) {
            EventQueue::keep_first_level(&mut held);
        }
        Snapshot {
            published: self.published,
            held,
        }
    }
}

impl Generation {
    pub(crate) async fn next(&mut self) -> Option<Output> {
        let output = self.outputs.recv().await;
        self.ended |= output.is_none_or(|output| output == Output::Finished);
        output
    }

    /// Whether token number `tokens`, from 1, is the last one.
    pub(crate) const fn ends_after(&self, tokens: usize) -> bool {
        tokens >= self.max_tokens
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.ended {
            self.rank.abort(self.id);
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "vLLM stamps its batches with wall time"
)]
pub(crate) fn unix_seconds() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}
