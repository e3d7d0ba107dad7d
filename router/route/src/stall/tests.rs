use super::*;

use crate::source_table::SourceTable;
use crate::testing::{source, source_id, start};

const PREDICTED: Duration = Duration::from_secs(1);

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// A detector that has seen the source answer.
fn learned(now: Instant) -> StallDetector {
    let mut stalls = StallDetector::default();
    stalls.progressed(source_id(), now);
    stalls
}

/// With so many answers of 100 ms that were not streamed.
fn learned_plain(start: Instant) -> StallDetector {
    let mut stalls = StallDetector::default();
    for counter in 1000..1020 {
        plain(&mut stalls, counter, start);
        stalls.answered(counter, start + Duration::from_millis(100));
    }
    stalls
}

fn plain(stalls: &mut StallDetector, counter: u64, now: Instant) {
    stalls.sent(counter, source_id(), Duration::from_millis(60), now);
    stalls.not_streamed(counter, now);
}

fn is_stalled(stalls: &mut StallDetector, now: Instant) -> bool {
    stalls.advance(now);
    stalls.is_stalled(source_id(), now)
}

#[test]
fn a_late_first_token_stalls_and_the_stall_ends_by_itself() {
    let start = start();
    let mut stalls = learned(start);
    stalls.sent(1, source_id(), PREDICTED, start);
    for (at, stalled) in [(9, false), (10, true), (14, true), (15, false)] {
        assert_eq!(is_stalled(&mut stalls, start + secs(at)), stalled, "{at} s");
    }
}

#[test]
fn a_first_token_ends_the_pause_and_probes_follow_without_a_herd() {
    let start = start();
    let mut stalls = learned(start);
    stalls.sent(1, source_id(), PREDICTED, start);
    stalls.sent(2, source_id(), PREDICTED, start + secs(5));
    assert!(is_stalled(&mut stalls, start + secs(10)));
    let mut now = start + secs(11);
    stalls.progressed(source_id(), now);
    assert!(is_stalled(&mut stalls, now), "blocks begin nothing");
    assert!(!stalls.answered(2, now));
    let mut counter = 10;
    for admitted in [2, 4, 8] {
        for _ in 0..admitted {
            assert!(!is_stalled(&mut stalls, now), "of {admitted}");
            stalls.sent(counter, source_id(), PREDICTED, now);
            counter += 1;
        }
        assert!(is_stalled(&mut stalls, now), "{admitted} are on their way");
        now += secs(1);
        assert_eq!(stalls.answered(counter - 1, now), admitted == 8);
        for left in counter - admitted..counter - 1 {
            stalls.ended(left);
        }
    }
    assert!(!is_stalled(&mut stalls, now));
    assert_eq!(stalls.stalls().count(), 0);
}

#[test]
fn requests_stuck_together_are_one_stall_and_a_stuck_probe_is_the_next_one() {
    let start = start();
    let mut stalls = learned(start);
    for counter in 0..10 {
        stalls.sent(counter, source_id(), PREDICTED, start);
    }
    assert!(is_stalled(&mut stalls, start + secs(10)));
    assert_eq!(stalls.count(), 1);
    let mut at = start + secs(15);
    for (probe, pause) in [(10, 10), (11, 10), (12, 10)] {
        assert!(!is_stalled(&mut stalls, at));
        stalls.sent(probe, source_id(), PREDICTED, at);
        assert!(is_stalled(&mut stalls, at + secs(5)), "one probe at a time");
        assert!(is_stalled(&mut stalls, at + secs(9 + pause)));
        at += secs(10 + pause);
    }
    assert_eq!(stalls.count(), 4);
}

#[test]
fn an_ended_request_stalls_no_source() {
    let start = start();
    let mut stalls = learned(start);
    stalls.sent(1, source_id(), PREDICTED, start);
    stalls.ended(1);
    assert!(!is_stalled(&mut stalls, start + secs(100)));
    assert_eq!(stalls.waiting(), 0);
    assert!(stalls.deadlines.is_empty());
}

#[test]
fn short_predictions_have_a_floor_which_is_higher_while_nothing_is_learned() {
    let start = start();
    for (mut stalls, patience) in [(learned(start), 5), (StallDetector::default(), 30)] {
        stalls.sent(1, source_id(), Duration::from_millis(10), start);
        assert!(!is_stalled(&mut stalls, start + secs(patience - 1)));
        assert!(is_stalled(&mut stalls, start + secs(patience)));
    }
}

#[test]
fn progress_of_any_request_defers_a_stall() {
    let start = start();
    let mut stalls = learned(start);
    stalls.sent(1, source_id(), PREDICTED, start);
    for second in 0..60 {
        stalls.progressed(source_id(), start + secs(second));
        assert!(!is_stalled(&mut stalls, start + secs(second)));
    }
    assert!(is_stalled(&mut stalls, start + secs(59 + 10)));
}

/// The source begins and answers others now and then.
#[test]
fn a_request_that_waits_long_stalls_its_source_if_others_begin_requests() {
    let start = start();
    let mut table = SourceTable::default();
    let [slow, other] = ["w", "v"].map(|name| table.intern(&source(name)));
    for (others_begin, first) in [(true, Some(15)), (false, None)] {
        let mut stalls = StallDetector::default();
        stalls.progressed(slow, start);
        stalls.sent(1, slow, PREDICTED, start);
        let stalled = (0..60).find(|second| {
            let now = start + secs(*second);
            stalls.sent(3, slow, PREDICTED, now);
            stalls.answered(3, now + secs(1));
            if others_begin {
                stalls.sent(2, other, PREDICTED, now);
                stalls.answered(2, now + Duration::from_millis(1));
            }
            stalls.advance(now);
            stalls.is_stalled(slow, now)
        });
        assert_eq!(stalled, first);
    }
}

/// The engine's API answers, and its core hangs: nothing comes back.
#[test]
fn answers_that_do_not_come_back_pile_up_and_stall() {
    let start = start();
    let mut stalls = learned_plain(start);
    let hung = start + secs(1);
    for n in 0..20 {
        plain(&mut stalls, n, hung + Duration::from_millis(100) * n as u32);
    }
    assert!(!is_stalled(&mut stalls, hung + secs(4)));
    assert!(is_stalled(&mut stalls, hung + secs(6)));
}

#[test]
fn a_few_long_answers_are_no_stall() {
    let start = start();
    let mut stalls = learned_plain(start);
    let sent = start + secs(1);
    // Fewer than a pile, and more that one client sends together.
    for at in [sent, sent + secs(1), sent + secs(2)] {
        plain(&mut stalls, at.duration_since(start).as_secs(), at);
    }
    assert!(!is_stalled(&mut stalls, start + secs(100)));
    let mut stalls = learned_plain(start);
    for n in 0..20 {
        plain(&mut stalls, n, sent);
    }
    assert!(!is_stalled(&mut stalls, start + secs(100)));
}

#[test]
fn a_fleet_that_answers_slowly_is_no_stall() {
    let start = start();
    let mut stalls = StallDetector::default();
    let mut open = std::collections::VecDeque::new();
    // Each answer takes 20 s; requests come each second.
    for second in 0..200_u64 {
        let now = start + secs(second);
        plain(&mut stalls, second, now);
        open.push_back(second);
        if second >= 20 {
            stalls.answered(open.pop_front().unwrap(), now);
        }
        assert!(!is_stalled(&mut stalls, now), "{second} s");
    }
}

/// 100,000 tokens on an engine of which the prediction is wrong by a factor of 15.
#[test]
fn first_tokens_far_behind_their_predictions_raise_the_patience() {
    let start = start();
    let mut stalls = StallDetector::default();
    let mut now = start;
    stalls.sent(0, source_id(), secs(2), now);
    now += secs(29);
    stalls.advance(now);
    stalls.answered(0, now);
    stalls.sent(1, source_id(), secs(2), now);
    assert!(!is_stalled(&mut stalls, now + secs(30)));
}

/// Two sources that overran their predictions by such factors, and the patience of a request with a
/// prediction of one second at the first.
fn patience_after(own: f64, other: f64) -> Duration {
    let start = start();
    let mut table = SourceTable::default();
    let ids = [table.intern(&source("w")), table.intern(&source("v"))];
    let mut stalls = StallDetector::default();
    for (counter, (id, factor)) in (0..).zip(ids.into_iter().zip([own, other])) {
        stalls.sent(counter, id, Duration::from_millis(100), start);
        stalls.answered(counter, start + Duration::from_millis(100).mul_f64(factor));
    }
    let now = start + Duration::from_millis(100).mul_f64(own.max(other));
    stalls.sent(10, ids[0], PREDICTED, now);
    let is_stalled = |stalls: &mut StallDetector, waited| {
        stalls.advance(now + secs(waited));
        stalls.is_stalled(ids[0], now + secs(waited))
    };
    let found = (0..400).find(|waited| is_stalled(&mut stalls, *waited));
    secs(found.unwrap())
}

#[test]
fn an_overrun_that_no_other_source_has_raises_the_patience_little() {
    assert_eq!(patience_after(1.0, 1.0), secs(10));
    assert_eq!(patience_after(6.0, 1.0), secs(18));
    assert_eq!(patience_after(90.0, 2.0), secs(30), "it may crawl");
    let of_a_slow_fleet = patience_after(90.0, 80.0);
    assert!(of_a_slow_fleet > secs(200), "{of_a_slow_fleet:?}");
}

/// Each first token comes after 6 s in place of 20 ms.
#[test]
fn an_engine_that_crawls_is_stalled_and_gets_one_probe_after_each_pause() {
    let start = start();
    let mut stalls = learned(start);
    let mut sent = std::collections::VecDeque::new();
    let mut probes = 0;
    for tenth in 0..600 {
        let now = start + Duration::from_millis(100) * tenth;
        while sent.front().is_some_and(|(_, at)| now >= *at + secs(6)) {
            let (counter, _) = sent.pop_front().unwrap();
            stalls.answered(counter, now);
        }
        if !is_stalled(&mut stalls, now) {
            let counter = u64::from(tenth);
            stalls.sent(counter, source_id(), Duration::from_millis(20), now);
            sent.push_back((counter, now));
            probes += u32::from(tenth > 60);
        }
    }
    assert!(probes <= 5, "{probes}");
    assert!(stalls.count() >= 4, "{}", stalls.count());
}

#[test]
fn times_at_a_stalled_source_are_not_learned() {
    let start = start();
    let mut stalls = learned_plain(start);
    let hung = start + secs(1);
    for n in 0..20 {
        plain(&mut stalls, n, hung + Duration::from_millis(100) * n as u32);
    }
    assert!(is_stalled(&mut stalls, hung + secs(8)));
    for n in 0..20 {
        stalls.answered(n, hung + secs(60));
    }
    assert!(stalls.answer_secs.unwrap() < 1.0);
}
