use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::testing::{sampled, source_id, start};

const SECOND: Duration = Duration::from_secs(1);

const LIMITS: PrefixLimits = PrefixLimits::REPORTED;

struct Fixture {
    reported: PrefixTable,
    now: Instant,
}

impl Fixture {
    fn new() -> Self {
        Self {
            reported: PrefixTable::new(LIMITS),
            now: start(),
        }
    }

    /// A report of a request that was decided just now.
    fn report(&mut self, prompt: &SampledPrefix, cached_blocks: u32) {
        self.report_of(prompt, cached_blocks, self.now);
    }

    fn report_of(&mut self, prompt: &SampledPrefix, cached_blocks: u32, decided: Instant) {
        let report = CacheReport {
            source: source_id(),
            prompt,
            cached_blocks,
            decided,
        };
        self.reported.report(&report, self.now);
    }

    fn credit(&self, prompt: &SampledPrefix) -> u32 {
        self.reported.held(prompt).of(source_id())
    }
}

#[test]
fn what_was_cached_is_credited_to_every_prompt_that_begins_with_it() {
    let mut fixture = Fixture::new();
    let (one, other) = (sampled(0..10), sampled((0..6).chain(50..60)));
    fixture.report(&one, 8);
    assert_eq!((fixture.credit(&one), fixture.credit(&other)), (8, 6));
    assert_eq!(fixture.credit(&sampled(50..60)), 0);
    fixture.report(&other, 6);
    fixture.report(&other, 12);
    assert_eq!((fixture.credit(&one), fixture.credit(&other)), (8, 12));
    assert_eq!(
        fixture.reported.len(),
        2,
        "a longer report replaces its beginning"
    );
}

#[test]
fn a_smaller_report_ends_everything_beyond_it() {
    let mut fixture = Fixture::new();
    let (one, other) = (sampled(0..10), sampled((0..6).chain(50..60)));
    fixture.report(&one, 10);
    fixture.report(&other, 16);
    fixture.now += SECOND;
    fixture.report(&one, 7);
    assert_eq!((fixture.credit(&one), fixture.credit(&other)), (7, 16));
    fixture.now += SECOND;
    fixture.report(&one, 2);
    assert_eq!((fixture.credit(&one), fixture.credit(&other)), (2, 2));
    fixture.report(&other, 0);
    assert_eq!(fixture.credit(&one), 0);
    assert!(fixture.reported.is_empty());
}

/// Answers end in another order than requests begin.
#[test]
fn an_earlier_request_neither_ends_nor_restores_what_a_later_one_found() {
    let mut fixture = Fixture::new();
    let asked = sampled(0..10);
    let earlier = fixture.now;
    fixture.now += SECOND;
    fixture.report(&asked, 10);
    fixture.report_of(&asked, 0, earlier);
    assert_eq!(fixture.credit(&asked), 10);
    fixture.now += SECOND;
    fixture.report(&asked, 3);
    fixture.report_of(&asked, 10, earlier + SECOND);
    assert_eq!(fixture.credit(&asked), 3);
}

#[test]
fn reports_end_by_the_index_by_a_new_generation_and_by_time() {
    let mut fixture = Fixture::new();
    let asked = sampled(0..10);
    fixture.report(&asked, 8);
    fixture.reported.counted(source_id(), &asked, 7);
    assert_eq!(fixture.credit(&asked), 8);
    fixture.reported.counted(source_id(), &asked, 8);
    assert_eq!(fixture.credit(&asked), 0);
    fixture.report(&asked, 8);
    fixture.reported.void(source_id());
    assert_eq!(fixture.credit(&asked), 0);
    fixture.report(&asked, 8);
    fixture.now += LIMITS.keep - SECOND;
    fixture.report(&asked, 8);
    fixture.now += SECOND;
    fixture.reported.expire(fixture.now);
    assert_eq!(fixture.credit(&asked), 8, "reported again in between");
    fixture.now += LIMITS.keep - SECOND;
    fixture.reported.expire(fixture.now);
    assert_eq!(fixture.credit(&asked), 0);
    assert_eq!(
        (
            fixture.reported.order.len(),
            fixture.reported.prompts.samples()
        ),
        (0, 0)
    );
}

#[test]
fn prefixes_of_a_source_are_bounded_and_the_oldest_go_first() {
    let mut fixture = Fixture::new();
    let most = u64::try_from(LIMITS.source_prefixes).unwrap();
    let first = sampled([1, 2]);
    for other in 0..2 * most {
        fixture.report(&sampled([1_000 + other, 7]), 2);
        fixture.now += Duration::from_millis(1);
        fixture.report(&first, 2);
    }
    assert!(fixture.reported.len() <= LIMITS.source_prefixes);
    assert!(fixture.reported.order.len() <= LIMITS.prefixes);
    assert_eq!(fixture.credit(&first), 2, "reported again and again");
    assert_eq!(fixture.credit(&sampled([1_000, 7])), 0);
    assert_eq!(fixture.credit(&sampled([999 + 2 * most, 7])), 2);
}

proptest! {
    /// Against a map from prefix to the last report about it, requests in order.
    #[test]
    fn agrees_with_the_last_reports(
        reports in prop::collection::vec((0_u64..3, 0_u64..3, 0_u32..=4), 1..40),
    ) {
        let mut fixture = Fixture::new();
        let mut held = BTreeMap::<Vec<u64>, bool>::new();
        let blocks = |one: u64, two: u64| vec![one, one, 10 + two, 20 + two];
        for (one, two, cached) in reports {
            let asked = blocks(one, two);
            for length in 1..=4 {
                let prefix = &asked[..length];
                if length > cached as usize {
                    held.retain(|known, _| !known.starts_with(prefix));
                } else {
                    held.insert(prefix.to_vec(), true);
                }
            }
            fixture.now += SECOND;
            fixture.report(&sampled(asked), cached);
            fixture.reported.expire(fixture.now);
            for one in 0..3 {
                for two in 0..3 {
                    let asked = blocks(one, two);
                    let right = (1..=4)
                        .take_while(|&length| held.contains_key(&asked[..length]))
                        .count();
                    let credit = fixture.credit(&sampled(asked)) as usize;
                    prop_assert!(credit <= right, "{credit} of {right}");
                }
            }
        }
    }
}
