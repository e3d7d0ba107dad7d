use std::time::Duration;

use proptest::prelude::*;

use super::*;

#[expect(clippy::disallowed_methods, reason = "an origin of virtual time")]
fn origin() -> Instant {
    Instant::now()
}

fn tenant(name: &str) -> TenantName {
    Some(name.parse().unwrap())
}

struct Line {
    queue: FairQueue<u64>,
    in_flight: InFlightTokens,
    numbers: u64,
    since: Instant,
}

impl Line {
    fn new() -> Self {
        Self {
            queue: FairQueue::default(),
            in_flight: InFlightTokens::default(),
            numbers: 0,
            since: origin(),
        }
    }

    fn push(&mut self, level: i64, name: &str, cost: u64) -> QueueSpot {
        self.push_for("m", level, name, cost)
    }

    fn push_for(&mut self, model: &str, level: i64, name: &str, cost: u64) -> QueueSpot {
        self.numbers += 1;
        let spot = QueueSpot {
            model: model.into(),
            level,
            tenant: tenant(name),
            number: TicketNumber(self.numbers),
        };
        let request = QueuedRequest {
            cost,
            bytes: 10,
            since: self.since,
            payload: self.numbers,
        };
        self.queue.push(&spot, request);
        spot
    }

    fn next(&mut self) -> Option<(QueueSpot, QueuedRequest<u64>)> {
        self.queue.pop(|_| true, &self.in_flight)
    }

    fn ahead(&self, level: i64, name: &str) -> usize {
        self.queue.ahead(&QueueLine {
            model: "m".to_owned(),
            level,
            tenant: tenant(name),
        })
    }

    fn waiting(&self, level: i64, name: &str) -> usize {
        let mut lines = self.queue.lines();
        let own = lines.find(|(of, tenant, _)| *of == level && **tenant == self::tenant(name));
        own.map_or(0, |(_, _, line)| line.size().requests)
    }

    fn pop(&mut self) -> (i64, String, u64) {
        let (spot, request) = self.next().unwrap();
        let name = spot
            .tenant
            .map_or_else(String::new, |name| name.to_string());
        (spot.level, name, request.payload)
    }
}

#[test]
fn tenants_share_tokens_and_keep_their_order() {
    let mut line = Line::new();
    for _ in 0..400 {
        line.push(0, "flood", 300);
    }
    for _ in 0..50 {
        line.push(0, "large", 3000);
    }
    line.push(0, "rare", 500);
    let order: Vec<_> = (0..100).map(|_| line.pop()).collect();
    // Behind one turn of each other tenant.
    let rare = order.iter().position(|(_, name, _)| name == "rare");
    assert!(rare.unwrap() < 8, "{rare:?}");
    let tokens = |name: &str, cost: u64| {
        let count = order.iter().filter(|(_, other, _)| other == name).count();
        u64::try_from(count).unwrap() * cost
    };
    let (flood, large) = (tokens("flood", 300), tokens("large", 3000));
    assert!(flood.abs_diff(large) < 6000, "{flood} {large}");
    for name in ["flood", "large"] {
        let own = order.iter().filter(|(_, other, _)| other == name);
        assert!(own.map(|(_, _, number)| number).is_sorted());
    }
}

/// A request of the first level waits for one of a lower level at most.
#[test]
fn later_requests_of_a_first_level_overtake_lower_ones() {
    let mut line = Line::new();
    for _ in 0..100 {
        line.push(5, "batch", 1000);
    }
    for _ in 0..20 {
        line.push(0, "chat", 1000);
        let (one, other) = (line.pop().0, line.waiting(0, "chat"));
        if one != 0 {
            assert_eq!((line.pop().0, other), (0, 1));
        }
    }
}

/// However many requests of the first level come, lower levels move on.
#[test]
fn no_level_starves() {
    let mut line = Line::new();
    for level in 1..=3 {
        for _ in 0..10 {
            line.push(level, "slow", 100_000);
        }
    }
    let mut served = BTreeMap::new();
    for _ in 0..10 * 3 * LOW_TURN {
        line.push(0, "fast", 1);
        line.push(0, "fast", 1);
        *served.entry(line.pop().0).or_insert(0) += 1;
    }
    assert_eq!(served, [(0, 210), (1, 10), (2, 10), (3, 10)].into());
}

#[test]
fn a_returned_request_is_the_next_one() {
    let mut line = Line::new();
    for name in ["a", "b", "a", "b"] {
        line.push(0, name, 5000);
    }
    let (spot, request) = line.next().unwrap();
    line.queue.push_back_first(&spot, request);
    assert_eq!(line.next().unwrap().0, spot);
}

/// A model whose places are taken does not hold up the others, and its tenant keeps its turn.
#[test]
fn the_next_request_that_fits_leaves() {
    let mut line = Line::new();
    let first = line.push_for("full", 0, "a", 5000);
    let spots = ["a", "b"].map(|name| line.push_for("free", 0, name, 5000));
    let late = line.push_for("free", 1, "a", 100);
    let mut order = Vec::new();
    while let Some((spot, _)) = line.queue.pop(|model| model == "free", &line.in_flight) {
        order.push(spot.number);
    }
    let [one, two] = spots.map(|spot| spot.number);
    assert_eq!(order, [one, two, late.number]);
    assert!(
        line.queue
            .pop(|model| model == "free", &line.in_flight)
            .is_none()
    );
    assert_eq!(line.next().unwrap().0, first);
}

/// Names of one engine, such as its adapters: who sends under many names gets no larger share.
#[test]
fn tenants_share_tokens_over_all_models() {
    let mut line = Line::new();
    for number in 0..400 {
        line.push_for(&format!("adapter{}", number % 20), 0, "many", 1000);
        line.push_for("base", 0, "one", 1000);
    }
    let order: Vec<_> = (0..100).map(|_| line.pop().1).collect();
    let of_one = order.iter().filter(|name| *name == "one").count();
    assert!((48..=52).contains(&of_one), "{of_one}");
}

proptest! {
    /// Sizes are those of what is in it, each request leaves once, a tenant's in order, and an empty
    /// queue keeps nothing.
    #[test]
    fn each_request_leaves_once_and_in_order(
        steps in prop::collection::vec((0_i64..3, 0_u8..4, 0_u64..200_000, 0_u8..6), 1..300),
    ) {
        let mut line = Line::new();
        let mut inside: BTreeMap<u64, QueueSpot> = BTreeMap::new();
        let check = |spot: &QueueSpot, inside: &mut BTreeMap<u64, QueueSpot>| {
            let same = |other: &&QueueSpot| {
                other.level == spot.level && other.tenant == spot.tenant
            };
            let first = inside.values().filter(same).map(|other| other.number).min();
            assert_eq!(first, Some(spot.number));
            assert!(inside.remove(&spot.number.0).is_some());
        };
        for (level, name, cost, step) in steps {
            match step {
                0..3 => {
                    let spot = line.push(level, &format!("t{name}"), cost);
                    inside.insert(spot.number.0, spot);
                }
                3 => if let Some((spot, _)) = line.next() {
                    check(&spot, &mut inside);
                },
                4 => if let Some(spot) = inside.values().nth(usize::from(name)).cloned() {
                    prop_assert!(line.queue.remove(&spot).is_some());
                    prop_assert!(line.queue.remove(&spot).is_none());
                    inside.remove(&spot.number.0);
                },
                _ => if let Some((spot, request)) = line.next() {
                    line.queue.push_back_first(&spot, request);
                },
            }
            prop_assert_eq!(line.queue.size().requests, inside.len());
            prop_assert_eq!(line.queue.size().bytes, 10 * inside.len());
        }
        while let Some((spot, _)) = line.next() {
            check(&spot, &mut inside);
        }
        prop_assert!(inside.is_empty() && line.queue.size().requests == 0 && line.queue.levels.is_empty());
    }

    /// While a tenant waits, no other one of its level is served more than a turn and its largest
    /// request beyond it.
    #[test]
    fn no_tenant_starves(
        costs in prop::collection::vec(1_u64..20_000, 2..6),
        pops in 10_usize..300,
    ) {
        let mut line = Line::new();
        for (number, cost) in costs.iter().enumerate() {
            for _ in 0..pops {
                line.push(0, &format!("t{number}"), *cost);
            }
        }
        let mut served = vec![0_u64; costs.len()];
        for _ in 0..pops {
            let (_, name, _) = line.pop();
            let number: usize = name[1..].parse().unwrap();
            served[number] += costs[number];
        }
        let largest = costs.iter().max().unwrap();
        let (least, most) = (served.iter().min().unwrap(), served.iter().max().unwrap());
        prop_assert!(most - least <= 2 * (QUANTUM_TOKENS + largest), "{served:?} {costs:?}");
    }
}

/// Completion times of a tenant's requests on engines with so many places, in virtual time.
struct Fleet {
    line: Line,
    places: usize,
    /// Ends of the requests in progress.
    running: Vec<(Duration, &'static str)>,
    rng: fastrand::Rng,
}

impl Fleet {
    /// The 99th percentile of the times from arrival to completion of the requests of `steady`. The
    /// engines complete 32 a second, so that the share of each of two tenants is 16.
    fn p99(steady_per_sec: f64, other_per_sec: f64) -> Duration {
        let mut fleet = Self {
            line: Line::new(),
            places: 64,
            running: Vec::new(),
            rng: fastrand::Rng::with_seed(7),
        };
        let mut arrivals = Vec::new();
        for (name, per_sec) in [("steady", steady_per_sec), ("other", other_per_sec)] {
            let mut at = 0.0;
            while at < 300.0 {
                at += -(1.0 - fleet.rng.f64()).ln() / per_sec;
                arrivals.push((Duration::from_secs_f64(at), name));
            }
        }
        arrivals.sort_unstable();
        let mut came = BTreeMap::new();
        let mut times = Vec::new();
        let mut arrivals = arrivals.into_iter().peekable();
        while let Some(&(next, name)) = arrivals.peek() {
            let first_end = fleet.running.iter().min().copied();
            let now = first_end.map_or(next, |(end, _)| end.min(next));
            if now == next {
                arrivals.next();
                let spot = fleet.line.push(0, name, 1000);
                came.insert(spot.number.0, next);
                // The flood is bounded by its line.
                if name == "other" && fleet.line.waiting(0, "other") > 5000 {
                    fleet.line.queue.remove(&spot);
                }
            } else {
                let (ended, running) = fleet.running.drain(..).partition(|(end, _)| *end <= now);
                fleet.running = running;
                let ended: Vec<(Duration, &str)> = ended;
                for (_, name) in ended {
                    fleet.line.in_flight.ended(&tenant(name), 1000);
                }
            }
            while fleet.running.len() < fleet.places && fleet.line.queue.size().requests > 0 {
                let (_, name, number) = fleet.line.pop();
                let name = if name == "steady" { "steady" } else { "other" };
                let end = now + Duration::from_secs_f64(1.0 + 2.0 * fleet.rng.f64());
                fleet.running.push((end, name));
                fleet.line.in_flight.began(&tenant(name), 1000);
                if name == "steady" {
                    times.push(end - came[&number]);
                }
            }
        }
        times.sort_unstable();
        times[times.len() * 99 / 100]
    }
}

/// Also near its share, which a tenant exceeds for moments.
#[test]
fn a_flood_does_not_raise_another_tenants_p99() {
    for (steady, before) in [(8.0, 0.001), (14.0, 0.001), (14.0, 14.0)] {
        let (calm, flooded) = (Fleet::p99(steady, before), Fleet::p99(steady, 1000.0));
        println!("{steady}/s: p99 {calm:?} beside {before}/s, {flooded:?} beside a flood");
        assert!(flooded <= calm.mul_f64(1.2), "{calm:?} {flooded:?}");
    }
}

/// Tenants with equal lines, one of which has most places: the places become free one by one.
#[test]
fn a_tenant_below_its_part_in_flight_goes_first() {
    let mut line = Line::new();
    line.in_flight.began(&tenant("flood"), 64_000);
    for name in ["flood", "late"].repeat(100) {
        line.push(0, name, 1000);
    }
    let mut order = Vec::new();
    for number in 0..80 {
        let (_, name, _) = line.pop();
        line.in_flight.began(&tenant(&name), 1000);
        let ended = if number < 32 || number % 2 == 0 {
            "flood"
        } else {
            "late"
        };
        line.in_flight.ended(&tenant(ended), 1000);
        order.push(name);
    }
    let late = |names: &[String]| names.iter().filter(|name| *name == "late").count();
    // Each fourth place is given in turn.
    assert!((24..=32).contains(&late(&order[..32])), "{order:?}");
    // Then in turn.
    let after = late(&order[32..]);
    assert!((20..=34).contains(&after), "{after}");
}

/// It has much in flight at another model, whose places these are not.
#[test]
fn a_tenant_above_its_part_is_not_starved() {
    let mut line = Line::new();
    line.in_flight.began(&tenant("busy"), 1 << 40);
    for name in ["busy", "other"].repeat(40) {
        line.push(0, name, 1000);
    }
    let served = (0..40).map(|_| line.pop().1);
    let busy = served.filter(|name| name == "busy").count();
    assert!(busy >= 4, "{busy} of 40");
}

#[test]
fn ahead_of_a_request_are_those_that_leave_before_it() {
    let mut line = Line::new();
    assert_eq!(line.ahead(0, "a"), 0);
    for _ in 0..100 {
        line.push(0, "flood", 1000);
    }
    line.push(0, "b", 1000);
    line.push_for("n", -1, "b", 1000);
    assert_eq!(line.ahead(0, "flood"), 101);
    assert_eq!(line.ahead(0, "b"), 3, "its own and two of the flood's");
    assert_eq!(line.ahead(0, "new"), 2);
    assert_eq!(line.ahead(-1, "new"), 0);
    // One of eight is of the later level.
    assert_eq!(line.ahead(5, "new"), 7);
    for _ in 0..3 {
        line.push(5, "batch", 1000);
    }
    assert_eq!(line.ahead(5, "batch"), 3 + 4 * 7);
    assert_eq!(line.ahead(0, "new"), 2, "not those of a later level");
    // Two later levels have eight turns each of sixteen.
    assert_eq!(line.ahead(6, "new"), 15);
    assert_eq!(line.ahead(5, "batch"), 3 + 4 * 7);
    for _ in 0..20 {
        line.push(5, "batch", 1000);
    }
    assert_eq!(line.ahead(5, "batch"), 23 + 101, "all");
}

/// The estimate against the queue itself, with requests of one cost.
#[test]
fn a_request_leaves_when_the_estimate_says() {
    for (flood, rare, batch) in [(0, 0, 0), (40, 3, 0), (40, 3, 2), (5, 0, 30), (7, 7, 7)] {
        for (level, name) in [
            (0, "flood"),
            (0, "rare"),
            (0, "new"),
            (5, "batch"),
            (5, "new"),
        ] {
            let mut line = Line::new();
            for (count, level, name) in
                [(flood, 0, "flood"), (rare, 0, "rare"), (batch, 5, "batch")]
            {
                (0..count).for_each(|_| drop(line.push(level, name, 1024)));
            }
            let estimate = line.ahead(level, name);
            let own = line.push(level, name, 1024);
            let left = std::iter::from_fn(|| line.next());
            let before = left.take_while(|(spot, _)| *spot != own).count();
            // A first level gives one of eight turns to others, and a tenant may be early in its ring.
            let margin = 2 + before.div_ceil(LOW_TURN as usize);
            let case = format!("{name} on {level} behind {flood}, {rare}, {batch}");
            assert!(
                estimate.abs_diff(before) <= margin,
                "{case}: {estimate}, {before}"
            );
        }
    }
}
