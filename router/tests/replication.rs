//! Replicas over real planes: in memory, and through a nats-server that is killed and restarted.
//! Measured times are printed; only generous limits are asserted.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test fails by panicking and prints times, its helpers too"
)]

#[path = "../../proto/plane/tests/nats_server/mod.rs"]
mod nats_server;
mod replicas;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nats_server::NatsServer;
use replicas::{Lossy, Router, all_agree, memory, nats, until};
use tokio::time::Instant;
use warmroute_plane::Plane;
use warmroute_proto::Namespace;
use warmroute_proto::subject::Subjects;
use warmroute_router::sync::{JOIN_MAX, StatusDetail};

/// Requests open on each router while something happens.
const OPEN: usize = 50;

async fn three(planes: [Arc<dyn Plane>; 3]) -> Vec<Router> {
    let mut routers = Vec::new();
    for (number, plane) in (1..).zip(planes) {
        routers.push(Router::start(number, plane));
    }
    for router in &mut routers {
        until("a router is ready", || async {
            router.ready.load(Ordering::Relaxed)
        })
        .await;
        router.open(OPEN);
    }
    routers
}

async fn three_over_nats(server: &NatsServer) -> Vec<Router> {
    let planes = [
        nats(server, "a").await,
        nats(server, "b").await,
        nats(server, "c").await,
    ];
    three(planes).await
}

async fn three_in_memory() -> Vec<Router> {
    let plane = memory();
    three([Arc::clone(&plane), Arc::clone(&plane), plane]).await
}

async fn agree(routers: &[Router], when: &str) {
    let since = Instant::now();
    until("all replicas agree", || all_agree(routers)).await;
    println!("{when}: all agree after {:?}", since.elapsed());
}

async fn converses(mut routers: Vec<Router>) {
    agree(&routers, "at rest").await;
    for _ in 0..20 {
        for router in &mut routers {
            router.work(20);
        }
        tokio::task::yield_now().await;
    }
    agree(&routers, "after a burst").await;
    // A router that leaves frees its slots immediately.
    let gone = routers.remove(0);
    let id = gone.router;
    let since = Instant::now();
    gone.stop().await;
    until("its slots are free", || async {
        routers.iter().all(|router| router.held(id) == 0)
    })
    .await;
    println!("goodbye: freed after {:?}", since.elapsed());
    for router in &mut routers {
        router.end_all();
    }
    agree(&routers, "idle").await;
    for router in routers {
        assert_eq!(router.left(), 0);
        router.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_agree_in_memory() {
    converses(three_in_memory().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_agree_over_nats() {
    let server = NatsServer::start().await;
    converses(three_over_nats(&server).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_routers_load_goes_and_a_joiner_has_the_rest_before_it_is_ready() {
    let server = NatsServer::start().await;
    let mut routers = three_over_nats(&server).await;
    agree(&routers, "at rest").await;
    let killed = routers.remove(0);
    let id = killed.router;
    let since = Instant::now();
    killed.kill();
    until("its slots are free", || async {
        routers.iter().all(|router| router.held(id) == 0)
    })
    .await;
    println!(
        "a silent router's load was gone after {:?}",
        since.elapsed()
    );
    assert!(routers.iter().all(|router| router.left() == 2 * OPEN));

    let plane = nats(&server, "d").await;
    let since = Instant::now();
    let joiner = Router::start(4, plane);
    until("the joiner is ready", || async {
        joiner.ready.load(Ordering::Relaxed)
    })
    .await;
    // A router that was ready later may have reached its time limit.
    let is_patient = since.elapsed() < JOIN_MAX;
    let knows_all = || {
        let mut others = routers.iter();
        others.all(|router| joiner.held(router.router) == OPEN as u64)
    };
    assert!(
        !is_patient || knows_all(),
        "ready, and does not know the load"
    );
    until("the joiner knows the load", || async { knows_all() }).await;
    routers.push(joiner);
    agree(&routers, "with the joiner").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_comes_back_and_all_is_equal_again() {
    let mut server = NatsServer::start().await;
    let mut routers = three_over_nats(&server).await;
    agree(&routers, "at rest").await;
    server.kill();
    for router in &mut routers {
        router.work(200);
    }
    let down = routers[0].plane.connection();
    until("the kill is seen", || async {
        *down.borrow() == warmroute_plane::Connection::Down
    })
    .await;
    server.restart().await;
    for router in &mut routers {
        router.work(200);
    }
    agree(&routers, "after the server came back").await;
    for router in &routers {
        let counts = router
            .handle
            .status(StatusDetail::Summary)
            .await
            .unwrap()
            .counts;
        println!("{:?} {:?}", counts.mended, counts.refused);
        assert_eq!(counts.deaths, 0, "no router was declared dead");
    }
}

/// Requests are not affected, and no router counts them twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_lease_brings_another_incarnation_with_the_same_slots() {
    let mut routers = three_in_memory().await;
    agree(&routers, "at rest").await;
    let (plane, first) = (
        Arc::clone(&routers[0].plane),
        routers[0].incarnation().await,
    );
    let key = Subjects::new(&Namespace::from("t")).router_key(routers[0].router);
    // A renewal may happen in between.
    until("the lease is taken away", || async {
        match plane.get(key.clone()).await.unwrap() {
            Some(entry) => plane.delete(key.clone(), entry.revision).await.is_ok(),
            None => true,
        }
    })
    .await;
    let loser = &routers[0];
    until("another incarnation is taken", || async {
        loser.incarnation().await > first
    })
    .await;
    agree(&routers, "under another incarnation").await;
    assert!(routers.iter().all(|router| router.left() == 3 * OPEN));
    routers[0].end_all();
    agree(&routers, "with its requests ended").await;
    assert!(routers.iter().all(|router| router.left() == 2 * OPEN));
}

/// Each router loses 30 % of all broadcasts, its own included.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_agree_when_a_lossy_time_ends() {
    let server = NatsServer::start().await;
    let mut planes: Vec<Arc<Lossy>> = Vec::new();
    for (seed, name) in (1..).zip(["a", "b", "c"]) {
        planes.push(Lossy::new(nats(&server, name).await, seed));
    }
    let [a, b, c]: [Arc<Lossy>; 3] = planes.clone().try_into().ok().unwrap();
    let mut routers = three([a, b, c]).await;
    for plane in &planes {
        plane.lose(30);
    }
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        for router in &mut routers {
            router.work(5);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for plane in &planes {
        plane.lose(0);
    }
    agree(&routers, "after the losses").await;
    for router in &routers {
        let counts = router
            .handle
            .status(StatusDetail::Summary)
            .await
            .unwrap()
            .counts;
        println!("{:?} {:?}", counts.verdicts, counts.mended);
        assert!(counts.mended.gaps > 0);
    }
}
