//! The key of `--api-key-file`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use warmroute_process::access::keys::{KeyHash, KeyIdError, StoredKey};
use warmroute_process::access::{OperatorKey, PortKeys, Role};
use warmroute_process::followed_file::FollowedFile;
use warmroute_process::small_file;

#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    #[error("cannot read {path}")]
    Unreadable {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{0} has no key of 16 to 256 characters on its first line")]
    NoKey(PathBuf),
    #[error(transparent)]
    Id(#[from] KeyIdError),
}

const FILE_BYTES_MAX: u64 = 64 << 10;

/// Shorter keys can be guessed.
const KEY_CHARS_MIN: usize = 16;

/// The key in force.
#[derive(Clone, Debug)]
pub struct ApiKey(Option<FollowedFile<Arc<[OperatorKey]>, KeyFileError>>);

impl ApiKey {
    /// Without a file, the port asks for no key.
    pub fn load(path: Option<PathBuf>) -> Result<Self, KeyFileError> {
        let file = path.map(|path| FollowedFile::load("--api-key-file", path, read));
        file.transpose().map(Self)
    }

    #[must_use]
    pub fn keys(&self) -> PortKeys {
        self.0.as_ref().map(FollowedFile::current)
    }

    /// Reads the file again until stopped.
    pub async fn follow(self, stop: CancellationToken) {
        match self.0 {
            Some(file) => file.follow(stop).await,
            None => stop.cancelled().await,
        }
    }
}

/// The key on the file's first line.
fn read(path: &Path) -> Result<Arc<[OperatorKey]>, KeyFileError> {
    let text =
        small_file::read(path, FILE_BYTES_MAX).map_err(|source| KeyFileError::Unreadable {
            path: path.to_owned(),
            source,
        })?;
    let text = String::from_utf8_lossy(&text);
    let key = text.lines().next().unwrap_or_default().trim();
    let is_long = key.chars().count() >= KEY_CHARS_MIN;
    let hash = KeyHash::of(key.as_bytes()).filter(|_| is_long);
    let key = StoredKey {
        id: "api-key-file".parse()?,
        hash: hash.ok_or_else(|| KeyFileError::NoKey(path.to_owned()))?,
        expires_unix_s: None,
    };
    let role = Role::Operate;
    Ok([OperatorKey { key, role }].into())
}

#[cfg(test)]
mod tests {
    use tokio_util::task::TaskTracker;
    use warmroute_process::followed_file::CHECK_PERIOD;

    use super::*;

    #[test]
    fn the_first_line_is_the_key() {
        let path = std::env::temp_dir().join(format!("wr-key-{}", uuid::Uuid::new_v4()));
        assert!(ApiKey::load(Some(path.clone())).is_err());
        assert_eq!(ApiKey::load(None).unwrap().keys(), None);
        for (text, key) in [
            ("0123456789abcdef\nmore", Some("0123456789abcdef")),
            (" 0123456789abcdef ", Some("0123456789abcdef")),
            ("0123456789abcde", None),
            ("", None),
        ] {
            std::fs::write(&path, text).unwrap();
            let keys = read(&path).ok();
            let hash = keys.map(|keys| keys[0].key.hash);
            assert_eq!(
                hash,
                key.and_then(|key| KeyHash::of(key.as_bytes())),
                "{text:?}"
            );
        }
        std::fs::remove_file(&path).unwrap();
        // Opening it would wait for a writer.
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        assert!(matches!(read(&path), Err(KeyFileError::Unreadable { .. })));
        std::fs::remove_file(&path).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_key_replaces_the_old_one_and_a_short_one_does_not() {
        let path = std::env::temp_dir().join(format!("wr-key-{}", uuid::Uuid::new_v4()));
        let (old, new) = ("0123456789abcdef", "fedcba9876543210");
        std::fs::write(&path, old).unwrap();
        let key = ApiKey::load(Some(path.clone())).unwrap();
        let stop = CancellationToken::new();
        let following = TaskTracker::new().spawn(key.clone().follow(stop.clone()));
        for (text, expected) in [("", old), (new, new), ("short", new)] {
            std::fs::write(&path, text).unwrap();
            tokio::time::sleep(3 * CHECK_PERIOD).await;
            let hash = key.keys().unwrap()[0].key.hash;
            assert_eq!(Some(hash), KeyHash::of(expected.as_bytes()), "{text:?}");
        }
        stop.cancel();
        following.await.unwrap();
        std::fs::remove_file(&path).unwrap();
    }
}
