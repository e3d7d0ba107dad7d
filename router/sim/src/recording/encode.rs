//! From requests to the bytes of one file.

use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;
use sha2::{Digest as _, Sha256};
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::{LocalHash, PrefixHash};

use super::{
    FileHeader, HASH_BYTES, HEADER, MAGIC, NAME_BYTES_MAX, REQUEST, RecordedPlacement,
    RequestFacts, check_sum,
};

/// The secret of a recording. Not written, and not shown.
#[derive(Clone)]
pub struct RecordingSalt([u8; 32]);

impl RecordingSalt {
    #[must_use]
    pub const fn new(random: [u8; 32]) -> Self {
        Self(random)
    }

    /// The name of a prefix in files: the beginning of a SHA-256 keyed by the salt.
    fn hash(&self, prefix: PrefixHash) -> [u8; HASH_BYTES] {
        let mut digest = Sha256::new_with_prefix(self.0);
        digest.update(prefix.0.to_le_bytes());
        let mut hash = [0; HASH_BYTES];
        hash.copy_from_slice(&digest.finalize()[..HASH_BYTES]);
        hash
    }
}

/// Encodes the requests of one file. All bytes must be written, in order.
pub struct FileEncoder {
    salt: RecordingSalt,
    names: FxHashMap<Arc<str>, u64>,
    /// Numbers of the file's blocks. Every prefix of one that is here is here.
    nodes: FxHashMap<PrefixHash, u64>,
    payload: Vec<u8>,
}

impl FileEncoder {
    /// Begins a file; `out` gets its header.
    #[must_use]
    pub fn new(salt: RecordingSalt, header: FileHeader, out: &mut Vec<u8>) -> Self {
        let mut encoder = Self {
            salt,
            names: FxHashMap::default(),
            nodes: FxHashMap::default(),
            payload: Vec::new(),
        };
        out.extend_from_slice(&MAGIC);
        encoder.payload.push(HEADER);
        encoder.number(header.recording);
        encoder.number(header.file.into());
        encoder.number(header.started_unix_ms);
        encoder.finish(out);
        encoder
    }

    /// Appends a request's frame to `out`. `blocks` are the prompt's whole blocks.
    pub fn encode(&mut self, facts: &RequestFacts, blocks: &[LocalHash], out: &mut Vec<u8>) {
        self.payload.push(REQUEST);
        self.micros(facts.arrived);
        self.payload.push(facts.outcome.byte());
        self.name(&facts.model);
        self.number(facts.prompt_tokens.into());
        self.number(facts.output_tokens.into());
        self.number(facts.block_tokens.into());
        self.optional(facts.ttft.map(micros));
        self.micros(facts.duration);
        self.optional(facts.cached_tokens.map(u64::from));
        match &facts.placement {
            None => self.payload.push(0),
            Some(placement) => {
                self.payload.push(1);
                self.placement(placement);
            }
        }
        match &facts.tenant {
            None => self.payload.push(0),
            Some(tenant) => {
                self.payload.push(1);
                self.name(tenant);
            }
        }
        self.blocks(blocks);
        self.finish(out);
    }

    fn placement(&mut self, placement: &RecordedPlacement) {
        self.name(&placement.worker);
        self.number(placement.dp_rank.into());
        self.number(placement.credited_blocks.into());
        self.number(placement.predicted_blocks.into());
        self.number(placement.active_requests.into());
        self.micros(placement.queue);
        self.micros(placement.prefill);
        self.micros(placement.decode);
    }

    /// The deepest known block as its number plus one, then the blocks after it.
    fn blocks(&mut self, blocks: &[LocalHash]) {
        let prefixes: Vec<PrefixHash> = prefix_hashes(None, blocks).collect();
        let known = prefixes.partition_point(|prefix| self.nodes.contains_key(prefix));
        let deepest = known.checked_sub(1).map(|deepest| prefixes[deepest]);
        let parent = deepest.and_then(|prefix| self.nodes.get(&prefix).copied());
        self.optional(parent);
        self.number((prefixes.len() - known) as u64);
        for &prefix in &prefixes[known..] {
            let number = self.nodes.len() as u64;
            self.nodes.insert(prefix, number);
            let hash = self.salt.hash(prefix);
            self.payload.extend_from_slice(&hash);
        }
    }

    /// The name's number in the file; its text follows where it is new.
    fn name(&mut self, name: &Arc<str>) {
        if let Some(&number) = self.names.get(name) {
            return self.number(number);
        }
        let number = self.names.len() as u64;
        self.names.insert(Arc::clone(name), number);
        self.number(number);
        let text = &name[..name.floor_char_boundary(NAME_BYTES_MAX)];
        self.number(text.len() as u64);
        self.payload.extend_from_slice(text.as_bytes());
    }

    fn optional(&mut self, number: Option<u64>) {
        self.number(number.map_or(0, |number| number.saturating_add(1)));
    }

    fn micros(&mut self, time: Duration) {
        self.number(micros(time));
    }

    /// LEB128.
    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.payload.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.payload.push(number as u8);
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        let length = u32::try_from(self.payload.len()).unwrap_or(u32::MAX);
        out.extend_from_slice(&length.to_le_bytes());
        out.extend_from_slice(&check_sum(&self.payload).to_le_bytes());
        out.append(&mut self.payload);
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
