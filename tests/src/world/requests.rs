//! Requests on their way through a router: `index_client` and `proxy::forward` without tasks, and
//! what has to hold of every decision.
//!
//! A worker is *gone* when its engine does not run. A router can know it from its own look at the
//! engine's HTTP, each second: at the latest after one such interval and three ways through the
//! network (an earlier look's answer, the next look, and its answer), as long as the router itself
//! runs. From then on it must not choose it. Before, it may, and learns it from the refused
//! connection.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use futures_util::FutureExt as _;
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::load::SlotEnd;
use warmroute_proto::query::{IndexAnswer, IndexQuery, SourceAnswer, SourceState, UnknownReason};
use warmroute_proto::{BlockSize, Generation, PrefixHash, Seed, Source, Tier, Tiers};
use warmroute_router::fleet::health::Observation;
use warmroute_router::index_client::{DEADLINE, HEDGE};
use warmroute_router::route::cost::capped;
use warmroute_router::route::index_view::{ANSWER_MEMORY, LAG_MAX};
use warmroute_router::route::{
    Admitted, Decision, IndexReply, Prompt, RouteRequest, SlotEvent, SlotSink as _,
};
use warmroute_router::shared_core::{MoveSignal, MoveWatch};
use warmroute_router::sim::EngineRequest;

use super::host::{Event, Http, Input, Timer};
use super::life::draw_request;
use super::plane::At;
use super::router::{PROBE_EVERY, RouterRun};
use super::{Breakage, World};

/// Clients come so long into the calm.
const COME_ON: Duration = Duration::from_secs(3);
/// The view keeps numbers of so short a time as one.
const GRAIN: Duration = Duration::from_millis(10);

/// A request in a router.
pub(super) struct Open {
    request: EngineRequest,
    prompt: Prompt,
    query: Rc<IndexQuery>,
    is_probe: bool,
    is_streaming: bool,
    /// The indexers that were asked and have not answered.
    asked: Vec<usize>,
    is_hedged: bool,
    second: Option<usize>,
    answer: Option<Rc<IndexAnswer>>,
    tried: Vec<Source>,
    pub(super) slot: Option<u64>,
    engine: Option<usize>,
    decision: Option<Decision>,
    /// While it may be moved.
    watch: Option<MoveWatch>,
    is_prefilled: bool,
}

impl Open {
    pub(super) fn decided(&self) -> Option<(&Decision, &Prompt)> {
        Some((self.decision.as_ref()?, &self.prompt))
    }
}

/// What answers showed of a source.
#[derive(Default)]
pub(super) struct Shown {
    generation: Option<Generation>,
    /// Records applied, and when first seen; ascending.
    seen: Vec<(u64, Instant)>,
    highest_at: Option<Instant>,
}

impl Shown {
    /// May this one be believed?
    fn take(&mut self, part: &SourceAnswer, now: Instant) -> bool {
        let applied = part.number.map_or(0, |number| number.0 + 1);
        let highest = self.seen.last().map(|(number, _)| *number);
        let forgotten = self.highest_at.is_none_or(|at| now - at >= ANSWER_MEMORY);
        let is_older = (Some(part.generation), Some(applied)) < (self.generation, highest);
        if self.generation < Some(part.generation) || is_older && forgotten {
            *self = Self {
                generation: Some(part.generation),
                ..Self::default()
            };
        } else if Some(part.generation) < self.generation {
            return false;
        }
        if self.seen.last().is_none_or(|(last, _)| *last < applied) {
            self.seen.push((applied, now));
        }
        if self.seen.last().is_some_and(|(last, _)| *last == applied) {
            self.highest_at = Some(now);
        }
        let mut higher = self.seen.iter().filter(|(number, _)| *number > applied);
        let overtaken = higher.next();
        overtaken.is_none_or(|(_, since)| now - *since < LAG_MAX + GRAIN)
    }
}

/// Arrivals that happen together are whole multiples of this apart.
const TOGETHER_MS: u64 = 100;
/// Attempts to draw a prompt that fits.
const PROBE_DRAWS: u32 = 1_000;

impl World {
    /// Often at the same moment as at other routers: then they choose without seeing each other.
    pub(super) fn plan_arrival(&mut self, host: usize) {
        let mut after = self.millis(50..900);
        if self.rng.bool() {
            let at = (self.now + after).as_micros() as u64;
            after += Duration::from_micros(at.next_multiple_of(TOGETHER_MS * 1000) - at);
        }
        self.timer(host, after, Timer::Arrive);
    }

    pub(super) fn request_input(&mut self, at: usize, run: &mut RouterRun, input: Input) {
        let host = self.routers[at].host;
        match input {
            Input::Timer(Timer::Arrive) => {
                if self
                    .calm_since
                    .is_none_or(|since| self.now < since + COME_ON)
                {
                    self.plan_arrival(host);
                    self.arrive(at, run, false);
                }
            }
            Input::Timer(Timer::Probe) => {
                self.timer(host, PROBE_EVERY, Timer::Probe);
                let since = self.checks.routers.index_well_since;
                if since.is_some_and(|since| run.probed.is_none_or(|probed| probed < since)) {
                    self.arrive(at, run, true);
                }
            }
            Input::Timer(Timer::Hedge(no)) => self.hedge(at, run, no),
            Input::Timer(Timer::Late(no)) => self.too_late(at, run, no),
            Input::Timer(Timer::Leave(no)) => self.client_leaves(at, run, no),
            Input::Timer(Timer::Prefilled(no)) => {
                if let Some(open) = run.requests.get_mut(&no)
                    && let Some(counter) = open.slot
                    && !std::mem::replace(&mut open.is_prefilled, true)
                {
                    self.account(at, run, SlotEvent::PrefillPredicted { counter });
                }
            }
            Input::Timer(Timer::Recheck(no)) => self.recheck(at, run, no),
            Input::Answer(no, indexer, answer) => {
                self.index_answers(at, run, no, (indexer, answer))
            }
            Input::Http(no, what) => self.engine_says(at, run, no, what),
            other => panic!("a router receives {other:?}"),
        }
    }

    fn arrive(&mut self, at: usize, run: &mut RouterRun, is_probe: bool) {
        let sizes = run
            .fleet
            .values()
            .filter_map(|member| member.entry.block_size);
        let Some(size) = sizes.into_iter().next() else {
            return;
        };
        // Where one engine's blocks are large and another one's cache is small, most prompts fit
        // nowhere.
        let draws = if is_probe { PROBE_DRAWS } else { 1 };
        let Some(request) = (0..draws).find_map(|_| self.some_request(size)) else {
            return;
        };
        let (lora, salt) = (request.lora_name.as_deref(), request.cache_salt.as_deref());
        let prompt = Prompt::new(&request.prompt, size, Seed::new(lora, salt));
        let query = Rc::new(IndexQuery {
            blocks: prompt.hit_blocks().to_vec(),
            at_least: None,
        });
        let no = run.next_request;
        run.next_request += 1;
        let open = Open {
            request,
            prompt,
            query,
            is_probe,
            is_streaming: self.rng.u8(0..4) > 0,
            asked: Vec::new(),
            is_hedged: false,
            second: None,
            answer: None,
            tried: Vec::new(),
            slot: None,
            engine: None,
            decision: None,
            watch: None,
            is_prefilled: false,
        };
        run.requests.insert(no, open);
        let host = self.routers[at].host;
        if !is_probe && self.rng.u8(0..6) == 0 {
            let after = self.millis(0..3_000);
            self.timer(host, after, Timer::Leave(no));
        }
        self.ask_index(at, run, no);
    }

    fn some_request(&mut self, size: BlockSize) -> Option<EngineRequest> {
        let longest = self
            .engines
            .iter()
            .map(|engine| engine.life.config.longest_request())
            .min();
        let mut request = draw_request(size, longest.unwrap_or(0), &mut self.rng)?;
        request.max_tokens = request.max_tokens.min(size.tokens() + 1);
        Some(request)
    }

    // --- `index_client`

    fn ask_index(&mut self, at: usize, run: &mut RouterRun, no: u64) {
        let host = self.routers[at].host;
        let now = self.router_now(at);
        let seed = self.rng.u64(..);
        let two = run.indexers.pick_two(now, &mut Rng::with_seed(seed));
        let [first, second] = two.map(|id| id.map(|id| id.parse::<usize>().unwrap()));
        let open = run.requests.get_mut(&no).unwrap();
        open.second = second;
        self.timer(host, HEDGE, Timer::Hedge(no));
        self.timer(host, DEADLINE, Timer::Late(no));
        if let Some(first) = first {
            self.ask_one(at, run, no, first);
        }
    }

    fn ask_one(&mut self, at: usize, run: &mut RouterRun, no: u64, indexer: usize) {
        let host = self.routers[at].host;
        let open = run.requests.get_mut(&no).unwrap();
        open.asked.push(indexer);
        let query = Input::Query(self.process(host), no, Rc::clone(&open.query));
        let to = self.indexers[indexer].host;
        let is_lost = self.strikes(self.rates.call_lost);
        let after = self.delay();
        if !self.hosts[host].is_cut && !is_lost {
            self.send_host(to, after, query);
        }
    }

    fn hedge(&mut self, at: usize, run: &mut RouterRun, no: u64) {
        let Some(open) = run.requests.get_mut(&no) else {
            return;
        };
        let is_waiting = open.slot.is_none() && !open.asked.is_empty();
        if is_waiting
            && !std::mem::replace(&mut open.is_hedged, true)
            && let Some(second) = open.second
        {
            self.ask_one(at, run, no, second);
        }
    }

    fn index_answers(
        &mut self,
        at: usize,
        run: &mut RouterRun,
        no: u64,
        (indexer, answer): (usize, Rc<IndexAnswer>),
    ) {
        let now = self.router_now(at);
        let Some(open) = run.requests.get_mut(&no) else {
            return;
        };
        if !open.asked.contains(&indexer) {
            return;
        }
        run.indexers.answered(&indexer.to_string());
        for late in open.asked.drain(..).filter(|asked| *asked != indexer) {
            run.indexers.late(&late.to_string(), now);
        }
        open.answer = Some(answer);
        self.place(at, run, no);
    }

    fn too_late(&mut self, at: usize, run: &mut RouterRun, no: u64) {
        let now = self.router_now(at);
        let Some(open) = run.requests.get_mut(&no) else {
            return;
        };
        if open.asked.is_empty() {
            return;
        }
        for late in open.asked.drain(..) {
            run.indexers.late(&late.to_string(), now);
        }
        self.place(at, run, no);
    }

    /// Checks an indexer's answer as of the moment at which it is sent.
    pub(super) fn check_answers(&mut self, at: usize, query: &IndexQuery, answer: &IndexAnswer) {
        let IndexAnswer::Runs { sources, .. } = answer else {
            return;
        };
        if self.is_clock_unseen(self.indexers[at].host) {
            return;
        }
        let age_max = self.age_max();
        let chain: Vec<PrefixHash> = prefix_hashes(None, &query.blocks).collect();
        for part in sources {
            if let Err(why) = self.check_answer(part, &chain, age_max) {
                self.fail(format!("indexer {at} answers of {}: {why}", part.source));
            }
        }
    }

    fn check_answer(
        &mut self,
        part: &SourceAnswer,
        chain: &[PrefixHash],
        age_max: Duration,
    ) -> Result<(), String> {
        let Some(worker) = self.worker(&part.source) else {
            return Ok(());
        };
        if !part.states.gpu.gives_credit() {
            return Ok(());
        }
        self.checks.routers.answers += 1;
        let truths = self.truths(worker, part.engine_seq, age_max)?;
        let mut runs = Vec::new();
        for truth in &truths {
            let holds =
                |prefix: &PrefixHash, tier: Tier| truth.contains(&(prefix.0, tier.number()));
            let gpu = chain
                .iter()
                .take_while(|prefix| holds(prefix, Tier::Gpu))
                .count();
            let lower = chain[gpu..].iter();
            let cpu = lower.take_while(|prefix| holds(prefix, Tier::Cpu)).count();
            let (gpu, cpu) = (gpu as u32, cpu as u32);
            let is_right = match (part.states.gpu, part.states.cpu) {
                (SourceState::Exact, SourceState::Exact) => {
                    part.run.gpu == gpu && part.run.cpu == cpu
                }
                (SourceState::Exact, _) => part.run.gpu == gpu,
                (_, _) => part.run.gpu <= gpu,
            };
            if is_right {
                return Ok(());
            }
            runs.push((gpu, cpu));
        }
        Err(format!("{part:?}, but held are {runs:?}"))
    }

    // --- `proxy::forward`

    /// Decides, accounts, and sends it there.
    fn place(&mut self, at: usize, run: &mut RouterRun, no: u64) {
        let open = run.requests.get_mut(&no).unwrap();
        let ask = RouteRequest {
            model: "m",
            prompt: &open.prompt,
            exclude: &open.tried,
        };
        let answer = self.answer_as_read(open.answer.as_deref());
        let reply = answer.map(|answer| IndexReply::Full(answer.into_owned()));
        let admitted = self.in_router(at, || run.core.admit(&ask, reply.as_ref()));
        let (admitted, watch) = match admitted {
            Ok(admitted) => admitted,
            Err(refusal) => {
                let was_tried = !open.tried.is_empty();
                self.checks.routers.refused += 1;
                run.requests.remove(&no);
                if !was_tried && let Some(engine) = self.known_well(at, run) {
                    self.fail(format!("router {at}: {refusal}, but engine {engine} runs"));
                }
                return;
            }
        };
        open.watch = watch;
        self.send(at, run, no, admitted);
    }

    /// `SharedCore::reconsider`: what was decided blindly is decided again. A request that moves
    /// has another number, since its connection is another one.
    pub(super) fn think_again(&mut self, at: usize, run: &mut RouterRun) {
        for no in self.crossed(at, run) {
            let open = &run.requests[&no];
            let slot = open.slot.unwrap();
            let host = self.routers[at].host;
            let ask = RouteRequest {
                model: "m",
                prompt: &open.prompt,
                exclude: &[],
            };
            let answer = self.answer_as_read(open.answer.as_deref());
            let reply = answer.map(|answer| IndexReply::Full(answer.into_owned()));
            let moved = self.in_router(at, || run.core.reconsider(slot, &ask, reply.as_ref()));
            let Some(moved) = moved else {
                continue;
            };
            let engine = open.engine.unwrap();
            let mut open = run.requests.remove(&no).unwrap();
            open.watch = None;
            let (from, no) = (self.process(host), Some(no));
            let after = self.delay();
            self.plan(after, Event::HangUp { engine, from, no });
            self.checks.routers.moves += 1;
            let no = run.next_request;
            run.next_request += 1;
            run.requests.insert(no, open);
            self.send(at, run, no, moved);
        }
    }

    /// The requests that another router's earlier choice crosses, and that may still be moved.
    fn crossed(&self, at: usize, run: &mut RouterRun) -> Vec<u64> {
        let mut crossed = Vec::new();
        for (no, open) in &mut run.requests {
            let watch = open.watch.as_ref().filter(|_| !open.is_prefilled);
            let signal = watch.map(|watch| self.in_router(at, || watch.signal().now_or_never()));
            match signal {
                None => open.watch = None,
                Some(None) => {}
                Some(Some(MoveSignal::Crossed)) => crossed.push(*no),
                Some(Some(MoveSignal::Expired)) => open.watch = None,
            }
        }
        crossed
    }

    fn send(&mut self, at: usize, run: &mut RouterRun, no: u64, admitted: Admitted) {
        let host = self.routers[at].host;
        let open = run.requests.get_mut(&no).unwrap();
        let decision = admitted.decision;
        open.slot = Some(admitted.slot);
        open.is_prefilled = false;
        let is_probe = open.is_probe;
        let engine = self.worker(&decision.source).unwrap();
        open.engine = Some(engine);
        self.note(|| {
            let (rung, blocks) = (decision.basis().label(), decision.overlap_blocks);
            format!("router {at}: request {no} to engine {engine} by {rung}, {blocks} blocks")
        });
        self.checks.routers.decisions += 1;
        let checked = self.check_decision(at, run, no, &decision);
        self.write_down(run);
        if let Err(why) = checked {
            self.fail(format!("router {at}: request {no} {why}"));
        }
        if is_probe {
            self.judge_probe(run, no, &decision);
            self.end(at, run, no, SlotEnd::Aborted);
            return;
        }
        let from = self.process(host);
        let open = run.requests.get_mut(&no).unwrap();
        if !open.is_streaming {
            self.timer(host, decision.predicted_ttft, Timer::Prefilled(no));
        }
        let request = Box::new(open.request.clone());
        open.decision = Some(decision);
        let after = self.delay();
        let event = Event::Submit {
            engine,
            from,
            no,
            request,
        };
        self.plan(after, event);
    }

    fn engine_says(&mut self, at: usize, run: &mut RouterRun, no: u64, what: Http) {
        let Some(open) = run.requests.get_mut(&no) else {
            return;
        };
        let (Some(counter), Some(engine)) = (open.slot, open.engine) else {
            return;
        };
        match what {
            Http::Refused | Http::Broken => {
                let sight = match what {
                    Http::Refused => Observation::ConnectRefused,
                    _ => Observation::ProbeFailed,
                };
                let has_begun = open.is_prefilled && open.is_streaming;
                let end = SlotEnd::Failed;
                if has_begun || open.tried.len() >= 2 {
                    self.see(run, engine, sight);
                    self.end(at, run, no, end);
                    return;
                }
                open.tried.push(self.engines[engine].source.clone());
                open.slot = None;
                self.see(run, engine, sight);
                self.account(at, run, SlotEvent::End { counter, end });
                self.place(at, run, no);
            }
            Http::Rejected => self.end(at, run, no, SlotEnd::Failed),
            Http::FirstToken => {
                if open.is_streaming && !std::mem::replace(&mut open.is_prefilled, true) {
                    self.account(at, run, SlotEvent::FirstToken { counter });
                }
            }
            Http::Block => {
                if open.is_streaming {
                    self.account(at, run, SlotEvent::Grow { counter, blocks: 1 });
                }
            }
            Http::Done(cached_tokens) => {
                if let Some(cached_tokens) = cached_tokens {
                    self.usage_reported(at, run, no, cached_tokens);
                }
                self.end(at, run, no, SlotEnd::Completed);
            }
        }
    }

    fn client_leaves(&mut self, at: usize, run: &mut RouterRun, no: u64) {
        let Some(open) = run.requests.get(&no) else {
            return;
        };
        if let Some(engine) = open.engine {
            let from = self.process(self.routers[at].host);
            let after = self.delay();
            let no = Some(no);
            self.plan(after, Event::HangUp { engine, from, no });
        }
        if self.broken == Some(Breakage::SlotLeaked) {
            run.requests.remove(&no);
            return;
        }
        self.end(at, run, no, SlotEnd::Aborted);
    }

    fn end(&mut self, at: usize, run: &mut RouterRun, no: u64, end: SlotEnd) {
        let open = run.requests.remove(&no);
        if let Some(counter) = open.and_then(|open| open.slot) {
            self.account(at, run, SlotEvent::End { counter, end });
        }
    }

    fn account(&mut self, at: usize, run: &mut RouterRun, event: SlotEvent) {
        self.in_router(at, || run.core.note(event));
        self.write_down(run);
    }

    // --- always

    fn check_decision(
        &self,
        at: usize,
        run: &mut RouterRun,
        no: u64,
        decision: &Decision,
    ) -> Result<(), String> {
        let open = &run.requests[&no];
        let (worker, tried) = (&decision.source, &open.tried);
        if tried.contains(worker) {
            return Err(format!("goes to {worker} again"));
        }
        let engine = self.worker(worker).unwrap();
        if self.is_known_gone(at, run, engine) {
            return Err(format!("goes to {worker}, which is gone"));
        }
        let now = self.router_now(at);
        let parts: &[SourceAnswer] = match open.answer.as_deref() {
            Some(IndexAnswer::Runs { sources, .. }) => sources,
            Some(IndexAnswer::Behind { .. }) | None => &[],
        };
        let mut believed = BTreeMap::new();
        for part in parts {
            let Some(engine) = self.worker(&part.source) else {
                continue;
            };
            let may = run.shown.entry(engine).or_default().take(part, now);
            believed.insert(part.source.clone(), (part, may));
        }
        for terms in &decision.weighed {
            let source = run.core.core().source(terms.source).unwrap().clone();
            let mut by_index = terms.overlap;
            by_index.gpu -= terms.reported_blocks;
            let has_credit = by_index != Tiers::default();
            let Some((part, may_be_believed)) = believed.get(&source) else {
                if has_credit {
                    return Err(format!("credits {source}, of which nothing was said"));
                }
                continue;
            };
            if has_credit && !may_be_believed {
                return Err(format!("credits {source} by what is overtaken: {part:?}"));
            }
            let credited = |state: SourceState, run| if state.gives_credit() { run } else { 0 };
            let said = Tiers {
                gpu: credited(part.states.gpu, part.run.gpu),
                cpu: credited(part.states.cpu, part.run.cpu),
                disk: credited(part.states.disk, part.run.disk),
            };
            let of_its_size = self.engines[self.worker(&source).unwrap()]
                .life
                .config
                .block_size
                == open.prompt.block_size();
            let credit_max = if of_its_size {
                open.prompt.credit_max()
            } else {
                0
            };
            let right = capped(said, credit_max);
            let is_right = by_index == right || !has_credit && terms.state >= SourceState::Stale;
            if !is_right || terms.state < part.states.gpu {
                return Err(format!("credits {by_index:?} of {source}, of {part:?}"));
            }
        }
        Ok(())
    }

    /// Whether this router must know that the engine is gone.
    fn is_known_gone(&self, at: usize, run: &RouterRun, engine: usize) -> bool {
        let down_since = self.engines[engine].past.last().map(|past| past.ended);
        !self.engines[engine].is_up && self.has_learnt(at, run, engine, down_since)
    }

    /// An engine of which this router must know that it runs.
    fn known_well(&self, at: usize, run: &RouterRun) -> Option<usize> {
        let is_well = |engine: &usize| {
            let up_since = Some(self.engines[*engine].up_since);
            self.engines[*engine].is_up && self.has_learnt(at, run, *engine, up_since)
        };
        (0..self.engines.len()).find(is_well)
    }

    /// Must it have seen by now what an engine has been since then?
    fn has_learnt(&self, at: usize, run: &RouterRun, engine: usize, since: Option<At>) -> bool {
        let way = if self.rates.late > 0 || self.was_late {
            Duration::from_secs(2)
        } else {
            Duration::from_millis(40)
        };
        let known_after = Duration::from_millis(1_050) + 3 * way;
        let ran_since = self.hosts[self.routers[at].host].stood_until;
        match (since, run.met.get(&engine)) {
            (Some(since), Some(met)) => since.max(ran_since).max(*met) + known_after < self.now,
            (Some(_) | None, Some(_) | None) => false,
        }
    }

    /// A decision in the calm rests on what the index knows of every worker.
    fn judge_probe(&self, run: &mut RouterRun, no: u64, decision: &Decision) {
        let open = &run.requests[&no];
        let parts: &[SourceAnswer] = match open.answer.as_deref() {
            Some(IndexAnswer::Runs { sources, .. }) => sources,
            Some(IndexAnswer::Behind { .. }) | None => &[],
        };
        let is_well = |terms: &warmroute_router::route::Terms| {
            let source = run.core.core().source(terms.source).cloned();
            let part = parts
                .iter()
                .find(|part| Some(&part.source) == source.as_ref());
            terms.state == SourceState::Exact
                || part.is_some_and(|part| part.reason == Some(UnknownReason::Memory))
        };
        let all = decision.weighed.len() == self.engines.len();
        if all && decision.weighed.iter().all(is_well) {
            run.probed = Some(self.now);
            return;
        }
        let states: Vec<_> = decision.weighed.iter().map(|terms| terms.state).collect();
        run.doubted = Some(format!("{states:?} of {parts:?}"));
    }
}
