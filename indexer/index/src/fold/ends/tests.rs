use std::time::Duration;

use super::*;
use crate::tests_support::clock_answer;

#[test]
fn record_is_as_old_as_the_last_end_before_it() {
    let start = crate::tests_support::some_instant();
    let mut ends = LogEnds::default();
    assert_eq!(ends.stored_after(LogPosition(1), 0), None);
    let later = start + Duration::from_secs(1);
    ends.observe(start, LogPosition(10), 1000);
    ends.observe(later, LogPosition(20), 2000);
    assert_eq!(ends.stored_after(LogPosition(10), 900), None, "backlog");
    assert_eq!(ends.stored_after(LogPosition(15), 1500), Some(start));
    assert_eq!(ends.stored_after(LogPosition(21), 2001), Some(later));
    assert_eq!(
        ends.stored_after(LogPosition(21), 1999),
        Some(start),
        "put back, or proposed before the look and stored after it"
    );
    assert_eq!(ends.stored_after(LogPosition(21), 999), None);
    assert_eq!(ends.reached(LogPosition(9)), None);
    assert_eq!(ends.reached(LogPosition(19)), Some(start));
    assert_eq!(ends.reached(LogPosition(20)), Some(later));
}

const SECOND: Duration = Duration::from_secs(1);

/// The log's clock showed 100 s at the start of ours.
fn asked_at_the_start() -> (Instant, LogEnds) {
    let start = crate::tests_support::some_instant();
    let mut ends = LogEnds::default();
    ends.observe(start, LogPosition(1), 100_000_000_000);
    (start, ends)
}

const fn log_time(secs: u64) -> Option<LogTime> {
    Some(LogTime(secs * 1_000_000_000))
}

#[test]
fn what_was_on_its_way_is_as_old_as_it_says() {
    let (start, ends) = asked_at_the_start();
    let now = start + 20 * SECOND;
    let fresh = ends.sent_at(now, now, log_time(120));
    assert_eq!(fresh, Some(now));
    let kept = ends.sent_at(now, now, log_time(113));
    assert_eq!(kept, Some(now - 7 * SECOND));
    let waited_here_too = ends.sent_at(now, now - 9 * SECOND, log_time(113));
    assert_eq!(waited_here_too, Some(now - 9 * SECOND));
}

#[test]
fn nothing_proves_more_for_what_it_says() {
    let (start, mut ends) = asked_at_the_start();
    let now = start + 20 * SECOND;
    let nothing_said = ends.sent_at(now, now, None);
    assert_eq!(
        nothing_said,
        Some(now),
        "an older shim, or one without the log's clock"
    );
    for from_the_future in [121, 130, 10_000_000_000] {
        assert_eq!(ends.sent_at(now, now, log_time(from_the_future)), Some(now));
    }
    // The next leader's clock is a minute behind: messages from before are no older.
    ends.observe(now, LogPosition(2), 60_000_000_000);
    assert_eq!(ends.sent_at(now, now, log_time(119)), Some(now));
    // A new observation of the clock is trusted.
    let later = now + 2 * SECOND;
    let kept = ends.sent_at(later, later, log_time(61));
    assert_eq!(kept, Some(later - SECOND));
    assert_eq!(
        ends.sent_at(later, later, Some(LogTime(u64::MAX))),
        Some(later)
    );
    assert_eq!(
        ends.sent_at(later, later, Some(LogTime(0))),
        Some(later - 62 * SECOND)
    );
}

/// Whatever our clock does against the log's, no source is without proof for good.
#[test]
fn a_clock_that_was_not_observed_for_long_is_ignored() {
    let (start, mut ends) = asked_at_the_start();
    let now = start + 61 * SECOND;
    assert_eq!(ends.sent_at(now, now, log_time(100)), Some(now));
    ends.observe(now, LogPosition(2), 0);
    assert_eq!(
        ends.sent_at(now, now, log_time(100)),
        Some(now),
        "does not tell"
    );
    ends.clear();
    assert_eq!(
        ends.sent_at(now, now, log_time(100)),
        Some(now),
        "never asked"
    );
}

/// A virtual machine was suspended: the log's clock shows 41 s more than before, ours 2 s.
#[test]
fn moments_before_a_suspension_are_older_than_our_clock_shows() {
    let (start, mut ends) = asked_at_the_start();
    let clock = |ends: &mut LogEnds, asked, answered, secs: u64| {
        ends.observe_clock(clock_answer(asked, answered, secs * 1_000_000_000))
    };
    assert_eq!(clock(&mut ends, start, start, 100), Duration::ZERO);
    let (asked, answered) = (start + SECOND, start + 2 * SECOND);
    let stood = clock(&mut ends, asked, answered, 141);
    assert_eq!(
        stood,
        40 * SECOND,
        "the clock may be read when it was asked"
    );
    assert_eq!(
        ends.stored_after(LogPosition(9), 101_000_000_000),
        Some(start - stood)
    );
    ends.clear();
    let later = answered + 9 * SECOND;
    let stood = clock(&mut ends, later, later, 150);
    assert_eq!(stood, Duration::ZERO, "a faster answer");
    let stood = clock(&mut ends, later, later, 155);
    assert_eq!(stood, 5 * SECOND, "it stood before the next log was read");
    let unknown = clock(&mut ends, later, later, 0);
    assert_eq!(unknown, Duration::ZERO);
}

/// Two tasks ask. The first to ask may be the last to pass its answer on.
#[test]
fn an_overtaken_answer_counts_no_suspension_twice() {
    let (start, mut ends) = asked_at_the_start();
    let at = |secs: u32| start + secs * SECOND;
    let clock = |ends: &mut LogEnds, asked: u32, answered: u32, secs: u64| {
        ends.observe_clock(clock_answer(at(asked), at(answered), secs * 1_000_000_000))
    };
    clock(&mut ends, 0, 0, 100);
    assert_eq!(clock(&mut ends, 2, 2, 142), 40 * SECOND);
    assert_eq!(clock(&mut ends, 1, 1, 101), Duration::ZERO, "overtaken");
    assert_eq!(
        clock(&mut ends, 3, 3, 143),
        Duration::ZERO,
        "counted before"
    );
    let slow = clock(&mut ends, 2, 4, 184);
    assert_eq!(
        slow,
        41 * SECOND,
        "asked before, and answered after another suspension"
    );
    assert_eq!(clock(&mut ends, 5, 5, 185), Duration::ZERO);
    // Asked before an answer came that shows more: a suspension lies between the two readings.
    assert_eq!(clock(&mut ends, 6, 9, 226), 40 * SECOND);
    assert_eq!(clock(&mut ends, 7, 8, 187), Duration::ZERO);
    assert_eq!(clock(&mut ends, 10, 10, 227), Duration::ZERO);
}

#[test]
fn an_overtaken_answer_without_a_clock_forgets_none() {
    let (start, mut ends) = asked_at_the_start();
    let at = |secs: u32| start + secs * SECOND;
    ends.observe_clock(clock_answer(at(1), at(3), 1));
    ends.observe_clock(clock_answer(at(2), at(4), 0));
    assert_eq!(ends.clock_state(at(60)), LogClockState::Silent);
    ends.observe_clock(clock_answer(at(5), at(6), 0));
    assert_eq!(ends.clock_state(at(60)), LogClockState::Known);
}

#[test]
fn a_clock_is_silent_after_its_last_answer_until_the_next() {
    let (start, mut ends) = asked_at_the_start();
    let later = start + 60 * SECOND;
    assert_eq!(ends.clock_state(later), LogClockState::Known, "never asked");
    ends.observe_clock(clock_answer(start, start + SECOND, 1));
    let silent_from = start + CLOCK_SILENCE_MAX + Duration::from_nanos(1);
    assert_eq!(
        ends.clock_state(start + CLOCK_SILENCE_MAX),
        LogClockState::Known
    );
    assert_eq!(ends.clock_state(silent_from), LogClockState::Silent);
    ends.observe_clock(clock_answer(silent_from, silent_from, 2));
    assert_eq!(ends.clock_state(silent_from), LogClockState::Known);
    let (asked, answered) = (silent_from + SECOND, silent_from + SECOND);
    ends.observe_clock(clock_answer(asked, answered, 0));
    assert_eq!(ends.clock_state(later), LogClockState::Known, "no clock");
}
