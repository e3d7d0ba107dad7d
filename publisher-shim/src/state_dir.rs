//! Checkpoint storage: one file per source in a directory per worker, replaced atomically, under a
//! lock.
//!
//! Invariant: no file is read or written through a symbolic link, or in a directory that another
//! user may write. Only the owner can read the files: orphans carry token ids. The kernel releases
//! the lock when the process ends, however it ends. All calls block; callers keep them off the hot
//! path.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::warn;
use warmroute_proto::subject::encode_name;
use warmroute_proto::{Source, WorkerId};

use crate::checkpoint::BYTES_MAX;

const DIR_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
/// Time for a process that is being replaced to end.
const HELD_MAX: Duration = Duration::from_secs(10);

/// Stores the checkpoints of one worker's sources. Its calls block.
pub trait CheckpointStore: fmt::Debug + Send + Sync + 'static {
    /// The bytes of a source's checkpoint, if there is one.
    fn load(&self, source: &Source) -> io::Result<Option<Vec<u8>>>;

    /// Replaces a source's checkpoint. A crash at any point leaves the old one or the new one.
    fn save(&self, source: &Source, bytes: &[u8]) -> io::Result<()>;
}

/// One worker's directory of checkpoint files, locked.
#[derive(Debug)]
pub struct StateDir {
    /// `STATE_DIR/WORKER`.
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
    /// Creates the worker's directory in `state` if needed, and locks it.
    ///
    /// `state` itself may be a symbolic link or belong to another user, as systemd and container
    /// volumes have it: the operator named it. The worker's directory may not.
    pub fn open(state: &Path, worker: &WorkerId) -> Result<Self, StateDirError> {
        let dir = state.join(encode_name(worker.as_str()));
        let failed = |error| StateDirError::Io {
            dir: dir.clone(),
            error,
        };
        DirBuilder::new()
            .recursive(true)
            .mode(DIR_MODE)
            .create(state)
            .map_err(failed)?;
        make_private(&dir).map_err(failed)?;
        let path = dir.join("lock");
        refuse_link(&path).map_err(failed)?;
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(FILE_MODE)
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
                return Err(StateDirError::Held { dir, by });
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        lock.set_len(0).map_err(failed)?;
        writeln!(lock, "{}", std::process::id()).map_err(failed)?;
        Ok(Self { dir, _lock: lock })
    }

    /// Like [`Self::open`], but waits for a holder that is just ending.
    pub async fn open_when_free(dir: &Path, worker: &WorkerId) -> Result<Self, StateDirError> {
        let deadline = Instant::now() + HELD_MAX;
        let mut is_logged = false;
        loop {
            match Self::open(dir, worker) {
                Err(StateDirError::Held { dir, by }) if Instant::now() < deadline => {
                    if !std::mem::replace(&mut is_logged, true) {
                        let dir = dir.display();
                        warn!(%dir, "waiting: another process{by} keeps this worker's state");
                    }
                    sleep(Duration::from_millis(200)).await;
                }
                opened => return opened,
            }
        }
    }

    /// `None`, after a WARN, of a directory that cannot be used: checkpoints shorten a restart, and
    /// are no reason to serve nothing. One that another process holds stays an error.
    pub fn if_usable(opened: Result<Self, StateDirError>) -> Result<Option<Self>, StateDirError> {
        match opened {
            Ok(dir) => Ok(Some(dir)),
            Err(held @ StateDirError::Held { .. }) => Err(held),
            Err(error @ StateDirError::Io { .. }) => {
                warn!(
                    %error,
                    "no checkpoints: a restart knows what the engine's replay buffer holds"
                );
                Ok(None)
            }
        }
    }

    fn path(&self, source: &Source, what: &str) -> PathBuf {
        self.dir.join(format!("{}.{what}", source.dp_rank))
    }
}

impl CheckpointStore for StateDir {
    fn load(&self, source: &Source) -> io::Result<Option<Vec<u8>>> {
        let path = self.path(source, "checkpoint");
        refuse_link(&path)?;
        let file = match File::open(path) {
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
        let mut file = create_file(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(new, self.path(source, "checkpoint"))?;
        File::open(&self.dir)?.sync_all()
    }
}

/// Creates a directory that only this user can use. Refuses a symbolic link and a directory of
/// another user; takes the access of others to an own one away.
fn make_private(dir: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(DIR_MODE).create(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        created => return created,
    }
    let named = fs::symlink_metadata(dir)?;
    if !named.is_dir() {
        return Err(io::Error::other("it is not a directory"));
    }
    let open = File::open(dir)?;
    let found = open.metadata()?;
    let probe = dir.join("owner");
    let own = create_file(&probe)?.metadata()?.uid();
    fs::remove_file(probe)?;
    // The inode differs if a link replaced the directory since.
    if found.uid() != own || found.ino() != named.ino() {
        return Err(io::Error::other("it belongs to another user"));
    }
    open.set_permissions(Permissions::from_mode(DIR_MODE))
}

/// Creates a file, replacing an older one. Follows no symbolic link: the name is new.
fn create_file(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(FILE_MODE);
    options.open(path)
}

fn refuse_link(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.is_file() => Err(io::Error::other(format!(
            "{} is not a regular file",
            path.display()
        ))),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;
    use warmroute_proto::DpRank;

    use super::*;

    /// A path where nothing is yet, in a directory that lives as long as the guard.
    fn scratch() -> (TempDir, PathBuf) {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("state");
        (dir, path)
    }

    fn source(worker: &str) -> Source {
        Source {
            worker: WorkerId::from(worker),
            dp_rank: DpRank(1),
        }
    }

    #[test]
    fn a_directory_that_cannot_be_made_costs_the_checkpoints_only() {
        let ((guard, scratch), worker) = (scratch(), WorkerId::from("w"));
        let file = guard.path().join("file");
        fs::write(&file, "").unwrap();
        let none = StateDir::if_usable(StateDir::open(&file.join("state"), &worker));
        assert!(none.unwrap().is_none());
        let held = StateDir::open(&scratch, &worker).unwrap();
        assert!(StateDir::if_usable(StateDir::open(&scratch, &worker)).is_err());
        drop(held);
    }

    #[test]
    fn saved_bytes_are_loaded_and_torn_leftovers_ignored() {
        let (_guard, scratch) = scratch();
        let worker = WorkerId::from("w/../1");
        let dir = StateDir::open(&scratch, &worker).unwrap();
        let source = source("w/../1");
        assert_eq!(dir.load(&source).unwrap(), None);
        dir.save(&source, b"one").unwrap();
        fs::write(dir.path(&source, "new"), b"torn").unwrap();
        assert_eq!(dir.load(&source).unwrap().unwrap(), b"one");
        dir.save(&source, b"2").unwrap();
        assert_eq!(dir.load(&source).unwrap().unwrap(), b"2");
        let names = fs::read_dir(&dir.dir).unwrap();
        assert_eq!(names.count(), 2, "a lock and a checkpoint");
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn only_the_owner_can_use_directory_and_files() {
        let (_guard, scratch) = scratch();
        let (worker, source) = (WorkerId::from("w"), source("w"));
        let dir = StateDir::open(&scratch, &worker).unwrap();
        dir.save(&source, b"one").unwrap();
        assert_eq!(mode(&scratch), 0o700);
        assert_eq!(mode(&dir.dir), 0o700);
        assert_eq!(mode(&dir.path(&source, "checkpoint")), 0o600);
        let own = dir.dir.clone();
        drop(dir);
        // A directory of the operator keeps its mode; the worker's does not.
        for dir in [&scratch, &own] {
            fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
        }
        let dir = StateDir::open(&scratch, &worker).unwrap();
        assert_eq!((mode(&scratch), mode(&own)), (0o755, 0o700));
        assert_eq!(dir.load(&source).unwrap().unwrap(), b"one");
    }

    #[test]
    fn symbolic_links_are_not_followed() {
        let (_guard, scratch) = scratch();
        let (worker, source) = (WorkerId::from("w"), source("w"));
        let elsewhere = scratch.join("elsewhere");
        fs::create_dir_all(&elsewhere).unwrap();
        let victim = elsewhere.join("victim");
        fs::write(&victim, b"keep").unwrap();
        let is_intact = || fs::read(&victim).unwrap() == b"keep";
        let named = scratch.join("w");
        symlink(&elsewhere, &named).unwrap();
        let refused = StateDir::open(&scratch, &worker).unwrap_err();
        assert!(refused.to_string().contains("not a directory"), "{refused}");
        fs::remove_file(&named).unwrap();

        let dir = StateDir::open(&scratch, &worker).unwrap();
        symlink(&victim, dir.path(&source, "new")).unwrap();
        symlink(&victim, dir.path(&source, "checkpoint")).unwrap();
        assert!(dir.load(&source).is_err());
        dir.save(&source, b"one").unwrap();
        assert_eq!(dir.load(&source).unwrap().unwrap(), b"one");
        assert!(is_intact());
        drop(dir);
        let lock = named.join("lock");
        fs::remove_file(&lock).unwrap();
        symlink(&victim, lock).unwrap();
        assert!(StateDir::open(&scratch, &worker).is_err());
        assert!(is_intact());
        // The operator may place the state directory behind a link.
        let linked = scratch.join("linked");
        symlink(&elsewhere, &linked).unwrap();
        assert!(StateDir::open(&linked, &worker).is_ok());
    }

    #[test]
    fn a_second_holder_is_refused_with_the_holders_pid() {
        let (_guard, scratch) = scratch();
        let worker = WorkerId::from("w");
        let first = StateDir::open(&scratch, &worker).unwrap();
        let refused = StateDir::open(&scratch, &worker).unwrap_err();
        let pid = format!("(pid {})", std::process::id());
        assert!(refused.to_string().contains(&pid), "{refused}");
        assert!(StateDir::open(&scratch, &WorkerId::from("v")).is_ok());
        drop(first);
        assert!(StateDir::open(&scratch, &worker).is_ok());
    }
}
