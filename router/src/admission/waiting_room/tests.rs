use warmroute_proto::{DpRank, Source};

use super::*;
use crate::route::SourceTable;

#[expect(clippy::disallowed_methods, reason = "an origin of virtual time")]
fn origin() -> Instant {
    Instant::now()
}

const BOUNDS: QueueBounds = QueueBounds {
    requests: 10,
    requests_per_model: 6,
    bytes: 1000,
};

struct Room {
    room: WaitingRoom<u32>,
    now: Instant,
    payloads: u32,
}

impl Room {
    fn new() -> Self {
        Self {
            room: WaitingRoom::default(),
            now: origin(),
            payloads: 0,
        }
    }

    fn join(&mut self, model: &str, level: i64, tenant: &str) -> Result<Vec<u32>, QueueAtBound> {
        self.join_with(model, level, tenant, 10, &BOUNDS)
    }

    fn join_with(
        &mut self,
        model: &str,
        level: i64,
        tenant: &str,
        bytes: usize,
        bounds: &QueueBounds,
    ) -> Result<Vec<u32>, QueueAtBound> {
        let request = QueuedRequest {
            cost: 500,
            bytes,
            since: self.now,
            payload: self.payloads,
        };
        let line = QueueLine {
            model: model.to_owned(),
            level,
            tenant: Some(tenant.parse().unwrap()),
        };
        let joined = self.room.join(&line, request, bounds)?;
        self.payloads += 1;
        Ok(joined.displaced)
    }
}

#[test]
fn at_a_bound_the_longest_line_of_the_last_level_yields() {
    let mut room = Room::new();
    for _ in 0..6 {
        assert_eq!(room.join("m", 0, "flood"), Ok(vec![]));
    }
    assert_eq!(room.join("m", 0, "flood"), Err(QueueAtBound));
    // The newest of the flood's.
    assert_eq!(room.join("m", 0, "rare"), Ok(vec![5]));
    assert_eq!(room.join("m", 0, "rare"), Ok(vec![4]));
    // Lines that are as long do not take from each other.
    assert_eq!(room.join("m", 0, "rare"), Ok(vec![3]));
    assert_eq!(room.join("m", 0, "rare"), Err(QueueAtBound));
    assert_eq!(room.join("m", -1, "first"), Ok(vec![8]));
    // The bound of all models.
    for number in 0..4 {
        assert_eq!(room.join("n", 2, "batch"), Ok(vec![]), "{number}");
    }
    assert_eq!(room.room.size().requests, 10);
    assert_eq!(room.join("o", 0, "flood").unwrap().len(), 1);
    assert_eq!(room.room.size().requests, 10);
}

const HUNDREDS: QueueBounds = QueueBounds {
    requests: 800,
    requests_per_model: 80,
    bytes: 1 << 20,
};

/// At the bound one of eight places in the queue is of later levels, as one of eight free places is.
#[test]
fn a_level_keeps_its_share_of_a_bound_against_earlier_and_later_ones() {
    let mut room = Room::new();
    let mut join = |level, tenant| {
        let joined = room.join_with("m", level, tenant, 10, &HUNDREDS);
        joined.map(|displaced| displaced.len())
    };
    for _ in 0..80 {
        assert_eq!(join(0, "flood"), Ok(0));
    }
    for number in 0..10 {
        assert_eq!(join(1, "late"), Ok(1), "{number}");
    }
    assert_eq!(join(1, "late"), Err(QueueAtBound));
    assert_eq!(join(0, "flood"), Err(QueueAtBound));
    // Two later levels have half of the part each.
    for number in 0..5 {
        assert_eq!(join(2, "latest"), Ok(1), "{number}");
    }
    assert_eq!(join(2, "latest"), Err(QueueAtBound));
    assert_eq!(join(1, "late"), Err(QueueAtBound));
    // The first level takes back what was beyond their shares, and no more.
    assert_eq!(join(0, "rare"), Ok(1));
    assert_eq!(room.room.size().requests, 80);
}

#[test]
fn the_only_place_is_the_first_level_s() {
    let mut room = Room::new();
    let one = QueueBounds {
        requests: 1,
        ..HUNDREDS
    };
    assert_eq!(room.join_with("m", 0, "a", 10, &one), Ok(vec![]));
    assert_eq!(room.join_with("m", 1, "b", 10, &one), Err(QueueAtBound));
    assert_eq!(room.join_with("m", -1, "c", 10, &one), Ok(vec![0]));
}

#[test]
fn a_later_level_is_served_one_of_eight_times_while_an_earlier_one_floods() {
    let mut room = Room::new();
    let mut served = [0, 0];
    for _ in 0..800 {
        // Many more than are served.
        for level in [0, 0, 0, 1] {
            let tenant = if level == 0 { "flood" } else { "late" };
            // At the bound the newest are refused.
            drop(room.join_with("m", level, tenant, 10, &HUNDREDS));
        }
        let (spot, _) = room.grant(1, 0).unwrap();
        room.room.settle(&spot.model, GrantEnd::Admitted, room.now);
        served[usize::try_from(spot.level).unwrap()] += 1;
    }
    assert_eq!(served, [700, 100]);
}

#[test]
fn a_level_keeps_its_share_of_the_bytes() {
    let mut room = Room::new();
    let mut join = |level, bytes| {
        let joined = room.join_with("m", level, "a", bytes, &BOUNDS);
        joined.map(|displaced| displaced.len())
    };
    for _ in 0..5 {
        assert_eq!(join(0, 200), Ok(0));
    }
    assert_eq!(join(1, 126), Err(QueueAtBound));
    assert_eq!(join(1, 125), Ok(1));
    assert_eq!(join(0, 100), Err(QueueAtBound));
}

#[test]
fn bytes_are_bounded_too() {
    let mut room = Room::new();
    let mut join = |tenant, bytes| room.join_with("m", 0, tenant, bytes, &BOUNDS);
    assert_eq!(join("a", 1001), Err(QueueAtBound));
    assert_eq!(join("a", 400), Ok(vec![]));
    assert_eq!(join("a", 400), Ok(vec![]));
    assert_eq!(join("a", 400), Err(QueueAtBound));
    assert_eq!(join("b", 300), Ok(vec![1]));
    assert_eq!(
        room.room.size(),
        QueueSize {
            requests: 2,
            bytes: 700
        }
    );
}

/// Which yield is decided before any does.
#[test]
fn a_request_that_does_not_fit_displaces_none() {
    let mut room = Room::new();
    let mut join = |tenant, bytes| room.join_with("m", 0, tenant, bytes, &BOUNDS);
    for tenant in ["a", "a", "b"] {
        assert_eq!(join(tenant, 300), Ok(vec![]));
    }
    // One of a's would yield, and the next one not: b's line is as long then.
    assert_eq!(join("c", 500), Err(QueueAtBound));
    assert_eq!(join("c", 250), Ok(vec![1]));
    assert_eq!(room.room.size().requests, 3);
}

/// Few requests with many bytes, against many with few.
#[test]
fn small_requests_do_not_shield_a_large_one() {
    let mut room = Room::new();
    for bytes in [800, 10, 10] {
        let joined = room.join_with("m", 0, "a", bytes, &BOUNDS);
        assert_eq!(joined, Ok(vec![]));
    }
    assert_eq!(room.join_with("m", 0, "b", 300, &BOUNDS), Ok(vec![0]));
    assert_eq!(room.room.size().bytes, 320);
}

#[test]
fn large_requests_do_not_displace_small_ones() {
    let mut room = Room::new();
    for tenant in ["small", "small", "small", "small", "huge"] {
        let (bytes, model) = if tenant == "huge" {
            (600, "n")
        } else {
            (100, "m")
        };
        let joined = room.join_with(model, 0, tenant, bytes, &BOUNDS);
        assert_eq!(joined, Ok(vec![]));
    }
    assert_eq!(
        room.join_with("m", 0, "huge", 300, &BOUNDS),
        Err(QueueAtBound)
    );
    assert_eq!(
        room.join_with("n", 0, "huge", 10, &BOUNDS),
        Err(QueueAtBound)
    );
    assert_eq!(room.join_with("m", 0, "small", 100, &BOUNDS), Ok(vec![4]));
    assert_eq!(room.room.size().bytes, 500);
}

/// Free places at sources that the models `m` and its adapter `a` share; `n` has its own.
fn places(shared: u32, own: u32) -> FreePlaces {
    let mut table = SourceTable::default();
    let [one, two] = ["w", "v"].map(|worker| {
        table.intern(&Source {
            worker: worker.into(),
            dp_rank: DpRank(0),
        })
    });
    let free = |source, free| {
        if free > 0 {
            vec![(source, free)]
        } else {
            vec![]
        }
    };
    let mut places = FreePlaces::default();
    places.add("m".into(), Some(free(one, shared)));
    places.add("a".into(), Some(free(one, shared)));
    places.add("n".into(), Some(free(two, own)));
    places
}

impl Room {
    fn grant(&mut self, shared: u32, own: u32) -> Option<(QueueSpot, QueuedRequest<u32>)> {
        let mut places = places(shared, own);
        self.room.take_granted(&mut places);
        self.room.grant(&mut places, &mut InFlightTokens::default())
    }

    fn is_engaged(&self, model: &str, shared: u32, own: u32) -> bool {
        self.room.is_engaged(model, |_| places(shared, own))
    }
}

#[test]
fn a_place_is_given_once() {
    let mut room = Room::new();
    for tenant in ["a", "b", "c"] {
        room.join("m", 0, tenant).unwrap();
    }
    let (spot, request) = room.grant(1, 0).unwrap();
    assert!(room.grant(1, 0).is_none());
    assert!(room.is_engaged("m", 9, 0), "others wait");
    // Another router took the place.
    room.room.give_back(&spot, request);
    assert_eq!(room.room.size().requests, 3);
    let (again, _) = room.grant(1, 0).unwrap();
    assert_eq!(again, spot);
    room.room.settle(&spot.model, GrantEnd::Admitted, room.now);
    // Two places, then the clients are gone.
    assert!(room.grant(2, 0).is_some() && room.grant(2, 0).is_some());
    assert_eq!(room.room.size(), QueueSize::default());
    room.room.settle(&spot.model, GrantEnd::Unused, room.now);
    assert!(room.is_engaged("m", 1, 0));
    assert!(!room.is_engaged("m", 2, 0), "a place is free");
    room.room.settle(&spot.model, GrantEnd::Unused, room.now);
    assert!(!room.is_engaged("m", 1, 0));
}

/// Names of one engine have the same places: none is given under two names, and a first level of
/// one name goes before a later level of another.
#[test]
fn models_that_share_sources_share_their_places() {
    let mut room = Room::new();
    room.join("m", 1, "late").unwrap();
    room.join("a", 0, "first").unwrap();
    let (spot, _) = room.grant(1, 0).unwrap();
    assert_eq!(&*spot.model, "a");
    assert!(room.grant(1, 0).is_none(), "the place is given");
    assert!(room.is_engaged("m", 1, 0) && room.is_engaged("a", 1, 0));
    assert!(room.is_engaged("a", 9, 0), "a request of m waits for them");
    assert!(!room.is_engaged("n", 1, 1), "none waits for its place");
    room.join("n", 5, "other").unwrap();
    let (spot, _) = room.grant(1, 1).unwrap();
    assert_eq!(&*spot.model, "n", "its place is of no use to the others");
    room.room.settle(&spot.model, GrantEnd::Admitted, room.now);
    assert!(room.grant(2, 0).is_some());
}

/// Whatever comes, at most the bound waits, and nothing of it is left when it is gone.
#[test]
fn ten_thousand_requests_wait_and_no_more() {
    let bounds = QueueBounds {
        requests: 10_000,
        requests_per_model: 10_000,
        bytes: 1 << 30,
    };
    let mut room = Room::new();
    let mut displaced = 0;
    let mut refused = 0;
    for number in 0..30_000_u32 {
        let tenant = if number.is_multiple_of(3) {
            "few".into()
        } else {
            format!("t{}", number % 7)
        };
        match room.join_with("m", 0, &tenant, 100, &bounds) {
            Ok(out) => displaced += out.len(),
            Err(QueueAtBound) => refused += 1,
        }
        assert!(room.room.size().requests <= 10_000);
    }
    assert_eq!(displaced + refused, 20_000);
    let mut granted = 0;
    while let Some((spot, _)) = room.grant(u32::MAX, 0) {
        granted += 1;
        room.room.settle(&spot.model, GrantEnd::Admitted, room.now);
    }
    assert_eq!((granted, room.room.size()), (10_000, QueueSize::default()));
    // A minute later a request of another model finds nothing of it.
    room.now += Duration::from_secs(61);
    room.join("n", 0, "a").unwrap();
    assert_eq!(room.room.statuses(room.now).len(), 1);
}

/// A tenant that floods waits for its own requests, and another one does not.
#[test]
fn the_time_to_try_again_is_that_of_the_tenants_line() {
    let mut room = Room::new();
    let bounds = QueueBounds {
        requests: 100,
        requests_per_model: 100,
        bytes: 1 << 20,
    };
    for _ in 0..62 {
        room.join_with("m", 0, "flood", 10, &bounds).unwrap();
    }
    // One leaves each second.
    for _ in 0..3 {
        let (spot, _) = room.grant(9, 0).unwrap();
        room.room.settle(&spot.model, GrantEnd::Admitted, room.now);
        room.now += Duration::from_secs(1);
    }
    room.now -= Duration::from_secs(1);
    let now = room.now;
    let mut secs = |model: &str, level, tenant: &str| {
        let line = QueueLine {
            model: model.to_owned(),
            level,
            tenant: Some(tenant.parse().unwrap()),
        };
        room.room.retry_after(&line, now).as_secs()
    };
    assert_eq!(secs("m", 0, "flood"), 60);
    assert_eq!(secs("m", 0, "new"), 2);
    assert_eq!(secs("m", -1, "flood"), 1);
    assert_eq!(secs("m", 1, "new"), 8);
    assert_eq!(secs("n", 0, "flood"), 1);
}
