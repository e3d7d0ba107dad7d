//! LoRA adapters that are loaded again under their name, from another place.
//!
//! vLLM's hash of a block covers the adapter's name and path; its events carry the name, and a number
//! that rises with each load. Routers know the name only. So the blocks of each *load* (one name from
//! one path) are kept apart, and those of a name's current load are held; the others' are held again
//! if the engine goes back to their path, where it finds them too.
//!
//! The path is on no wire. A store shows its load by a block that is known: its parent, or its first
//! block under the same hash. One hash for a prefix that another load has under another hash shows
//! another path, and so a load of its own. A number that is not known begins one, until a block shows
//! it to be an older one: a reload from the same path.
//!
//! A reload shows with the first store after it. Until then its name's old blocks count.

use warmroute_proto::{LocalHash, PrefixHash};

use super::Mirror;
use super::nodes::{LoadId, NodeId};
use super::store_block::{StoreBlock, root_seed};
use crate::fields::{Field, FieldReader, Malformed, write_length};
use crate::wire::{EngineHash, LoraRef, StoredBlocks};

/// Loads kept apart at a time. Blocks of further ones are not indexed.
const LOADS_MAX: usize = if cfg!(test) { 4 } else { 4096 };

#[derive(Clone, Debug)]
struct Load {
    name: Box<str>,
    /// The engine's last number of it.
    number: Option<u64>,
    is_current: bool,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Adapters {
    /// By [`LoadId`], from 1 on; `None` for a free place.
    loads: Vec<Option<Load>>,
    /// Another load became a name's current one since the last `settle`.
    pub(super) have_switched: bool,
}

impl Adapters {
    fn get(&self, id: LoadId) -> Option<&Load> {
        let at = usize::from(id.0).checked_sub(1)?;
        self.loads.get(at)?.as_ref()
    }

    fn of_name<'a>(&'a self, name: &str) -> impl Iterator<Item = (LoadId, &'a Load)> {
        let loads = (1_u16..).map(LoadId).zip(&self.loads);
        let loads = loads.filter_map(|(id, load)| Some((id, load.as_ref()?)));
        loads.filter(move |(_, load)| *load.name == *name)
    }

    fn current(&self, name: &str) -> Option<(LoadId, &Load)> {
        self.of_name(name).find(|(_, load)| load.is_current)
    }

    /// Blocks of this load can be found by requests of its adapter's name.
    pub(super) fn are_found(&self, id: LoadId) -> bool {
        id == LoadId::NONE || self.get(id).is_some_and(|load| load.is_current)
    }

    /// `None` if there is no place.
    fn add(&mut self, name: &str, number: Option<u64>) -> Option<LoadId> {
        let load = Some(Load {
            name: name.into(),
            number,
            is_current: false,
        });
        let free = self.loads.iter().position(Option::is_none);
        let at = free.unwrap_or(self.loads.len());
        if at >= LOADS_MAX {
            return None;
        }
        if at == self.loads.len() {
            self.loads.push(load);
        } else {
            self.loads[at] = load;
        }
        u16::try_from(at + 1).ok().map(LoadId)
    }

    fn drop_load(&mut self, id: LoadId) {
        if let Some(load) = usize::from(id.0)
            .checked_sub(1)
            .and_then(|at| self.loads.get_mut(at))
        {
            *load = None;
        }
    }

    /// A store showed a load under this number. The newest number of a name is that of its current
    /// load. Returns whether another load was current.
    fn showed(&mut self, id: LoadId, number: Option<u64>) -> bool {
        let Some(name) = self.get(id).map(|load| load.name.clone()) else {
            return false;
        };
        let mut has_switched = false;
        let current = self.current(&name);
        let becomes_current = current
            .is_none_or(|(known, load)| known != id && (number.is_none() || load.number <= number));
        for (at, load) in (1_u16..).map(LoadId).zip(&mut self.loads) {
            let Some(load) = load.as_mut().filter(|load| load.name == name) else {
                continue;
            };
            if at == id {
                load.number = load.number.max(number);
                load.is_current |= becomes_current;
            } else if becomes_current && load.is_current {
                load.is_current = false;
                has_switched = true;
            }
        }
        has_switched
    }

    pub(super) fn write(&self, to: &mut Vec<u8>) {
        write_length(self.loads.len(), to);
        for load in &self.loads {
            let name = load.as_ref().map_or("", |load| &load.name);
            write_length(name.len(), to);
            name.bytes().for_each(|byte| byte.write(to));
            let number = load.as_ref().and_then(|load| load.number);
            load.is_some().write(to);
            number.is_some().write(to);
            number.unwrap_or_default().write(to);
            load.as_ref().is_some_and(|load| load.is_current).write(to);
        }
    }

    pub(super) fn read(from: &mut FieldReader<'_>) -> Result<Self, Malformed> {
        const LOAD_BYTES: usize = 15;
        let mut adapters = Self::default();
        let count = from.length(LOAD_BYTES)?;
        if count > LOADS_MAX {
            return Err(Malformed("the number of adapters"));
        }
        for _ in 0..count {
            let length = from.length(1)?;
            let name = str::from_utf8(from.bytes(length)?).map_err(|_| Malformed("a name"))?;
            let name = name.to_owned();
            let is_there = from.read()?;
            let has_number = from.read()?;
            let number = Some(from.read()?).filter(|_| has_number);
            let is_current = from.read()?;
            if is_current && adapters.current(&name).is_some() {
                return Err(Malformed("a second current load"));
            }
            let load = Load {
                name: name.into(),
                number,
                is_current,
            };
            adapters.loads.push(Some(load).filter(|_| is_there));
        }
        Ok(adapters)
    }

    pub(super) fn knows(&self, id: LoadId) -> bool {
        id == LoadId::NONE || self.get(id).is_some()
    }
}

impl Mirror {
    /// The load of a store's blocks. `None` if it cannot be kept apart.
    pub(super) fn load_of(&mut self, stored: &StoredBlocks, block_tokens: usize) -> Option<LoadId> {
        let LoraRef::Named(name) = &stored.lora else {
            return Some(LoadId::NONE);
        };
        let number = stored.lora_number;
        let shown = self.shown_load(stored);
        let load = match shown {
            Some(load) => {
                self.merge_provisional(name, number, load);
                load
            }
            None => {
                let known = self.load_without_contradiction(stored, name, block_tokens);
                let load = known.or_else(|| self.adapters.add(name, number));
                let load = load.or_else(|| {
                    self.drop_unused_loads();
                    self.adapters.add(name, number)
                });
                load?
            }
        };
        if self.adapters.showed(load, number) {
            self.adapters.have_switched = true;
            self.touch_all();
        }
        Some(load)
    }

    /// The load of a block that the store continues or stores again.
    fn shown_load(&self, stored: &StoredBlocks) -> Option<LoadId> {
        let hash = stored.parent.or_else(|| stored.hashes.first().copied())?;
        let node = self.nodes.get(self.engine_hashes.node(hash)?)?;
        Some(node.load).filter(|load| *load != LoadId::NONE)
    }

    /// A known load with the store's number, unless it has the store's first block under another hash.
    fn load_without_contradiction(
        &self,
        stored: &StoredBlocks,
        name: &str,
        block_tokens: usize,
    ) -> Option<LoadId> {
        let first = stored.tokens.get(..block_tokens);
        let is_root = stored.parent.is_none();
        let prefix = first.filter(|_| is_root).map(|first| {
            let keys = stored.keys.first().filter(|(of, _)| *of == 0);
            let keys = keys.map(|(_, keys)| keys);
            let is_pairs = stored.tokens_per_position > 1;
            let hash = *stored.hashes.first().unwrap_or(&EngineHash(0));
            let lookahead = stored.lookahead_of(0);
            let seed = root_seed(stored);
            let block = StoreBlock::new(hash, first, lookahead, keys, is_pairs, seed);
            self.root_prefix(block.local)
        });
        let contradicts = |load: LoadId| {
            let node = prefix.and_then(|prefix| self.nodes.find(prefix, load));
            let node = node.and_then(|id| self.nodes.get(id));
            node.is_some_and(|node| node.references > 0)
        };
        let with_number =
            |(id, load): &(LoadId, &Load)| load.number == stored.lora_number && !contradicts(*id);
        // The current one first: a load in place keeps the number.
        let current = self.adapters.current(name);
        let others = self.adapters.of_name(name);
        let mut all = current.into_iter().chain(others);
        all.find(with_number).map(|(id, _)| id)
    }

    /// The prefix of a sequence's first block.
    fn root_prefix(&self, local: LocalHash) -> PrefixHash {
        let root = LocalHash::RESUME_ROOT;
        let above = self.resume.is_some().then(|| PrefixHash::after(None, root));
        PrefixHash::after(above, local)
    }

    /// An unknown number turned out to be a reload of `load` from the same path: what was stored under
    /// it in between is of that load.
    fn merge_provisional(&mut self, name: &str, number: Option<u64>, load: LoadId) {
        let is_known = |(id, known): &(LoadId, &Load)| *id == load && known.number == number;
        if self.adapters.of_name(name).any(|known| is_known(&known)) {
            return;
        }
        let is_provisional = |(id, other): &(LoadId, &Load)| *id != load && other.number == number;
        let provisional = self.adapters.of_name(name).find(is_provisional);
        let Some(provisional) = provisional.map(|(id, _)| id) else {
            return;
        };
        let of = self.nodes_of(provisional);
        let is_apart = of.iter().all(|&id| {
            let node = self.nodes.get(id);
            node.is_none_or(|node| self.nodes.find(node.prefix, load).is_none())
        });
        if is_apart {
            for id in of {
                if let Some(node) = self.nodes.get_mut(id) {
                    node.load = load;
                }
            }
            self.adapters.drop_load(provisional);
            // The older load's blocks are found again.
            self.touch_all();
        }
    }

    fn nodes_of(&self, load: LoadId) -> Vec<NodeId> {
        let ids = self.nodes.ids();
        ids.filter(|&id| self.nodes.get(id).is_some_and(|node| node.load == load))
            .collect()
    }

    /// Frees the places of loads without blocks. Those of a name's current load can be added again.
    fn drop_unused_loads(&mut self) {
        let mut used = vec![false; LOADS_MAX + 1];
        for id in self.nodes.ids() {
            if let Some(node) = self.nodes.get(id)
                && let Some(used) = used.get_mut(usize::from(node.load.number()))
            {
                *used = true;
            }
        }
        for (at, is_used) in (0_u16..).map(LoadId).zip(used) {
            if !is_used {
                self.adapters.drop_load(at);
            }
        }
    }
}
