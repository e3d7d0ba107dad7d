use axum::http::{HeaderMap, HeaderValue, header};
use warmroute_plane::{PutIf, Revision};
use warmroute_proto::tenant_use::{TenantLevel, TenantUse, UnitUse};

use super::*;
use crate::settings::{LiveSettings, Settings};
use crate::tenants::LimitSharing;
use crate::testing::{TestTask, plane, subjects};

/// A thousand requests a minute for the key `abc`.
const SETTINGS: &str = "[[tenants]]\nname = \"t\"\nrequests_per_minute = 1000\nkeys = [{ id = \"k\", \
     sha256 = \"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\" }]\n";

/// Router 0.
struct World {
    plane: Arc<dyn Plane>,
    tenants: Arc<Tenants>,
    ready: Arc<Ready>,
    _task: TestTask,
}

fn id(router: u8) -> RouterId {
    RouterId([router; 16])
}

impl World {
    fn start() -> Self {
        Self::start_with(SETTINGS)
    }

    fn start_with(settings: &str) -> Self {
        let settings = LiveSettings::new(Settings::parse(settings).unwrap());
        let tenants = Arc::new(Tenants::new(settings, LimitSharing::WithOthers));
        let (plane, ready) = (plane(), Arc::<Ready>::default());
        ready.registry_read();
        ready.drains_read();
        ready.workers_settled();
        ready.load_known();
        let sync = TenantSync {
            router: id(0),
            tenants: Arc::clone(&tenants),
            ready: Arc::clone(&ready),
            plane: Arc::clone(&plane),
            subjects: subjects(),
        };
        Self {
            plane,
            tenants,
            ready,
            _task: TestTask::spawn(|stop| sync.run(stop)),
        }
    }

    async fn list(&self, router: RouterId) -> Revision {
        let key = subjects().router_key(router);
        let put = self.plane.put(key, Bytes::new(), PutIf::Always, None);
        put.await.unwrap()
    }

    async fn send_levels(&self, router: RouterId, known: RouterId, minute: i64) {
        let levels = TenantLevels {
            router,
            known: vec![known],
            following: 0,
            tenants: vec![TenantLevel {
                tenant: TenantUse::id("t"),
                minute: Some(minute),
                ..TenantLevel::default()
            }],
        };
        self.send(&levels).await;
    }

    async fn send(&self, levels: &TenantLevels) {
        let bytes = codec::encode(levels).unwrap();
        let subject = subjects().tenant_reports();
        self.plane.publish(subject, bytes.into()).await.unwrap();
    }

    /// Requests that are admitted now.
    fn admitted(&self) -> usize {
        let admits = |_: &u32| {
            let mut headers = HeaderMap::new();
            let key = HeaderValue::from_static("Bearer abc");
            headers.insert(header::AUTHORIZATION, key);
            self.tenants.enter(&mut headers).is_ok()
        };
        (0..2000).filter(admits).count()
    }
}

async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}

#[tokio::test(start_paused = true)]
async fn a_router_without_others_has_its_whole_limit_when_its_own_key_is_listed() {
    let world = World::start();
    pass(REPORT_PERIOD * 100).await;
    assert!(!world.ready.is_initialized());
    assert_eq!(world.admitted(), 50, "a twentieth");
    world.list(id(0)).await;
    pass(REPORT_PERIOD * 3).await;
    assert!(world.ready.is_initialized());
    let admitted = world.admitted();
    assert!((950..=956).contains(&admitted), "{admitted}");
}

#[tokio::test(start_paused = true)]
async fn a_router_beside_others_waits_for_what_they_left() {
    let world = World::start();
    world.list(id(1)).await;
    world.list(id(2)).await;
    world.list(id(0)).await;
    pass(REPORT_PERIOD * 3).await;
    world.send_levels(id(1), id(0), 301).await;
    pass(REPORT_PERIOD * 3).await;
    assert!(!world.ready.is_initialized(), "one has sent nothing");
    world.send_levels(id(2), id(1), 300).await;
    pass(REPORT_PERIOD * 2).await;
    assert!(!world.ready.is_initialized(), "one does not know this one");
    let subject = subjects().tenant_reports();
    let mut sent = world.plane.subscribe(subject).await.unwrap();
    world.send_levels(id(2), id(0), 300).await;
    pass(REPORT_PERIOD * 3).await;
    assert!(world.ready.is_initialized());
    // The third part, since none reports, and what is refilled in 0.3 s.
    let admitted = world.admitted();
    assert!((100..=102).contains(&admitted), "{admitted}");
    let report = async {
        loop {
            let message = sent.next().await.unwrap();
            if let Ok(report) = codec::decode::<TenantReport>(&message.payload) {
                return report;
            }
        }
    };
    let report = report.await;
    assert_eq!(report.router, id(0));
    let [row] = &report.tenants[..] else {
        panic!("its claims are in its first report: {report:?}");
    };
    assert!((100..=102).contains(&row.requests.claim), "{row:?}");
}

/// A router that is dead.
#[tokio::test(start_paused = true)]
async fn a_router_does_not_wait_long_for_one_that_sends_nothing() {
    let world = World::start();
    world.list(id(1)).await;
    world.list(id(0)).await;
    pass(JOIN_MAX / 2).await;
    assert!(!world.ready.is_initialized());
    pass(JOIN_MAX).await;
    assert!(world.ready.is_initialized());
    let admitted = world.admitted();
    assert!((500..=510).contains(&admitted), "{admitted}");
}

#[tokio::test(start_paused = true)]
async fn without_tenants_no_request_waits() {
    let world = World::start_with("");
    pass(REPORT_PERIOD).await;
    assert!(world.ready.is_initialized());
}

/// The first message may be sent before a new router has subscribed.
#[tokio::test(start_paused = true)]
async fn levels_count_when_each_message_of_the_report_has_come() {
    let world = World::start();
    world.list(id(1)).await;
    world.list(id(0)).await;
    let send = async |known: &[u8], following, tenant: &str| {
        let levels = TenantLevels {
            router: id(1),
            known: known.iter().copied().map(id).collect(),
            following,
            tenants: vec![TenantLevel {
                tenant: TenantUse::id(tenant),
                minute: Some(100),
                ..TenantLevel::default()
            }],
        };
        world.send(&levels).await;
        pass(REPORT_PERIOD / 2).await;
    };
    send(&[], 0, "another").await;
    send(&[], u32::MAX, "another").await;
    // The second of three is lost.
    send(&[0], 2, "another").await;
    send(&[], 0, "another").await;
    pass(REPORT_PERIOD).await;
    assert!(!world.ready.is_initialized());
    send(&[0], 1, "t").await;
    send(&[], 0, "another").await;
    pass(REPORT_PERIOD).await;
    assert!(world.ready.is_initialized());
    let admitted = world.admitted();
    assert!((50..=56).contains(&admitted), "{admitted}");
}

#[tokio::test(start_paused = true)]
async fn a_thousand_tenants_levels_are_a_report_of_two_messages() {
    let tenant =
        |at| format!("[[tenants]]\nname = \"t{at}\"\nrequests_per_minute = 1000\nkeys = []\n");
    let settings: String = (0..1000).map(tenant).collect();
    let world = World::start_with(&settings);
    world.list(id(0)).await;
    // Its own reports after it joined are over.
    pass(REPORT_PERIOD * 20).await;
    assert!(world.ready.is_initialized());
    let subject = subjects().tenant_reports();
    let mut sent = world.plane.subscribe(subject).await.unwrap();
    world.list(id(1)).await;
    let mut levels = Vec::new();
    while levels.len() < 2 {
        let message = sent.next().await.unwrap();
        assert!(
            message.payload.len() < 64 << 10,
            "{}",
            message.payload.len()
        );
        levels.extend(codec::decode::<TenantLevels>(&message.payload));
    }
    let [first, last] = &levels[..] else {
        panic!("{levels:?}");
    };
    assert_eq!((&first.known[..], first.following), (&[id(1)][..], 1));
    assert_eq!((&last.known[..], last.following), (&[][..], 0));
    assert_eq!(first.tenants.len() + last.tenants.len(), 1000);
}

/// A report can keep this router's part small. Afterwards its limit is as before.
#[tokio::test(start_paused = true)]
async fn a_peer_with_absurd_numbers_costs_a_bucket_at_most() {
    let settings = SETTINGS.replace("keys", "max_concurrent_requests = 100\nkeys");
    let world = World::start_with(&settings);
    let listed = world.list(id(1)).await;
    world.list(id(0)).await;
    pass(REPORT_PERIOD * 3).await;
    world.send_levels(id(1), id(0), i64::MIN).await;
    pass(REPORT_PERIOD * 3).await;
    assert!(world.ready.is_initialized());
    assert_eq!(world.admitted(), 0);
    let absurd = UnitUse {
        before: i64::MIN,
        used: i64::MAX,
        demand: u64::MAX,
        claim: i64::MAX,
    };
    for (number, used) in [
        (1, absurd),
        (
            2,
            UnitUse {
                used: i64::MIN,
                ..absurd
            },
        ),
    ] {
        let report = TenantReport {
            router: id(1),
            number,
            tenants: vec![TenantUse {
                tenant: TenantUse::id("t"),
                requests: used,
                tokens: used,
                open: u32::MAX,
                open_claim: u32::MAX,
                second_claim: i64::MIN,
            }],
        };
        let bytes = codec::encode(&report).unwrap();
        let subject = subjects().tenant_reports();
        world.plane.publish(subject, bytes.into()).await.unwrap();
        pass(REPORT_PERIOD * 3).await;
    }
    let key = subjects().router_key(id(1));
    world.plane.delete(key, listed).await.unwrap();
    pass(Duration::from_secs(180)).await;
    assert_eq!(world.admitted(), 1000);
}
