//! Requests of a router's clients (`client`) as the world sees them: when they come, what engines
//! do with them, and what has to hold of every decision.
//!
//! A worker is *gone* when its engine does not run. A router can know it from its own look at the
//! engine's HTTP, each second: at the latest after one such interval and three ways through the
//! network (an earlier look's answer, the next look, and its answer), as long as the router itself
//! runs. From then on it must not choose it. Before, it may, and learns it from the refused
//! connection.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio_util::sync::CancellationToken;
use warmroute_indexer::Handle;
use warmroute_proto::codec::Message as _;
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::query::{IndexAnswer, IndexQuery, SourceAnswer, SourceState, UnknownReason};
use warmroute_proto::roster::{
    DeepHolderQuery, HolderAnswer, HolderPart, HolderQuery, RosterPage, RosterRow,
};
use warmroute_proto::{BlockSize, LocalHash, PrefixHash, Seed, Source, Tier, Tiers, codec};
use warmroute_router::route::Prompt;
use warmroute_router::route::cost::capped;
use warmroute_router::route::index_view::{ANSWER_MEMORY, LAG_MAX};
use warmroute_router::sim::EngineRequest;
use xxhash_rust::xxh3::xxh3_64;

use super::World;
use super::client::{AnswerForm, ClientNews, ClientRequest, Decided, StatedSource};
use super::host::{Event, Input, Kind, Timer};
use super::life::draw_request;
use super::plane::At;
use super::replica::Written;
use super::router::{HEALTH_EVERY, PROBE_EVERY, RouterRun};
use super::trouble::Trouble;

/// Clients come so long into the calm.
const COME_ON: Duration = Duration::from_secs(3);
/// The view keeps numbers of so short a time as one.
const GRAIN: Duration = Duration::from_millis(10);

/// What was seen of the routers.
#[derive(Default)]
pub(super) struct RouterChecks {
    pub(super) decisions: u64,
    /// Decisions that moved a request.
    pub(super) moves: u64,
    /// Shortfalls that an index explained.
    pub(super) rechecks: u64,
    /// Requests that no worker could take.
    pub(super) refused: u64,
    /// Credited sources in answers to routers, compared with the engines.
    pub(super) answers: u64,
    /// Views of other routers' load, compared with what these wrote.
    pub(super) views: u64,
    pub(super) written: Arc<Mutex<Written>>,
    /// What indexers answered to each question: sources with blocks.
    pub(super) answered: BTreeMap<u64, Vec<(Source, Tiers<u32>)>>,
    /// Where messages are small: the questions that later parts of a prompt continue, by the prefix
    /// hash of their last block.
    pub(super) continued: BTreeMap<PrefixHash, Vec<LocalHash>>,
    /// Answers to later parts that name sources.
    pub(super) later_parts: u64,
    /// The source of each number of a roster.
    pub(super) names: BTreeMap<(u64, u32), Source>,
    pub(super) index_well_since: Option<At>,
}

/// What answers showed of a source, or of the log.
pub(super) struct Shown<G> {
    generation: Option<G>,
    generation_at: Option<Instant>,
    /// Records applied, and when first seen; ascending.
    seen: Vec<(u64, Instant)>,
    /// An answer without a number shows no number.
    highest_at: Option<Instant>,
}

impl<G> Default for Shown<G> {
    fn default() -> Self {
        Self {
            generation: None,
            generation_at: None,
            seen: Vec::new(),
            highest_at: None,
        }
    }
}

impl<G: Copy + Ord> Shown<G> {
    /// May this one be believed?
    fn take(&mut self, generation: G, applied: Option<u64>, now: Instant) -> bool {
        let is_forgotten = |at: Option<Instant>| at.is_none_or(|at| now - at >= ANSWER_MEMORY);
        if Some(generation) < self.generation && !is_forgotten(self.generation_at) {
            return false;
        }
        if self.generation != Some(generation) {
            *self = Self {
                generation: Some(generation),
                ..Self::default()
            };
        }
        self.generation_at = Some(now);
        let Some(applied) = applied else {
            return true;
        };
        if self.seen.last().is_some_and(|(last, _)| *last > applied)
            && is_forgotten(self.highest_at)
        {
            self.seen.clear();
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
/// What a request is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Answer,
    /// Only the decision counts.
    Probe,
}

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
                    self.arrive(at, run, Purpose::Answer);
                }
            }
            // The process runs when its probes are due: they leave at their own time.
            Input::Timer(Timer::Health) => self.timer(host, HEALTH_EVERY, Timer::Health),
            Input::Timer(Timer::Probe) => {
                self.timer(host, PROBE_EVERY, Timer::Probe);
                let since = self.checks.routers.index_well_since;
                if since.is_some_and(|since| run.probed.is_none_or(|probed| probed < since)) {
                    self.arrive(at, run, Purpose::Probe);
                }
            }
            Input::Timer(Timer::Leave(no)) => {
                if let Some(leaves) = run.leaves.remove(&no) {
                    leaves.cancel();
                }
            }
            Input::Http(no, what) => {
                if let Some(call) = run.calls.get(&no) {
                    // A full queue loses it.
                    let _lost = call.try_send(what);
                }
            }
            other => panic!("a router receives {other:?}"),
        }
    }

    fn arrive(&mut self, at: usize, run: &mut RouterRun, purpose: Purpose) {
        let Some(&engine) = run.met.keys().next() else {
            return;
        };
        let size = self.engines[engine].life.config.block_size;
        // Where one engine's blocks are large and another one's cache is small, most prompts fit
        // nowhere.
        let draws = match purpose {
            Purpose::Probe => PROBE_DRAWS,
            Purpose::Answer => 1,
        };
        let Some(request) = (0..draws).find_map(|_| self.some_request(size)) else {
            return;
        };
        let (lora, salt) = (request.lora_name.as_deref(), request.cache_salt.as_deref());
        let cut = self.engines[engine].life.config.block_cut();
        let prompt = Prompt::new(&request.prompt, cut, Seed::new(lora, salt));
        let request = Arc::new(ClientRequest {
            request,
            prompt: Arc::new(prompt),
            is_streaming: self.rng.u8(0..4) > 0,
            is_probe: purpose == Purpose::Probe,
            number: run.next_request,
        });
        let no = run.next_request;
        run.next_request += 1;
        let leaves = CancellationToken::new();
        if purpose == Purpose::Answer && self.rng.u8(0..6) == 0 {
            let after = self.millis(0..3_000);
            self.timer(self.routers[at].host, after, Timer::Leave(no));
            run.leaves.insert(no, leaves.clone());
        }
        let serve = Arc::clone(&run.client).serve(request);
        let client = async move {
            leaves.run_until_cancelled(serve).await;
        };
        self.in_router(at, || run.clients.spawn(client));
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

    // --- what indexers answer

    /// What an indexer's process answers to a router.
    pub(super) fn check_served(&mut self, host: usize, question: &Bytes, answer: &Bytes) {
        let Kind::Indexer(at) = self.hosts[host].kind else {
            return;
        };
        match codec::kind(question) {
            Some(IndexQuery::KIND) => {
                if let (Ok(query), Ok(answer)) = (codec::decode(question), codec::decode(answer)) {
                    self.check_answers(at, &query, &answer);
                }
            }
            Some(HolderQuery::KIND) => {
                let query = codec::decode::<HolderQuery>(question);
                let answer = codec::decode(answer);
                if let (Ok(query), Ok(HolderAnswer::Holders(part))) = (query, answer) {
                    self.check_holders(at, &query.blocks, &part);
                }
            }
            Some(DeepHolderQuery::KIND) => {
                let query = codec::decode::<DeepHolderQuery>(question);
                let answer = codec::decode(answer);
                if let (Ok(query), Ok(HolderAnswer::Holders(part))) = (query, answer) {
                    self.check_later_part(at, query, &part);
                }
            }
            _ => {
                if let Ok(page) = codec::decode::<RosterPage>(answer) {
                    self.learn_names(page.roster.0, &page.rows);
                }
            }
        }
    }

    /// A number of a roster stands for one source only.
    fn learn_names(&mut self, roster: u64, rows: &[RosterRow]) {
        for RosterRow { number, source, .. } in rows {
            let names = &mut self.checks.routers.names;
            let known = names
                .entry((roster, number.0))
                .or_insert_with(|| source.clone());
            if known != source {
                let known = known.clone();
                self.fail(format!(
                    "roster {roster}: {number:?} is {known} and {source}"
                ));
            }
        }
    }

    /// An answer to a later part is one about all blocks down to its last. It says nothing of
    /// sources that it does not name: the index may know no source that holds the blocks before.
    fn check_later_part(&mut self, at: usize, query: DeepHolderQuery, part: &HolderPart) {
        let Some(mut blocks) = self
            .checks
            .routers
            .continued
            .get(&query.before.prefix)
            .cloned()
        else {
            self.fail(format!(
                "indexer {at} is asked to go on from {:?}",
                query.before
            ));
            return;
        };
        blocks.extend(query.blocks);
        let answers = self.named_answers(&blocks, part);
        self.checks.routers.later_parts += u64::from(!answers.is_empty());
        self.check_all(at, &blocks, &answers);
    }

    fn check_holders(&mut self, at: usize, blocks: &[LocalHash], part: &HolderPart) {
        self.learn_names(part.roster.0, &part.changes);
        let mut answers = self.named_answers(blocks, part);
        // A source that is not named holds nothing. What it has applied is not in the answer.
        let position = self.read_index(at, Handle::position);
        if part.next.is_none() && position == Some(part.position) {
            for standing in self.standings(at) {
                let is_named = answers.iter().any(|named| named.source == standing.source);
                if let Some(generation) = standing.generation.filter(|_| !is_named) {
                    answers.push(SourceAnswer {
                        source: standing.source,
                        generation,
                        number: standing.number,
                        engine_seq: standing.engine_seq,
                        states: standing.states,
                        reason: None,
                        proof_age_ms: 0,
                        run: Tiers::default(),
                    });
                }
            }
        }
        self.check_all(at, blocks, &answers);
    }

    /// What an answer about these blocks says of the sources that it names in detail.
    fn named_answers(&mut self, blocks: &[LocalHash], part: &HolderPart) -> Vec<SourceAnswer> {
        let mut answers = Vec::new();
        for group in &part.groups {
            for number in group.members.iter() {
                let name = self.checks.routers.names.get(&(part.roster.0, number.0));
                let detail = part.details.iter().find(|detail| detail.source == number);
                let (Some(source), Some(detail)) = (name, detail) else {
                    continue;
                };
                answers.push(SourceAnswer {
                    source: source.clone(),
                    generation: detail.generation,
                    number: detail.number,
                    engine_seq: detail.engine_seq,
                    states: group.states,
                    reason: None,
                    proof_age_ms: 0,
                    run: group.run,
                });
            }
        }
        self.note_answers(blocks, &answers);
        answers
    }

    fn check_all(&mut self, at: usize, blocks: &[LocalHash], answers: &[SourceAnswer]) {
        if self.is_clock_unseen(self.indexers[at].host) {
            return;
        }
        let chain: Vec<PrefixHash> = prefix_hashes(None, blocks).collect();
        let age_max = self.age_max();
        for answer in answers {
            if let Err(why) = self.check_answer(answer, &chain, age_max) {
                self.fail(format!("indexer {at} answers of {}: {why}", answer.source));
            }
        }
    }

    fn note_answers(&mut self, question: &[LocalHash], answers: &[SourceAnswer]) {
        let said = answers.iter().filter(|part| part.run != Tiers::default());
        let said = said.map(|part| (part.source.clone(), part.run));
        let answered = &mut self.checks.routers.answered;
        answered.entry(hash(question)).or_default().extend(said);
        if self.has_small_messages()
            && let Some(last) = prefix_hashes(None, question).last()
        {
            let continued = &mut self.checks.routers.continued;
            continued.insert(last, question.to_vec());
        }
    }

    const fn has_small_messages(&self) -> bool {
        self.rates.set.record_bytes_max.is_some()
    }

    /// Checks an indexer's answer as of the moment at which it is sent.
    fn check_answers(&mut self, at: usize, query: &IndexQuery, answer: &IndexAnswer) {
        let IndexAnswer::Runs { sources, .. } = answer else {
            return;
        };
        self.note_answers(&query.blocks, sources);
        self.check_all(at, &query.blocks, sources);
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

    // --- what clients report

    pub(super) fn client_reports(&mut self, host: usize, news: ClientNews) {
        let Kind::Router(at) = self.hosts[host].kind else {
            return;
        };
        let Some(mut run) = self.routers[at].run.take() else {
            return;
        };
        let from = self.process(host);
        match news {
            ClientNews::Decided(decided) => self.decided(at, &mut run, &decided),
            ClientNews::Refused(refusal, tried) => {
                self.checks.routers.refused += 1;
                if tried == 0
                    && let Some(engine) = self.known_well(at, &run)
                {
                    self.fail(format!("router {at}: {refusal}, but engine {engine} runs"));
                }
            }
            ClientNews::Submit(no, source, request, to) => {
                run.calls.insert(no, to);
                let after = self.delay();
                let event = Event::Submit {
                    engine: self.worker(&source).unwrap(),
                    from,
                    no,
                    request: Box::new(request),
                };
                self.plan(after, event);
            }
            ClientNews::HangUp(no, source) => {
                run.calls.remove(&no);
                let engine = self.worker(&source).unwrap();
                let no = Some(no);
                let after = self.delay();
                self.plan(after, Event::HangUp { engine, from, no });
            }
            ClientNews::Ended(end) => self.request_ended(at, end),
            ClientNews::RunAfter(after) => self.run_after(host, after),
        }
        self.routers[at].run = Some(run);
    }

    fn decided(&mut self, at: usize, run: &mut RouterRun, decided: &Decided) {
        let Decided { no, decision, .. } = decided;
        let engine = self.worker(&decision.source).unwrap();
        self.note(|| {
            let (rung, blocks) = (decision.basis().label(), decision.overlap_blocks);
            format!("router {at}: request {no} to engine {engine} by {rung}, {blocks} blocks")
        });
        self.checks.routers.decisions += 1;
        self.checks.routers.moves += u64::from(decided.moved_from.is_some());
        if let Err(why) = self.check_decision(at, run, decided) {
            self.fail(format!("router {at}: request {no} {why}"));
        }
        if decided.request.is_probe {
            self.judge_probe(run, decided);
        }
    }

    // --- always

    fn check_decision(
        &self,
        at: usize,
        run: &mut RouterRun,
        decided: &Decided,
    ) -> Result<(), String> {
        let Decided {
            decision, tried, ..
        } = decided;
        let worker = &decision.source;
        if tried.contains(worker) {
            return Err(format!("goes to {worker} again"));
        }
        let engine = self.worker(worker).unwrap();
        if self.is_known_gone(at, run, engine) {
            return Err(format!("goes to {worker}, which is gone"));
        }
        self.check_stated(decided)?;
        let believed = self.believed(at, run, decided);
        let prompt = &decided.request.prompt;
        for terms in &decision.weighed {
            let source = run
                .shared_core()
                .core()
                .source(terms.source)
                .unwrap()
                .clone();
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
            let engine = &self.engines[self.worker(&source).unwrap()];
            let is_cut_alike = engine.life.config.block_cut() == prompt.block_cut();
            let credit_max = if is_cut_alike { prompt.credit_max() } else { 0 };
            let right = capped(said, credit_max);
            // What the engine reported, where the index gives no credit.
            let by_reports = terms.reported_blocks > 0 && terms.state == SourceState::Unverified;
            let is_weak = terms.state >= SourceState::Stale || by_reports;
            let is_right = by_index == right || !has_credit && is_weak;
            if !is_right || terms.state < part.states.gpu && !by_reports {
                return Err(format!("credits {by_index:?} of {source}, of {part:?}"));
            }
        }
        Ok(())
    }

    /// A router goes by what an indexer answered to the request's own question, or, where messages
    /// are small, to its beginning.
    fn check_stated(&self, decided: &Decided) -> Result<(), String> {
        let blocks = decided.request.prompt.hit_blocks();
        let least = match self.has_small_messages() {
            true => 0,
            false => blocks.len(),
        };
        let questions = (least..=blocks.len()).map(|len| hash(&blocks[..len]));
        let answered = questions.filter_map(|question| self.checks.routers.answered.get(&question));
        let answered: Vec<_> = answered.flatten().collect();
        let was_said = |part: &&StatedSource| {
            let said = (part.source.clone(), part.run);
            part.run == Tiers::default() || answered.contains(&&said)
        };
        match decided.stated.sources.iter().find(|part| !was_said(part)) {
            Some(part) => Err(format!("reads {part:?}, which no indexer answered")),
            None => Ok(()),
        }
    }

    /// What the answer states of each source, and whether it may be believed.
    fn believed<'d>(
        &self,
        at: usize,
        run: &mut RouterRun,
        decided: &'d Decided,
    ) -> BTreeMap<Source, (&'d StatedSource, bool)> {
        let now = self.router_now(at);
        let stated = &decided.stated;
        let position_may = match stated.position {
            None => stated.form == AnswerForm::Names,
            Some(of) => {
                let log = (of.log.created_unix_ns, of.log.nonce);
                let may = run.shown_log.take(log, Some(of.position.0), now);
                // Only a number of records shows that an answer with names is overtaken.
                may || stated.form == AnswerForm::Names
            }
        };
        let mut believed = BTreeMap::new();
        for part in &stated.sources {
            if let Some(engine) = self.worker(&part.source) {
                let shown = run.shown.entry(engine).or_default();
                let may = shown.take(part.generation, part.applied, now);
                believed.insert(part.source.clone(), (part, may && position_may));
            }
        }
        believed
    }

    /// Whether this router must know that the engine is gone, or asleep.
    fn is_known_gone(&self, at: usize, run: &RouterRun, engine: usize) -> bool {
        let node = &self.engines[engine];
        let since = match node.trouble.present {
            Some(Trouble::Asleep) => Some(node.trouble.since),
            Some(_) | None if node.is_up => return false,
            Some(_) | None => node.past.last().map(|past| past.ended),
        };
        self.has_learnt(at, run, engine, since)
    }

    /// An engine of which this router must know that it runs.
    fn known_well(&self, at: usize, run: &RouterRun) -> Option<usize> {
        let is_well = |engine: &usize| {
            let node = &self.engines[*engine];
            node.is_up
                && node.trouble.present.is_none()
                && self.has_learnt(at, run, *engine, Some(node.up_since))
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
    fn judge_probe(&self, run: &mut RouterRun, decided: &Decided) {
        let Decided {
            decision, stated, ..
        } = decided;
        let parts = &stated.sources;
        let is_well = |terms: &warmroute_router::route::Terms| {
            let source = run.shared_core().core().source(terms.source).cloned();
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

/// Stands for the question about these blocks.
fn hash(question: &[LocalHash]) -> u64 {
    let bytes: Vec<u8> = question
        .iter()
        .flat_map(|block| block.0.to_le_bytes())
        .collect();
    xxh3_64(&bytes)
}
