//! The files of a recording: one directory, bounded in bytes, the oldest file deleted first.
//!
//! The bound holds for all recordings of the directory together. A file is appended to by one
//! process in one life: after a restart or a failed write another one is begun. All calls block.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use tokio::time::Instant;
use uuid::Uuid;
use warmroute_sim::recording::{FileEncoder, FileHeader, RECORDING_EXTENSION, RecordingSalt};
use warmroute_sim::recording::{RequestFacts, file_name, start_of_name};

use super::QueuedRecord;
use crate::clock::unix_time;
use crate::settings::RecordingRule;

/// The encoder remembers a file's blocks, in up to 12 times the bytes that they take in the file.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Files of the smallest directory.
const FILES_MIN: u64 = 8;

/// A record without its prompt's blocks: three names, and numbers.
const FACTS_BYTES_MAX: u64 = 16 << 10;

/// For the router's user alone.
const FILE_MODE: u32 = 0o600;
const DIR_MODE: u32 = 0o700;

/// Bytes of a block.
const BLOCK_BYTES: u64 = 4;

/// A running recording.
pub(super) struct RecordingFiles {
    rule: RecordingRule,
    /// The lock lasts as long as the file is open.
    _lock: File,
    salt: RecordingSalt,
    header: FileHeader,
    started: Instant,
    current: Option<CurrentFile>,
}

struct CurrentFile {
    file: File,
    encoder: FileEncoder,
    written: u64,
    /// Encoded bytes that are not in the file yet.
    pending: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum RecordingOpenError {
    #[error("another process records into {}", .0.display())]
    Held(PathBuf),
    #[error("{}: {error}", dir.display())]
    Io { dir: PathBuf, error: io::Error },
}

impl RecordingFiles {
    /// Creates the directory if needed, and locks it.
    pub(super) fn open(rule: RecordingRule) -> Result<Self, RecordingOpenError> {
        let locked = lock(&rule.dir).and_then(|lock| {
            lock.map(|lock| Ok((lock, start_time(&rule.dir)?)))
                .transpose()
        });
        let (lock, started_unix_ms) = match locked {
            Ok(Some(locked)) => locked,
            Ok(None) => return Err(RecordingOpenError::Held(rule.dir)),
            Err(error) => {
                let dir = rule.dir;
                return Err(RecordingOpenError::Io { dir, error });
            }
        };
        let [one, other] = [Uuid::new_v4(), Uuid::new_v4()];
        let mut secret = [0; 32];
        secret[..16].copy_from_slice(one.as_bytes());
        secret[16..].copy_from_slice(other.as_bytes());
        Ok(Self {
            rule,
            _lock: lock,
            salt: RecordingSalt::new(secret),
            header: FileHeader {
                recording: Uuid::new_v4().as_u64_pair().0,
                file: 0,
                started_unix_ms,
            },
            started: Instant::now(),
            current: None,
        })
    }

    /// Writes records. Returns the number of those that fit into a file.
    pub(super) fn append(&mut self, batch: &[QueuedRecord]) -> io::Result<u64> {
        let mut written = 0;
        for record in batch {
            let blocks = record.prompt.blocks();
            let size = FACTS_BYTES_MAX + BLOCK_BYTES * blocks.len() as u64;
            if size > self.file_bytes_max() {
                continue;
            }
            let facts = RequestFacts {
                arrived: record.arrived.saturating_duration_since(self.started),
                ..record.facts.clone()
            };
            let current = self.with_room(size)?;
            current.encoder.encode(&facts, blocks, &mut current.pending);
            written += 1;
        }
        if let Some(current) = &mut self.current {
            current.flush()?;
        }
        Ok(written)
    }

    fn file_bytes_max(&self) -> u64 {
        FILE_BYTES_MAX.min(self.rule.max_bytes / FILES_MIN)
    }

    /// The current file, or the next one if it has no room for so many bytes.
    fn with_room(&mut self, bytes: u64) -> io::Result<&mut CurrentFile> {
        let bytes_max = self.file_bytes_max();
        let current = match self.current.take() {
            Some(current) if current.size() + bytes <= bytes_max => current,
            full => {
                if let Some(mut full) = full {
                    full.flush()?;
                }
                self.next_file()?
            }
        };
        Ok(self.current.insert(current))
    }

    /// Begins the next file, after making room for it.
    fn next_file(&mut self) -> io::Result<CurrentFile> {
        let dir = &self.rule.dir;
        prune(
            dir,
            self.rule.max_bytes.saturating_sub(self.file_bytes_max()),
        )?;
        let file = OpenOptions::new()
            .append(true)
            .create_new(true)
            .mode(FILE_MODE)
            .open(dir.join(file_name(&self.header)))?;
        let mut pending = Vec::new();
        let encoder = FileEncoder::new(self.salt.clone(), self.header, &mut pending);
        self.header.file += 1;
        Ok(CurrentFile {
            file,
            encoder,
            written: 0,
            pending,
        })
    }
}

impl CurrentFile {
    fn size(&self) -> u64 {
        self.written + self.pending.len() as u64
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all(&self.pending)?;
        self.written += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }
}

/// Locks the directory; `None` if another process does.
fn lock(dir: &Path) -> io::Result<Option<File>> {
    DirBuilder::new()
        .recursive(true)
        .mode(DIR_MODE)
        .create(dir)?;
    let lock = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(FILE_MODE)
        .open(dir.join("lock"))?;
    match lock.try_lock() {
        Ok(()) => Ok(Some(lock)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Start of a new recording, in milliseconds since 1970. It is later than the start of every file
/// in the directory, also if the clock was set back, since files are deleted in this order.
fn start_time(dir: &Path) -> io::Result<u64> {
    let now = u64::try_from(unix_time().as_millis()).unwrap_or(u64::MAX);
    let newest = recorded_files(dir)?
        .iter()
        .filter_map(|(path, _)| start_of_name(path.file_name()?.to_str()?))
        .max();
    Ok(newest.map_or(now, |newest| now.max(newest + 1)))
}

/// Deletes the oldest files until all have at most so many bytes.
fn prune(dir: &Path, bytes_max: u64) -> io::Result<()> {
    let mut files = recorded_files(dir)?;
    files.sort();
    let mut bytes: u64 = files.iter().map(|(_, bytes)| bytes).sum();
    for (path, size) in files {
        if bytes <= bytes_max {
            break;
        }
        fs::remove_file(path)?;
        bytes -= size;
    }
    Ok(())
}

/// The files of all recordings, and their sizes.
fn recorded_files(dir: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        if path
            .extension()
            .is_some_and(|ext| ext == RECORDING_EXTENSION)
        {
            files.push((path, entry.metadata()?.len()));
        }
    }
    Ok(files)
}
