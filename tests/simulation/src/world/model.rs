//! What one rank holds after a list of payloads, written from vLLM's wire format and from nothing of
//! ours: JSON in, pairs out. Slow and obvious on purpose. [`Rules`] can be broken one by one, to show
//! that a wrong consumer would be seen.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// (prefix hash, tier number): what the digest counts.
pub type Pair = (u64, u8);

/// The local hash above all resume points, as `docs/PROTOCOL.md` has it.
const RESUME_ROOT: u64 = 0x7265_7375_6D65_3A31;

#[derive(Clone, Copy)]
pub struct Rules {
    /// A block has as many copies as stores without a remove.
    pub references: bool,
    /// A hit needs the last blocks of every group with a window.
    pub windows: bool,
}

impl Rules {
    pub const TRUE: Self = Self {
        references: true,
        windows: true,
    };
}

pub struct Model {
    rules: Rules,
    /// Every block ever named, by engine hash, whether or not it is still cached.
    blocks: BTreeMap<String, Block>,
    /// (tier, group, engine hash) → copies.
    copies: BTreeMap<(u8, u64, String), u64>,
    main_groups: BTreeSet<u64>,
    /// The blocks of its window by group.
    windows: BTreeMap<u64, usize>,
    /// Blocks whose ancestors are not all known yet.
    nameless: Vec<String>,
}

struct Block {
    parent: Option<String>,
    tokens: Vec<u8>,
    lora: Option<String>,
    salt: Option<String>,
    /// Prefix hash and seed, once every ancestor is known.
    name: Option<(u64, u64)>,
}

impl Model {
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            blocks: BTreeMap::new(),
            copies: BTreeMap::new(),
            main_groups: BTreeSet::new(),
            windows: BTreeMap::new(),
            nameless: Vec::new(),
        }
    }

    pub fn apply(&mut self, payload: &Value) {
        for event in list(&payload[1]) {
            match event["type"].as_str().expect("a type") {
                "BlockStored" => self.stored(event),
                "BlockRemoved" => self.removed(event),
                "AllBlocksCleared" => self.copies.retain(|(tier, _, _), _| *tier != 0),
                other => panic!("{other}"),
            }
        }
        let mut nameless = std::mem::take(&mut self.nameless);
        nameless.retain(|hash| self.name(hash).is_none());
        self.nameless = nameless;
    }

    /// Pairs whose block is cached in every main group, as far as the prefix is known; of an engine
    /// with windows its resume points.
    pub fn held(&self) -> BTreeSet<Pair> {
        let mut groups: BTreeMap<(u8, String), BTreeSet<u64>> = BTreeMap::new();
        for (tier, group, hash) in self.copies.keys() {
            let key = (*tier, hash.clone());
            groups.entry(key).or_default().insert(*group);
        }
        groups.retain(|_, groups| groups.is_superset(&self.main_groups));
        let whole: BTreeSet<(u8, String)> = groups.into_keys().collect();
        if self.rules.windows && !self.windows.is_empty() {
            let points = whole.iter().filter(|(tier, _)| *tier == 0);
            let points = points.filter_map(|(_, hash)| self.resume_point(hash, &whole));
            return points.map(|point| (point, 0)).collect();
        }
        whole
            .into_iter()
            .filter_map(|(tier, hash)| Some((self.blocks.get(&hash)?.name?.0, tier)))
            .collect()
    }

    /// The resume point after a block: every main group holds all blocks up to it, and each window's
    /// group the last ones.
    fn resume_point(&self, hash: &str, whole: &BTreeSet<(u8, String)>) -> Option<u64> {
        let mut upwards = Vec::new();
        let mut at = Some(hash);
        while let Some(hash) = at {
            let block = self.blocks.get(hash)?;
            let (_, seed) = block.name?;
            upwards.push((hash, xxh3_64_with_seed(&block.tokens, seed)));
            at = block.parent.as_deref();
        }
        let mut all = upwards.iter();
        let is_whole = all.all(|(hash, _)| whole.contains(&(0, (*hash).to_owned())));
        let has_windows = self.windows.iter().all(|(group, blocks)| {
            let mut last = upwards.iter().take(*blocks);
            last.all(|(hash, _)| self.copies.contains_key(&(0, *group, (*hash).to_owned())))
        });
        let locals = upwards.iter().rev().map(|(_, local)| *local);
        let root = chain(None, RESUME_ROOT);
        let point = locals.fold(root, |above, local| chain(Some(above), local));
        (is_whole && has_windows).then_some(point)
    }

    fn stored(&mut self, event: &Value) {
        let (tier, group) = place(event);
        let kind = event["kv_cache_spec_kind"]
            .as_str()
            .unwrap_or("full_attention");
        let main = ["full_attention", "mla_attention", "sink_full_attention"].contains(&kind);
        let number = |key: &str| usize::try_from(event[key].as_u64().expect(key)).expect("small");
        let size = number("block_size");
        if !main {
            // Its hashes are those of blocks that a main group's event names.
            let window = number("kv_cache_spec_sliding_window");
            self.windows.insert(group, (window - 1).div_ceil(size));
            for hash in list(&event["block_hashes"]) {
                self.count(tier, group, engine_hash(hash).expect("a hash"));
            }
            return;
        }
        self.main_groups.insert(group);
        let tokens: Vec<u32> = list(&event["token_ids"])
            .iter()
            .map(|token| u32::try_from(token.as_u64().expect("a token")).expect("32 bits"))
            .collect();
        let mut parent = engine_hash(&event["parent_block_hash"]);
        for (index, hash) in list(&event["block_hashes"]).iter().enumerate() {
            let hash = engine_hash(hash).expect("a hash");
            let tokens = &tokens[index * size..(index + 1) * size];
            let block = block(event, index, tokens, parent.clone());
            self.blocks.entry(hash.clone()).or_insert(block);
            self.nameless.push(hash.clone());
            self.count(tier, group, hash.clone());
            parent = Some(hash);
        }
    }

    fn count(&mut self, tier: u8, group: u64, hash: String) {
        let copies = self.copies.entry((tier, group, hash)).or_insert(0);
        *copies = if self.rules.references {
            *copies + 1
        } else {
            1
        };
    }

    fn removed(&mut self, event: &Value) {
        let (tier, group) = place(event);
        for hash in list(&event["block_hashes"]) {
            let key = (tier, group, engine_hash(hash).expect("a hash"));
            if let Some(copies) = self.copies.get_mut(&key) {
                *copies -= 1;
                if *copies == 0 {
                    self.copies.remove(&key);
                }
            }
        }
    }

    /// The prefix hash and seed of a block: ancestors first, without recursion.
    fn name(&mut self, hash: &str) -> Option<(u64, u64)> {
        let mut unnamed = Vec::new();
        let mut at = Some(hash.to_owned());
        let mut above = None;
        while let Some(hash) = at {
            let block = self.blocks.get(&hash)?;
            if block.name.is_some() {
                above = block.name;
                break;
            }
            at = block.parent.clone();
            unnamed.push(hash);
        }
        for hash in unnamed.into_iter().rev() {
            let block = self.blocks.get_mut(&hash)?;
            let seed = above.map_or_else(|| block.seed(), |(_, seed)| seed);
            let local = xxh3_64_with_seed(&block.tokens, seed);
            above = Some((chain(above.map(|(prefix, _)| prefix), local), seed));
            block.name = above;
        }
        above
    }
}

/// The pair of a prefix in GPU memory, from its token ids and nothing of an engine's events.
pub fn gpu_pair(tokens: &[u32], block_size: usize, salt: Option<&str>) -> Pair {
    let first = Block {
        parent: None,
        tokens: Vec::new(),
        lora: None,
        salt: salt.map(str::to_owned),
        name: None,
    };
    let locals = tokens.chunks_exact(block_size).map(|block| {
        let bytes: Vec<u8> = block.iter().flat_map(|token| token.to_le_bytes()).collect();
        xxh3_64_with_seed(&bytes, first.seed())
    });
    let prefix = locals.fold(None, |above, local| Some(chain(above, local)));
    (prefix.expect("a whole block"), 0)
}

impl Block {
    /// Salt and adapter stand in the first block; its descendants inherit them.
    fn seed(&self) -> u64 {
        let part = |name: &Option<String>, seed| {
            name.as_ref()
                .map_or(0, |name| xxh3_64_with_seed(name.as_bytes(), seed))
        };
        1337_u64
            .wrapping_add(part(&self.lora, 0))
            .wrapping_add(part(&self.salt, 1))
    }
}

fn block(event: &Value, index: usize, tokens: &[u32], parent: Option<String>) -> Block {
    let mut bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    // vLLM with EAGLE or MTP: the tokens behind the block are a part of its name.
    for token in event["lookahead_token_ids"]
        .get(index)
        .map_or(&[][..], list)
    {
        let token = u32::try_from(token.as_u64().expect("a token")).expect("32 bits");
        bytes.extend(token.to_le_bytes());
    }
    let lora = event["lora_name"].as_str().map(str::to_owned);
    // SGLang has it in the event, vLLM in the extra keys.
    let mut salt = event["cache_salt"].as_str().map(str::to_owned);
    let mut items = Vec::new();
    for key in event["extra_keys"].get(index).map_or(&[][..], list) {
        match key {
            Value::Array(item) => items.push(item_hash(item[0].as_str().expect("an id"))),
            Value::String(text) if Some(text) != lora.as_ref() => salt = Some(text.clone()),
            Value::String(_) => {}
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => panic!("{key}"),
        }
    }
    items.sort_unstable();
    bytes.extend(items.iter().flat_map(|item: &u64| item.to_le_bytes()));
    Block {
        parent,
        tokens: bytes,
        lora,
        salt,
        name: None,
    }
}

fn place(event: &Value) -> (u8, u64) {
    let medium = event["medium"]
        .as_str()
        .unwrap_or("GPU")
        .to_ascii_lowercase();
    let tier = match medium.as_str() {
        "gpu" => 0,
        "cpu" => 1,
        "storage" => 2,
        other => panic!("{other}"),
    };
    (tier, event["group_idx"].as_u64().unwrap_or(0))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Integers and byte strings alike, as text.
fn engine_hash(value: &Value) -> Option<String> {
    (!value.is_null()).then(|| value.to_string())
}

/// An identifier of at least 16 hexadecimal digits stands for its first 64 bits.
fn item_hash(identifier: &str) -> u64 {
    identifier
        .get(..16)
        .and_then(|digits| u64::from_str_radix(digits, 16).ok())
        .unwrap_or_else(|| xxh3_64_with_seed(identifier.as_bytes(), 0))
}

/// The blocks of a prompt, given by their local hashes, that a request can use of the GPU: the run
/// from the first block, or all up to the deepest resume point.
pub fn gpu_run(held: &BTreeSet<Pair>, locals: impl Iterator<Item = u64> + Clone) -> usize {
    let from = |root: Option<u64>| {
        let prefixes = locals.clone().scan(root, |above, local| {
            *above = Some(chain(*above, local));
            *above
        });
        prefixes.map(|prefix| held.contains(&(prefix, 0)))
    };
    let run = from(None).take_while(|is_held| *is_held).count();
    let points = (1..).zip(from(Some(chain(None, RESUME_ROOT))));
    let deepest = points.filter(|(_, is_held)| *is_held).last();
    deepest.map_or(run, |(depth, _)| run.max(depth))
}

/// The prefix chain as `docs/PROTOCOL.md` writes it.
pub fn chain(parent: Option<u64>, local: u64) -> u64 {
    let parent = parent.unwrap_or(0x9E37_79B9_7F4A_7C15) ^ 0xA076_1D64_78BD_642F;
    let product = u128::from(parent) * u128::from(local ^ 0xE703_7ED1_A0B4_28DB);
    (product >> 64) as u64 ^ product as u64
}
