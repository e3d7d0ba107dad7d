//! The state from which a restarted shim resumes while its engine goes on running.
//!
//! A [`Checkpoint`] is one source at one engine batch: the mirror with all references, the batch's
//! sequence and the hash of its bytes, and the generation as a fence. Nothing restored is credited
//! before a replay from that batch, inclusive, has proven that it is the same life of the engine.
//! [`CheckpointSchedule`] decides when the next one is due: often enough that the engine's replay
//! buffer reaches back to it.
//!
//! The bytes are versioned and checksummed. A checkpoint that is torn, or of another source,
//! configuration or version, is refused with a reason: a shim without one only knows less.
//!
//! Pure; files and locks are in the shell's `state_dir`.

mod schedule;

use warmroute_proto::{BlockSize, DpRank, EngineSeq, Generation, Source, WorkerId};
use xxhash_rust::xxh3::xxh3_128;

use crate::fields::{Field as _, FieldReader, Malformed, write_length};
use crate::mirror::{self, Mirror, MirrorConfig, MirrorSnapshot};
pub use schedule::CheckpointSchedule;

const MAGIC: [u8; 8] = *b"WRSHIMCP";
/// Incremented with each change of the encoding behind it.
const VERSION: u32 = 3;
const CHECKSUM_BYTES: usize = 16;

/// Bound of a checkpoint; ten million blocks take a third of it.
pub const BYTES_MAX: u64 = 2 << 30;

/// The source as of one batch, not yet encoded.
#[derive(Debug)]
pub struct Checkpoint {
    pub header: CheckpointHeader,
    pub(crate) config: MirrorConfig,
    pub(crate) mirror: MirrorSnapshot,
}

/// The source, batch and generation of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointHeader {
    pub source: Source,
    /// The generation in use: a later one must be above it.
    pub generation: Generation,
    /// The last batch in the mirror.
    pub engine_seq: EngineSeq,
    /// XXH3 of that batch's bytes.
    pub payload_hash: u64,
}

/// A decoded checkpoint, not yet proven.
#[derive(Debug)]
pub struct Restored {
    pub header: CheckpointHeader,
    pub(crate) mirror: Mirror,
}

impl Restored {
    /// Number of prefixes in its mirror.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.mirror.prefixes()
    }
}

/// Why a checkpoint is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    #[error("not a checkpoint")]
    Foreign,
    #[error("unknown version {0}")]
    Version(u32),
    #[error("torn or corrupt: the checksum does not match")]
    Checksum,
    #[error("written for source {0}")]
    Source(Source),
    #[error("written with another block size or other assumptions")]
    Config,
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

impl CheckpointError {
    /// The label of a metric.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Foreign => "foreign",
            Self::Version(_) => "version",
            Self::Checksum => "checksum",
            Self::Source(_) => "source",
            Self::Config => "config",
            Self::Malformed(_) => "malformed",
        }
    }
}

/// Encodes a checkpoint for its file.
#[must_use]
pub fn encode(checkpoint: &Checkpoint) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(checkpoint.mirror.bytes_hint());
    bytes.extend_from_slice(&MAGIC);
    VERSION.write(&mut bytes);
    let header = &checkpoint.header;
    let worker = header.source.worker.as_str();
    write_length(worker.len(), &mut bytes);
    bytes.extend_from_slice(worker.as_bytes());
    header.source.dp_rank.0.write(&mut bytes);
    header.generation.0.write(&mut bytes);
    header.engine_seq.0.write(&mut bytes);
    header.payload_hash.write(&mut bytes);
    bytes.extend_from_slice(&fingerprint(&checkpoint.config));
    checkpoint.mirror.write(&mut bytes);
    let checksum = xxh3_128(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes
}

/// Decodes a checkpoint of this source and configuration.
pub fn decode(
    bytes: &[u8],
    source: &Source,
    config: MirrorConfig,
) -> Result<Restored, CheckpointError> {
    let (body, checksum) = bytes
        .len()
        .checked_sub(CHECKSUM_BYTES)
        .and_then(|at| bytes.split_at_checked(at))
        .ok_or(CheckpointError::Foreign)?;
    let mut reader = FieldReader::new(body);
    if reader.bytes(MAGIC.len()) != Ok(&MAGIC) {
        return Err(CheckpointError::Foreign);
    }
    // The version comes first: a newer one may compute the checksum differently.
    let version: u32 = reader.read()?;
    if version != VERSION {
        return Err(CheckpointError::Version(version));
    }
    if checksum != xxh3_128(body).to_le_bytes() {
        return Err(CheckpointError::Checksum);
    }
    let name = reader.length(1)?;
    let worker = str::from_utf8(reader.bytes(name)?).map_err(|_| Malformed("a name"))?;
    let found = Source {
        worker: WorkerId::from(worker),
        dp_rank: DpRank(reader.read()?),
    };
    if found != *source {
        return Err(CheckpointError::Source(found));
    }
    let header = CheckpointHeader {
        source: found,
        generation: Generation(reader.read()?),
        engine_seq: EngineSeq(reader.read()?),
        payload_hash: reader.read()?,
    };
    if reader.bytes(FINGERPRINT_BYTES)? != fingerprint(&config) {
        return Err(CheckpointError::Config);
    }
    let mirror = Mirror::read(config, &mut reader)?;
    if !reader.is_at_end() {
        return Err(Malformed("bytes behind the end").into());
    }
    Ok(Restored { header, mirror })
}

const FINGERPRINT_BYTES: usize = 9;

/// The options that change how events are folded into a mirror.
fn fingerprint(config: &MirrorConfig) -> [u8; FINGERPRINT_BYTES] {
    let MirrorConfig {
        block_size,
        blocks_max: _,
        orphans_max: _,
        speculates: _,
        connects: _,
        assume,
    } = config;
    let mirror::Assumptions {
        no_extra_keys,
        no_lora,
        main_attention_only,
        plain_lookup,
        removals,
    } = *assume;
    let tokens = block_size.map_or(0, BlockSize::tokens) as u64;
    let [a, b, c, d, ..] = tokens.to_le_bytes();
    let flags = [
        no_extra_keys,
        no_lora,
        main_attention_only,
        plain_lookup,
        removals,
    ];
    let [e, f, g, h, i] = flags.map(u8::from);
    [a, b, c, d, e, f, g, h, i]
}

#[cfg(test)]
mod tests;
