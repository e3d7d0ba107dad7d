//! Clients of a router, as tasks of its process: what `proxy` does with a request, without HTTP.
//! They ask the product's index client and decision core. What they do and see is reported to the
//! world, which has the engines.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use warmroute_proto::query::{IndexAnswer, SourceAnswer, SourceState, UnknownReason};
use warmroute_proto::{Generation, RecordNumber, Source, Tiers, WorkerId};
use warmroute_router::audit::UsageAudit;
use warmroute_router::fleet::health::Observation;
use warmroute_router::fleet::{
    Fleet, RequestCase, RequestResult, SuspectedFailure, TrackedRequest,
};
use warmroute_router::index_client::{DEADLINE, HEDGE, IndexClient};
use warmroute_router::lost_sources::LossWatch;
use warmroute_router::openai::TokenUsage;
use warmroute_router::route::AnswerPosition;
use warmroute_router::route::{
    AdmitError, Admitted, Decision, IndexReply, KnownHolder, Prompt, RouteRequest, SlotEvent,
    SlotGuard, SlotSink,
};
use warmroute_router::shared_core::{MoveSignal, MoveWatch, SharedCore};
use warmroute_router::sim::EngineRequest;
use warmroute_router::sync::head;

use super::Breakage;
use super::host::Http;
use super::replica::Written;
use super::shim::url;
use super::sim_plane::{Outbox, Sent};

/// Answers of one engine to one request that may wait.
const ANSWERS_MAX: usize = 1 << 10;
/// Workers that one request is sent to.
const ATTEMPTS_MAX: usize = 3;

/// The decision core, with a record of what it held at each number that it wrote.
pub(super) struct ObservedCore {
    pub(super) core: Arc<SharedCore>,
    written: Arc<Mutex<Written>>,
    /// Slots that requests hold.
    held: AtomicU64,
}

impl ObservedCore {
    pub(super) const fn new(core: Arc<SharedCore>, written: Arc<Mutex<Written>>) -> Self {
        Self {
            core,
            written,
            held: AtomicU64::new(0),
        }
    }

    pub(super) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Before and after each change: an incarnation begins in between.
    pub(super) fn record(&self) {
        let core = self.core.core();
        let head = head(&core);
        let router = core.ledger().router();
        let key = (router, head.incarnation, head.number);
        self.written.lock().unwrap().insert(key, head.digest);
    }
}

impl SlotSink for ObservedCore {
    fn note(&self, event: SlotEvent) {
        self.record();
        self.core.note(event);
        self.record();
    }
}

/// What the clients of one router's process share.
pub(super) struct ClientContext {
    pub(super) observed: Arc<ObservedCore>,
    pub(super) index: IndexClient,
    pub(super) audit: UsageAudit,
    pub(super) fleet: Arc<Fleet>,
    pub(super) outbox: Outbox,
    pub(super) broken: Option<Breakage>,
    /// Counts what is sent to engines.
    pub(super) sent: AtomicU64,
}

/// A client's request.
#[derive(Clone, Debug)]
pub(super) struct ClientRequest {
    pub(super) request: EngineRequest,
    pub(super) prompt: Arc<Prompt>,
    pub(super) is_streaming: bool,
    /// Only the decision counts.
    pub(super) is_probe: bool,
    /// Distinguishes it from others of its router.
    pub(super) number: u64,
}

/// How a request ended, as its client saw it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestEnd {
    /// Until the answer's first byte.
    pub(super) waited: Duration,
    pub(super) has_failed: bool,
    pub(super) is_salted: bool,
}

/// What an answer states of one source, before anything is trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StatedSource {
    pub(super) source: Source,
    pub(super) generation: Generation,
    /// Number of records of the generation that are applied, if the answer names it.
    pub(super) applied: Option<u64>,
    pub(super) states: Tiers<SourceState>,
    pub(super) reason: Option<UnknownReason>,
    /// Blocks per tier, also those of a tier whose state gives no credit.
    pub(super) run: Tiers<u32>,
}

/// An answer of the index, and what it states.
#[derive(Clone, Debug, Default)]
pub(super) struct Stated {
    pub(super) sources: Vec<StatedSource>,
    pub(super) form: AnswerForm,
    pub(super) position: Option<AnswerPosition>,
}

/// How an answer names sources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum AnswerForm {
    #[default]
    Names,
    Numbers,
}

/// A decision, and what it rests on.
#[derive(Debug)]
pub(super) struct Decided {
    pub(super) no: u64,
    pub(super) decision: Decision,
    pub(super) stated: Arc<Stated>,
    pub(super) tried: Vec<Source>,
    pub(super) request: Arc<ClientRequest>,
    /// It replaces this placement.
    pub(super) moved_from: Option<u64>,
}

/// What a client reports to the world.
#[derive(Debug)]
pub(super) enum ClientNews {
    Decided(Box<Decided>),
    /// No worker could take a request, after so many were tried.
    Refused(AdmitError, usize),
    /// To an engine, whose answers come here.
    Submit(u64, Source, EngineRequest, mpsc::Sender<Http>),
    HangUp(u64, Source),
    /// A request whose client stayed is over.
    Ended(RequestEnd),
    /// A timer of a request ends after this time.
    RunAfter(Duration),
}

/// A slot with its guard. A client that leaves drops it.
struct HeldSlot {
    guard: Option<SlotGuard<ObservedCore>>,
    observed: Arc<ObservedCore>,
    is_leaked: bool,
}

/// One request at one engine.
struct EngineCall {
    no: u64,
    source: Source,
    outbox: Outbox,
    answers: mpsc::Receiver<Http>,
    is_over: bool,
}

struct Attempt {
    decision: Decision,
    slot: HeldSlot,
    tracked: TrackedRequest,
    watch: Option<MoveWatch>,
    call: EngineCall,
    /// Workers that failed before.
    tried: Vec<Source>,
    is_prefilled: bool,
    /// When the client's first byte came.
    first_byte: Option<Instant>,
    /// Losses of sources after the choice.
    losses: LossWatch,
}

enum AttemptEnd {
    Over {
        has_failed: bool,
        first_byte: Option<Instant>,
    },
    /// This engine did not serve it. Another engine's answer proves the failure.
    Unserved(Source, Option<SuspectedFailure>),
}

impl HeldSlot {
    fn new(counter: u64, client: &ClientContext) -> Self {
        let observed = Arc::clone(&client.observed);
        observed.held.fetch_add(1, Ordering::Relaxed);
        Self {
            guard: Some(SlotGuard::new(Arc::clone(&observed), counter)),
            observed,
            is_leaked: client.broken == Some(Breakage::SlotLeaked),
        }
    }

    fn guard(&mut self) -> &mut SlotGuard<ObservedCore> {
        self.guard.as_mut().unwrap()
    }

    /// Ends the slot; without an end of its own it is aborted.
    fn end(mut self, end: impl FnOnce(&mut SlotGuard<ObservedCore>)) {
        end(&mut self.guard.take().unwrap());
    }
}

impl Drop for HeldSlot {
    fn drop(&mut self) {
        self.observed.held.fetch_sub(1, Ordering::Relaxed);
        if self.is_leaked {
            std::mem::forget(self.guard.take());
        }
    }
}

impl Drop for EngineCall {
    fn drop(&mut self) {
        if !self.is_over {
            let news = ClientNews::HangUp(self.no, self.source.clone());
            self.outbox.push(Sent::Client(news));
        }
    }
}

impl ClientContext {
    fn report(&self, news: ClientNews) {
        self.outbox.push(Sent::Client(news));
    }

    fn run_after(&self, after: Duration) {
        self.report(ClientNews::RunAfter(after));
    }

    /// A request, from its query of the index to its end.
    pub(super) async fn serve(self: Arc<Self>, request: Arc<ClientRequest>) {
        self.run_after(HEDGE);
        self.run_after(DEADLINE);
        let reply = self.index.ask(request.prompt.hit_blocks()).await.ok();
        let stated = Arc::new(reply.as_ref().map(stated).unwrap_or_default());
        let reply = self.reply_as_read(reply, &stated);
        let (begun, mut tried, mut suspected) = (Instant::now(), Vec::new(), Vec::new());
        let ended = |has_failed, first_byte: Option<Instant>| {
            let first_byte = first_byte.unwrap_or_else(Instant::now);
            ClientNews::Ended(RequestEnd {
                waited: first_byte.duration_since(begun),
                has_failed,
                is_salted: request.request.cache_salt.is_some(),
            })
        };
        while let Some(attempt) = self.admit(&request, reply.as_ref(), &stated, &tried) {
            if request.is_probe {
                attempt.slot.end(|_| ());
                return;
            }
            match self
                .attempt(attempt, &request, reply.as_ref(), &stated)
                .await
            {
                AttemptEnd::Over {
                    has_failed,
                    first_byte,
                } => {
                    if !has_failed {
                        suspected.into_iter().for_each(SuspectedFailure::proven);
                    }
                    return self.report(ended(has_failed, first_byte));
                }
                AttemptEnd::Unserved(source, failure) => {
                    tried.push(source);
                    suspected.extend(failure);
                    if tried.len() == ATTEMPTS_MAX {
                        break;
                    }
                }
            }
        }
        if !request.is_probe {
            self.report(ended(true, None));
        }
    }

    /// An answer as the decision gets to see it.
    fn reply_as_read(&self, reply: Option<IndexReply>, stated: &Stated) -> Option<IndexReply> {
        match stated.position {
            Some(at) if self.broken == Some(Breakage::OvertakenBelieved) => {
                let sources = stated.sources.iter().map(without_number).collect();
                Some(IndexReply::Full(IndexAnswer::Runs {
                    log: at.log,
                    position: at.position,
                    sources,
                }))
            }
            Some(_) | None => reply,
        }
    }

    /// Chooses and accounts.
    fn admit(
        &self,
        request: &Arc<ClientRequest>,
        reply: Option<&IndexReply>,
        stated: &Arc<Stated>,
        tried: &[Source],
    ) -> Option<Box<Attempt>> {
        let ask = RouteRequest {
            model: "m",
            prompt: &request.prompt,
            exclude: tried,
            leg: warmroute_router::route::Leg::Whole,
        };
        let losses = self.observed.core.losses().watch();
        self.observed.record();
        let admitted = self.observed.core.admit(&ask, reply);
        self.observed.record();
        let (Admitted { decision, slot, .. }, watch) = match admitted {
            Ok(admitted) => admitted,
            Err(refusal) => {
                self.report(ClientNews::Refused(refusal, tried.len()));
                return None;
            }
        };
        let slot = HeldSlot::new(slot, self);
        let no = self.sent.fetch_add(1, Ordering::Relaxed);
        self.report(ClientNews::Decided(Box::new(Decided {
            no,
            decision: decision.clone(),
            stated: Arc::clone(stated),
            tried: tried.to_vec(),
            request: Arc::clone(request),
            moved_from: None,
        })));
        let call = self.call(no, &decision.source, request);
        Some(Box::new(Attempt {
            tracked: self.tracked(&decision.source, request),
            decision,
            slot,
            watch,
            call,
            tried: tried.to_vec(),
            is_prefilled: false,
            first_byte: None,
            losses,
        }))
    }

    fn tracked(&self, source: &Source, request: &ClientRequest) -> TrackedRequest {
        let worker = &source.worker;
        let tracked = self.fleet.request_began(worker, &url(worker));
        tracked.of_case(RequestCase(request.number))
    }

    fn call(&self, no: u64, source: &Source, request: &ClientRequest) -> EngineCall {
        let (to, answers) = mpsc::channel(ANSWERS_MAX);
        if !request.is_probe {
            let request = request.request.clone();
            self.report(ClientNews::Submit(no, source.clone(), request, to));
        }
        EngineCall {
            no,
            source: source.clone(),
            outbox: self.outbox.clone(),
            answers,
            is_over: request.is_probe,
        }
    }

    /// Until the engine has answered, or has failed.
    async fn attempt(
        &self,
        mut attempt: Box<Attempt>,
        request: &Arc<ClientRequest>,
        reply: Option<&IndexReply>,
        stated: &Arc<Stated>,
    ) -> AttemptEnd {
        loop {
            let predicted = attempt.decision.predicted_ttft;
            if !request.is_streaming && !attempt.is_prefilled {
                self.run_after(predicted);
            }
            let mut prefill_end = pin!(sleep(predicted));
            let source = attempt.decision.source.clone();
            let moved = loop {
                let watch = attempt.watch.as_ref();
                tokio::select! {
                    // A request is not moved once a byte of its answer is there.
                    biased;
                    what = attempt.call.answers.recv() => {
                        match self.answered(attempt, request, what.unwrap_or(Http::Broken)) {
                            Ok(end) => return end,
                            Err(goes_on) => attempt = goes_on,
                        }
                    }
                    signal = next_signal(watch) => match signal {
                        MoveSignal::Crossed => {
                            if let Some(moved) = self.reconsider(&attempt, request, reply) {
                                break moved;
                            }
                        }
                        MoveSignal::Expired => attempt.watch = None,
                    },
                    _ = attempt.losses.lost(&source), if attempt.first_byte.is_none() => {
                        if self.leaves(&attempt) {
                            attempt.slot.end(SlotGuard::fail);
                            return AttemptEnd::Unserved(source, None);
                        }
                    }
                    () = &mut prefill_end, if !request.is_streaming && !attempt.is_prefilled => {
                        attempt.is_prefilled = true;
                        attempt.watch = None;
                        attempt.slot.guard().prefill_predicted();
                    }
                }
            };
            self.go(&mut attempt, request, stated, moved);
        }
    }

    fn answered(
        &self,
        mut attempt: Box<Attempt>,
        request: &ClientRequest,
        what: Http,
    ) -> Result<AttemptEnd, Box<Attempt>> {
        let mut has_failed = false;
        match what {
            Http::FirstToken if request.is_streaming => {
                attempt.watch = None;
                attempt.is_prefilled = true;
                attempt.first_byte = Some(Instant::now());
                attempt.tracked.report(RequestResult::Answered);
                attempt.slot.guard().first_token();
                return Err(attempt);
            }
            Http::Block if request.is_streaming => {
                attempt.slot.guard().grow(1);
                return Err(attempt);
            }
            Http::FirstToken | Http::Block => return Err(attempt),
            Http::Failed | Http::ErrorEvent => {
                attempt.call.is_over = true;
                has_failed = true;
                if self.broken == Some(Breakage::ErrorsAreAnswers) {
                    attempt.tracked.report(RequestResult::Answered);
                } else if self.may_repeat(&attempt) {
                    let failure = attempt.tracked.suspect(None);
                    attempt.slot.end(SlotGuard::fail);
                    let source = attempt.decision.source;
                    return Ok(AttemptEnd::Unserved(source, Some(failure)));
                } else {
                    attempt.tracked.fail();
                }
                attempt.slot.end(SlotGuard::fail);
            }
            Http::Done(cached_tokens) => {
                attempt.call.is_over = true;
                attempt.tracked.report(RequestResult::Answered);
                let usage = TokenUsage {
                    prompt_tokens: request.prompt.tokens().into(),
                    completion_tokens: 0,
                    cached_tokens: cached_tokens.and_then(|tokens| u64::try_from(tokens).ok()),
                };
                self.audit
                    .reported(&attempt.decision, &request.prompt, usage);
                attempt.slot.end(SlotGuard::complete);
            }
            Http::Rejected => {
                attempt.call.is_over = true;
                attempt.tracked.report(RequestResult::Answered);
                attempt.slot.end(SlotGuard::fail);
            }
            Http::Refused | Http::Broken => {
                attempt.call.is_over = true;
                match what {
                    Http::Refused => self.refused(&attempt.decision.source.worker),
                    _ => attempt.tracked.report(RequestResult::Broken),
                }
                attempt.slot.end(SlotGuard::fail);
                if attempt.first_byte.is_none() {
                    return Ok(AttemptEnd::Unserved(attempt.decision.source, None));
                }
                has_failed = true;
            }
        }
        let first_byte = attempt.first_byte;
        Ok(AttemptEnd::Over {
            has_failed,
            first_byte,
        })
    }

    /// Whether another worker may serve the request: its client has no byte, nothing failed before,
    /// and some worker can take it.
    fn may_repeat(&self, attempt: &Attempt) -> bool {
        let core = self.observed.core.core();
        let (worker, now) = (&attempt.decision.source.worker, Instant::now().into_std());
        attempt.first_byte.is_none()
            && attempt.tried.is_empty()
            && core.has_other(("m", warmroute_router::route::Leg::Whole), &[], worker, now)
    }

    /// Whether the request leaves its source, which is lost.
    fn leaves(&self, attempt: &Attempt) -> bool {
        self.broken != Some(Breakage::LossesIgnored) && self.may_repeat(attempt)
    }

    /// A worker refused the connection.
    fn refused(&self, worker: &WorkerId) {
        if self.broken != Some(Breakage::HealthIgnored) {
            let seen = Observation::ConnectRefused;
            self.fleet.observe(worker, &url(worker), seen);
        }
    }

    /// Decides again. `None`: the request stays.
    fn reconsider(
        &self,
        attempt: &Attempt,
        request: &ClientRequest,
        reply: Option<&IndexReply>,
    ) -> Option<Admitted> {
        let ask = RouteRequest {
            model: "m",
            prompt: &request.prompt,
            exclude: &[],
            leg: warmroute_router::route::Leg::Whole,
        };
        let slot = attempt.slot.guard.as_ref().map(SlotGuard::counter)?;
        self.observed.record();
        let moved = self.observed.core.reconsider(slot, &ask, reply);
        self.observed.record();
        moved
    }

    /// Closes the connection to one engine, and sends the request to another one.
    fn go(
        &self,
        attempt: &mut Attempt,
        request: &Arc<ClientRequest>,
        stated: &Arc<Stated>,
        moved: Admitted,
    ) {
        attempt.slot.guard().take_over(moved.slot);
        attempt.watch = None;
        let no = self.sent.fetch_add(1, Ordering::Relaxed);
        self.report(ClientNews::Decided(Box::new(Decided {
            no,
            decision: moved.decision.clone(),
            stated: Arc::clone(stated),
            tried: attempt.tried.clone(),
            request: Arc::clone(request),
            moved_from: Some(attempt.call.no),
        })));
        attempt.losses = self.observed.core.losses().watch();
        attempt.tracked = self.tracked(&moved.decision.source, request);
        attempt.call = self.call(no, &moved.decision.source, request);
        attempt.decision = moved.decision;
    }
}

fn stated(reply: &IndexReply) -> Stated {
    let position = match reply {
        IndexReply::Full(IndexAnswer::Runs { log, position, .. }) => Some(AnswerPosition {
            log: *log,
            position: *position,
        }),
        IndexReply::Holders(holders) => holders.position(),
        IndexReply::Full(IndexAnswer::Behind { .. }) | IndexReply::Cuts(_) => None,
    };
    Stated {
        sources: stated_sources(reply),
        form: match reply {
            IndexReply::Holders(_) => AnswerForm::Numbers,
            IndexReply::Full(_) | IndexReply::Cuts(_) => AnswerForm::Names,
        },
        position,
    }
}

fn stated_sources(reply: &IndexReply) -> Vec<StatedSource> {
    match reply {
        IndexReply::Full(IndexAnswer::Runs { sources, .. }) => {
            sources.iter().map(StatedSource::from).collect()
        }
        IndexReply::Full(IndexAnswer::Behind { .. }) => Vec::new(),
        IndexReply::Holders(holders) => {
            let sources = holders.sources();
            sources.filter_map(|holder| named(&holder)).collect()
        }
        IndexReply::Cuts(cuts) => {
            let replies = cuts.iter().map(|(_, reply)| reply);
            replies.flat_map(stated_sources).collect()
        }
    }
}

/// `None`: its generation is with the next page of the roster.
fn named(holder: &KnownHolder<'_>) -> Option<StatedSource> {
    Some(StatedSource {
        source: holder.row.source.clone(),
        generation: holder.generation()?,
        applied: holder.detail.map(|detail| applied(detail.number)),
        states: holder.states()?,
        reason: holder.row.status.and_then(|status| status.reason),
        run: holder.run(),
    })
}

impl From<&SourceAnswer> for StatedSource {
    fn from(answer: &SourceAnswer) -> Self {
        Self {
            source: answer.source.clone(),
            generation: answer.generation,
            applied: Some(applied(answer.number)),
            states: answer.states,
            reason: answer.reason,
            run: answer.run,
        }
    }
}

/// An answer that nothing overtakes.
fn without_number(part: &StatedSource) -> SourceAnswer {
    SourceAnswer {
        source: part.source.clone(),
        generation: Generation(1),
        number: None,
        engine_seq: None,
        states: part.states,
        reason: part.reason,
        proof_age_ms: 0,
        run: part.run,
    }
}

/// 0 before the first record of a generation, n + 1 after number n.
fn applied(number: Option<RecordNumber>) -> u64 {
    number.map_or(0, |number| number.0 + 1)
}

/// Pending without a watch.
async fn next_signal(watch: Option<&MoveWatch>) -> MoveSignal {
    match watch {
        Some(watch) => watch.signal().await,
        None => std::future::pending().await,
    }
}
