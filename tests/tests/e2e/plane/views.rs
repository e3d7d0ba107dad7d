//! What each router holds of every other, compared.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::fleet::{Fleet, text};

/// A router's load as somebody sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) standing: String,
    pub(crate) requests: u64,
    /// Incarnation, number and digest: equal means equal slots.
    place: (u64, Option<u64>, String),
}

/// By router, as this one sees them; empty while it does not answer.
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

/// The name under which a router speaks.
pub(crate) async fn id(fleet: &Fleet, router: usize) -> String {
    text(&fleet.get(fleet.admin(router, "/v1/slots")).await["router"])
}

/// Requests that one router holds of another.
pub(crate) async fn held(fleet: &Fleet, by: usize, of: &str) -> u64 {
    seen(fleet, by)
        .await
        .get(of)
        .map_or(0, |seen| seen.requests)
}

/// Do all hold of each exactly what it holds itself? The dead, who have nothing, aside.
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
