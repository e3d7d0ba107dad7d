use super::*;
use crate::testing::{source, start};
use proptest::prelude::*;
use warmroute_proto::{LogPosition, RecordNumber, Source, StreamIdentity};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn part(generation: u64, number: Option<u64>) -> SourceAnswer {
    SourceAnswer {
        source: source("w"),
        generation: Generation(generation),
        number: number.map(RecordNumber),
        engine_seq: None,
        states: Tiers::all(SourceState::Exact),
        reason: None,
        proof_age_ms: 0,
        run: Tiers {
            gpu: 7,
            cpu: 2,
            disk: 1,
        },
    }
}

const LOG: StreamIdentity = StreamIdentity {
    created_unix_ns: 2,
    nonce: 2,
};

fn runs(sources: Vec<SourceAnswer>) -> IndexReply {
    runs_of(LOG, sources)
}

fn runs_of(log: StreamIdentity, sources: Vec<SourceAnswer>) -> IndexReply {
    let answer = IndexAnswer::Runs {
        log,
        position: LogPosition(1),
        sources,
    };
    answer.into()
}

#[derive(Default)]
struct Fixture {
    view: IndexView,
    table: SourceTable,
}

impl Fixture {
    fn judge(&mut self, part: SourceAnswer, now: Instant) -> TrustedSource {
        let trusted = self.view.judge(&mut self.table, &runs(vec![part]), now);
        *trusted.of(self.table.intern(&source("w"))).unwrap()
    }

    fn state(&mut self, generation: u64, number: Option<u64>, now: Instant) -> SourceState {
        self.judge(part(generation, number), now).state()
    }
}

#[test]
fn a_lower_generation_is_stale_and_gives_no_credit() {
    let (mut fixture, start) = (Fixture::default(), start());
    assert_eq!(fixture.state(5, Some(1), start), SourceState::Exact);
    let old = fixture.judge(part(4, Some(900)), start);
    assert_eq!(old.state(), SourceState::Stale);
    assert_eq!(old.run, Tiers::default());
    assert!(!old.gives_credit());
    assert_eq!(fixture.view.counts().lagging, 1);
}

#[test]
fn a_lower_number_is_believed_for_half_a_second() {
    let (mut fixture, start) = (Fixture::default(), start());
    fixture.state(5, Some(10), start);
    assert_eq!(
        fixture.state(5, Some(9), start + ms(499)),
        SourceState::Exact
    );
    assert_eq!(
        fixture.state(5, Some(9), start + ms(500)),
        SourceState::Stale
    );
    assert_eq!(
        fixture.state(5, Some(10), start + ms(500)),
        SourceState::Exact
    );
}

/// What counts is the oldest of the higher numbers, not the newest.
#[test]
fn newer_records_do_not_prolong_the_belief_in_an_old_one() {
    let (mut fixture, start) = (Fixture::default(), start());
    for step in 0..100 {
        fixture.state(5, Some(step), start + ms(20 * step));
    }
    let now = start + ms(20 * 99);
    // Number 75 was overtaken by 76, first seen 460 ms ago; 73 by 74, 500 ms ago.
    assert_eq!(fixture.state(5, Some(75), now), SourceState::Exact);
    assert_eq!(fixture.state(5, Some(73), now), SourceState::Stale);
    assert_eq!(fixture.state(5, Some(0), now), SourceState::Stale);
    assert_eq!(fixture.state(5, None, now), SourceState::Stale);
}

#[test]
fn memory_is_bounded_however_fast_records_come() {
    let (mut fixture, start) = (Fixture::default(), start());
    for step in 0..20_000 {
        fixture.state(5, Some(step), start + Duration::from_micros(100 * step));
    }
    let id = fixture.table.intern(&source("w"));
    assert!(fixture.view.sources.get_mut(id).numbers.seen.len() <= 52);
}

#[test]
fn a_new_generation_restarts_its_numbers_and_is_reported_once() {
    let (mut fixture, start) = (Fixture::default(), start());
    let mut judge = |generation, number| {
        let answer = runs(vec![part(generation, number)]);
        let trusted = fixture.view.judge(&mut fixture.table, &answer, start);
        trusted.restarted.len()
    };
    assert_eq!(judge(5, Some(100)), 0, "the first one is no restart");
    assert_eq!(judge(6, None), 1);
    assert_eq!(judge(6, Some(0)), 0);
    assert_eq!(judge(5, Some(200)), 0);
    assert_eq!(fixture.state(6, None, start), SourceState::Exact);
}

const fn of_log(generation: u64) -> LogGeneration {
    LogGeneration {
        log: LOG,
        generation: Generation(generation),
    }
}

/// Log and registry were lost: the new log's first generation has the number of the demoted one.
#[test]
fn a_demotion_ends_with_its_log() {
    let (mut fixture, start) = (Fixture::default(), start());
    fixture.state(5, Some(1), start);
    let id = fixture.table.intern(&source("w"));
    fixture.view.demote(id, of_log(5));
    let mut judge = |created_unix_ns, now| {
        let log = StreamIdentity {
            created_unix_ns,
            nonce: 3,
        };
        let reply = runs_of(log, vec![part(5, Some(1))]);
        let trusted = fixture.view.judge(&mut fixture.table, &reply, now);
        let known = trusted.of(id).unwrap();
        (known.state(), known.demoted.is_some())
    };
    // A replica that still reads an older log: nothing to compare, and no end.
    assert_eq!(judge(1, start), (SourceState::Stale, false));
    assert_eq!(judge(9, start), (SourceState::Exact, false));
    assert_eq!(fixture.view.demoted().count(), 0);
    assert!(!fixture.view.reinstate(id));
}

/// Replicas without a common log: records alone show which one is behind, and what an engine
/// contradicted is contradicted whichever replica answers.
#[test]
fn replicas_with_logs_of_their_own_are_compared_by_records() {
    let (mut fixture, start) = (Fixture::default(), start());
    let id = fixture.table.intern(&source("w"));
    let judge = |fixture: &mut Fixture, nonce, number, now| {
        let log = StreamIdentity::of_one_reader(nonce);
        let reply = runs_of(log, vec![part(5, Some(number))]);
        let trusted = fixture.view.judge(&mut fixture.table, &reply, now);
        trusted.of(id).unwrap().state()
    };
    for (nonce, number) in [(7, 3), (1, 4), (7, 4), (9, 4), (1, 4)] {
        let state = judge(&mut fixture, nonce, number, start);
        assert_eq!(state, SourceState::Exact, "{nonce}");
    }
    let later = start + ms(600);
    assert_eq!(judge(&mut fixture, 9, 3, later), SourceState::Stale);
    let mut positions = PositionsSeen::default();
    for (nonce, position) in [(7, 9), (1, 3), (9, 2), (7, 1)] {
        let log = StreamIdentity::of_one_reader(nonce);
        for now in [start, start + ms(600)] {
            let seen = positions.observe(log, LogPosition(position), now);
            assert_eq!(seen, Freshness::Fresh, "{nonce}");
        }
    }
    let demoted = LogGeneration {
        log: StreamIdentity::of_one_reader(7),
        generation: Generation(5),
    };
    fixture.view.demote(id, demoted);
    for nonce in [7, 1] {
        assert_eq!(judge(&mut fixture, nonce, 5, later), SourceState::Stale);
    }
}

#[test]
fn a_demoted_source_is_stale_until_its_next_generation() {
    let (mut fixture, start) = (Fixture::default(), start());
    fixture.state(5, Some(1), start);
    let id = fixture.table.intern(&source("w"));
    fixture.view.demote(id, of_log(5));
    fixture.view.demote(id, of_log(5));
    assert_eq!(fixture.view.counts().demoted, 1);
    let known = fixture.judge(part(5, Some(2)), start);
    assert_eq!(
        (known.state(), known.gives_credit()),
        (SourceState::Stale, false)
    );
    assert_eq!(fixture.state(6, None, start), SourceState::Exact);
}

#[test]
fn a_stale_tier_gives_no_credit_and_the_others_keep_theirs() {
    let (mut fixture, start) = (Fixture::default(), start());
    let mut answer = part(5, Some(1));
    answer.states.cpu = SourceState::Stale;
    let known = fixture.judge(answer, start);
    assert_eq!(
        known.run,
        Tiers {
            gpu: 7,
            cpu: 0,
            disk: 1
        }
    );
    assert_eq!(known.state(), SourceState::Exact);
}

#[test]
fn a_credit_is_as_weak_as_the_tiers_that_it_rests_on() {
    let (mut fixture, start) = (Fixture::default(), start());
    let mut answer = part(5, Some(1));
    answer.states.cpu = SourceState::Unverified;
    answer.states.disk = SourceState::Stale;
    let known = fixture.judge(answer, start);
    let of = |gpu, cpu| known.credit_state(&Tiers { gpu, cpu, disk: 0 });
    assert_eq!(of(7, 0), SourceState::Exact);
    assert_eq!(of(7, 1), SourceState::Unverified);
    assert_eq!(of(0, 1), SourceState::Unverified);
}

#[test]
fn what_is_weaker_than_stale_stays_weaker() {
    let (mut fixture, start) = (Fixture::default(), start());
    fixture.state(5, Some(1), start);
    let mut answer = part(4, Some(1));
    answer.states = Tiers::all(SourceState::Unknown);
    assert_eq!(fixture.judge(answer, start).state(), SourceState::Unknown);
}

#[test]
fn an_answer_of_a_replica_that_is_behind_is_ignored() {
    let mut fixture = Fixture::default();
    let id = fixture.table.intern(&source("w"));
    let answer = IndexAnswer::Behind {
        position: LogPosition(3),
    };
    let trusted = fixture
        .view
        .judge(&mut fixture.table, &answer.into(), start());
    assert_eq!(trusted.of(id), None);
}

proptest! {
    /// The rule as the design words it, over the whole history.
    #[test]
    fn the_rule_is_that_of_the_design(
        steps in prop::collection::vec((0..3_u64, 0..6_u64, 0..300_u64), 1..40),
    ) {
        let (mut fixture, start) = (Fixture::default(), start());
        let mut history: Vec<((u64, u64), u64)> = Vec::new();
        let mut clock = 0;
        for (generation, number, pause) in steps {
            // Coarse steps of time: what the grain joins was seen at the same time here.
            clock += pause / 20 * 20;
            let found = fixture.state(generation, Some(number), start + ms(clock));
            history.push(((generation, number), clock));
            let newest = history.iter().map(|((generation, _), _)| *generation).max().unwrap();
            // A number that came back after the newer generation began was not seen in it.
            let overtaken = history.iter().any(|((other, higher), seen)| {
                *other == generation && *higher > number && clock - seen >= 500
            });
            let stale = generation < newest || overtaken;
            let expected = if stale { SourceState::Stale } else { SourceState::Exact };
            prop_assert_eq!(found, expected);
        }
    }
}

/// Registry and log were lost, and generations are counted from 1 again.
#[test]
fn a_number_that_no_answer_reaches_expires() {
    let (mut fixture, start) = (Fixture::default(), start());
    fixture.state(7, Some(40), start);
    fixture
        .view
        .demote(fixture.table.intern(&source("w")), of_log(7));
    let shortly_before = start + ANSWER_MEMORY - ms(1);
    assert_eq!(
        fixture.state(1, Some(0), shortly_before),
        SourceState::Stale
    );
    let later = start + ANSWER_MEMORY;
    assert_eq!(fixture.state(1, Some(0), later), SourceState::Exact);
    assert_eq!(fixture.state(1, Some(1), later), SourceState::Exact);
}

#[test]
fn a_number_that_is_still_shown_is_never_forgotten() {
    let (mut fixture, start) = (Fixture::default(), start());
    for step in 0..100 {
        let now = start + ms(1000 * step);
        assert_eq!(fixture.state(7, Some(40), now), SourceState::Exact);
        if step > 0 {
            assert_eq!(fixture.state(7, Some(39), now), SourceState::Stale);
            assert_eq!(fixture.state(6, Some(90), now), SourceState::Stale);
        }
    }
}

mod holders {
    use std::sync::Arc;

    use warmroute_proto::roster::{
        HolderDetail, HolderGroup, HolderPart, NumberSet, RosterId, RosterNumber, RosterPage,
        RosterRow, RosterStatus,
    };

    use super::*;
    use crate::replica_roster::ReplicaRoster;

    /// An answer of a replica whose roster has the one source, in this generation.
    fn reply(generation: u64, position: u64, number: Option<u64>) -> IndexReply {
        let (roster, part) = answer(generation, position, number);
        IndexReply::Holders(HolderReply::new(roster, vec![part]).unwrap())
    }

    fn answer(
        generation: u64,
        position: u64,
        number: Option<u64>,
    ) -> (Arc<ReplicaRoster>, HolderPart) {
        let states = Tiers::all(SourceState::Exact);
        let status = RosterStatus {
            generation: Generation(generation),
            states,
            reason: None,
        };
        let mut roster = ReplicaRoster::default();
        let page = RosterPage {
            roster: RosterId(1),
            version: 1,
            rows: vec![RosterRow {
                number: RosterNumber(0),
                source: source("w"),
                status: Some(status),
            }],
            more: false,
        };
        roster.take(page).unwrap();
        let detail = number.map(|number| HolderDetail {
            source: RosterNumber(0),
            generation: Generation(generation),
            number: Some(RecordNumber(number)),
            engine_seq: Some(EngineSeq(number)),
        });
        let part = HolderPart {
            roster: RosterId(1),
            log: LOG,
            position: LogPosition(position),
            groups: vec![HolderGroup {
                run: part(1, None).run,
                states,
                members: NumberSet::from_ascending([RosterNumber(0), RosterNumber(5)]),
            }],
            details: detail.into_iter().collect(),
            changes: Vec::new(),
            next: None,
        };
        (Arc::new(roster), part)
    }

    fn judge(fixture: &mut Fixture, reply: &IndexReply, now: Instant) -> TrustedSource {
        let trusted = fixture.view.judge(&mut fixture.table, reply, now);
        *trusted.of(fixture.table.intern(&source("w"))).unwrap()
    }

    #[test]
    fn a_holder_has_the_run_of_its_group_and_the_numbers_of_its_detail() {
        let (mut fixture, start) = (Fixture::default(), start());
        let known = judge(&mut fixture, &reply(3, 10, Some(8)), start);
        let full = fixture.judge(part(3, Some(8)), start);
        assert_eq!(
            known,
            TrustedSource {
                engine_seq: Some(EngineSeq(8)),
                position: known.position,
                ..full
            }
        );
        assert_eq!(
            judge(&mut fixture, &reply(3, 10, None), start).run,
            full.run
        );
    }

    #[test]
    fn a_position_that_was_overtaken_half_a_second_ago_gives_no_credit() {
        let (mut fixture, start) = (Fixture::default(), start());
        judge(&mut fixture, &reply(3, 10, None), start);
        let state = |fixture: &mut Fixture, position, now| {
            judge(fixture, &reply(3, position, None), now).state()
        };
        assert_eq!(state(&mut fixture, 9, start + ms(499)), SourceState::Exact);
        assert_eq!(state(&mut fixture, 9, start + ms(500)), SourceState::Stale);
        assert_eq!(state(&mut fixture, 10, start + ms(500)), SourceState::Exact);
        // Log and registry were lost and are counted from 1 again.
        let later = start + ms(500) + ANSWER_MEMORY;
        assert_eq!(state(&mut fixture, 1, later), SourceState::Exact);
    }

    #[test]
    fn an_old_generation_gives_no_credit_with_or_without_detail() {
        let (mut fixture, start) = (Fixture::default(), start());
        fixture.judge(part(4, Some(0)), start);
        for number in [None, Some(900)] {
            let old = judge(&mut fixture, &reply(3, 1, number), start);
            assert_eq!(
                (old.state(), old.run),
                (SourceState::Stale, Tiers::default())
            );
        }
        // A number that is not named does not lower what is known.
        judge(&mut fixture, &reply(4, 1, None), start);
        assert_eq!(fixture.state(4, Some(0), start), SourceState::Exact);
    }

    /// Log, registry and the shim's state were lost, and the generation counts from 0 again. An
    /// answer names no number of a source that does not hold the prompt.
    #[test]
    fn a_number_expires_while_answers_show_only_its_generation() {
        let (mut fixture, start) = (Fixture::default(), start());
        judge(&mut fixture, &reply(1, 10, Some(40)), start);
        for second in 1..=31 {
            let now = start + ms(1000 * second);
            if second < 30 && second % 10 == 1 {
                let lagging = judge(&mut fixture, &reply(1, 10, Some(0)), now);
                assert_eq!(lagging.state(), SourceState::Stale);
            }
            let known = judge(&mut fixture, &reply(1, 10, None), now);
            assert_eq!(known.state(), SourceState::Exact);
        }
        let now = start + ms(31_000);
        let trusted = (fixture.view).judge(&mut fixture.table, &reply(1, 10, Some(0)), now);
        let id = fixture.table.intern(&source("w"));
        assert_eq!(trusted.of(id).unwrap().state(), SourceState::Exact);
        assert_eq!(trusted.restarted, [], "only the numbers are forgotten");
        // The generation was shown all the time.
        assert_eq!(
            judge(&mut fixture, &reply(0, 10, None), now).state(),
            SourceState::Stale
        );
    }

    /// The roster was read before the source began its generation and became partial, and before
    /// the other source came.
    #[test]
    fn changes_of_an_answer_replace_rows_and_name_new_ones() {
        let (mut fixture, start) = (Fixture::default(), start());
        let (roster, mut part) = answer(3, 10, None);
        let row = |number, worker: &str, generation, state| RosterRow {
            number: RosterNumber(number),
            source: Source {
                worker: worker.into(),
                ..source("w")
            },
            status: Some(RosterStatus {
                generation: Generation(generation),
                states: Tiers::all(state),
                reason: None,
            }),
        };
        part.groups.clear();
        part.changes = vec![
            row(0, source("w").worker.as_str(), 4, SourceState::Partial),
            row(5, "new", 1, SourceState::Exact),
        ];
        let reply = IndexReply::Holders(HolderReply::new(roster, vec![part]).unwrap());
        let trusted = fixture.view.judge(&mut fixture.table, &reply, start);
        let mut of = |source| *trusted.of(fixture.table.intern(&source)).unwrap();
        let old = of(source("w"));
        assert_eq!((old.generation.0, old.state()), (4, SourceState::Partial));
        let new = of(Source {
            worker: "new".into(),
            ..source("w")
        });
        assert_eq!((new.generation.0, new.state()), (1, SourceState::Exact));
    }
}

/// Sources are looked for where the last answer named them.
#[test]
fn a_source_is_found_in_an_answer_of_another_order() {
    let (mut fixture, start) = (Fixture::default(), start());
    for order in ["abc", "cab", "ab", "bxa", "", "abcx"] {
        let named = |(place, name): (usize, char)| SourceAnswer {
            source: source(&name.to_string()),
            run: Tiers {
                gpu: u32::try_from(place).unwrap(),
                cpu: 0,
                disk: 0,
            },
            ..part(1, Some(1))
        };
        let reply = runs(order.chars().enumerate().map(named).collect());
        let Fixture { view, table } = &mut fixture;
        let trusted = view.judge(table, &reply, start);
        assert_eq!(trusted.all().count(), order.len());
        for (place, name) in order.chars().enumerate() {
            let known = trusted.of(table.intern(&source(&name.to_string())));
            assert_eq!(known.map(|known| known.run.gpu as usize), Some(place));
        }
    }
}
