//! The form of a TensorRT-LLM server (1.3), where it differs from vLLM's: its cache events, which
//! one reader takes by HTTP. Written from its sources.
//!
//! It holds each block in one level of memory. The engine model copies blocks to CPU memory when
//! they are cached; here such a copy counts once the GPU has none.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use warmroute_proto::BlockSize;
use warmroute_sim::sim::{
    CacheEvent, EngineConfig, EngineHash, ExtraKey, GroupKind, HeldPrefix, Medium, StoredBlocks,
};

use crate::server::Server;

const VERSION: &str = "1.3.0";
const WINDOW: u32 = 32_768;

pub(crate) fn routes() -> Router<Arc<Server>> {
    Router::new()
        .route("/version", get(version))
        .route("/metrics", get(metrics))
        .route("/kv_cache_events", post(kv_cache_events))
}

async fn version() -> Json<Value> {
    Json(json!({"version": VERSION}))
}

/// Statistics of iterations, each handed out once. This server has none.
async fn metrics() -> Json<Value> {
    Json(json!([]))
}

async fn kv_cache_events(State(server): State<Arc<Server>>) -> Json<Vec<Value>> {
    let mut events = Vec::new();
    if !server.args.events.no_events {
        let ranks = server.ranks.iter();
        events.extend(ranks.flat_map(|rank| rank.drain_events()));
    }
    if server.ranks.len() == 1 {
        for event in &mut events {
            // Named with attention data parallelism only.
            event
                .as_object_mut()
                .map(|event| event.remove("attention_dp_rank"));
        }
    }
    Json(events)
}

/// Copies of a block in each tier of the engine model.
#[derive(Clone, Copy, Default)]
struct Copies {
    gpu: u32,
    cpu: u32,
}

impl Copies {
    const fn level(self) -> Option<Medium> {
        match self {
            Self { gpu: 1.., .. } => Some(Medium::Gpu),
            Self { cpu: 1.., .. } => Some(Medium::Cpu),
            Self { .. } => None,
        }
    }

    const fn of(&mut self, medium: Medium) -> &mut u32 {
        match medium {
            Medium::Gpu => &mut self.gpu,
            Medium::Cpu => &mut self.cpu,
        }
    }
}

/// The events of one rank that its reader has not taken.
pub(crate) struct EventQueue {
    rank: u32,
    block_size: BlockSize,
    /// The number of the next event.
    next: u64,
    max: usize,
    events: VecDeque<Value>,
    copies: BTreeMap<EngineHash, Copies>,
    /// Blocks that are followed by one that is not full.
    with_part: BTreeSet<EngineHash>,
}

impl EventQueue {
    pub(crate) fn new(rank: u32, config: &EngineConfig, max: usize) -> Self {
        let mut queue = Self {
            rank,
            block_size: config.block_size,
            next: 0,
            max,
            events: VecDeque::new(),
            copies: BTreeMap::new(),
            with_part: BTreeSet::new(),
        };
        let blocks = [config.num_blocks, config.cpu_blocks];
        queue.add(
            &json!({"type": "created", "num_blocks_per_cache_level": blocks}),
            false,
        );
        queue
    }

    pub(crate) fn drain(&mut self) -> Vec<Value> {
        self.events.drain(..).collect()
    }

    /// The engine model's truth, with each block in one level.
    pub(crate) fn keep_first_level(held: &mut Vec<HeldPrefix>) {
        let on_gpu = held.iter().filter(|held| held.medium == Medium::Gpu);
        let on_gpu: BTreeSet<u64> = on_gpu.map(|held| held.prefix.0).collect();
        held.retain(|held| held.medium == Medium::Gpu || !on_gpu.contains(&held.prefix.0));
    }

    /// The events of the engine model as changes of the one level of each block.
    pub(crate) fn one_level(&mut self, events: &[CacheEvent]) -> Vec<CacheEvent> {
        let mut changes = Vec::new();
        for event in events {
            match event {
                CacheEvent::Stored(stored) => self.count_stored(stored, &mut changes),
                CacheEvent::Removed { hash, medium, .. } => {
                    let before = self.copies.get(hash).and_then(|copies| copies.level());
                    let copies = self.copies.entry(*hash).or_default();
                    let count = copies.of(*medium);
                    *count = count.saturating_sub(1);
                    self.change(*hash, before, &mut changes);
                }
                CacheEvent::Cleared => {
                    let all: Vec<EngineHash> = self.copies.keys().copied().collect();
                    for hash in all {
                        let copies = self.copies.entry(hash).or_default();
                        let before = copies.level();
                        copies.gpu = 0;
                        self.change(hash, before, &mut changes);
                    }
                }
            }
        }
        changes
    }

    fn count_stored(&mut self, stored: &StoredBlocks, changes: &mut Vec<CacheEvent>) {
        let mut new = self.run(stored.medium, stored.parent);
        let blocks = stored.tokens.chunks_exact(stored.block_size.tokens());
        for (index, (&hash, tokens)) in stored.hashes.iter().zip(blocks).enumerate() {
            let copies = self.copies.entry(hash).or_default();
            let before = copies.level();
            *copies.of(stored.medium) += 1;
            if before.is_none() {
                new.hashes.push(hash);
                new.tokens.extend(tokens);
                let keys = stored.extra_keys.as_ref().and_then(|keys| keys.get(index));
                let keys = keys.cloned().unwrap_or_default();
                new.extra_keys.get_or_insert_default().push(keys);
                continue;
            }
            let run = std::mem::replace(&mut new, self.run(stored.medium, Some(hash)));
            changes.extend((!run.hashes.is_empty()).then_some(CacheEvent::Stored(run)));
            self.change(hash, before, changes);
        }
        changes.extend((!new.hashes.is_empty()).then_some(CacheEvent::Stored(new)));
    }

    /// A run without blocks.
    const fn run(&self, medium: Medium, parent: Option<EngineHash>) -> StoredBlocks {
        StoredBlocks {
            hashes: Vec::new(),
            parent,
            tokens: Vec::new(),
            block_size: self.block_size,
            extra_keys: Some(Vec::new()),
            lookahead: None,
            lora_name: None,
            medium,
            group: 0,
            kind: GroupKind::FullAttention,
        }
    }

    /// A move is a store without tokens and a removal.
    fn change(&self, hash: EngineHash, before: Option<Medium>, changes: &mut Vec<CacheEvent>) {
        let after = self.copies.get(&hash).and_then(|copies| copies.level());
        let Some(before) = before.filter(|&before| after != Some(before)) else {
            return;
        };
        if let Some(after) = after {
            let mut moved = self.run(after, None);
            moved.hashes.push(hash);
            changes.push(CacheEvent::Stored(moved));
        }
        changes.push(CacheEvent::Removed {
            hash,
            medium: before,
            group: 0,
        });
    }

    /// Numbers these changes and queues them, unless they are lost. Returns the last number.
    pub(crate) fn publish(&mut self, changes: &[CacheEvent], is_lost: bool) -> u64 {
        let mut changes = changes.iter().peekable();
        while let Some(change) = changes.next() {
            let data = match change {
                CacheEvent::Stored(stored) if stored.tokens.is_empty() => {
                    // Its removal from the old level is a part of this event.
                    changes.next();
                    updated(stored)
                }
                CacheEvent::Stored(stored) => self.stored(stored),
                CacheEvent::Removed { hash, .. } => {
                    let part = self.with_part.remove(hash).then(|| part_of(*hash));
                    let hashes: Vec<u64> = [Some(*hash), part]
                        .into_iter()
                        .flatten()
                        .map(|hash| hash.0)
                        .collect();
                    json!({"type": "removed", "block_hashes": hashes})
                }
                CacheEvent::Cleared => continue,
            };
            self.add(&data, is_lost);
        }
        self.next.saturating_sub(1)
    }

    fn add(&mut self, data: &Value, is_lost: bool) {
        let event = json!({
            "event_id": self.next, "data": data, "window_size": WINDOW,
            "attention_dp_rank": self.rank,
        });
        self.next += 1;
        if !is_lost {
            self.events.push_back(event);
        }
        while self.events.len() > self.max {
            self.events.pop_front();
        }
    }

    /// With a block behind the last one that is not full.
    fn stored(&mut self, stored: &StoredBlocks) -> Value {
        let size = stored.block_size.tokens();
        let salt = stored
            .extra_keys
            .iter()
            .flatten()
            .flatten()
            .find_map(|key| match key {
                ExtraKey::Salt(salt) => Some(salt.to_string()),
                ExtraKey::Lora(_) | ExtraKey::Item { .. } => None,
            });
        let level = level(stored.medium);
        let block = |hash: EngineHash, tokens: &[u32]| {
            let unique = tokens.iter().map(
                |token| json!({"type": "unique_token", "token_id": token, "token_extra_id": 0}),
            );
            json!({
                "type": "stored_block", "block_hash": hash.0, "cache_level": level,
                "priority": 35, "mm_keys": [], "cache_salt": salt,
                "tokens": unique.collect::<Vec<_>>(),
            })
        };
        let full = stored.hashes.iter().zip(stored.tokens.chunks_exact(size));
        let mut blocks: Vec<Value> = full.map(|(&hash, tokens)| block(hash, tokens)).collect();
        if let Some(&last) = stored.hashes.last() {
            self.with_part.insert(last);
            blocks.push(block(part_of(last), &stored.tokens[..1]));
        }
        let parent = stored.parent.map(|hash| hash.0);
        json!({"type": "stored", "parent_hash": parent, "blocks": blocks})
    }
}

fn updated(stored: &StoredBlocks) -> Value {
    let (new, old) = match stored.medium {
        Medium::Gpu => (0, 1),
        Medium::Cpu => (1, 0),
    };
    json!({
        "type": "updated", "block_hash": stored.hashes[0].0, "priority": null,
        "cache_level": {"type": "event_diff", "new_value": new, "old_value": old},
    })
}

const fn level(medium: Medium) -> u32 {
    match medium {
        Medium::Gpu => 0,
        Medium::Cpu => 1,
    }
}

const fn part_of(last: EngineHash) -> EngineHash {
    EngineHash(!last.0)
}
