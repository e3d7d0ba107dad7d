use super::*;
use crate::engine_load::{EngineBounds, EngineReading, READING_LIFE, RoutedLoad};
use crate::index_view::IndexView;
use crate::prompt::SessionKey;
use crate::source_table::{SourceId, SourceTable};
use crate::speed::AcceptedPrefill;
use crate::terms::IndexKnowledge;
use crate::testing::start;
use proptest::prelude::{any, prop, prop_assert_eq, proptest};
use warmroute_proto::load::{LoadChange, SampledPrefix};
use warmroute_proto::query::{IndexAnswer, SourceAnswer};
use warmroute_proto::{
    BlockSize, DpRank, EngineSeq, Generation, LogPosition, RecordNumber, RouterId, Seed,
    StreamIdentity,
};

const ROUTER: RouterId = RouterId([1; 16]);

fn source(number: u32) -> Source {
    Source {
        worker: format!("w{number:03}").into(),
        dp_rank: DpRank(0),
    }
}

fn size() -> BlockSize {
    BlockSize::new(16).unwrap()
}

fn prompt(tokens: u32) -> Prompt {
    let tokens: Vec<u32> = (0..tokens).collect();
    Prompt::new(&tokens, size(), Seed::PLAIN)
}

/// A fleet of idle sources that nothing is known of.
struct Fixture {
    table: SourceTable,
    candidates: Vec<Candidate>,
    trusted: TrustedAnswer,
    slots: Slots,
    expected: Expectations,
    stalls: StallDetector,
    engines: EngineLoads,
    speed: SpeedTracker,
    slowness: SlownessTracker,
    knobs: Knobs,
    exclude: Vec<Source>,
    next: u64,
    now: Instant,
}

impl Fixture {
    fn of(count: u32) -> Self {
        let mut table = SourceTable::default();
        let candidates = (0..count)
            .map(|number| Candidate {
                id: table.intern(&source(number)),
                source: source(number),
                url: "http://w".into(),
                cut: Some(size().into()),
                main_attention_only: true,
                role: warmroute_proto::registry::WorkerRole::Both,
                on_trial: false,
            })
            .collect();
        Self {
            table,
            candidates,
            trusted: TrustedAnswer::default(),
            slots: Slots::default(),
            expected: Expectations::default(),
            stalls: StallDetector::default(),
            engines: EngineLoads::default(),
            speed: SpeedTracker::default(),
            slowness: SlownessTracker::default(),
            knobs: Policy::Kv.into(),
            exclude: Vec::new(),
            next: 0,
            now: start(),
        }
    }

    fn id(&self, number: u32) -> SourceId {
        self.table.id(&source(number)).unwrap()
    }

    /// The index's answer: state and run of some sources.
    fn index(&mut self, parts: &[(u32, SourceState, Tiers<u32>)]) {
        let sources = parts
            .iter()
            .map(|&(number, state, run)| SourceAnswer {
                source: source(number),
                generation: Generation(1),
                number: Some(RecordNumber(1)),
                engine_seq: Some(EngineSeq(9)),
                states: Tiers::all(state),
                reason: None,
                proof_age_ms: 0,
                run,
            })
            .collect();
        let answer = IndexAnswer::Runs {
            log: StreamIdentity {
                created_unix_ns: 0,
                nonce: 0,
            },
            position: LogPosition(1),
            sources,
        };
        self.trusted = IndexView::default().judge(&mut self.table, &answer.into(), self.now);
    }

    /// A request of another prompt on a source.
    fn load(&mut self, number: u32, prefill_tokens: u32, blocks: u32) {
        self.next += 1;
        let change = LoadChange::AddRequest {
            counter: self.next,
            source: source(number),
            prefill_tokens,
            blocks,
            prompt: SampledPrefix::default(),
        };
        let incarnation = Generation(1);
        self.slots
            .apply(&mut self.table, ROUTER, incarnation, &change);
        let slot = SlotKey {
            router: ROUTER,
            counter: self.next,
        };
        let prefill = AcceptedPrefill {
            source: self.id(number),
            tokens: prefill_tokens,
            outstanding_tokens: 0,
            foreign_tokens: 0,
            block_tokens: 16,
        };
        self.speed.accepted(slot, prefill, self.now);
    }

    fn expect(&mut self, number: u32, prompt: &Prompt) {
        let id = self.id(number);
        self.next += 1;
        self.expected
            .predictions
            .sent(ROUTER, self.next, id, prompt.sampled());
    }

    /// A request of this prompt completed there.
    fn sent(&mut self, number: u32, prompt: &Prompt) {
        let (id, hashes) = (self.id(number), prompt.sampled().hashes.clone());
        self.expected.sent.completed(id, hashes, self.now);
    }

    fn decide_with(
        &self,
        prompt: &Prompt,
        turn: u64,
        rng: &mut Rng,
    ) -> Result<Decision, RouteRefusal> {
        let input = DecisionInput {
            turn,
            ..self.input(prompt)
        };
        decide(&input, rng)
    }

    fn input<'a>(&'a self, prompt: &'a Prompt) -> DecisionInput<'a> {
        DecisionInput {
            prompt,
            candidates: &self.candidates,
            leg: Leg::Whole,
            exclude: &self.exclude,
            except: None,
            turn: 0,
            trusted: &self.trusted,
            slots: &self.slots,
            expected: &self.expected,
            stalls: &self.stalls,
            engines: &self.engines,
            speed: &self.speed,
            slowness: &self.slowness,
            knobs: &self.knobs,
            now: self.now,
        }
    }

    fn decide(&self, prompt: &Prompt) -> Decision {
        self.decide_with(prompt, 0, &mut Rng::with_seed(1)).unwrap()
    }

    fn refusal(&self, prompt: &Prompt) -> RouteRefusal {
        self.decide_with(prompt, 0, &mut Rng::with_seed(1))
            .unwrap_err()
    }
}

const fn gpu(gpu: u32) -> Tiers<u32> {
    Tiers {
        gpu,
        cpu: 0,
        disk: 0,
    }
}

#[test]
fn the_source_that_holds_the_prefix_wins_and_the_decision_explains_it() {
    let mut fixture = Fixture::of(3);
    fixture.index(&[
        (0, SourceState::Exact, gpu(1)),
        (1, SourceState::Exact, gpu(5)),
        (2, SourceState::Exact, gpu(0)),
    ]);
    let decision = fixture.decide(&prompt(100));
    assert_eq!(decision.source, source(1));
    assert_eq!((decision.overlap_blocks, decision.predicted_blocks), (5, 0));
    assert_eq!(decision.index_state, SourceState::Exact);
    assert_eq!(decision.basis(), DecisionBasis::Index);
    assert_eq!(decision.prefill_tokens, 20);
    assert_eq!(decision.weighed.len(), 3);
    assert_eq!(decision.claim.engine_seq, Some(EngineSeq(9)));
}

#[test]
fn credit_is_capped_in_header_cost_and_claim() {
    let mut fixture = Fixture::of(1);
    // The engine holds all four blocks of a prompt of four whole blocks.
    fixture.index(&[(0, SourceState::Exact, gpu(4))]);
    let decision = fixture.decide(&prompt(64));
    assert_eq!(decision.overlap_blocks, 3);
    assert_eq!(decision.claim.blocks, 3);
    assert_eq!(decision.chosen.prefill_blocks, 1.0);
    assert_eq!(decision.prefill_tokens, 16);
}

#[test]
fn load_outweighs_overlap_when_it_is_larger() {
    let mut fixture = Fixture::of(2);
    fixture.index(&[(0, SourceState::Exact, gpu(5))]);
    fixture.load(0, 0, 4);
    assert_eq!(fixture.decide(&prompt(100)).source, source(0));
    fixture.load(0, 32, 4);
    assert_eq!(fixture.decide(&prompt(100)).source, source(1));
}

#[test]
fn a_state_without_credit_credits_nothing_and_is_reported() {
    for state in [
        SourceState::Stale,
        SourceState::CatchingUp,
        SourceState::Unknown,
    ] {
        let mut fixture = Fixture::of(1);
        fixture.index(&[(0, state, gpu(5))]);
        let decision = fixture.decide(&prompt(100));
        assert_eq!(decision.overlap_blocks, 0);
        assert_eq!(decision.index_state, state);
        assert_eq!(decision.basis(), DecisionBasis::LoadOnly);
    }
}

#[test]
fn a_stale_tier_is_as_if_it_held_nothing() {
    let mut fixture = Fixture::of(1);
    let run = Tiers {
        gpu: 2,
        cpu: 2,
        disk: 0,
    };
    fixture.index(&[(0, SourceState::Exact, run)]);
    let both = fixture.decide(&prompt(100));
    assert_eq!(both.overlap_blocks, 4);
    assert_eq!(both.chosen.prefill_blocks, 100.0 / 16.0 - 2.0 - 2.0 * 0.8);
}

#[test]
fn prediction_moves_the_choice_but_never_the_overlap() {
    let mut fixture = Fixture::of(2);
    let asked = prompt(100);
    fixture.index(&[
        (0, SourceState::Exact, gpu(1)),
        (1, SourceState::Exact, gpu(0)),
    ]);
    fixture.expect(1, &asked);
    let decision = fixture.decide(&asked);
    assert_eq!(decision.source, source(1));
    assert_eq!((decision.overlap_blocks, decision.predicted_blocks), (0, 6));
    assert_eq!(decision.claim.blocks, 0);
    assert_eq!(
        decision.basis(),
        DecisionBasis::Index,
        "the index was there, and said nothing"
    );
}

#[test]
fn prediction_counts_only_beyond_the_credit() {
    let mut fixture = Fixture::of(1);
    let asked = prompt(100);
    fixture.index(&[(0, SourceState::Exact, gpu(4))]);
    fixture.expect(0, &asked);
    let decision = fixture.decide(&asked);
    assert_eq!((decision.overlap_blocks, decision.predicted_blocks), (4, 2));
}

#[test]
fn without_an_answer_prediction_decides_and_then_load_alone() {
    let mut fixture = Fixture::of(2);
    let asked = prompt(100);
    fixture.load(0, 0, 1);
    let by_load = fixture.decide(&asked);
    assert_eq!(
        (by_load.source.clone(), by_load.basis()),
        (source(1), DecisionBasis::LoadOnly)
    );
    assert_eq!(by_load.index_state, SourceState::Unknown);
    fixture.expect(0, &asked);
    let by_prediction = fixture.decide(&asked);
    assert_eq!(by_prediction.source, source(0));
    assert_eq!(by_prediction.basis(), DecisionBasis::Prediction);
    assert_eq!(by_prediction.index_state, SourceState::Unknown);
}

#[test]
fn blocks_of_another_size_are_not_comparable() {
    let mut fixture = Fixture::of(1);
    fixture.candidates[0].cut = BlockSize::new(32).map(Into::into);
    fixture.index(&[(0, SourceState::Exact, gpu(5))]);
    let asked = prompt(100);
    fixture.expect(0, &asked);
    let decision = fixture.decide(&asked);
    assert_eq!((decision.overlap_blocks, decision.predicted_blocks), (0, 0));
    assert_eq!(decision.basis(), DecisionBasis::LoadOnly);
}

#[test]
fn predicted_blocks_of_other_tokens_are_not_comparable() {
    let mut fixture = Fixture::of(2);
    let matched = prompt(1600);
    fixture.expect(0, &matched);
    assert_eq!(fixture.decide(&matched).source, source(0));
    let mismatched = matched.with_mismatched(vec![source(0).worker]);
    let decision = fixture.decide(&mismatched);
    assert!(
        decision
            .weighed
            .iter()
            .all(|terms| terms.predicted_blocks == 0)
    );
    assert_eq!(decision.basis(), DecisionBasis::LoadOnly);
}

#[test]
fn equal_sources_share_requests_at_random() {
    let fixture = Fixture::of(4);
    let mut rng = Rng::with_seed(3);
    let mut counts = [0; 4];
    for _ in 0..4000 {
        let decision = fixture.decide_with(&prompt(100), 0, &mut rng).unwrap();
        counts[decision.claim.source.index()] += 1;
    }
    assert!(
        counts.iter().all(|count| (850..1150).contains(count)),
        "{counts:?}"
    );
}

#[test]
fn what_was_tried_is_not_tried_again() {
    let mut fixture = Fixture::of(2);
    fixture.exclude = vec![source(0)];
    assert_eq!(fixture.decide(&prompt(100)).source, source(1));
    fixture.exclude.push(source(1));
    assert_eq!(fixture.refusal(&prompt(100)), RouteRefusal::AllTried);
}

#[test]
fn a_stalled_source_is_left_out_unless_all_are() {
    let mut fixture = Fixture::of(2);
    let long_ago = Duration::from_secs(6);
    fixture.load(1, 0, 50);
    let (first, second) = (fixture.id(0), fixture.id(1));
    fixture.stalls.progressed(first, fixture.now);
    fixture.stalls.sent(100, first, Duration::ZERO, fixture.now);
    fixture.now += long_ago;
    fixture.stalls.advance(fixture.now);
    assert_eq!(fixture.decide(&prompt(100)).source, source(1));
    fixture
        .stalls
        .sent(101, second, Duration::ZERO, fixture.now - long_ago);
    fixture.stalls.advance(fixture.now);
    assert_eq!(fixture.decide(&prompt(100)).source, source(0));
}

/// A stream that breaks there costs its client the answer; another request is sent elsewhere.
#[test]
fn a_source_on_trial_gets_no_stream_unless_it_is_the_only_one() {
    let mut fixture = Fixture::of(2);
    fixture.load(1, 0, 50);
    fixture.candidates[0].on_trial = true;
    let stream = prompt(100).with_shown(true);
    assert_eq!(fixture.decide(&prompt(100)).source, source(0));
    assert_eq!(fixture.decide(&stream).source, source(1));
    fixture.exclude = vec![source(1)];
    assert_eq!(fixture.decide(&stream).source, source(0));
}

#[test]
fn when_all_are_full_the_refusal_has_a_retry_time() {
    let mut fixture = Fixture::of(2);
    fixture.knobs.active_max = Some(1);
    fixture.load(0, 0, 1);
    assert_eq!(fixture.decide(&prompt(100)).source, source(1));
    fixture.load(1, 0, 1);
    let refusal = fixture.refusal(&prompt(100));
    assert!(matches!(refusal, RouteRefusal::Full { retry_after } if retry_after > Duration::ZERO));
}

#[test]
fn round_robin_takes_turns() {
    let mut fixture = Fixture::of(3);
    fixture.knobs.policy = Policy::RoundRobin;
    fixture.load(0, 1000, 1000);
    let mut rng = Rng::with_seed(1);
    let order: Vec<_> = (0..6)
        .map(|turn| fixture.decide_with(&prompt(100), turn, &mut rng).unwrap())
        .map(|decision| decision.claim.source.index())
        .collect();
    assert_eq!(order, [0, 1, 2, 0, 1, 2]);
}

#[test]
fn least_load_counts_requests_and_random_nothing() {
    let mut fixture = Fixture::of(3);
    fixture.index(&[(0, SourceState::Exact, gpu(6))]);
    fixture.load(0, 0, 1);
    fixture.load(2, 0, 1);
    fixture.knobs.policy = Policy::LeastLoad;
    assert_eq!(fixture.decide(&prompt(100)).source, source(1));
    fixture.knobs.policy = Policy::Random;
    let mut rng = Rng::with_seed(5);
    let mut seen = [false; 3];
    for _ in 0..100 {
        let decision = fixture.decide_with(&prompt(100), 0, &mut rng).unwrap();
        seen[decision.claim.source.index()] = true;
    }
    assert_eq!(seen, [true; 3]);
}

#[test]
fn blocks_that_are_active_there_already_are_not_new() {
    let mut fixture = Fixture::of(2);
    let asked = prompt(100);
    let change = LoadChange::AddRequest {
        counter: 77,
        source: source(0),
        prefill_tokens: 0,
        blocks: asked.blocks_taken(),
        prompt: asked.sampled().clone(),
    };
    let incarnation = Generation(1);
    fixture
        .slots
        .apply(&mut fixture.table, ROUTER, incarnation, &change);
    let decision = fixture.decide(&asked);
    let of = |index: usize| decision.weighed[index].decode_blocks;
    // Seven active ones, of which six whole blocks are shared.
    assert_eq!((of(0), of(1)), (8.0, 7.0));
}

#[test]
fn the_first_tokens_time_counts_what_waits_there() {
    let mut fixture = Fixture::of(1);
    let idle = fixture.decide(&prompt(1000)).predicted_ttft;
    fixture.load(0, 100_000, 1);
    let busy = fixture.decide(&prompt(1000)).predicted_ttft;
    assert!(busy > idle + Duration::from_secs(5), "{idle:?}, {busy:?}");
}

#[test]
fn under_time_a_cached_prefix_outweighs_a_short_queue_and_not_a_long_one() {
    let prompt = prompt(8_000);
    let mut fixture = Fixture::of(2);
    fixture.knobs = Policy::Time.into();
    fixture.index(&[
        (0, SourceState::Exact, gpu(490)),
        (1, SourceState::Exact, gpu(0)),
    ]);
    assert_eq!(fixture.decide(&prompt).source, source(0));
    fixture.load(0, 4_000, 10);
    assert_eq!(fixture.decide(&prompt).source, source(0));
    fixture.load(0, 6_000, 10);
    assert_eq!(fixture.decide(&prompt).source, source(1));
    // The queue drains in part while nothing is reported.
    fixture.now += Duration::from_secs(2);
    assert_eq!(fixture.decide(&prompt).source, source(0));
}

#[test]
fn under_time_a_slow_source_takes_what_it_computes_as_fast() {
    let prompt = prompt(8_000);
    let mut fixture = Fixture::of(2);
    fixture.knobs = Policy::Time.into();
    for tokens in (0..200).map(|lesson| lesson * 100) {
        for (number, micros) in [(0, 50), (1, 500)] {
            let id = fixture.id(number);
            let elapsed = Duration::from_micros(20_000 + micros * tokens);
            fixture.speed.ttft.learn(id, tokens, elapsed);
        }
    }
    assert_eq!(fixture.decide(&prompt).source, source(0));
    // Five times the tokens here still end before the slow source's.
    fixture.load(0, 40_000, 10);
    assert_eq!(fixture.decide(&prompt).source, source(0));
    fixture.load(0, 80_000, 10);
    assert_eq!(fixture.decide(&prompt).source, source(1));
}

#[test]
fn under_time_the_fewest_active_requests_decide_between_near_times() {
    let prompt = prompt(800);
    let mut fixture = Fixture::of(3);
    fixture.knobs = Policy::Time.into();
    for (number, requests) in [(0, 3), (1, 2), (2, 3)] {
        for _ in 0..requests {
            fixture.load(number, 0, 0);
        }
    }
    // Learned noise, within what is near.
    for (number, micros) in [(0, 100), (1, 101), (2, 100)] {
        let id = fixture.id(number);
        for tokens in (0..100).map(|lesson| lesson * 100) {
            let elapsed = Duration::from_micros(20_000 + micros * tokens);
            fixture.speed.ttft.learn(id, tokens, elapsed);
        }
    }
    for seed in 0..20 {
        let decision = fixture.decide_with(&prompt, 0, &mut Rng::with_seed(seed));
        let decision = decision.unwrap();
        assert_eq!(decision.source, source(1));
        // What is shown agrees with the choice.
        assert_eq!(decision.chosen.probability, 1.0);
    }
}

/// The costs that are shown are those of the terms, although another source is cheaper.
#[test]
fn a_choice_among_near_times_shows_true_costs() {
    let mut fixture = Fixture::of(3);
    fixture.knobs = Policy::Time.into();
    fixture.load(1, 0, 0);
    for (number, micros) in [(0, 280), (1, 100), (2, 9000)] {
        let id = fixture.id(number);
        for tokens in (0..100).map(|lesson| lesson * 100) {
            let elapsed = Duration::from_micros(20_000 + micros * tokens);
            fixture.speed.ttft.learn(id, tokens, elapsed);
        }
    }
    let decision = fixture.decide(&prompt(16));
    let [chosen, cheaper, slow] = decision.weighed[..] else {
        panic!("not three: {:?}", decision.weighed);
    };
    assert_eq!(decision.source, source(0));
    let costs = [cheaper, chosen, slow].map(|terms| terms.cost);
    assert!(costs.is_sorted(), "{costs:?}");
    assert_eq!(
        [chosen, cheaper, slow].map(|terms| terms.is_near),
        [true, true, false]
    );
    for terms in &decision.weighed {
        assert!((cost_by_terms(terms, Policy::Time) - terms.cost).abs() < 1e-9);
    }
}

/// Neither load nor cache moves a session; a worker that is excluded does.
#[test]
fn a_session_sticks_to_its_source_for_every_router() {
    let mut fixture = Fixture::of(8);
    fixture.knobs.policy = Policy::Session;
    let asked =
        |session: u32, tokens| prompt(tokens).with_session(SessionKey::named(&session.to_string()));
    let owner = |fixture: &Fixture, session| fixture.decide(&asked(session, 100)).source;
    let owners: Vec<Source> = (0..40).map(|session| owner(&fixture, session)).collect();
    for number in 0..8 {
        assert!(owners.contains(&source(number)), "{number} of {owners:?}");
    }
    for number in 0..7 {
        fixture.load(number, 10_000, 1000);
    }
    let mut other = Fixture::of(8);
    other.knobs.policy = Policy::Session;
    other.candidates.reverse();
    for session in 0..40 {
        let before = &owners[session as usize];
        assert_eq!(&owner(&fixture, session), before);
        assert_eq!(&owner(&other, session), before);
    }
    fixture.exclude = vec![owners[0].clone()];
    assert_ne!(owner(&fixture, 0), owners[0]);
    let decision = fixture.decide(&prompt(100));
    let least = (decision.source, decision.policy);
    assert_eq!(least, (source(7), Policy::LeastLoad), "without a session");
}

#[test]
fn a_beginning_stays_on_its_source_until_the_bound() {
    let mut fixture = Fixture::of(4);
    fixture.knobs.policy = Policy::PrefixHash;
    let first = fixture.decide(&prompt(2000)).source;
    assert_eq!(
        fixture.decide(&prompt(3000)).source,
        first,
        "the first 1,024 tokens are equal"
    );
    let number = (0..4).find(|&number| source(number) == first).unwrap();
    fixture.load(number, 100, 1);
    // One request on four sources: two are the bound of the second one, ceil(1.25 x 2 / 4) = 1.
    assert_ne!(fixture.decide(&prompt(2000)).source, first);
    fixture.knobs.prefix_load_percent = 400;
    assert_eq!(fixture.decide(&prompt(2000)).source, first);
    let short = fixture.decide(&prompt(10));
    assert_eq!(short.policy, Policy::LeastLoad, "no whole block");
}

#[test]
fn two_random_sources_are_compared_by_load() {
    let mut fixture = Fixture::of(3);
    fixture.knobs.policy = Policy::PowerOfTwo;
    fixture.load(1, 0, 1);
    let mut rng = Rng::with_seed(5);
    let mut chosen = [0; 3];
    for _ in 0..200 {
        let decision = fixture.decide_with(&prompt(100), 0, &mut rng).unwrap();
        chosen[decision.claim.source.index()] += 1;
        assert_eq!(decision.chosen.probability, 0.5);
    }
    assert!(
        chosen[0] > 50 && chosen[1] == 0 && chosen[2] > 50,
        "{chosen:?}"
    );
}

/// The source's engine has requests from elsewhere: four run in half of its 1,000 blocks.
fn flood(fixture: &mut Fixture, number: u32, waiting: u32) {
    let (id, now) = (fixture.id(number), fixture.now);
    fixture.engines.set_bounds(Some(EngineBounds {
        foreign_waiting: 8,
        kv_usage: 0.9,
    }));
    let reading = EngineReading {
        running: 4,
        waiting,
        kv_usage: Some(0.5),
    };
    let routed = RoutedLoad::default();
    fixture.engines.learn(id, reading, routed, Some(1000), now);
}

#[test]
fn requests_from_elsewhere_are_a_term_of_both_costs() {
    for policy in [Policy::Kv, Policy::Time] {
        let mut fixture = Fixture::of(2);
        fixture.knobs = policy.into();
        // All of it but the last block.
        fixture.index(&[(0, SourceState::Exact, gpu(62))]);
        let prompt = prompt(1000);
        assert_eq!(fixture.decide(&prompt).source, source(0), "{policy:?}");
        flood(&mut fixture, 0, 2);
        let decision = fixture.decide(&prompt);
        assert_eq!(decision.source, source(1), "{policy:?}");
        let flooded = decision.weighed[0];
        assert_eq!((flooded.active_requests, flooded.foreign_requests), (0, 6));
        assert_eq!(flooded.foreign_prefill_blocks, 250.0);
        assert_eq!(flooded.foreign_decode_blocks, 750.0);
        let secs = fixture.speed.prefill_secs(fixture.id(0), 250 * 16);
        assert_eq!(flooded.time.foreign, secs);
        assert!(flooded.time.decode > decision.weighed[1].time.decode);
        if policy == Policy::Kv {
            let own = flooded.prefill_blocks + flooded.decode_blocks;
            assert_eq!(flooded.cost, own + 1000.0);
        }
    }
}

#[test]
fn policies_that_count_requests_count_foreign_ones() {
    for policy in [Policy::LeastLoad, Policy::PowerOfTwo] {
        let mut fixture = Fixture::of(2);
        fixture.knobs = policy.into();
        flood(&mut fixture, 0, 0);
        (0..3).for_each(|_| fixture.load(1, 10, 1));
        let decision = fixture.decide(&prompt(100));
        assert_eq!(decision.source, source(1));
        assert_eq!(decision.weighed[0].probability, 0.0);
    }
}

#[test]
fn a_source_whose_engine_is_at_a_bound_is_full() {
    let mut fixture = Fixture::of(2);
    fixture.knobs.active_max = Some(4);
    flood(&mut fixture, 0, 8);
    fixture.load(1, 10, 1);
    assert_eq!(fixture.decide(&prompt(100)).source, source(1));
    // Four foreign requests run there.
    flood(&mut fixture, 1, 0);
    let is_full = |refusal| matches!(refusal, RouteRefusal::Full { .. });
    assert!(is_full(fixture.refusal(&prompt(100))));
    fixture.knobs.active_max = None;
    assert_eq!(fixture.decide(&prompt(100)).source, source(1));
    flood(&mut fixture, 1, 8);
    assert!(is_full(fixture.refusal(&prompt(100))));
    fixture.now += READING_LIFE;
    fixture.decide(&prompt(100));
}

/// The sum that the docs state for the terms of a cost.
fn cost_by_terms(terms: &Terms, policy: Policy) -> f64 {
    let (time, factors) = (terms.time, terms.factors);
    if policy.is_timed() {
        let own = time.prefill * factors.prefill + time.decode * factors.decode;
        return time.queue + time.foreign + own;
    }
    let prefill = terms.prefill_blocks + terms.foreign_prefill_blocks - terms.prediction_blocks();
    let decode = terms.decode_blocks + terms.foreign_decode_blocks;
    prefill.max(0.0) * factors.prefill + decode * factors.decode
}

proptest! {
    /// The compared value of every candidate is that of its terms, whatever is known of it, and as if
    /// one slot were not open.
    #[test]
    fn candidates_are_compared_by_the_cost_of_their_terms(
        parts in prop::collection::vec((0..4_u8, 0..70_u32, 0..3_u32, 0..30_000_u32, 0..20_u32), 1..40),
        tokens in 0..1200_u32,
        is_text in any::<bool>(),
        policy in prop::sample::select(vec![Policy::Time, Policy::Kv, Policy::Approx]),
        except in 0..60_u64,
    ) {
        let mut fixture = Fixture::of(u32::try_from(parts.len()).unwrap());
        fixture.knobs = policy.into();
        let asked = match is_text {
            true => Prompt::of_text(&[&[7; 3000]], tokens, size(), Seed::PLAIN),
            false => prompt(tokens),
        };
        let states = [SourceState::Exact, SourceState::Partial, SourceState::Stale];
        let mut answers = Vec::new();
        for (number, &(state, run, requests, tokens, lessons)) in (0..).zip(&parts) {
            if let Some(&state) = states.get(usize::from(state)) {
                let run = Tiers { gpu: run / 3, cpu: run % 5, disk: run % 7 };
                answers.push((number, state, run));
            }
            for turn in 0..requests {
                fixture.load(number, tokens, turn + 1);
                fixture.sent(number, &prompt(16 * run));
            }
            if lessons % 3 == 0 {
                fixture.expect(number, &prompt(16 * lessons));
            }
            let elapsed = Duration::from_millis(lessons.into());
            let id = fixture.id(number);
            fixture.speed.ttft.learn(id, tokens.into(), elapsed);
            fixture.slowness.learn(id, elapsed, 5 * elapsed, fixture.now);
        }
        flood(&mut fixture, 0, 2);
        fixture.index(&answers);
        let slot = SlotKey { router: ROUTER, counter: except };
        for except in [None, Some(slot)] {
            let input = DecisionInput { except, ..fixture.input(&asked) };
            let scale = CandidateScale::new(&input);
            for candidate in &fixture.candidates {
                let (compared, terms) = (scale.compared(candidate), scale.terms(candidate));
                prop_assert_eq!(compared.cost.to_bits(), terms.cost.to_bits());
                let apart = (cost_by_terms(&terms, policy) - terms.cost).abs();
                prop_assert_eq!(apart > 1e-9 * terms.cost.max(1.0), false);
                prop_assert_eq!(compared.requests, terms.requests());
                prop_assert_eq!(compared.expected_blocks, terms.expected_blocks);
                let is_silent = compared.knowledge == IndexKnowledge::Silent;
                prop_assert_eq!(is_silent, terms.approximate_blocks.is_some());
            }
        }
    }
}

#[test]
fn the_cheapest_of_many_candidates_are_explained() {
    let mut fixture = Fixture::of(40);
    for number in 0..40 {
        fixture.load(number, 10_000 + number * 7 % 40 * 1000, 1);
    }
    let decision = fixture.decide(&prompt(100));
    assert_eq!(decision.compared.len(), 40);
    let explained: Vec<f64> = decision.weighed.iter().map(|terms| terms.cost).collect();
    let mut costs: Vec<f64> = decision.compared.iter().map(|one| one.cost).collect();
    let order = |costs: &[f64]| {
        let mut costs = costs.to_vec();
        costs.sort_by(f64::total_cmp);
        costs
    };
    costs = order(&costs);
    assert_eq!(order(&explained), costs[..WEIGHED_MAX]);
    assert_eq!(decision.chosen.cost, costs[0]);
}
