//! A small file whose content is used while the process runs, and replaced when the file changes.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Time between two looks at the file.
pub const CHECK_PERIOD: Duration = Duration::from_secs(2);

/// What a file has. A file that cannot be read later changes nothing. Clones share it.
#[derive(Debug)]
pub struct FollowedFile<T, E> {
    /// The flag that names the file, for the log.
    flag: &'static str,
    path: PathBuf,
    read: fn(&Path) -> Result<T, E>,
    content: watch::Sender<T>,
}

impl<T, E> Clone for FollowedFile<T, E> {
    fn clone(&self) -> Self {
        Self {
            flag: self.flag,
            path: self.path.clone(),
            read: self.read,
            content: self.content.clone(),
        }
    }
}

impl<T, E> FollowedFile<T, E>
where
    T: Clone + PartialEq + Send + Sync + 'static,
    E: Display + Send + 'static,
{
    pub fn load(
        flag: &'static str,
        path: PathBuf,
        read: fn(&Path) -> Result<T, E>,
    ) -> Result<Self, E> {
        let content = watch::Sender::new(read(&path)?);
        Ok(Self {
            flag,
            path,
            read,
            content,
        })
    }

    #[must_use]
    pub fn current(&self) -> T {
        self.content.borrow().clone()
    }

    /// Reads the file again until stopped.
    pub async fn follow(self, stop: CancellationToken) {
        let Self { flag, read, .. } = self;
        let mut failure = None;
        let wait = || stop.run_until_cancelled(sleep(CHECK_PERIOD));
        while wait().await.is_some() {
            let path = self.path.clone();
            let Ok(content) = spawn_blocking(move || read(&path)).await else {
                continue;
            };
            let error = content.as_ref().err().map(ToString::to_string);
            if let Some(error) = error.as_ref().filter(|_| error != failure) {
                tracing::error!(flag, error, "file not read, its old content stays in force");
            }
            failure = error;
            if let Ok(content) = content
                && *self.content.borrow() != content
            {
                tracing::info!(flag, "the file's new content is in force");
                self.content.send_replace(content);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io;

    use tokio_util::task::TaskTracker;

    use super::*;

    fn number(path: &Path) -> Result<u32, io::Error> {
        fs::read_to_string(path)?.parse().map_err(io::Error::other)
    }

    #[tokio::test(start_paused = true)]
    async fn new_content_replaces_the_old_one_and_a_bad_file_does_not() {
        let path = std::env::temp_dir().join(format!("wr-file-{}", std::process::id()));
        assert!(FollowedFile::load("--file", path.clone(), number).is_err());
        fs::write(&path, "1").unwrap();
        let file = FollowedFile::load("--file", path.clone(), number).unwrap();
        let stop = CancellationToken::new();
        let following = TaskTracker::new().spawn(file.clone().follow(stop.clone()));
        for (text, expected) in [("", 1), ("2", 2), ("x", 2), ("1", 1)] {
            fs::write(&path, text).unwrap();
            sleep(3 * CHECK_PERIOD).await;
            assert_eq!(file.current(), expected, "{text:?}");
        }
        fs::remove_file(&path).unwrap();
        sleep(3 * CHECK_PERIOD).await;
        assert_eq!(file.current(), 1);
        stop.cancel();
        following.await.unwrap();
    }
}
