//! The format of recordings: the requests of one router, as far as a replay needs them.
//!
//! docs/WORKBENCH.md defines the bytes. A file is a sequence of frames: the length and the check sum
//! of a payload, then the payload. The first frame is the file's header, each other one a request.
//!
//! A prompt is a path in a tree of blocks. A request names the deepest node that its file has
//! already, and the salted hashes of the blocks after it: a shared prefix is written once a file.
//! Files are readable alone, so that the oldest one can be deleted.
//!
//! Neither text, tokens nor hashes of them are in a file: a block's hash is keyed by a secret that
//! is drawn for each recording and never written.

mod decode;
mod encode;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

pub use decode::{BlockNode, NamedFile, Recording, RecordingError, is_recording};
pub use encode::{FileEncoder, RecordingSalt};

/// First bytes of each file; the last one is the version.
const MAGIC: [u8; 8] = *b"wrmrec\0\x02";

/// Kinds of frames: the first byte of a payload.
const HEADER: u8 = 0;
const REQUEST: u8 = 1;

/// Length and check sum of a payload.
const FRAME_HEAD_BYTES: usize = 8;

/// Bytes of a block's salted hash. Two blocks are equal if their hashes and their parents are, so
/// that a collision takes two blocks after one prefix.
const HASH_BYTES: usize = 4;

/// Longest name of a model or worker.
const NAME_BYTES_MAX: usize = 4096;

/// Which recording a file belongs to, and its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileHeader {
    /// Drawn at the recording's start.
    pub recording: u64,
    /// Files of a recording count from 0.
    pub file: u32,
    /// Start of the recording, in milliseconds since 1970.
    pub started_unix_ms: u64,
}

/// Extension of a recording's files.
pub const RECORDING_EXTENSION: &str = "wrec";

/// Digits of the start in a file's name.
const START_DIGITS: usize = 14;

/// Name of a file. Names of later recordings and later files are greater.
#[must_use]
pub fn file_name(header: &FileHeader) -> String {
    let FileHeader {
        recording,
        file,
        started_unix_ms,
    } = header;
    format!("{started_unix_ms:0START_DIGITS$}-{recording:016x}-{file:08}.{RECORDING_EXTENSION}")
}

/// The start of the recording that a file name names, in milliseconds since 1970.
#[must_use]
pub fn start_of_name(name: &str) -> Option<u64> {
    let (started, _) = name.split_at_checked(START_DIGITS)?;
    started.parse().ok()
}

/// How a recorded request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordedOutcome {
    /// The client has the whole answer.
    Completed,
    /// The client closed its connection before the end.
    Cancelled,
    /// An engine answered with an error, or closed its connection before the end.
    Failed,
    /// No worker took it.
    Unplaced,
}

impl RecordedOutcome {
    const ALL: [Self; 4] = [
        Self::Completed,
        Self::Cancelled,
        Self::Failed,
        Self::Unplaced,
    ];

    fn byte(self) -> u8 {
        match self {
            Self::Completed => 0,
            Self::Cancelled => 1,
            Self::Failed => 2,
            Self::Unplaced => 3,
        }
    }
}

/// What is recorded of a request, besides the blocks of its prompt. Times have microseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestFacts {
    /// Since the recording began.
    pub arrived: Duration,
    pub model: Arc<str>,
    /// As the router counted them; an estimate if it could not tokenize the prompt.
    pub prompt_tokens: u32,
    /// As the engine reported them, else the number of output chunks.
    pub output_tokens: u32,
    pub block_tokens: u32,
    /// From arrival to the first output; `None` if the answer is not streamed or has no output.
    pub ttft: Option<Duration>,
    /// From arrival to the end.
    pub duration: Duration,
    /// Prompt tokens that the engine reported as cached.
    pub cached_tokens: Option<u32>,
    pub outcome: RecordedOutcome,
    /// `None` if no worker took it.
    pub placement: Option<RecordedPlacement>,
    /// The tenant of its key, if the router has tenants.
    pub tenant: Option<Arc<str>>,
}

/// Where a request ran, and what the router expected there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedPlacement {
    pub worker: Arc<str>,
    pub dp_rank: u32,
    /// Blocks that the index or the engine's reports credited.
    pub credited_blocks: u32,
    /// Blocks that were predicted beyond them.
    pub predicted_blocks: u32,
    /// Running requests of the source.
    pub active_requests: u32,
    /// Terms of the policy `time`.
    pub queue: Duration,
    pub prefill: Duration,
    pub decode: Duration,
}

impl RequestFacts {
    /// Mean time between two tokens; `None` without a first token or a second one.
    #[must_use]
    pub fn itl(&self) -> Option<Duration> {
        let gaps = self.output_tokens.checked_sub(1).filter(|&gaps| gaps > 0)?;
        Some(self.duration.checked_sub(self.ttft?)? / gaps)
    }
}

/// Low half of a payload's XXH3.
fn check_sum(payload: &[u8]) -> u32 {
    let [a, b, c, d, ..] = xxhash_rust::xxh3::xxh3_64(payload).to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
