use super::*;
use crate::testing::{source_id, start};
use proptest::prelude::*;
use warmroute_proto::LocalHash;

const ROUTER: RouterId = RouterId([1; 16]);
const PEER: RouterId = RouterId([2; 16]);

fn prompt(path: &str) -> SampledPrefix {
    let blocks: Vec<_> = path
        .bytes()
        .map(|letter| LocalHash(u64::from(letter)))
        .collect();
    SampledPrefix::of(&blocks)
}

#[derive(Clone)]
struct Fixture {
    predictions: Predictions,
    source: SourceId,
    start: Instant,
}

impl Fixture {
    /// One request with this prompt is on its way, as counter 1.
    fn with(path: &str) -> Self {
        let mut fixture = Self {
            predictions: Predictions::default(),
            source: source_id(),
            start: start(),
        };
        fixture.sent(1, path);
        fixture
    }

    fn sent(&mut self, counter: u64, path: &str) {
        self.predictions
            .sent(ROUTER, counter, self.source, &prompt(path));
    }

    fn ended(&mut self, counter: u64, end: SlotEnd) {
        self.predictions.ended(ROUTER, counter, end, self.start);
    }

    fn counted(&mut self, path: &str, credited: u32) {
        self.predictions
            .counted(self.source, &prompt(path), credited);
    }

    fn predicted(&self, path: &str) -> u32 {
        let all = self.predictions.predicted(&prompt(path), None, self.start);
        all.of(self.source)
    }
}

#[test]
fn a_prompt_is_expected_from_the_moment_it_is_sent() {
    let fixture = Fixture::with("abcd");
    assert_eq!(fixture.predicted("abcdef"), 4);
    assert_eq!(fixture.predicted("abx"), 2);
    assert_eq!(fixture.predicted("x"), 0);
}

#[test]
fn it_is_expected_for_a_while_after_its_request_completed() {
    let mut fixture = Fixture::with("abcd");
    fixture.ended(1, SlotEnd::Completed);
    fixture
        .predictions
        .expire(fixture.start + KEEP - Duration::from_millis(1));
    assert_eq!(fixture.predicted("abcd"), 4);
    fixture.predictions.expire(fixture.start + KEEP);
    assert_eq!(fixture.predicted("abcd"), 0);
    assert_eq!(fixture.predictions.samples(), 0);
}

#[test]
fn a_failure_and_an_abort_end_the_expectation() {
    for end in [SlotEnd::Failed, SlotEnd::Aborted] {
        let mut fixture = Fixture::with("abcd");
        fixture.ended(1, end);
        assert_eq!(fixture.predicted("abcd"), 0);
    }
}

#[test]
fn a_failure_does_not_end_what_another_request_brings() {
    let mut fixture = Fixture::with("abcd");
    fixture.sent(2, "abcd");
    fixture.ended(1, SlotEnd::Failed);
    assert_eq!(fixture.predicted("abcd"), 4);
    fixture.ended(2, SlotEnd::Completed);
    assert_eq!(fixture.predicted("abcd"), 4);
}

#[test]
fn an_answer_that_counts_it_ends_it_also_when_the_blocks_go_again() {
    let mut fixture = Fixture::with("abcd");
    fixture.counted("abcdef", 4);
    assert_eq!(fixture.predicted("abcd"), 0);
    // Its request ends later, and does not bring it back.
    fixture.ended(1, SlotEnd::Completed);
    assert_eq!(fixture.predicted("abcd"), 0);
}

#[test]
fn an_answer_that_counts_less_leaves_it() {
    let mut fixture = Fixture::with("abcd");
    fixture.counted("abcd", 3);
    assert_eq!(fixture.predicted("abcd"), 4);
    // An answer about another prompt proves nothing of the rest.
    fixture.counted("abxx", 4);
    assert_eq!(fixture.predicted("abcd"), 4);
}

#[test]
fn a_former_requests_end_does_not_touch_a_later_expectation() {
    let mut fixture = Fixture::with("abcd");
    fixture.counted("abcd", 4);
    fixture.sent(2, "abcd");
    fixture.ended(1, SlotEnd::Failed);
    assert_eq!(fixture.predicted("abcd"), 4);
}

#[test]
fn a_new_generation_ends_everything_at_its_source() {
    let mut fixture = Fixture::with("abcd");
    fixture.predictions.restarted(fixture.source);
    assert_eq!(fixture.predicted("abcd"), 0);
    assert_eq!(fixture.predictions.samples(), 0);
    fixture.ended(1, SlotEnd::Completed);
    fixture.predictions.expire(fixture.start + KEEP);
}

#[test]
fn a_dead_routers_requests_bring_nothing() {
    let mut fixture = Fixture::with("abcd");
    let at = fixture.source;
    fixture.predictions.sent(PEER, 1, at, &prompt("xyz"));
    while fixture.predictions.release_step(ROUTER, 3, fixture.start) {}
    assert_eq!(fixture.predicted("abcd"), 0);
    assert_eq!(fixture.predicted("xyz"), 3);
}

#[test]
fn memory_is_bounded_and_what_was_dropped_is_counted() {
    let (at, start) = (source_id(), start());
    let mut predictions = Predictions::default();
    let long = |first: u64| SampledPrefix {
        hashes: (0..448).map(|n| PrefixHash((first << 32) | n)).collect(),
    };
    for counter in 0..6000 {
        predictions.sent(ROUTER, counter, at, &long(counter));
        assert!(predictions.samples() < SAMPLES_KEPT_MAX + 448);
    }
    assert!(predictions.dropped() > 0);
    // Ended ones make room for new ones.
    for counter in 0..6000 {
        predictions.ended(ROUTER, counter, SlotEnd::Completed, start);
    }
    let dropped = predictions.dropped();
    predictions.sent(ROUTER, 9999, at, &long(9999));
    assert_eq!(predictions.dropped(), dropped);
    predictions.ended(ROUTER, 9999, SlotEnd::Aborted, start);
    predictions.expire(start + KEEP);
    assert_eq!(predictions.samples(), 0);
    assert!(predictions.tickets.is_empty() && predictions.ended.is_empty());
}

proptest! {
    /// Whatever happens, a request can be left out of account as if it had been aborted, and nothing
    /// stays once all requests ended and the time is over.
    #[test]
    fn nothing_is_left_behind(steps in prop::collection::vec((0..8_u64, "[ab]{0,6}", 0..6_u8), 0..60)) {
        let mut fixture = Fixture::with("ab");
        for (counter, path, what) in steps {
            match what {
                0 | 1 => fixture.sent(counter, &path),
                2 => fixture.ended(counter, SlotEnd::Completed),
                3 => fixture.ended(counter, SlotEnd::Failed),
                4 => fixture.counted(&path, 3),
                _ => fixture.predictions.expire(fixture.start + KEEP),
            }
            let at = fixture.source;
            for counter in 0..8 {
                let slot = SlotKey { router: ROUTER, counter };
                let without = fixture.predictions.predicted(&prompt(&path), Some(slot), fixture.start);
                let mut aborted = fixture.clone();
                aborted.ended(counter, SlotEnd::Aborted);
                prop_assert_eq!(without.of(at), aborted.predicted(&path));
            }
            prop_assert_eq!(fixture.predictions.is_empty(at), fixture.predictions.samples() == 0);
        }
        while fixture.predictions.release_step(ROUTER, 3, fixture.start) {}
        fixture.predictions.expire(fixture.start + KEEP);
        prop_assert_eq!(fixture.predictions.samples(), 0);
        prop_assert!(fixture.predictions.is_empty(fixture.source));
    }
}
