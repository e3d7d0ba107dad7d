//! What every published batch changed: the reference for tests that check an index continuously.
//!
//! Prefix hashes are computed from the events alone (tokens, adapter, salt, items), with the hash
//! functions that have fixed vectors, and not by the engine model or the shim. Enabled by
//! `--history`; keeps the newest [`BATCHES_MAX`] batches.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use warmroute_proto::hash::item_hash;
use warmroute_proto::{LocalHash, PrefixHash, Seed};
use warmroute_sim::sim::{CacheEvent, EngineHash, ExtraKey, Medium, StoredBlocks};

const BATCHES_MAX: usize = 1 << 20;

/// What one published batch changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryBatch {
    pub seq: u64,
    /// Blocks that no earlier batch named.
    pub names: Vec<BlockName>,
    pub changes: Vec<PairChange>,
}

/// A block's prefix hash, its parent's prefix hash, and its local hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockName(pub u64, pub Option<u64>, pub u64);

/// Prefix hash, tier number, and whether the pair is held after the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairChange(pub u64, pub u8, pub bool);

/// Reference counts of each (hash, medium) in the main group. Shows which batches change the set.
pub(crate) struct Pairs {
    main_group: u32,
    references: BTreeMap<Pair, u32>,
}

type Pair = (EngineHash, Medium);

#[derive(Default)]
pub(crate) struct History {
    /// Prefix hash and seed of each block ever stored.
    names: BTreeMap<EngineHash, (PrefixHash, Seed)>,
    batches: VecDeque<HistoryBatch>,
}

impl Pairs {
    pub(crate) const fn new(main_group: u32) -> Self {
        Self {
            main_group,
            references: BTreeMap::new(),
        }
    }

    pub(crate) const fn main_group(&self) -> u32 {
        self.main_group
    }

    /// Returns the pairs whose held state differs after the events.
    pub(crate) fn apply(&mut self, events: &[CacheEvent]) -> Vec<(Pair, bool)> {
        let mut before: BTreeMap<Pair, bool> = BTreeMap::new();
        for event in events {
            match event {
                CacheEvent::Stored(stored) if stored.group == self.main_group => {
                    for &hash in &stored.hashes {
                        let pair = (hash, stored.medium);
                        let references = self.references.entry(pair).or_default();
                        before.entry(pair).or_insert(*references > 0);
                        *references += 1;
                    }
                }
                CacheEvent::Removed {
                    hash,
                    medium,
                    group,
                } if *group == self.main_group => {
                    let pair = (*hash, *medium);
                    let references = self.references.entry(pair).or_default();
                    before.entry(pair).or_insert(*references > 0);
                    *references = references.saturating_sub(1);
                }
                CacheEvent::Cleared => {
                    for (pair, references) in &mut self.references {
                        if pair.1 == Medium::Gpu {
                            before.entry(*pair).or_insert(*references > 0);
                            *references = 0;
                        }
                    }
                }
                CacheEvent::Stored(_) | CacheEvent::Removed { .. } => {}
            }
        }
        let mut changes = Vec::new();
        for (pair, was_held) in before {
            let is_held = self.references.get(&pair).is_some_and(|&count| count > 0);
            if is_held != was_held {
                changes.push((pair, is_held));
            }
            if !is_held {
                self.references.remove(&pair);
            }
        }
        changes
    }
}

impl History {
    pub(crate) fn record(
        &mut self,
        seq: u64,
        events: &[CacheEvent],
        main_group: u32,
        changes: &[(Pair, bool)],
    ) {
        let mut batch = HistoryBatch {
            seq,
            ..HistoryBatch::default()
        };
        for event in events {
            if let CacheEvent::Stored(stored) = event
                && stored.group == main_group
            {
                self.name(stored, &mut batch.names);
            }
        }
        let change = |&((hash, medium), is_held): &(Pair, bool)| {
            let (prefix, _) = self.names.get(&hash)?;
            let tier = match medium {
                Medium::Gpu => 0,
                Medium::Cpu => 1,
            };
            Some(PairChange(prefix.0, tier, is_held))
        };
        batch.changes = changes.iter().filter_map(change).collect();
        self.batches.push_back(batch);
        if self.batches.len() > BATCHES_MAX {
            self.batches.pop_front();
        }
    }

    /// Returns up to `max` batches from `seq` on, or `None` if they are no longer kept.
    pub(crate) fn from(&self, seq: u64, max: usize) -> Option<Vec<&HistoryBatch>> {
        let first = self.batches.front().map_or(0, |batch| batch.seq);
        let skipped = usize::try_from(seq.checked_sub(first)?).ok()?;
        Some(self.batches.iter().skip(skipped).take(max).collect())
    }

    fn name(&mut self, stored: &StoredBlocks, names: &mut Vec<BlockName>) {
        let size = stored.block_size.tokens();
        let mut parent = stored
            .parent
            .and_then(|hash| self.names.get(&hash).copied());
        for (index, (&hash, tokens)) in stored
            .hashes
            .iter()
            .zip(stored.tokens.chunks_exact(size))
            .enumerate()
        {
            let keys = stored.extra_keys.as_ref().and_then(|keys| keys.get(index));
            let keys = keys.map_or(&[][..], Vec::as_slice);
            let seed = parent.map_or_else(|| seed(stored, keys), |(_, seed)| seed);
            let behind = stored.lookahead.as_ref().and_then(|lists| lists.get(index));
            let behind = behind.map_or(&[][..], Vec::as_slice);
            let local = LocalHash::of_block(&[tokens, behind].concat(), &items(keys), seed);
            let before = parent.map(|(prefix, _)| prefix);
            let prefix = PrefixHash::after(before, local);
            if self.names.insert(hash, (prefix, seed)).is_none() {
                names.push(BlockName(prefix.0, before.map(|prefix| prefix.0), local.0));
            }
            parent = Some((prefix, seed));
        }
    }
}

fn seed(stored: &StoredBlocks, keys: &[ExtraKey]) -> Seed {
    let salt = keys.iter().find_map(|key| match key {
        ExtraKey::Salt(salt) => Some(&**salt),
        ExtraKey::Lora(_) | ExtraKey::Item { .. } => None,
    });
    Seed::new(stored.lora_name.as_deref(), salt)
}

fn items(keys: &[ExtraKey]) -> Vec<u64> {
    let item = |key: &ExtraKey| match key {
        ExtraKey::Item { identifier, offset } => Some(item_hash(identifier, *offset)),
        ExtraKey::Lora(_) | ExtraKey::Salt(_) => None,
    };
    keys.iter().filter_map(item).collect()
}
