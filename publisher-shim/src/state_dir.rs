//! Checkpoint storage: one file per source, replaced atomically, under a lock per worker.
//!
//! The kernel releases the lock when the process ends, however it ends. Only the owner can read the
//! files: orphans carry token ids. All calls block; callers keep them off the hot path.

use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use warmroute_proto::subject::encode_name;
use warmroute_proto::{Source, WorkerId};

use crate::checkpoint::BYTES_MAX;

/// Stores the checkpoints of one worker's sources. Its calls block.
pub trait CheckpointStore: fmt::Debug + Send + Sync + 'static {
    /// The bytes of a source's checkpoint, if there is one.
    fn load(&self, source: &Source) -> io::Result<Option<Vec<u8>>>;

    /// Replaces a source's checkpoint. A crash at any point leaves the old one or the new one.
    fn save(&self, source: &Source, bytes: &[u8]) -> io::Result<()>;
}

/// A directory of checkpoint files, locked for one worker.
#[derive(Debug)]
pub struct StateDir {
    dir: PathBuf,
    /// The lock lasts as long as the file is open.
    _lock: File,
}

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateDirError {
    #[error("another process{by} keeps this worker's state in {}", dir.display())]
    Held { dir: PathBuf, by: String },
    #[error("cannot keep state in {}: {error}", dir.display())]
    Io { dir: PathBuf, error: io::Error },
}

impl StateDir {
    /// Creates the directory if needed, and locks it for this worker.
    pub fn open(dir: &Path, worker: &WorkerId) -> Result<Self, StateDirError> {
        let failed = |error| StateDirError::Io {
            dir: dir.to_owned(),
            error,
        };
        fs::create_dir_all(dir).map_err(failed)?;
        let path = dir.join(format!("{}.lock", encode_name(worker.as_str())));
        let mut lock = private_file()
            .read(true)
            .truncate(false)
            .open(path)
            .map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // For the error message only.
                let by = match lock.take(32).read_to_string(&mut holder) {
                    Ok(1..) => format!(" (pid {})", holder.trim()),
                    Ok(0) | Err(_) => String::new(),
                };
                let dir = dir.to_owned();
                return Err(StateDirError::Held { dir, by });
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        lock.set_len(0).map_err(failed)?;
        writeln!(lock, "{}", std::process::id()).map_err(failed)?;
        Ok(Self {
            dir: dir.to_owned(),
            _lock: lock,
        })
    }

    fn path(&self, source: &Source, what: &str) -> PathBuf {
        let worker = encode_name(source.worker.as_str());
        self.dir.join(format!("{worker}.{}.{what}", source.dp_rank))
    }
}

impl CheckpointStore for StateDir {
    fn load(&self, source: &Source) -> io::Result<Option<Vec<u8>>> {
        let file = match File::open(self.path(source, "checkpoint")) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let len = file.metadata()?.len();
        if len > BYTES_MAX {
            return Err(io::Error::other(format!("{len} bytes are no checkpoint")));
        }
        let mut bytes = Vec::new();
        file.take(BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    fn save(&self, source: &Source, bytes: &[u8]) -> io::Result<()> {
        let new = self.path(source, "new");
        let mut file = private_file().truncate(true).open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(new, self.path(source, "checkpoint"))?;
        File::open(&self.dir)?.sync_all()
    }
}

fn private_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create(true).mode(0o600);
    options
}

#[cfg(test)]
mod tests {
    use warmroute_proto::DpRank;

    use super::*;

    struct Scratch(PathBuf);

    impl Drop for Scratch {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    fn scratch(name: &str) -> Scratch {
        let name = format!("warmroute-state-{}-{name}", std::process::id());
        Scratch(std::env::temp_dir().join(name))
    }

    fn source(worker: &str) -> Source {
        Source {
            worker: WorkerId::from(worker),
            dp_rank: DpRank(1),
        }
    }

    #[test]
    fn saved_bytes_are_loaded_and_torn_leftovers_ignored() {
        let scratch = scratch("files");
        let worker = WorkerId::from("w/../1");
        let dir = StateDir::open(&scratch.0, &worker).unwrap();
        let source = source("w/../1");
        assert_eq!(dir.load(&source).unwrap(), None);
        dir.save(&source, b"one").unwrap();
        fs::write(dir.path(&source, "new"), b"torn").unwrap();
        assert_eq!(dir.load(&source).unwrap().unwrap(), b"one");
        dir.save(&source, b"2").unwrap();
        assert_eq!(dir.load(&source).unwrap().unwrap(), b"2");
        let names = fs::read_dir(&scratch.0).unwrap();
        assert_eq!(names.count(), 2, "a lock and a checkpoint");
    }

    #[test]
    fn a_second_holder_is_refused_with_the_holders_pid() {
        let scratch = scratch("lock");
        let worker = WorkerId::from("w");
        let first = StateDir::open(&scratch.0, &worker).unwrap();
        let refused = StateDir::open(&scratch.0, &worker).unwrap_err();
        let pid = format!("(pid {})", std::process::id());
        assert!(refused.to_string().contains(&pid), "{refused}");
        assert!(StateDir::open(&scratch.0, &WorkerId::from("v")).is_ok());
        drop(first);
        assert!(StateDir::open(&scratch.0, &worker).is_ok());
    }
}
