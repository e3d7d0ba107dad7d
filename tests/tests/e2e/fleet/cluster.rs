//! Three real nats-servers in one JetStream cluster.

use std::ffi::OsString;
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::{PATIENCE, client, free_port, free_ports};
use crate::nats_server::NatsServer;

pub(crate) const NODES: u16 = 3;

pub(crate) fn node(index: usize) -> String {
    format!("node-{index}")
}

/// Starts the first server and its peers, and waits for a leader and working streams.
pub(super) async fn start() -> (NatsServer, Vec<NatsServer>) {
    let routes = free_ports(NODES);
    let route = |index: u16| format!("nats://127.0.0.1:{}", routes + index);
    let all: Vec<String> = (0..NODES).map(route).collect();
    let all = all.join(",");
    let mut servers = Vec::new();
    let mut pages = Vec::new();
    for index in 0..NODES {
        let page = free_port();
        let own = route(index);
        let (name, page_port) = (node(index.into()), page.to_string());
        let arguments = [
            "-js",
            "-n",
            &name,
            "--cluster_name",
            "test",
            "--cluster",
            &own,
        ];
        let more = ["--routes", &all, "-m", &page_port];
        let arguments: Vec<OsString> = arguments.into_iter().chain(more).map(Into::into).collect();
        servers.push(NatsServer::start_with(&arguments, &[]).await);
        pages.push(page);
    }
    let http = client().build().expect("a client");
    let deadline = Instant::now() + PATIENCE;
    while !is_formed(&http, &pages).await {
        assert!(Instant::now() < deadline, "the cluster has no leader");
        sleep(Duration::from_millis(20)).await;
    }
    let peers = servers.split_off(1);
    (servers.remove(0), peers)
}

/// Whether every node knows the cluster's leader and members.
async fn is_formed(http: &reqwest::Client, pages: &[u16]) -> bool {
    let mut leaders = Vec::new();
    for page in pages {
        let Some(told) = page_of(http, *page, "/jsz").await else {
            return false;
        };
        let meta = &told["meta_cluster"];
        if meta["cluster_size"] != NODES {
            return false;
        }
        leaders.push(meta["leader"].as_str().unwrap_or_default().to_owned());
    }
    !leaders[0].is_empty() && leaders.iter().all(|leader| *leader == leaders[0])
}

async fn page_of(http: &reqwest::Client, port: u16, path: &str) -> Option<Value> {
    let answer = http
        .get(format!("http://127.0.0.1:{port}{path}"))
        .send()
        .await;
    answer.ok()?.json().await.ok()
}
