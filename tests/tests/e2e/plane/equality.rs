//! Processes at rest, compared with the engines' own lists.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use warmroute_proto::{Digest, PrefixHash, Tier};

use crate::fleet::{Fleet, text};

/// Waits until engines, mirrors and indexes hold the same pairs.
pub(crate) async fn until_equal(fleet: &Fleet) {
    fleet.until_indexed().await;
    fleet
        .until(
            "mirrors and indexes are what the engines hold",
            async |fleet| {
                let truth = true_digests(fleet).await;
                let mut tellers = fleet.indexes();
                tellers.extend(fleet.parts().shims.iter().map(|shim| shim.base()));
                let mut told = BTreeMap::new();
                for base in &tellers {
                    let digest = fleet.get(format!("{base}/v1/digest")).await;
                    for source in digest["sources"].as_array().expect("sources") {
                        told.insert((name(source), base.clone()), held(source));
                    }
                }
                let copies = 1 + fleet.indexes().len();
                told.len() == truth.len() * copies
                    && told
                        .iter()
                        .all(|((source, _), held)| *held == truth[source])
            },
        )
        .await;
    fleet.assert_indexed_is_true().await;
}

async fn true_digests(fleet: &Fleet) -> BTreeMap<String, Value> {
    let truth = fleet.truth().await;
    let digests = truth.iter().map(|((worker, rank), held)| {
        let mut digest = Digest::default();
        for (prefix, tier) in held {
            let tier = Tier::ALL.into_iter().find(|known| known.label() == tier);
            digest.insert(PrefixHash(prefix.parse().unwrap()), tier.expect("a tier"));
        }
        (
            format!("{worker}/{rank}"),
            json!([digest.count, digest.hex()]),
        )
    });
    digests.collect()
}

/// Generations by source in an index.
pub(crate) async fn generations(fleet: &Fleet, index: &str) -> BTreeMap<String, u64> {
    let digest = fleet.get(format!("{index}/v1/digest")).await;
    let sources = digest["sources"].as_array().expect("sources").iter();
    let row = |source: &Value| Some((name(source), source["generation"].as_u64()?));
    sources.filter_map(row).collect()
}

/// States by source in an index.
pub(crate) async fn states(fleet: &Fleet, index: &str) -> BTreeMap<String, String> {
    let digest = fleet.get(format!("{index}/v1/digest")).await;
    let sources = digest["sources"].as_array().expect("sources").iter();
    sources
        .map(|source| (name(source), text(&source["state"])))
        .collect()
}

/// Whether every index reports every source exact.
pub(crate) async fn all_exact(fleet: &Fleet) -> bool {
    for index in fleet.indexes() {
        let states = states(fleet, &index).await;
        if states.is_empty() || states.values().any(|state| state != "exact") {
            return false;
        }
    }
    true
}

/// A source of `/v1/digest`.
pub(super) fn name(source: &Value) -> String {
    format!("{}/{}", text(&source["worker"]), source["dp_rank"])
}

/// Number and digest of its pairs.
pub(super) fn held(source: &Value) -> Value {
    json!([source["blocks"], source["digest"]])
}
