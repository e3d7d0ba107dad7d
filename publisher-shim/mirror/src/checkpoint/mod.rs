//! What lets a restarted shim go on where it was, while its engine lived on.
//!
//! A [`Checkpoint`] is one source at one engine batch: the mirror with all its references, the
//! batch's sequence and the hash of its bytes, and the generation as a fence. The engine's replay
//! from that batch on, inclusive, proves whether it is still the same life; nothing restored is
//! believed before. [`CheckpointSchedule`] says when the next one is due: often enough that the engine's replay
//! buffer reaches back to it.
//!
//! The bytes are versioned and checksummed. What is torn, of another source, of another
//! configuration or of a newer version is refused with a reason, never guessed at: a shim without a
//! checkpoint only knows less.
//!
//! Pure. Files and locks: `state_dir`.

mod fields;
mod schedule;

use warmroute_proto::{DpRank, EngineSeq, Generation, Source, WorkerId};
use xxhash_rust::xxh3::xxh3_128;

pub use fields::Malformed;
pub(crate) use fields::{FieldReader, FieldWriter};
pub use schedule::CheckpointSchedule;
// Until the shell uses the new name.
pub use schedule::CheckpointSchedule as Pace;

use crate::mirror::{self, Mirror, MirrorConfig, MirrorSnapshot};

const MAGIC: [u8; 8] = *b"WRSHIMCP";
/// Grows with every change of what follows it; stable otherwise.
const VERSION: u32 = 1;
const CHECKSUM_BYTES: usize = 16;

/// No checkpoint is larger: ten million blocks take a third of it.
pub const BYTES_MAX: u64 = 2 << 30;

/// The source as of one batch, before it is bytes.
#[derive(Debug)]
pub struct Checkpoint {
    pub header: CheckpointHeader,
    pub(crate) config: MirrorConfig,
    pub(crate) mirror: MirrorSnapshot,
}

/// Where a checkpoint stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointHeader {
    pub source: Source,
    /// The generation in use; no lower one may be claimed again.
    pub generation: Generation,
    /// The last batch in the mirror, and the hash of its bytes.
    pub engine_seq: EngineSeq,
    pub payload_hash: u64,
}

/// A checkpoint read back, not yet proven.
#[derive(Debug)]
pub struct Restored {
    pub header: CheckpointHeader,
    pub(crate) mirror: Mirror,
}

impl Restored {
    /// Prefixes in its mirror.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.mirror.prefixes()
    }
}

/// Why bytes are not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    #[error("it is no checkpoint")]
    Foreign,
    #[error("its version {0} is not known here")]
    Version(u32),
    #[error("it is torn or corrupt: its checksum does not match")]
    Checksum,
    #[error("it is of source {0}")]
    Source(Source),
    #[error("it was written under another block size or other assumptions")]
    Config,
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

impl CheckpointError {
    /// For a metric's label.
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

/// The bytes of a file.
#[must_use]
pub fn encode(checkpoint: &Checkpoint) -> Vec<u8> {
    let mut writer = FieldWriter::with_capacity(checkpoint.mirror.bytes_hint());
    writer.bytes(&MAGIC);
    writer.u32(VERSION);
    let header = &checkpoint.header;
    let worker = header.source.worker.as_str().as_bytes();
    writer.count(worker.len());
    writer.bytes(worker);
    writer.u32(header.source.dp_rank.0);
    writer.u64(header.generation.0);
    writer.u64(header.engine_seq.0);
    writer.u64(header.payload_hash);
    writer.bytes(&fingerprint(&checkpoint.config));
    checkpoint.mirror.save(&mut writer);
    let checksum = xxh3_128(writer.written());
    writer.bytes(&checksum.to_le_bytes());
    writer.into_bytes()
}

/// The checkpoint in these bytes, if it is of this source and configuration.
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
    // Before the checksum, which a newer version may compute differently.
    let version = reader.u32()?;
    if version != VERSION {
        return Err(CheckpointError::Version(version));
    }
    if checksum != xxh3_128(body).to_le_bytes() {
        return Err(CheckpointError::Checksum);
    }
    let name = reader.count(1)?;
    let worker = str::from_utf8(reader.bytes(name)?).map_err(|_| Malformed("a name"))?;
    let found = Source {
        worker: WorkerId::from(worker),
        dp_rank: DpRank(reader.u32()?),
    };
    if found != *source {
        return Err(CheckpointError::Source(found));
    }
    let header = CheckpointHeader {
        source: found,
        generation: Generation(reader.u64()?),
        engine_seq: EngineSeq(reader.u64()?),
        payload_hash: reader.u64()?,
    };
    if reader.bytes(FINGERPRINT_BYTES)? != fingerprint(&config) {
        return Err(CheckpointError::Config);
    }
    let mirror = Mirror::load(config, &mut reader)?;
    if !reader.is_at_end() {
        return Err(Malformed("more behind the end").into());
    }
    Ok(Restored { header, mirror })
}

const FINGERPRINT_BYTES: usize = 7;

/// What decides how events were folded: under another one the same events make another mirror.
fn fingerprint(config: &MirrorConfig) -> [u8; FINGERPRINT_BYTES] {
    let MirrorConfig {
        block_size,
        blocks_max: _,
        orphans_max: _,
        assume,
    } = config;
    let mirror::Assumptions {
        no_extra_keys,
        no_lora,
        main_attention_only,
    } = *assume;
    let tokens = block_size.map_or(0, |size| size.tokens() as u64);
    let [a, b, c, d, ..] = tokens.to_le_bytes();
    let flag = u8::from;
    [
        a,
        b,
        c,
        d,
        flag(no_extra_keys),
        flag(no_lora),
        flag(main_attention_only),
    ]
}

#[cfg(test)]
mod tests;
