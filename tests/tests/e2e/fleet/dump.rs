//! Held pairs of the engines' own lists and of an index's dump, in one form.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use warmroute_proto::{LocalHash, PrefixHash};

use super::{Fleet, text, worker_name};

/// Prefix hash and tier, both as text.
pub(crate) type Held = BTreeSet<(String, String)>;

/// By worker and rank.
pub(crate) type BySource<T> = BTreeMap<(String, u64), T>;

impl Fleet {
    /// Pairs that the engines hold.
    pub(crate) async fn truth(&self) -> BySource<Held> {
        let mut held = BTreeMap::new();
        for index in 0..self.engines.len() {
            let truth = self.get(self.engine(index, "/debug/blocks")).await;
            for rank in truth["ranks"].as_array().expect("ranks") {
                let blocks = rank["blocks"].as_array().expect("blocks").iter();
                let blocks =
                    blocks.map(|block| (text(&block["prefix_hash"]), text(&block["tier"])));
                let key = (
                    worker_name(index),
                    rank["dp_rank"].as_u64().expect("a rank"),
                );
                held.insert(key, blocks.collect());
            }
        }
        held
    }

    /// Whether every index holds exactly the engines' pairs.
    pub(crate) async fn assert_indexed_is_true(&self) {
        let truth = self.truth().await;
        for index in self.indexes() {
            assert_eq!(self.dumped(&index).await, truth, "{index}");
        }
    }

    /// Pairs of an index, from its dump.
    async fn dumped(&self, index: &str) -> BySource<Held> {
        let answer = self.http.get(format!("{index}/dump")).send().await;
        let mut held: BySource<Held> = BTreeMap::new();
        let mut source = (String::new(), 0);
        for line in answer.unwrap().text().await.unwrap().lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            if let Some(digest) = line.get("source") {
                source = (text(&digest["worker"]), digest["dp_rank"].as_u64().unwrap());
                held.entry(source.clone()).or_default();
            } else {
                apply(held.get_mut(&source).expect("its source came first"), &line);
            }
        }
        held
    }
}

fn apply(held: &mut Held, line: &Value) {
    let (stored, removed) = (&line["stored"], &line["removed"]);
    if let Some(blocks) = stored["blocks"].as_array() {
        let mut parent = stored["parent"].as_u64().map(PrefixHash);
        for block in blocks {
            let block = LocalHash(block.as_u64().unwrap());
            let prefix = PrefixHash::after(parent, block);
            parent = Some(prefix);
            held.insert((prefix.0.to_string(), text(&stored["tier"])));
        }
    } else if let Some(blocks) = removed["blocks"].as_array() {
        for block in blocks {
            held.remove(&(block.as_u64().unwrap().to_string(), text(&removed["tier"])));
        }
    } else {
        panic!("{line}");
    }
}
