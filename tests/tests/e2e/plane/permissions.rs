//! Permissions and limits of a stream that change under a running process, and change back.
//!
//! The server reloads its configuration, removes subscriptions and keeps the connections.

use std::time::Duration;

use super::doctor::look;
use super::equality::until_equal;
use crate::fleet::traffic::{request, serve};
use crate::fleet::{Access, Engines, Flags, Fleet, Mode, worker_name};

const ENGINES: Engines = Engines {
    count: 1,
    ranks: 1,
    blocks: 400,
    flags: &["--profile", "instant"],
};
const MODE: Mode = Mode::Nats {
    indexers: 1,
    routers: 1,
};

const RECORDS: &str = r#""wr.prod.kv.worker-0.*", "wr.prod.hb.worker-0.*""#;
const NO_RECORDS: &str = r#""wr.prod.hb.worker-0.*""#;

const HEARTBEATS: &str = r#""wr.prod.query", "wr.prod.query.*", "wr.prod.hb.>"]"#;
const NO_HEARTBEATS: &str = r#""wr.prod.query", "wr.prod.query.*"]"#;

const INBOX: &str = r#""_INBOX.shim-worker-0.>", "wr.prod.resync.worker-0""#;
const NO_INBOX: &str = r#""wr.prod.resync.worker-0""#;

const INDEXER_INBOX: &str = r#"["_INBOX.indexer.>", "wr.prod.query","#;
const NO_INDEXER_INBOX: &str = r#"["wr.prod.query","#;

const QUERIES: &str = r#""wr.prod.query", "wr.prod.query.*", "wr.prod.load", "#;
const NO_QUERIES: &str = r#""wr.prod.none", "wr.prod.load", "#;

const PASSWORD: &str = "user: shim-worker-0, password: $WR_SHIM_0_PASSWORD";
const OTHER_PASSWORD: &str = "user: shim-worker-0, password: changed";

async fn start() -> Fleet {
    start_with(Access::LeastPrivilege).await
}

async fn start_with(access: Access) -> Fleet {
    let flags = Flags {
        init: &["--max-bytes", "64MiB"],
        access,
        ..Flags::default()
    };
    let fleet = Fleet::start(MODE, ENGINES, flags).await;
    change_engine(&fleet).await;
    fleet.until_indexed().await;
    fleet
}

/// Sends requests that change the engine's blocks.
async fn change_engine(fleet: &Fleet) {
    let mut rng = fastrand::Rng::new();
    for _ in 0..5 {
        let (path, body) = request(&mut rng);
        serve(fleet, path, &body).await;
    }
}

/// Whether the indexer credits the source.
async fn is_exact(fleet: &Fleet) -> bool {
    let sources = fleet.positions(&fleet.indexes()[0]).await;
    let source = sources.get(&(worker_name(0), 0));
    source.is_some_and(|(state, _)| state == "exact")
}

/// `doctor` finds the worker without its shim, and advises to look for refused credentials.
#[tokio::test(flavor = "multi_thread")]
async fn a_shim_whose_password_is_refused_warns_and_doctor_finds_its_worker() {
    let fleet = start().await;
    fleet.reload_nats(PASSWORD, OTHER_PASSWORD).await;
    fleet.until_refused(0, "shim-worker-0").await;
    fleet.until_found("worker_unregistered", "worker-0, ").await;
    fleet.reload_nats(OTHER_PASSWORD, PASSWORD).await;
    until_equal(&fleet).await;
}

/// Warnings in a process's log about this missing permission.
fn warnings(fleet: &Fleet, log: &str, grant: &str) -> usize {
    let text = std::fs::read_to_string(fleet.file(log)).unwrap();
    let is_warning = |line: &&str| {
        line.contains("the server refuses a permission") && line.contains(&format!("{grant:?}"))
    };
    text.lines().filter(is_warning).count()
}

async fn forced_reconnects(fleet: &Fleet, base: &str) -> f64 {
    let name = "warmroute_nats_forced_reconnects_total";
    fleet.metric_at(format!("{base}/metrics"), name).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shim_whose_records_are_refused_is_not_credited() {
    let fleet = start().await;
    fleet.reload_nats(RECORDS, NO_RECORDS).await;
    let refused = async |fleet: &Fleet| {
        change_engine(fleet).await;
        warnings(fleet, "shim-0.log", "wr.prod.kv.worker-0.0") > 0
    };
    fleet.until("the records are refused", refused).await;
    until_uncredited(&fleet).await;
    fleet.until_found("source_stale", "worker-0/0").await;
    change_engine(&fleet).await;
    fleet.reload_nats(NO_RECORDS, RECORDS).await;
    until_equal(&fleet).await;
    let warned = warnings(&fleet, "shim-0.log", "wr.prod.kv.worker-0.0");
    assert_eq!(warned, 1, "warnings");
    let base = fleet.parts().shims[0].base();
    assert!(forced_reconnects(&fleet, &base).await < 1.0);
}

/// No router and no registry ever knew it: only its server and its own log do.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_shim_that_the_plane_never_knew_is_found_at_the_servers_monitoring_port() {
    let fleet = start().await;
    let unknown = "shim-worker-9";
    // Its supervisor would start it again.
    let (code, log) = fleet.stray_shim(unknown).await;
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("authorization"), "{log}");
    let (_, found) = look(&fleet).await;
    assert!(!format!("{found:?}").contains(unknown), "{found:#?}");
    let (code, page) = fleet
        .command("doctor", &["doctor", "--nats-monitor", &fleet.monitor()])
        .await;
    assert_eq!(code, Some(1), "{page}");
    assert!(page.contains("credentials_refused"), "{page}");
    assert!(page.contains(&format!("{unknown} at 127.0.0.1")), "{page}");
    let nothing = ["doctor", "--nats-monitor", "http://127.0.0.1:9"];
    let (code, page) = fleet.command("doctor", &nothing).await;
    assert_eq!(code, Some(1), "{page}");
    assert!(page.contains("monitor_unread"), "{page}");
}

/// The registry still renews the lease, and heartbeats still arrive.
async fn until_uncredited(fleet: &Fleet) {
    let most = Duration::from_secs(8);
    let uncredited = async |fleet: &Fleet| !is_exact(fleet).await;
    fleet
        .until_within(most, "the source is not credited", uncredited)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shim_whose_records_exceed_the_stream_s_limit_is_not_credited() {
    let fleet = start_with(Access::Open).await;
    limit_messages(&fleet, 64).await;
    let refused = async |fleet: &Fleet| {
        change_engine(fleet).await;
        fleet.parts().shims[0]
            .logged()
            .contains("message size exceeds maximum allowed")
    };
    fleet.until("the records are refused", refused).await;
    until_uncredited(&fleet).await;
    let about = "wr_prod: max_msg_size is 64";
    fleet.until_found("stream_differs", about).await;
    limit_messages(&fleet, -1).await;
    until_equal(&fleet).await;
    let logged = fleet.parts().shims[0].logged();
    assert_eq!(logged.matches("the log takes no record").count(), 1);
}

async fn limit_messages(fleet: &Fleet, bytes: i32) {
    let client = async_nats::connect(fleet.parts().urls()).await.unwrap();
    let jetstream = async_nats::jetstream::new(client);
    let mut stream = jetstream.get_stream("wr_prod").await.unwrap();
    let mut config = stream.info().await.unwrap().config.clone();
    config.max_message_size = bytes;
    jetstream.update_stream(config).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_indexer_that_lost_its_inbox_credits_again() {
    let fleet = start().await;
    let index = &fleet.indexes()[0];
    fleet.reload_nats(INDEXER_INBOX, NO_INDEXER_INBOX).await;
    let unready = async |fleet: &Fleet| !fleet.is_ready(index).await && !is_exact(fleet).await;
    fleet.until("the indexer is not ready", unready).await;
    fleet.reload_nats(NO_INDEXER_INBOX, INDEXER_INBOX).await;
    let credits = async |fleet: &Fleet| fleet.is_ready(index).await && is_exact(fleet).await;
    fleet.until("the indexer credits again", credits).await;
    assert!(forced_reconnects(&fleet, index).await >= 1.0);
    assert_eq!(warnings(&fleet, "indexer-0.log", "_INBOX.indexer.>"), 1);
    change_engine(&fleet).await;
    until_equal(&fleet).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_indexer_that_lost_its_heartbeats_credits_again() {
    let fleet = start().await;
    let index = &fleet.indexes()[0];
    fleet.reload_nats(HEARTBEATS, NO_HEARTBEATS).await;
    let unready = async |fleet: &Fleet| !fleet.is_ready(index).await && !is_exact(fleet).await;
    fleet.until("the indexer is not ready", unready).await;
    fleet.until_found("indexer_not_ready", "").await;
    let refused = async |fleet: &Fleet| {
        let found = look(fleet).await.1;
        let missing = found.get("permission_missing");
        missing.is_some_and(|list| {
            list.iter()
                .any(|one| one.ends_with("subscribe wr.prod.hb.>"))
        })
    };
    fleet.until("doctor names the permission", refused).await;
    fleet.reload_nats(NO_HEARTBEATS, HEARTBEATS).await;
    // The source is idle: only heartbeats credit it.
    let credits = async |fleet: &Fleet| fleet.is_ready(index).await && is_exact(fleet).await;
    fleet.until("the indexer credits again", credits).await;
    assert!(forced_reconnects(&fleet, index).await >= 1.0);
    assert_eq!(warnings(&fleet, "indexer-0.log", "wr.prod.hb.>"), 1);
    change_engine(&fleet).await;
    until_equal(&fleet).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shim_that_lost_its_inbox_renews_its_lease_again() {
    let fleet = start().await;
    let shim = fleet.parts().shims[0].base();
    fleet.reload_nats(INBOX, NO_INBOX).await;
    let unready = async |fleet: &Fleet| !fleet.is_ready(&shim).await && !is_exact(fleet).await;
    fleet.until("the shim is not ready", unready).await;
    fleet.reload_nats(NO_INBOX, INBOX).await;
    let ready = async |fleet: &Fleet| fleet.is_ready(&shim).await && is_exact(fleet).await;
    fleet.until("the shim serves its worker again", ready).await;
    assert!(forced_reconnects(&fleet, &shim).await >= 1.0);
    let inbox = "_INBOX.shim-worker-0.>";
    assert_eq!(warnings(&fleet, "shim-0.log", inbox), 1);
    change_engine(&fleet).await;
    until_equal(&fleet).await;
}

/// Its requests are served without the index.
#[tokio::test(flavor = "multi_thread")]
async fn a_router_that_may_not_query_is_named_by_doctor() {
    let fleet = start().await;
    fleet.reload_nats(QUERIES, NO_QUERIES).await;
    let named = async |fleet: &Fleet| {
        change_engine(fleet).await;
        let found = look(fleet).await.1;
        let missing = found.get("permission_missing").cloned();
        let is_query =
            |one: &String| one.starts_with("router ") && one.contains("publish wr.prod.query");
        missing.is_some_and(|list| list.iter().any(is_query))
    };
    fleet
        .until("doctor names the router's permission", named)
        .await;
    fleet.reload_nats(NO_QUERIES, QUERIES).await;
    let credited = async |fleet: &Fleet| {
        let (path, body) = request(&mut fastrand::Rng::with_seed(3));
        serve(fleet, path, &body).await;
        serve(fleet, path, &body).await.basis == "index"
    };
    fleet.until("the index is queried again", credited).await;
}
