//! Compares what each router holds of every other.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::fleet::{Fleet, text};

/// A router's load in another router's view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) standing: String,
    pub(crate) requests: u64,
    /// Incarnation, number and digest. Equal numbers mean equal slots.
    place: (u64, Option<u64>, String),
}

/// Rows by router in one router's view; empty while it does not answer.
pub(crate) async fn seen(fleet: &Fleet, by: usize) -> BTreeMap<String, Seen> {
    let slots = fleet.get(fleet.admin(by, "/v1/slots")).await;
    let Some(replicas) = slots["sync"]["replicas"].as_array() else {
        return BTreeMap::new();
    };
    let row = |view: &Value| {
        let place = (
            view["incarnation"].as_u64().unwrap_or(0),
            view["number"].as_u64(),
            text(&view["digest"]),
        );
        let row = Seen {
            standing: text(&view["standing"]),
            requests: view["active_requests"].as_u64().expect("a count"),
            place,
        };
        (text(&view["router"]), row)
    };
    replicas.iter().map(row).collect()
}

/// The router's name in messages.
pub(crate) async fn id(fleet: &Fleet, router: usize) -> String {
    text(&fleet.get(fleet.admin(router, "/v1/slots")).await["router"])
}

/// Requests of one router that another one holds.
pub(crate) async fn held(fleet: &Fleet, by: usize, of: &str) -> u64 {
    seen(fleet, by)
        .await
        .get(of)
        .map_or(0, |seen| seen.requests)
}

/// Whether all routers hold each router's own state. Dead routers without requests are ignored.
pub(crate) async fn agree(fleet: &Fleet) -> bool {
    let mut views = Vec::new();
    for router in 0..fleet.routers.len() {
        views.push((id(fleet, router).await, seen(fleet, router).await));
    }
    views.iter().all(|(router, own)| {
        let truth = own.get(router).map(|seen| (seen.requests, &seen.place));
        let same = |(_, view): &(String, BTreeMap<String, Seen>)| {
            let theirs = view.get(router);
            theirs.is_some_and(|seen| seen.standing != "lacking")
                && theirs.map(|seen| (seen.requests, &seen.place)) == truth
        };
        truth.is_some() && views.iter().all(same)
    })
}
