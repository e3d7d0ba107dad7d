//! Compares the reports of processes about one moment. Moments are numbers, not times, so that this
//! holds under load.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::equality::{held, name};
use crate::fleet::{Fleet, text};

/// All reports so far, by subject.
#[derive(Default)]
pub(crate) struct Agreement {
    said: BTreeMap<String, (String, Value)>,
    compared: BTreeMap<&'static str, u64>,
}

impl Agreement {
    /// Queries every process once.
    pub(crate) async fn look(&mut self, fleet: &Fleet) {
        for index in fleet.indexes() {
            let digest = fleet.get(format!("{index}/v1/digest")).await;
            self.hear_position(&index, &digest);
            self.hear_records(&index, &digest);
        }
        for shim in &fleet.parts().shims {
            let base = shim.base();
            let digest = fleet.get(format!("{base}/v1/digest")).await;
            self.hear_records(&base, &digest);
        }
        for router in 0..fleet.routers.len() {
            let slots = fleet.get(fleet.admin(router, "/v1/slots")).await;
            self.hear_slots(&slots);
        }
    }

    /// Number of moments with reports of two processes.
    pub(crate) fn compared(&self, what: &'static str) -> u64 {
        self.compared.get(what).copied().unwrap_or(0)
    }

    fn hear(&mut self, what: &'static str, teller: &str, of: &str, value: Value) {
        let key = format!("{what} {of}");
        match self.said.get(&key) {
            None => {
                self.said.insert(key, (teller.to_owned(), value));
            }
            Some((first, known)) => {
                assert_eq!(value, *known, "{teller} and {first} differ: {key}");
                if teller != first {
                    *self.compared.entry(what).or_default() += 1;
                }
            }
        }
    }

    /// All sources of an indexer at its position.
    fn hear_position(&mut self, teller: &str, digest: &Value) {
        let sources = digest["sources"].as_array().expect("sources").iter();
        let value: Vec<Value> = sources
            .map(|source| json!([name(source), held(source)]))
            .collect();
        self.hear(
            "positions",
            teller,
            &digest["position"].to_string(),
            json!(value),
        );
    }

    /// Each source at its record, from an indexer or its shim.
    fn hear_records(&mut self, teller: &str, digest: &Value) {
        for source in digest["sources"].as_array().expect("sources") {
            if source["number"].is_u64() {
                let of = format!("{} {}", name(source), point(source));
                self.hear("records", teller, &of, held(source));
            }
        }
    }

    /// Each router's slots at its number, from itself and from the others.
    fn hear_slots(&mut self, slots: &Value) {
        let teller = text(&slots["router"]);
        for view in slots["sync"]["replicas"].as_array().expect("replicas") {
            let standing = text(&view["standing"]);
            if ["own", "following"].contains(&&*standing) && view["number"].is_u64() {
                let of = format!(
                    "{} {} {}",
                    view["router"], view["incarnation"], view["number"]
                );
                let value = json!([view["active_requests"], view["digest"]]);
                let what = if view["active_requests"] == 0 {
                    "idle slots"
                } else {
                    "slots"
                };
                self.hear(what, &teller, &of, value);
            }
        }
    }
}

fn point(source: &Value) -> String {
    format!(
        "generation {} number {}",
        source["generation"], source["number"]
    )
}
