//! The shipped permissions cover everything that the processes do with NATS.

use std::time::Duration;

use async_nats::{Client, Message, StatusCode, Subscriber};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::equality::until_equal;
use super::load::sequential;
use crate::fleet::{Access, Engines, Flags, Fleet, Mode};

const DEADLINE: Duration = Duration::from_secs(20);

/// An empty message in each stream, on subjects that no process uses.
const KEPT: [(&str, &str); 3] = [
    ("wr_prod", "wr.prod.kv.worker-0.7"),
    ("KV_wr_prod", "$KV.wr_prod.wr.prod.generation.worker-0.7"),
    ("OBJ_wr_prod", "$O.wr_prod.C.kept"),
];

/// Subjects of workers and indexers that the user of worker 0 may not write.
const FOREIGN: [(&str, &str); 3] = [
    ("wr_prod", "wr.prod.kv.worker-1.7"),
    ("KV_wr_prod", "$KV.wr_prod.wr.prod.generation.worker-1.7"),
    ("OBJ_wr_prod", "$O.wr_prod.C.foreign"),
];

#[tokio::test(flavor = "multi_thread")]
async fn the_shipped_permissions_are_enough_for_all_work() {
    do_all_work(Access::LeastPrivilege).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_permissions_of_signed_users_are_enough_for_all_work() {
    do_all_work(Access::SignedUsers).await;
}

/// Its users index, snapshot, restore, lead, route and replicate, and the server refuses nothing.
async fn do_all_work(access: Access) {
    let engines = Engines {
        count: 2,
        ranks: 2,
        blocks: 400,
        flags: &["--profile", "instant"],
    };
    let mode = Mode::Nats {
        indexers: 2,
        routers: 2,
    };
    let flags = Flags {
        indexer: &["--snapshot-every-secs", "1"],
        access,
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    sequential(&fleet, 30, 20).await;
    let written = async |fleet: &Fleet| {
        let mut snapshots = 0.0;
        for index in fleet.indexes() {
            let page = format!("{index}/metrics");
            let outcome = "warmroute_indexer_snapshots_total{outcome=\"written\"}";
            snapshots += fleet.metric_at(page, outcome).await;
        }
        snapshots > 0.0
    };
    fleet.until("a snapshot is written", written).await;
    fleet.parts().indexers[0].restart().await;
    fleet.parts().shims[1].restart().await;
    until_equal(&fleet).await;
    let restored = format!("{}/metrics", fleet.indexes()[0]);
    let restores = fleet
        .metric_at(restored, "warmroute_indexer_restores_total")
        .await;
    assert!(restores >= 1.0, "the snapshot was not read");
    sequential(&fleet, 31, 20).await;
    fleet.until_idle().await;

    let (code, page) = fleet
        .command("doctor", &["doctor", "--expect-indexers", "2"])
        .await;
    println!("{page}");
    assert_eq!(code, Some(0), "the doctor finds nothing");

    let mut pages: Vec<String> = fleet.indexes();
    pages.extend(fleet.parts().shims.iter().map(|shim| shim.base()));
    pages.extend((0..fleet.routers.len()).map(|router| fleet.admin(router, "")));
    for base in pages {
        let answer = fleet.http.get(format!("{base}/metrics")).send().await;
        let page = answer.unwrap().text().await.unwrap();
        let mut lines = page.lines().filter(|line| !line.starts_with('#'));
        let refused = lines.find(|line| line.contains("nats_server_errors_total"));
        let refused = refused.and_then(|line| line.rsplit(' ').next());
        assert_eq!(refused, Some("0"), "what the server refused to {base}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_user_of_the_shipped_file_lets_the_server_change_a_stream() {
    let_the_server_change_streams(Access::LeastPrivilege).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_signed_user_lets_the_server_change_a_stream() {
    let_the_server_change_streams(Access::SignedUsers).await;
}

/// A reader names the subject to which the server sends what a stream keeps. An empty message deletes
/// or purges a stream where it reaches the JetStream API.
async fn let_the_server_change_streams(access: Access) {
    let engines = Engines {
        count: 1,
        ranks: 1,
        blocks: 400,
        flags: &["--profile", "instant"],
    };
    let mode = Mode::Nats {
        indexers: 1,
        routers: 1,
    };
    let flags = Flags {
        init: &["--max-bytes", "64MiB"],
        access,
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    let (indexer, shim) = (
        user(&fleet, "indexer").await,
        user(&fleet, "shim-worker-0").await,
    );
    for (client, (stream, subject)) in [&shim, &shim, &indexer].into_iter().zip(KEPT) {
        let stored = request(client, subject, Value::Null).await;
        assert_eq!(json_of(&stored)["stream"], stream, "{stored:?}");
    }
    let before = kept(&indexer).await;

    let read = "$JS.API.DIRECT.GET.wr_prod.wr.prod.kv.worker-0.7";
    for to in calls(&KEPT).chain(FOREIGN.map(|(_, subject)| subject.to_owned())) {
        name_in_read(&shim, read, to).await;
    }
    for (name, stream) in [
        ("indexer", "wr_prod"),
        ("router", "KV_wr_prod"),
        ("doctor", "KV_wr_prod"),
    ] {
        let client = user(&fleet, name).await;
        // Indexers purge snapshots.
        let snapshots = "STREAM.PURGE.OBJ_wr_prod";
        for to in calls(&KEPT).filter(|to| !to.ends_with(snapshots)) {
            if name != "router" {
                name_in_read(&client, read, to.clone()).await;
            }
            name_in_consumer(&client, stream, to.clone()).await;
            name_in_request(&client, stream, to).await;
        }
    }
    assert_eq!(kept(&indexer).await, before, "what the streams keep");
    for (stream, subject) in FOREIGN {
        let read = format!("$JS.API.DIRECT.GET.{stream}.{subject}");
        let answer = request(&indexer, &read, Value::Null).await;
        assert_eq!(answer.status, Some(StatusCode::NOT_FOUND), "{subject}");
    }
    until_equal(&fleet).await;
}

async fn user(fleet: &Fleet, name: &str) -> Client {
    fleet.parts().client(name).await
}

/// The calls as clients name them, and as the account of signed users would import them.
fn calls(streams: &[(&'static str, &str)]) -> impl Iterator<Item = String> {
    let calls = streams.iter().flat_map(|(stream, _)| {
        ["$JS.API", "wr.prod.api"].into_iter().flat_map(move |api| {
            ["DELETE", "PURGE"].map(|call| format!("{api}.STREAM.{call}.{stream}"))
        })
    });
    calls.collect::<Vec<_>>().into_iter()
}

async fn request(client: &Client, subject: &str, body: Value) -> Message {
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    let answer = client.request(subject.to_owned(), body.into()).await;
    answer.unwrap_or_else(|error| panic!("{subject}: {error}"))
}

fn json_of(message: &Message) -> Value {
    serde_json::from_slice(&message.payload).expect("JSON")
}

/// Sequence and time of each kept message.
async fn kept(indexer: &Client) -> Vec<String> {
    let mut kept = Vec::new();
    for (stream, subject) in KEPT {
        let read = format!("$JS.API.DIRECT.GET.{stream}.{subject}");
        let message = request(indexer, &read, Value::Null).await;
        let headers = message.headers.unwrap_or_default();
        let of = |name| headers.get(name).map(ToString::to_string);
        let (sequence, time) = (of("Nats-Sequence"), of("Nats-Time-Stamp"));
        kept.push(format!("{stream} {sequence:?} {time:?}"));
    }
    kept
}

/// Names the subject for the answer to a read. A second read is answered after the first.
async fn name_in_read(client: &Client, read: &str, to: String) {
    let sent = client
        .publish_with_reply(read.to_owned(), to, "".into())
        .await;
    sent.expect("it is sent");
    let answer = request(client, read, Value::Null).await;
    assert!(
        answer.headers.is_some() && answer.payload.is_empty(),
        "{answer:?}"
    );
}

/// Names the subject for deliveries. Another consumer delivers to the client.
async fn name_in_consumer(client: &Client, stream: &str, to: String) {
    create_consumer(client, stream, json!({"deliver_subject": to})).await;
    let (inbox, deliveries) = inbox(client).await;
    create_consumer(client, stream, json!({"deliver_subject": inbox})).await;
    until_delivered(deliveries).await;
}

/// Names the subject in a request for the next message. A second request, the client's own, is
/// answered after it: with another message, or when it expires.
async fn name_in_request(client: &Client, stream: &str, to: String) {
    let name = create_consumer(client, stream, json!({})).await;
    let next = format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}");
    let sent = client.publish_with_reply(next.clone(), to, "".into()).await;
    sent.expect("it is sent");
    let (inbox, deliveries) = inbox(client).await;
    let own = json!({"batch": 1, "expires": 100_000_000});
    let sent = client.publish_with_reply(next, inbox, own.to_string().into());
    sent.await.expect("it is sent");
    until_delivered(deliveries).await;
}

/// Deliveries have the subjects of stored messages, by which a request's answer is not found.
async fn inbox(client: &Client) -> (String, Subscriber) {
    let inbox = client.new_inbox();
    let deliveries = client.subscribe(inbox.clone()).await;
    (inbox, deliveries.expect("a subscription"))
}

async fn until_delivered(mut deliveries: Subscriber) {
    let delivered = timeout(DEADLINE, deliveries.next()).await;
    delivered.expect("a delivery").expect("a message");
}

/// Creates a consumer of empty messages. Returns its name.
async fn create_consumer(client: &Client, stream: &str, more: Value) -> String {
    let name = client.new_inbox().replace('.', "-");
    let mut config = json!({
        "name": name, "deliver_policy": "all", "ack_policy": "none", "replay_policy": "instant",
        "num_replicas": 1, "mem_storage": true, "headers_only": true,
        "inactive_threshold": 60_000_000_000_u64,
    });
    for (field, value) in more.as_object().into_iter().flatten() {
        config[field] = value.clone();
    }
    let body = json!({"stream_name": stream, "action": "create", "config": config});
    let subject = format!("$JS.API.CONSUMER.CREATE.{stream}.{name}");
    let answer = json_of(&request(client, &subject, body).await);
    assert!(answer["error"].is_null(), "{answer}");
    name
}
