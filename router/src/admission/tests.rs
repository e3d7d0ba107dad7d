use std::pin::Pin;

use futures_util::FutureExt as _;
use tokio_util::task::TaskTracker;
use warmroute_proto::BlockSize;

use super::*;
use crate::route::{Health, Knobs, Prompt, RouteRequest};
use crate::shared_core::SlotHold;
use crate::testing::{ROUTER, core, worker_entry};

const PATIENCE: Duration = Duration::from_secs(60);

impl Admission {
    /// Tokens of a tenant's requests that have a place.
    pub(crate) fn tokens_in_flight(&self, tenant: &str) -> u64 {
        self.in_flight().of(&Some(tenant.parse().unwrap()))
    }
}

/// One worker, and the task that gives its places.
struct Door {
    admission: Arc<Admission>,
    core: Arc<SharedCore>,
    _fleet: watch::Sender<()>,
}

impl Door {
    fn new(active_max: u32) -> Self {
        let knobs = Knobs {
            active_max: Some(active_max),
            ..Knobs::default()
        };
        let mut core = core(ROUTER, knobs);
        core.set_workers(&[worker_entry("w", 16)]);
        core.set_health(&"w".into(), Health::Healthy);
        let core = SharedCore::new(core);
        let admission = Admission::new(Arc::clone(&core), 1 << 30, &Metrics::new().unwrap());
        let (fleet, changes) = watch::channel(());
        let places = Arc::clone(&admission).run(changes, CancellationToken::new());
        drop(TaskTracker::new().spawn(places));
        Self {
            admission,
            core,
            _fleet: fleet,
        }
    }

    fn admit(&self) -> Option<SlotHold> {
        let prompt = Prompt::opaque(100, BlockSize::new(16).unwrap());
        let ask = RouteRequest {
            model: "m",
            prompt: &prompt,
            exclude: &[],
            leg: crate::route::Leg::Whole,
        };
        let (admitted, _) = self.core.admit(&ask, None).ok()?;
        Some(SlotHold::new(Arc::clone(&self.core), admitted.slot))
    }

    fn join(&self) -> AdmissionTicket {
        self.join_as(None)
    }

    fn join_as(&self, tenant: TenantName) -> AdmissionTicket {
        let line = QueueLine {
            model: "m".to_owned(),
            level: 0,
            tenant,
        };
        let demand = QueueDemand {
            prompt_tokens: 100,
            bytes: 1000,
            lengths: QueueLengths {
                all: 10_000,
                per_model: 10_000,
            },
            until: Instant::now() + PATIENCE,
        };
        self.admission.join(&line, demand).unwrap()
    }

    async fn until_waiting(&self, requests: usize) {
        while self.admission.size().requests != requests {
            tokio::task::yield_now().await;
        }
    }
}

/// Lets all other tasks run until they wait.
async fn settle() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn each_freed_slot_lets_one_request_in() {
    let door = Door::new(2);
    let mut slots = vec![door.admit().unwrap(), door.admit().unwrap()];
    assert!(door.admit().is_none());
    let mut tickets: Vec<_> = (0..5).map(|_| door.join()).collect();
    settle().await;
    assert_eq!(door.admission.size().requests, 5);
    for left in (0..5).rev() {
        drop(slots.pop());
        let mut ticket = tickets.remove(0);
        ticket.granted().await.unwrap();
        settle().await;
        assert_eq!(door.admission.size().requests, left);
        // The place is the ticket's: another request would wait.
        assert!(door.admission.is_engaged("m"));
        slots.push(door.admit().unwrap());
        ticket.admitted();
    }
    assert!(!door.admission.is_engaged("m"));
}

/// Before it has seen its grant, and after.
#[tokio::test(start_paused = true)]
async fn the_grant_of_a_client_that_is_gone_is_the_next_ones() {
    let door = Door::new(1);
    let slot = door.admit();
    let (unseen, mut seen, mut last) = (door.join(), door.join(), door.join());
    drop(slot);
    door.until_waiting(2).await;
    drop(unseen);
    seen.granted().await.unwrap();
    drop(seen);
    last.granted().await.unwrap();
    last.give_back();
    // The place is still free.
    last.granted().await.unwrap();
    let slot = door.admit().unwrap();
    last.admitted();
    let gone = door.join();
    drop(gone);
    assert_eq!(door.admission.size(), QueueSize::default());
    drop(slot);
    assert!(!door.admission.is_engaged("m"));
}

/// From its grant on, until it has ended.
/// A wake-up crosses threads and costs more than what it announces.
#[tokio::test]
async fn tasks_are_woken_for_waiting_requests_and_for_other_routers_only() {
    let door = Door::new(1);
    let core = &door.core;
    let is_woken = || {
        drop(door.admit().unwrap());
        let written = core.written().now_or_never().is_some();
        (core.room_changed().now_or_never().is_some(), written)
    };
    assert_eq!(is_woken(), (false, true));
    core.await_room();
    assert_eq!(is_woken(), (true, true));
    core.ignore_room();
    core.set_alone();
    assert_eq!(is_woken(), (false, false));
}

/// The only waiting request, whose place another router took before it did.
#[tokio::test(start_paused = true)]
async fn a_grant_that_was_vain_waits_for_the_next_place_and_not_for_a_sweep() {
    let door = Door::new(1);
    let first = door.admit().unwrap();
    let mut ticket = door.join();
    settle().await;
    drop(first);
    ticket.granted().await.unwrap();
    let second = door.admit().unwrap();
    ticket.give_back();
    settle().await;
    let began = Instant::now();
    drop(second);
    ticket.granted().await.unwrap();
    assert_eq!(began.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_place_is_in_flight_once_and_as_long_as_it_is_used() {
    let door = Door::new(1);
    let slot = door.admit();
    let tenant: TenantName = Some("t".parse().unwrap());
    let in_flight = || door.admission.tokens_in_flight("t");
    let at_once = door.admission.began(tenant.as_ref(), 100);
    assert_eq!(in_flight(), 356);
    drop(at_once);
    let tickets = [(); 4].map(|()| door.join_as(tenant.clone()));
    let [left, unseen, mut unused, mut used] = tickets;
    drop(left);
    assert_eq!(in_flight(), 0);
    drop(slot);
    door.until_waiting(2).await;
    assert_eq!(in_flight(), 356);
    drop(unseen);
    unused.granted().await.unwrap();
    assert_eq!(in_flight(), 356);
    drop(unused);
    used.granted().await.unwrap();
    used.give_back();
    assert_eq!(in_flight(), 0);
    used.granted().await.unwrap();
    let place = used.admitted();
    assert_eq!(in_flight(), 356);
    drop(place);
    assert_eq!(in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_wait_ends_with_its_time() {
    let door = Door::new(1);
    let slot = door.admit();
    let mut ticket = door.join();
    let shed = ticket.granted().await.unwrap_err();
    assert_eq!(shed.reason, ShedReason::Timeout);
    assert!(shed.retry_after_secs() >= 1);
    assert_eq!(door.admission.size().requests, 0);
    drop(slot);
}

/// They find out that there is no worker, and do not wait for a place in vain.
#[tokio::test(start_paused = true)]
async fn requests_of_a_model_without_workers_leave() {
    let door = Door::new(1);
    let _slot = door.admit();
    let mut tickets: Vec<_> = (0..3).map(|_| door.join()).collect();
    settle().await;
    assert_eq!(door.admission.size().requests, 3);
    let core = Arc::clone(&door.core);
    core.core().set_health(&"w".into(), Health::Unhealthy);
    for ticket in &mut tickets {
        ticket.granted().await.unwrap();
    }
    assert!(door.admit().is_none());
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_requests_wait_and_leave() {
    let door = Door::new(1);
    let slot = door.admit();
    let mut tickets: Vec<_> = (0..10_000).map(|_| door.join()).collect();
    let line = QueueLine {
        model: "m".to_owned(),
        level: 0,
        tenant: None,
    };
    let refused = door.admission.join(&line, tickets[0].demand);
    assert_eq!(refused.err().unwrap().reason, ShedReason::QueueFull);
    let mut waits: Vec<Pin<Box<_>>> = Vec::new();
    for ticket in &mut tickets {
        waits.push(Box::pin(ticket.granted()));
    }
    assert!(futures_util::poll!(&mut waits[0]).is_pending());
    drop(waits);
    tickets.truncate(100);
    assert_eq!(door.admission.size().requests, 100);
    drop(tickets);
    drop(slot);
    settle().await;
    assert_eq!(door.admission.size(), QueueSize::default());
    assert!(!door.admission.is_engaged("m"));
}
