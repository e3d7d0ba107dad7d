use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use super::super::usage::TenantUsage;
use super::*;
use crate::settings::TenantLimits;

const STEP: Duration = Duration::from_millis(5);
const REPORT_STEPS: u64 = 20;
const SILENT_STEPS: u64 = 600;
const SECOND: u64 = 200;

#[expect(clippy::disallowed_methods, reason = "an origin of virtual time")]
fn origin() -> Instant {
    Instant::now()
}

fn id(router: usize) -> RouterId {
    RouterId([u8::try_from(router).unwrap(); 16])
}

struct Report {
    due: u64,
    from: usize,
    to: usize,
    row: Option<TenantUse>,
}

/// Routers with one tenant, whose reports are late and may be lost.
struct Net {
    origin: Instant,
    step: u64,
    routers: Vec<TenantUsage>,
    ids: Vec<RouterId>,
    /// Steps of the last reports, by receiver and sender.
    heard: Vec<Vec<Option<u64>>>,
    reports: Vec<Report>,
    loss: f64,
    /// Neither sends nor receives.
    cut: Option<usize>,
    /// Has not joined.
    starting: Option<usize>,
    newcomers: Newcomers,
    admitted: Vec<u64>,
    /// Ends of the requests in progress.
    open: Vec<(u64, usize)>,
    rng: fastrand::Rng,
}

impl Net {
    fn new(routers: usize, limits: &TenantLimits) -> Self {
        let origin = origin();
        let mut net = Self {
            origin,
            step: 0,
            routers: (0..routers)
                .map(|_| TenantUsage::new(limits, LimitSharing::WithOthers, origin))
                .collect(),
            ids: (0..routers).map(id).collect(),
            heard: vec![vec![None; routers]; routers],
            reports: Vec::new(),
            loss: 0.0,
            cut: None,
            starting: None,
            newcomers: Newcomers::None,
            admitted: vec![0; routers],
            open: Vec::new(),
            rng: fastrand::Rng::with_seed(3),
        };
        net.run(SECOND, |_, _| {});
        net
    }

    fn now(&self) -> Instant {
        self.origin + STEP * u32::try_from(self.step).unwrap()
    }

    /// Runs so many steps. In each, `load` sends requests to each router.
    fn run(&mut self, steps: u64, mut load: impl FnMut(&mut Self, usize)) {
        for _ in 0..steps {
            self.step += 1;
            self.deliver();
            for router in 0..self.routers.len() {
                let ends = |open: &(u64, usize)| open.1 == router && open.0 <= self.step;
                let ended = self.open.iter().filter(|open| ends(open)).count();
                self.open
                    .retain(|open| !(open.1 == router && open.0 <= self.step));
                (0..ended).for_each(|_| self.routers[router].leave());
                load(self, router);
                if (self.step + 7 * router as u64).is_multiple_of(REPORT_STEPS) {
                    self.report(router);
                }
            }
        }
    }

    fn deliver(&mut self) {
        let (due, later) = std::mem::take(&mut self.reports)
            .into_iter()
            .partition(|report: &Report| report.due <= self.step);
        self.reports = later;
        for report in due {
            self.heard[report.to][report.from] = Some(self.step);
            if let Some(row) = report.row {
                self.routers[report.to].receive(self.ids[report.from], &row);
            }
        }
    }

    fn report(&mut self, from: usize) {
        if self.starting == Some(from) {
            return;
        }
        let others = (0..self.routers.len()).filter(|other| *other != from);
        let is_live = |other: &usize| {
            self.heard[from][*other].is_some_and(|at| self.step - at < SILENT_STEPS)
        };
        let reporting = others.clone().filter(is_live);
        let mut reporting: Vec<_> = reporting.map(|other| self.ids[other]).collect();
        reporting.sort_unstable();
        let routers = SharingRouters {
            own: self.ids[from],
            count: self.routers.len(),
            reporting,
            newcomers: self.newcomers,
        };
        let row = self.routers[from].report(&routers, self.now());
        for to in others {
            let is_cut = self.cut.is_some_and(|cut| cut == from || cut == to);
            if !is_cut && self.rng.f64() >= self.loss {
                // In order, as one connection has it.
                let due = self.step + 4;
                self.reports.push(Report { due, from, to, row });
            }
        }
    }

    /// Sends a request that lasts so many steps.
    fn send(&mut self, router: usize, lasts: u64) {
        if self.routers[router].enter(self.now()).is_ok() {
            self.admitted[router] += 1;
            self.open.push((self.step + lasts, router));
        }
    }

    /// Admitted within so many seconds in which each router gets so many requests a second.
    fn flood(&mut self, secs: u64, per_sec: &[f64]) -> Vec<u64> {
        let before = self.admitted.clone();
        self.run(secs * SECOND, |net, router| {
            let mut mean = per_sec[router] / 200.0;
            while mean > 0.0 {
                if net.rng.f64() < mean {
                    net.send(router, 1);
                }
                mean -= 1.0;
            }
        });
        let both = self.admitted.iter().zip(before);
        both.map(|(after, before)| after - before).collect()
    }
}

fn per_second(requests: u32) -> TenantLimits {
    TenantLimits {
        requests_per_second: NonZeroU32::new(requests),
        ..TenantLimits::default()
    }
}

/// Between 95 and 105 % of what one router admits: the rate, and a full bucket at the beginning.
fn assert_whole(admitted: &[u64], rate: u64, secs: u64, bucket: u64) {
    let sum = admitted.iter().sum::<u64>();
    let (low, high) = (rate * secs, rate * secs + bucket);
    let within = low * 95 / 100..=high * 105 / 100;
    assert!(
        within.contains(&sum),
        "{admitted:?}: {sum} not in {within:?}"
    );
}

#[test]
fn four_routers_admit_as_many_as_one() {
    for (rate, load) in [
        (100, [100.0; 4]),
        (100, [1000.0; 4]),
        (100, [0.0, 400.0, 0.0, 0.0]),
        (100, [300.0, 60.0, 20.0, 0.0]),
        (20, [100.0; 4]),
        (3, [50.0; 4]),
        (3, [0.0, 0.0, 50.0, 0.0]),
    ] {
        let mut net = Net::new(4, &per_second(rate));
        let admitted = net.flood(20, &load);
        println!("{rate}/s {load:?}: {admitted:?}");
        assert_whole(&admitted, rate.into(), 20, u64::from(rate) + 4);
    }
}

/// Each burst begins with full buckets everywhere.
#[test]
fn bursts_take_no_more_than_one_bucket() {
    let limits = TenantLimits {
        requests_per_minute: NonZeroU32::new(600),
        ..TenantLimits::default()
    };
    let mut net = Net::new(4, &limits);
    let burst = net.flood(1, &[4000.0; 4]);
    assert_whole(&burst, 610, 1, 4);
    net.run(70 * SECOND, |_, _| {});
    let burst = net.flood(2, &[0.0, 0.0, 8000.0, 0.0]);
    assert_whole(&burst, 310, 2, 4);
}

#[test]
fn demand_moves_from_router_to_router() {
    let mut net = Net::new(4, &per_second(100));
    let mut sum = 0;
    for turn in 0..10 {
        let mut load = [0.0; 4];
        load[turn % 4] = 500.0;
        sum += net.flood(3, &load).iter().sum::<u64>();
    }
    assert_whole(&[sum], 100, 30, 100);
}

#[test]
fn lost_reports_cost_little() {
    let mut net = Net::new(4, &per_second(100));
    net.loss = 0.3;
    let admitted = net.flood(20, &[200.0; 4]);
    assert_whole(&admitted, 100, 20, 100);
}

/// One that is cut off has the fourth part, and the others the rest, as long as it is listed.
#[test]
fn routers_that_are_cut_off_have_an_equal_part_each() {
    let mut net = Net::new(4, &per_second(100));
    net.flood(5, &[200.0; 4]);
    net.cut = Some(3);
    net.flood(5, &[200.0; 4]);
    let cut = net.flood(10, &[200.0; 4]);
    assert!((237..=263).contains(&cut[3]), "{cut:?}");
    assert_whole(&cut, 100, 10, 0);
    net.cut = None;
    net.flood(2, &[200.0; 4]);
    assert_whole(&net.flood(10, &[200.0; 4]), 100, 10, 0);
    // None hears of another one.
    net.loss = 1.0;
    net.flood(5, &[200.0; 4]);
    for part in net.flood(10, &[200.0; 4]) {
        assert!((237..=263).contains(&part), "{part}");
    }
}

/// Whatever the others used: a router that starts adds a part within the error, before it has joined
/// and after.
#[test]
fn a_router_that_starts_adds_no_bucket() {
    for limits in [
        TenantLimits {
            requests_per_minute: NonZeroU32::new(6000),
            ..TenantLimits::default()
        },
        per_second(100),
    ] {
        let mut net = Net::new(4, &limits);
        // No bucket is left.
        net.flood(3, &[8000.0; 4]);
        for starts in [3, 0] {
            let now = net.now();
            net.routers[starts] = TenantUsage::new(&limits, LimitSharing::WithOthers, now);
            net.ids[starts] = id(10 + starts);
            net.reports.retain(|report| report.from != starts);
            net.heard[starts].fill(None);
            net.heard.iter_mut().for_each(|heard| heard[starts] = None);
            net.starting = Some(starts);
            let own = net.flood(2, &[1000.0; 4])[starts];
            assert!((1..=310).contains(&own), "{own}");
            if limits.requests_per_second.is_some() {
                assert!(own <= 15, "5 a second, and 5 of the bucket: {own}");
            }
            let now = net.now();
            let levels = net.routers[1].levels(now);
            net.routers[starts].learn(&levels, now);
            net.starting = None;
            net.newcomers = Newcomers::Some;
            let mut whole = net.flood(10, &[1000.0; 4]);
            net.newcomers = Newcomers::None;
            println!("{own} before it joins, {whole:?} in the next 10 s");
            // What it used before is charged to all.
            whole.push(own);
            assert_whole(&whole, 100, 10, 15);
        }
    }
}

/// Requests in progress elsewhere are known before a router that starts begins more than a few.
#[test]
fn a_router_that_starts_begins_few_requests_beside_those_in_progress() {
    let limits = TenantLimits {
        concurrent_requests: NonZeroU32::new(40),
        ..TenantLimits::default()
    };
    let mut net = Net::new(3, &limits);
    let flood = |net: &mut Net, router| net.send(router, 100 * SECOND);
    net.run(5 * SECOND, flood);
    assert!((38..=40).contains(&net.open.len()), "{}", net.open.len());
    let now = net.now();
    net.routers
        .push(TenantUsage::new(&limits, LimitSharing::WithOthers, now));
    net.ids.push(id(3));
    net.admitted.push(0);
    net.heard.iter_mut().for_each(|heard| heard.push(None));
    net.heard.push(vec![None; 4]);
    net.starting = Some(3);
    net.newcomers = Newcomers::Some;
    net.run(SECOND / 5, flood);
    net.starting = None;
    net.run(5 * SECOND, flood);
    assert!((38..=42).contains(&net.open.len()), "{}", net.open.len());
}

/// A limit that all routers read in their settings in the same moment.
#[test]
fn a_new_limit_is_shared_from_the_first_moment() {
    let now = origin();
    let admitted = [(); 4].map(|()| {
        let usage = TenantUsage::new(&TenantLimits::default(), LimitSharing::WithOthers, now);
        let routers = SharingRouters {
            own: id(0),
            count: 4,
            reporting: (1..4).map(id).collect(),
            newcomers: Newcomers::None,
        };
        usage.report(&routers, now);
        usage.set_limits(&per_second(100), now);
        (0..100).filter(|_| usage.enter(now).is_ok()).count()
    });
    assert_eq!(admitted, [5; 4]);
}

/// A router that is gone does not report.
#[test]
fn a_router_without_reports_has_an_equal_part() {
    let mut net = Net::new(4, &per_second(100));
    net.cut = Some(0);
    net.flood(5, &[0.0, 400.0, 0.0, 0.0]);
    let admitted = net.flood(10, &[0.0, 400.0, 0.0, 0.0]);
    assert_whole(&admitted, 75, 10, 0);
}

#[test]
fn requests_in_progress_are_bounded_over_all() {
    for (max, load) in [(40, [1, 1, 1, 1]), (40, [0, 1, 0, 0]), (10, [1, 1, 1, 1])] {
        let limits = TenantLimits {
            concurrent_requests: NonZeroU32::new(max),
            ..TenantLimits::default()
        };
        let mut net = Net::new(4, &limits);
        let (mut most, mut sum) = (0, 0);
        net.run(20 * SECOND, |net, router| {
            for _ in 0..load[router] {
                let lasts = net.rng.u64(100..300);
                net.send(router, lasts);
            }
            if router == 3 && net.step > 5 * SECOND {
                most = most.max(net.open.len());
                sum += net.open.len() as u64;
            }
        });
        let mean = sum as f64 / (16 * SECOND) as f64;
        println!("{max}: at most {most}, mean {mean}");
        assert!(most <= (max + 2) as usize, "{max}: {most}");
        assert!(mean >= 0.95 * f64::from(max), "{max}: {mean}");
    }
}

#[test]
fn tokens_are_shared_whatever_their_requests() {
    let limits = TenantLimits {
        tokens_per_minute: NonZeroU64::new(60_000),
        ..TenantLimits::default()
    };
    let mut net = Net::new(4, &limits);
    let mut used = 0;
    net.run(120 * SECOND, |net, router| {
        let prompt = [100, 400, 1600, 3000][router];
        let now = net.now();
        let usage = &net.routers[router];
        if net.step % (20 * (router as u64 + 1)) == 0 && usage.enter(now).is_ok() {
            if usage.admit_tokens(prompt, now).is_ok() {
                usage.spend_tokens(50, now);
                used += prompt + 50;
            }
            usage.leave();
        }
    });
    assert_whole(&[used], 1000, 120, 60_000);
    assert!(used > 170_000, "{used}");
}

#[test]
fn a_report_that_comes_twice_or_late_says_nothing_new() {
    let limits = per_second(100);
    let now = origin();
    let [one, two] = [(); 2].map(|()| TenantUsage::new(&limits, LimitSharing::Alone, now));
    let routers = |own, other| SharingRouters {
        own: id(own),
        count: 2,
        reporting: vec![id(other)],
        newcomers: Newcomers::None,
    };
    (0..10).for_each(|_| one.enter(now).unwrap());
    let row = one.report(&routers(1, 2), now).unwrap();
    two.receive(id(1), &row);
    two.receive(id(1), &row);
    two.report(&routers(2, 1), now);
    assert_eq!(two.status(now).requests.unwrap().remaining, 90);
    // Alone again, it has the whole of what is left.
    let alone = SharingRouters {
        count: 1,
        reporting: Vec::new(),
        ..routers(2, 1)
    };
    assert_eq!(two.report(&alone, now), None);
    let admitted = (0..200).filter(|_| two.enter(now).is_ok()).count();
    assert_eq!(admitted, 90);
}

/// Neither use nor demand from before concerns a router that joins.
#[test]
fn a_router_that_joins_has_its_part() {
    let limits = TenantLimits {
        tokens_per_minute: NonZeroU64::new(1000),
        ..TenantLimits::default()
    };
    let mut now = origin();
    let [old, new] = [(); 2].map(|()| TenantUsage::new(&limits, LimitSharing::Alone, now));
    let routers = |own, others: &[RouterId]| SharingRouters {
        own,
        count: 1 + others.len(),
        reporting: others.to_vec(),
        newcomers: Newcomers::None,
    };
    for _ in 0..2 {
        for _ in 0..100 {
            now += Duration::from_mins(1);
            old.spend_tokens(900, now);
            assert!(old.report(&routers(id(0), &[]), now).is_none());
            assert!(new.report(&routers(id(1), &[]), now).is_none());
        }
        now += Duration::from_mins(1);
        let row = old.report(&routers(id(0), &[id(1)]), now).unwrap();
        new.receive(id(0), &row);
        new.report(&routers(id(1), &[id(0)]), now);
        assert_eq!(new.admit_tokens(400, now), Ok(()));
        assert_eq!(new.admit_tokens(90, now), Ok(()));
        assert!(new.admit_tokens(400, now).is_err(), "the old one's part");
    }
}

/// No value in a report ends the process, or uses more than a bucket.
#[test]
fn a_hostile_report_costs_one_bucket() {
    let now = origin();
    let limits = TenantLimits {
        tokens_per_minute: NonZeroU64::new(1000),
        ..per_second(10)
    };
    let usage = TenantUsage::new(&limits, LimitSharing::WithOthers, now);
    let routers = SharingRouters {
        own: id(0),
        count: 3,
        reporting: vec![id(1), id(2)],
        newcomers: Newcomers::None,
    };
    let extreme = UnitUse {
        before: i64::MIN,
        used: i64::MAX,
        demand: u64::MAX,
        claim: i64::MAX,
    };
    let row = TenantUse {
        tenant: 0,
        requests: extreme,
        tokens: extreme,
        second_claim: i64::MIN,
        open: u32::MAX,
        open_claim: u32::MAX,
    };
    for router in [1, 2, 1] {
        usage.receive(id(router), &row);
    }
    usage.report(&routers, now);
    let later = now + Duration::from_mins(2);
    let alone = SharingRouters {
        count: 1,
        reporting: Vec::new(),
        ..routers
    };
    usage.report(&alone, later);
    assert_eq!(usage.enter(later), Ok(()));
    assert_eq!(usage.admit_tokens(1000, later), Ok(()));
}

/// Streams that run do not take the one admission that a report permits without a claim.
#[test]
fn generated_tokens_take_no_admission() {
    let now = origin();
    let limits = TenantLimits {
        tokens_per_minute: NonZeroU64::new(1000),
        ..TenantLimits::default()
    };
    let usage = TenantUsage::new(&limits, LimitSharing::WithOthers, now);
    let routers = SharingRouters {
        own: id(0),
        count: 4,
        reporting: (1..4).map(id).collect(),
        newcomers: Newcomers::None,
    };
    for router in 1..4 {
        usage.receive(id(router), &TenantUse::default());
    }
    usage.report(&routers, now);
    usage.spend_tokens(64, now);
    assert_eq!(usage.admit_tokens(600, now), Ok(()), "more than its part");
    assert!(usage.admit_tokens(300, now).is_err());
}
