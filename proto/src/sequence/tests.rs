//! The rule against a reader that was there all along.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;

const PATIENCE: Duration = Duration::from_secs(6);

fn sequencer() -> Sequencer {
    Sequencer::new(PATIENCE)
}

/// A clock that no test waits for.
fn start() -> Instant {
    #[expect(
        clippy::disallowed_methods,
        reason = "an arbitrary origin, never compared with real time"
    )]
    Instant::now()
}

fn accept(sequencer: &mut Sequencer, generation: u64, number: u64) -> SequenceVerdict {
    sequencer.accept(
        start(),
        Generation(generation),
        RecordNumber(number),
        generation * 1000 + number,
    )
}

#[test]
fn next_seen_ahead_newer_and_older_have_their_verdicts() {
    let mut reader = sequencer();
    assert!(!reader.is_complete(), "nothing seen is nothing known");
    assert_eq!(accept(&mut reader, 3, 0), SequenceVerdict::Start);
    assert_eq!(accept(&mut reader, 3, 1), SequenceVerdict::Apply);
    assert_eq!(accept(&mut reader, 3, 1), SequenceVerdict::Duplicate);
    assert_eq!(accept(&mut reader, 3, 4), SequenceVerdict::Ahead);
    assert!(!reader.is_complete());
    assert_eq!(accept(&mut reader, 3, 2), SequenceVerdict::Apply);
    assert!(!reader.is_complete(), "3 and 4 are known to exist");
    assert_eq!(accept(&mut reader, 3, 3), SequenceVerdict::Apply);
    assert!(!reader.is_complete(), "4 is known to exist");
    assert_eq!(accept(&mut reader, 3, 4), SequenceVerdict::Apply);
    assert!(reader.is_complete());
    assert_eq!(accept(&mut reader, 2, 5), SequenceVerdict::Old);
    assert_eq!(accept(&mut reader, 5, 2), SequenceVerdict::StartBehind);
    assert!(!reader.is_complete());
    assert_eq!(
        accept(&mut reader, 3, 5),
        SequenceVerdict::Old,
        "the fence moved"
    );
    assert_eq!(accept(&mut reader, 5, 0), SequenceVerdict::Apply);
}

#[test]
fn other_bytes_under_a_known_number_taint_until_the_next_generation() {
    let mut reader = sequencer();
    accept(&mut reader, 1, 0);
    let verdict = reader.accept(start(), Generation(1), RecordNumber(0), 77);
    assert_eq!(verdict, SequenceVerdict::Violation);
    assert!(!reader.is_complete());
    accept(&mut reader, 1, 1);
    assert!(!reader.is_complete());
    accept(&mut reader, 2, 0);
    assert!(reader.is_complete());
}

/// The payloads of the last records are known, and no more.
#[test]
fn other_bytes_are_noticed_as_far_back_as_payloads_are_kept() {
    let last = RECENT_PAYLOADS as u64 + 9;
    let verdict_of_other_bytes = |number| {
        let mut reader = sequencer();
        for number in 0..=last {
            accept(&mut reader, 1, number);
        }
        reader.accept(start(), Generation(1), RecordNumber(number), 77)
    };
    for number in [10, 11, last - 1, last] {
        assert_eq!(verdict_of_other_bytes(number), SequenceVerdict::Violation);
    }
    assert_eq!(verdict_of_other_bytes(9), SequenceVerdict::Duplicate);
}

#[test]
fn a_gap_asks_for_recovery_once_per_patience_and_never_after_it_closed() {
    let t0 = start();
    let mut reader = sequencer();
    let at = |reader: &mut Sequencer, secs, number| {
        reader.accept(
            t0 + Duration::from_secs(secs),
            Generation(1),
            RecordNumber(number),
            number,
        )
    };
    at(&mut reader, 0, 0);
    assert_eq!(reader.deadline(), None);
    at(&mut reader, 1, 2);
    at(&mut reader, 4, 3);
    assert_eq!(reader.deadline(), Some(t0 + Duration::from_secs(7)));
    assert!(!reader.gap_expired(t0 + Duration::from_secs(6)));
    assert!(reader.gap_expired(t0 + Duration::from_secs(7)));
    assert!(!reader.gap_expired(t0 + Duration::from_secs(8)), "once");
    assert!(reader.gap_expired(t0 + Duration::from_secs(13)), "again");
    for number in 1..4 {
        at(&mut reader, 14, number);
    }
    assert_eq!(reader.deadline(), None);
}

#[test]
fn a_heartbeat_reveals_a_lost_tail() {
    let mut reader = sequencer();
    accept(&mut reader, 4, 0);
    let now = start();
    let beat = |reader: &mut Sequencer, generation, number: Option<u64>| {
        reader.observe_heartbeat(now, Generation(generation), number.map(RecordNumber))
    };
    assert_eq!(beat(&mut reader, 4, Some(0)), SequenceComparison::Level);
    assert_eq!(beat(&mut reader, 4, None), SequenceComparison::Ahead);
    assert_eq!(beat(&mut reader, 3, Some(9)), SequenceComparison::Old);
    assert_eq!(beat(&mut reader, 5, Some(0)), SequenceComparison::Behind);
    assert!(reader.is_complete());
    assert_eq!(beat(&mut reader, 4, Some(1)), SequenceComparison::Behind);
    assert!(!reader.is_complete());
    accept(&mut reader, 4, 1);
    assert!(reader.is_complete());
}

#[test]
fn a_restored_reader_goes_on_behind_its_last_number() {
    let mut reader = Sequencer::restored(PATIENCE, Generation(2), Some(RecordNumber(9)));
    assert_eq!(accept(&mut reader, 2, 9), SequenceVerdict::Duplicate);
    assert_eq!(accept(&mut reader, 2, 10), SequenceVerdict::Apply);
    let mut empty = Sequencer::restored(PATIENCE, Generation(2), None);
    assert_eq!(accept(&mut empty, 2, 0), SequenceVerdict::Apply);
}

/// What one delivery does to the list of messages under way.
#[derive(Clone, Debug)]
enum Fate {
    Deliver,
    Drop,
    Twice,
    Later(Index),
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        6 => Just(Fate::Deliver),
        1 => Just(Fate::Drop),
        1 => Just(Fate::Twice),
        1 => any::<Index>().prop_map(Fate::Later),
    ]
}

/// The clean log: generations with gaps between them, each with some numbers.
fn log() -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec((1u64..4, 1u64..12), 1..5).prop_map(|generations| {
        let mut generation = 0;
        let mut log = Vec::new();
        for (step, length) in generations {
            generation += step;
            log.extend((0..length).map(|number| (generation, number)));
        }
        log
    })
}

/// What a reader that obeys the verdicts holds at the end.
fn read(log: &[(u64, u64)]) -> (Sequencer, Vec<(u64, u64)>) {
    let mut reader = sequencer();
    let mut held = Vec::new();
    for &(generation, number) in log {
        match accept(&mut reader, generation, number) {
            SequenceVerdict::Start => held = vec![(generation, number)],
            SequenceVerdict::StartBehind => held.clear(),
            SequenceVerdict::Apply => held.push((generation, number)),
            SequenceVerdict::Ahead
            | SequenceVerdict::Duplicate
            | SequenceVerdict::Violation
            | SequenceVerdict::Old => {}
        }
    }
    (reader, held)
}

proptest! {
    /// Whatever happens on the way, the reader ends in the clean log's state or says that it does
    /// not.
    #[test]
    fn any_interleaving_ends_clean_or_says_so(
        log in log(),
        fates in prop::collection::vec(fate(), 0..60),
    ) {
        let mut delivered = log.clone();
        for (at, fate) in fates.into_iter().enumerate() {
            if at >= delivered.len() {
                break;
            }
            let message = delivered[at];
            match fate {
                Fate::Deliver => {}
                Fate::Drop => {
                    delivered.remove(at);
                }
                Fate::Twice => delivered.insert(at, message),
                Fate::Later(to) => {
                    delivered.remove(at);
                    delivered.insert(to.index(delivered.len() + 1), message);
                }
            }
        }
        let (_, clean) = read(&log);
        let (mut reader, held) = read(&delivered);
        let &(generation, number) = log.last().unwrap();
        let standing = reader.observe_heartbeat(start(), Generation(generation), Some(RecordNumber(number)));
        if reader.is_complete() && standing == SequenceComparison::Level {
            prop_assert_eq!(held, clean);
        } else {
            prop_assert_ne!(&held, &clean, "it is clean and does not say so");
        }
    }

    /// Go-back-N from any earlier point always heals.
    #[test]
    fn sending_the_last_generation_again_heals(
        log in log(),
        lost in prop::collection::vec(any::<Index>(), 0..20),
    ) {
        let mut delivered = log.clone();
        for index in lost {
            if !delivered.is_empty() {
                let index = index.index(delivered.len());
                delivered.remove(index);
            }
        }
        let last = log.last().unwrap().0;
        delivered.extend(log.iter().filter(|(generation, _)| *generation == last));
        let (reader, held) = read(&delivered);
        prop_assert!(reader.is_complete());
        prop_assert_eq!(held, read(&log).1);
    }
}
