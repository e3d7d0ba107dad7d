//! dynamo-kv-router's trees, driven as its own thread pool drives them: one lane, fed by a channel.

use std::cell::RefCell;

use dynamo_kv_router::indexer::{RadixTree, SyncIndexer, WorkerTask};
use dynamo_kv_router::nested_map::SearchMode;
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
    KvCacheStoreData, KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
    compute_block_hash_for_seq,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, PositionalIndexer};
use tokio::sync::oneshot;
use warmroute_proto::Tiers;

use crate::index::Index;
use crate::workload::{Event, TOKENS_PER_BLOCK};

fn router_event(id: &mut u64, event: Event) -> RouterEvent {
    *id += 1;
    let (worker, data) = match event {
        Event::Store {
            worker,
            parent,
            blocks,
            ..
        } => {
            let blocks = blocks
                .into_iter()
                .map(|(local, engine)| KvCacheStoredBlockData {
                    block_hash: ExternalSequenceBlockHash(engine),
                    tokens_hash: LocalBlockHash(local),
                    mm_extra_info: None,
                })
                .collect();
            let data = KvCacheStoreData {
                parent_hash: parent.map(ExternalSequenceBlockHash),
                start_position: None,
                blocks,
            };
            (worker, KvCacheEventData::Stored(data))
        }
        Event::Remove { worker, blocks, .. } => {
            let block_hashes = blocks.into_iter().map(ExternalSequenceBlockHash).collect();
            (
                worker,
                KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }),
            )
        }
    };
    let event = KvCacheEvent {
        event_id: *id,
        data,
        dp_rank: 0,
    };
    RouterEvent::new(u64::from(worker), event)
}

fn prepare(blocks: &[u64], prepared: &mut Vec<LocalBlockHash>) {
    prepared.clear();
    prepared.extend(blocks.iter().map(|&local| LocalBlockHash(local)));
}

fn hash(tokens: &[u32], prepared: &mut Vec<LocalBlockHash>) {
    let options = BlockHashOptions::default();
    *prepared = compute_block_hash_for_seq(tokens, TOKENS_PER_BLOCK as u32, options);
}

fn each(answer: &OverlapScores, see: &mut dyn FnMut(u32, Tiers<u32>)) {
    for (worker, &gpu) in &answer.scores {
        let run = Tiers {
            gpu,
            ..Tiers::default()
        };
        see(worker.worker_id as u32, run);
    }
}

fn encode(events: &[RouterEvent]) -> Option<Vec<u8>> {
    rmp_serde::to_vec_named(events).ok()
}

/// Feeds a lane: all tasks are in its channel before it starts.
fn lane(index: &impl SyncIndexer, parts: Vec<Vec<RouterEvent>>, done: &(dyn Fn(usize) + Sync)) {
    let (sender, receiver) = flume::unbounded();
    let mut marks = Vec::new();
    for part in parts {
        for event in part {
            sender.send(WorkerTask::Event(event)).unwrap();
        }
        let (mark, marked) = oneshot::channel();
        sender.send(WorkerTask::Flush(mark)).unwrap();
        marks.push(marked);
    }
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for (index, mark) in marks.into_iter().enumerate() {
                mark.blocking_recv().unwrap();
                done(index);
            }
            sender.send(WorkerTask::Terminate).unwrap();
        });
        index.worker(receiver, None).unwrap();
    });
}

fn lane_lazily(
    index: &impl SyncIndexer,
    events: &mut (dyn Iterator<Item = RouterEvent> + Send),
    done: &(dyn Fn() + Sync),
) {
    let (sender, receiver) = flume::bounded(64);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for event in events {
                sender.send(WorkerTask::Event(event)).unwrap();
            }
            let (mark, marked) = oneshot::channel();
            sender.send(WorkerTask::Flush(mark)).unwrap();
            marked.blocking_recv().unwrap();
            done();
            sender.send(WorkerTask::Terminate).unwrap();
        });
        index.worker(receiver, None).unwrap();
    });
}

macro_rules! concurrent {
    ($variant:ident, $name:literal, $new:expr) => {
        impl Index for $variant {
            const NAME: &'static str = $name;
            type Translator = u64;
            type Change = RouterEvent;
            type Prepared = Vec<LocalBlockHash>;
            type Answer = OverlapScores;

            fn new(_: u32) -> Self {
                Self($new)
            }
            fn translator() -> u64 {
                0
            }
            fn translate(id: &mut u64, event: Event) -> RouterEvent {
                router_event(id, event)
            }
            fn write(&self, parts: Vec<Vec<RouterEvent>>, done: &(dyn Fn(usize) + Sync)) {
                lane(&self.0, parts, done);
            }
            fn write_lazily(
                &self,
                changes: &mut (dyn Iterator<Item = RouterEvent> + Send),
                done: &(dyn Fn() + Sync),
            ) {
                lane_lazily(&self.0, changes, done);
            }
            fn prepare(&self, blocks: &[u64], prepared: &mut Self::Prepared) {
                prepare(blocks, prepared);
            }
            fn hash(&self, tokens: &[u32], prepared: &mut Self::Prepared) {
                hash(tokens, prepared);
            }
            fn lookup(&self, prepared: &mut Self::Prepared) -> OverlapScores {
                self.0.find_matches(prepared, false)
            }
            fn each(&self, answer: &OverlapScores, see: &mut dyn FnMut(u32, Tiers<u32>)) {
                each(answer, see);
            }
            fn snapshot(&self) -> Option<Vec<u8>> {
                encode(&self.0.dump_events()?)
            }
            fn restore(&self, snapshot: &[u8]) -> Option<Self> {
                let events: Vec<RouterEvent> = rmp_serde::from_slice(snapshot).ok()?;
                let restored = Self::new(0);
                restored.write(vec![events], &|_| ());
                Some(restored)
            }
        }
    };
}

pub struct Concurrent(ConcurrentRadixTreeCompressed);
concurrent!(
    Concurrent,
    "peer: concurrent tree",
    ConcurrentRadixTreeCompressed::new()
);

pub struct Positional(PositionalIndexer);
concurrent!(
    Positional,
    "peer: positional, binary",
    PositionalIndexer::new_with_mode(64, SearchMode::Binary)
);

pub struct SingleThread(RefCell<RadixTree>);

impl Index for SingleThread {
    const NAME: &'static str = "peer: single-thread tree";
    type Translator = u64;
    type Change = RouterEvent;
    type Prepared = Vec<LocalBlockHash>;
    type Answer = OverlapScores;

    fn new(_: u32) -> Self {
        Self(RefCell::new(RadixTree::new()))
    }
    fn translator() -> u64 {
        0
    }
    fn translate(id: &mut u64, event: Event) -> RouterEvent {
        router_event(id, event)
    }
    fn write(&self, parts: Vec<Vec<RouterEvent>>, done: &(dyn Fn(usize) + Sync)) {
        let tree = &mut *self.0.borrow_mut();
        for (index, part) in parts.into_iter().enumerate() {
            for event in part {
                tree.apply_event(event).ok();
            }
            done(index);
        }
    }
    fn write_lazily(
        &self,
        changes: &mut (dyn Iterator<Item = RouterEvent> + Send),
        done: &(dyn Fn() + Sync),
    ) {
        for event in changes {
            self.0.borrow_mut().apply_event(event).ok();
        }
        done();
    }
    fn prepare(&self, blocks: &[u64], prepared: &mut Self::Prepared) {
        prepare(blocks, prepared);
    }
    fn hash(&self, tokens: &[u32], prepared: &mut Self::Prepared) {
        hash(tokens, prepared);
    }
    fn lookup(&self, prepared: &mut Self::Prepared) -> OverlapScores {
        let sequence = std::mem::take(prepared);
        self.0.borrow().find_matches(sequence, false)
    }
    fn each(&self, answer: &OverlapScores, see: &mut dyn FnMut(u32, Tiers<u32>)) {
        each(answer, see);
    }
    fn snapshot(&self) -> Option<Vec<u8>> {
        encode(&self.0.borrow().dump_tree_as_events())
    }
    fn restore(&self, snapshot: &[u8]) -> Option<Self> {
        let events: Vec<RouterEvent> = rmp_serde::from_slice(snapshot).ok()?;
        let restored = Self::new(0);
        restored.write(vec![events], &|_| ());
        Some(restored)
    }
}
