use super::*;

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
    assert_eq!(room.join("m", 1, "late"), Err(QueueAtBound));
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

#[test]
fn a_place_is_given_once() {
    let mut room = Room::new();
    for tenant in ["a", "b", "c"] {
        room.join("m", 0, tenant).unwrap();
    }
    assert_eq!(room.room.wanting(), [("m".to_owned(), 3)]);
    let (spot, request) = room.room.grant("m", 1).unwrap();
    assert!(room.room.grant("m", 1).is_none());
    assert!(room.room.is_engaged("m", |_| 1));
    assert!(room.room.is_engaged("m", |_| 9), "others wait");
    // Another router took the place.
    room.room.give_back("m", &spot, request);
    assert_eq!(room.room.size().requests, 3);
    let (again, _) = room.room.grant("m", 1).unwrap();
    assert_eq!(again, spot);
    room.room.settle("m", GrantEnd::Admitted, room.now);
    // Two places, then the clients are gone.
    assert!(room.room.grant("m", 2).is_some() && room.room.grant("m", 2).is_some());
    assert_eq!(room.room.size(), QueueSize::default());
    room.room.settle("m", GrantEnd::Unused, room.now);
    assert!(room.room.is_engaged("m", |_| 1));
    assert!(!room.room.is_engaged("m", |_| 2), "a place is free");
    room.room.settle("m", GrantEnd::Unused, room.now);
    assert!(!room.room.is_engaged("m", |_| 1));
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
    while room.room.grant("m", u32::MAX).is_some() {
        granted += 1;
        room.room.settle("m", GrantEnd::Admitted, room.now);
    }
    assert_eq!((granted, room.room.size()), (10_000, QueueSize::default()));
    // A minute later a request of another model finds nothing of it.
    room.now += Duration::from_secs(61);
    room.join("n", 0, "a").unwrap();
    assert_eq!(room.room.statuses(room.now).len(), 1);
}
