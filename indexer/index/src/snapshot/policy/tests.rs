use proptest::prelude::*;
use warmroute_proto::snapshot::RecordMark;

use super::*;

fn log(created_unix_ns: u64) -> StreamIdentity {
    StreamIdentity {
        created_unix_ns,
        nonce: created_unix_ns * 7,
    }
}

fn name(created: u64, position: u64, suffix: &str) -> String {
    let name = Name {
        log: log(created),
        position: LogPosition(position),
        suffix: suffix.to_owned(),
    };
    name.to_string()
}

fn snapshot(created: u64, position: u64) -> SnapshotRef {
    SnapshotRef {
        name: name(created, position, "w-1"),
        log: log(created),
        at: RecordMark {
            position: LogPosition(position),
            stored_unix_ns: 0,
            checksum: 0,
        },
        bytes: 1,
    }
}

#[test]
fn names_are_read_back_and_foreign_ones_are_left_alone() {
    let text = name(5, 9, "w-1-2");
    let parsed = Name::parse(&text).unwrap();
    assert_eq!(parsed.log, log(5));
    assert_eq!(parsed.position, LogPosition(9));
    assert_eq!(parsed.suffix, "w-1-2");
    for foreign in ["", "s1-", "s1-5-35-9-w", "s2-0-0-0-w", "backup.tar"] {
        assert_eq!(Name::parse(foreign), None, "{foreign}");
    }
}

#[test]
fn the_newest_of_this_log_comes_first() {
    let names = [
        name(5, 9, "a"),
        name(5, 16, "a"),
        name(6, 1, "a"),
        "x".to_owned(),
    ];
    let found = candidates(&names, log(5));
    let found: Vec<_> = found.iter().map(|(name, _)| name.position.0).collect();
    assert_eq!(found, [16, 9]);
}

#[test]
fn a_dead_pointer_is_replaced_and_its_older_one_stays() {
    let pointer = SnapshotPointer {
        newest: snapshot(5, 100),
        older: Some(snapshot(5, 50)),
    };
    assert_eq!(moved(Some(&pointer), snapshot(5, 70), false), None);
    let moved = moved(Some(&pointer), snapshot(5, 70), true).unwrap();
    assert_eq!(moved.newest, snapshot(5, 70));
    assert_eq!(moved.older, Some(snapshot(5, 50)));
}

/// A log's creation is what some server's clock showed: it says nothing of which log is there now.
#[test]
fn a_pointer_to_another_log_is_replaced_if_that_is_no_more_and_only_then() {
    let pointer = SnapshotPointer {
        newest: snapshot(5, 100),
        older: Some(snapshot(5, 50)),
    };
    for created in [4, 6] {
        assert_eq!(moved(Some(&pointer), snapshot(created, 200), false), None);
        let moved = moved(Some(&pointer), snapshot(created, 7), true).unwrap();
        assert_eq!(moved.newest, snapshot(created, 7));
        assert_eq!(moved.older, None);
        let dropped: Vec<&str> = dropped(&pointer, &moved).collect();
        assert_eq!(dropped, [snapshot(5, 100).name, snapshot(5, 50).name]);
    }
    let same_log = moved(Some(&pointer), snapshot(5, 70), true).unwrap();
    let dropped: Vec<&str> = dropped(&pointer, &same_log).collect();
    assert_eq!(dropped, [snapshot(5, 100).name]);
}

#[test]
fn only_what_lies_before_the_two_is_outdated() {
    let pointer = SnapshotPointer {
        newest: snapshot(5, 100),
        older: Some(snapshot(5, 50)),
    };
    let names = [
        name(4, 900, "w-1"),
        name(5, 49, "w-1"),
        name(5, 50, "w-1"),
        name(5, 70, "crashed"),
        name(5, 100, "w-1"),
        name(5, 200, "being-written"),
        name(6, 1, "new-log"),
        "backup.tar".to_owned(),
    ];
    assert_eq!(outdated(&names, &pointer), [&names[0], &names[1]]);
}

const SCHEDULE: Schedule = Schedule {
    bytes: 1000,
    every: Duration::from_secs(60),
};

fn reading(start: Instant, seconds: u64, position: u64, bytes: u64) -> ReadProgress {
    ReadProgress {
        at: start + Duration::from_secs(seconds),
        position: LogPosition(position),
        bytes,
        first: LogPosition(1),
    }
}

#[test]
fn due_before_a_small_log_lets_the_last_one_go() {
    let start = crate::tests_support::some_instant();
    let mut progress = SnapshotProgress::default();
    progress.took(reading(start, 0, 100, 100));
    let mut now = reading(start, 1, 125, 125);
    assert!(!progress.is_due(now, &SCHEDULE), "nothing was trimmed");
    now.first = LogPosition(26);
    assert!(progress.is_due(now, &SCHEDULE));
    now.position = LogPosition(124);
    assert!(!progress.is_due(now, &SCHEDULE));
}

#[test]
fn due_by_bytes_by_time_and_for_want_of_any() {
    let start = crate::tests_support::some_instant();
    let at = |seconds, position, bytes| reading(start, seconds, position, bytes);
    let mut progress = SnapshotProgress::default();
    assert!(!progress.is_due(at(0, 0, 0), &SCHEDULE), "nothing was read");
    assert!(progress.is_due(at(0, 1, 1), &SCHEDULE), "there is none");
    progress.took(at(0, 1, 1));
    assert!(!progress.is_due(at(59, 2, 1000), &SCHEDULE));
    assert!(progress.is_due(at(59, 2, 1001), &SCHEDULE), "bytes");
    assert!(progress.is_due(at(60, 2, 2), &SCHEDULE), "time");
    assert!(!progress.is_due(at(3600, 1, 1), &SCHEDULE), "nothing new");
    assert!(
        progress.is_due(at(86_400, 1, 1), &SCHEDULE),
        "before the store's age"
    );
    progress.wait_until(start + Duration::from_secs(70));
    assert!(!progress.is_due(at(69, 2, 2), &SCHEDULE));
    assert!(progress.is_due(at(70, 2, 2), &SCHEDULE));
}

#[test]
fn what_another_replica_wrote_counts() {
    let start = crate::tests_support::some_instant();
    let at = |seconds, position, bytes| reading(start, seconds, position, bytes);
    let mut progress = SnapshotProgress::default();
    // Found at the start: of unknown age, so it is renewed after the usual time even if idle.
    progress.learned(at(0, 10, 500), LogPosition(10));
    assert!(!progress.is_due(at(59, 10, 500), &SCHEDULE));
    assert!(progress.is_due(at(60, 10, 500), &SCHEDULE));
    // Seen while watching: half of what was read since is in it.
    progress.learned(at(60, 30, 2500), LogPosition(20));
    assert!(!progress.is_due(at(61, 30, 2499), &SCHEDULE));
    assert!(progress.is_due(at(61, 30, 2500), &SCHEDULE));
    progress.learned(at(62, 40, 2500), LogPosition(15));
    assert!(
        progress.is_due(at(62, 40, 2500), &SCHEDULE),
        "an older one changes nothing"
    );
    progress.nothing_there();
    assert!(progress.is_due(at(62, 40, 2500), &SCHEDULE));
}

proptest! {
    /// Whatever is written in whatever order: the pointer's place in its log never falls, and what
    /// it names is never outdated.
    #[test]
    fn the_pointer_never_moves_back(writes in prop::collection::vec((1..4_u64, 1..20_u64), 1..40)) {
        let mut pointer: Option<SnapshotPointer> = None;
        let mut names = Vec::new();
        let mut newest = (0, 0);
        for (created, position) in writes {
            let new = snapshot(created, position);
            names.push(new.name.clone());
            let is_dead = pointer.as_ref().is_some_and(|known| known.newest.log != new.log);
            let moved = moved(pointer.as_ref(), new, is_dead);
            prop_assert_eq!(moved.is_some(), is_dead || (created, position) >= newest);
            if let Some(moved) = moved {
                newest = (created, position);
                let outdated = outdated(&names, &moved);
                prop_assert!(!outdated.contains(&moved.newest.name.as_str()));
                if let Some(older) = &moved.older {
                    prop_assert!(order_of(older) <= order_of(&moved.newest));
                    prop_assert!(!outdated.contains(&older.name.as_str()));
                }
                pointer = Some(moved);
            }
            let present = pointer.as_ref().unwrap();
            prop_assert_eq!(order_of(&present.newest), order(log(newest.0), LogPosition(newest.1)));
        }
    }
}
