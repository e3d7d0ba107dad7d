//! The keys of `--api-key-file`. All routes that need one only read, so keys have no roles.

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
    #[error("line {line} of {path} is no key of 16 to 256 characters and no sha256:HASH")]
    NoKey { path: PathBuf, line: usize },
    #[error(transparent)]
    Id(#[from] KeyIdError),
}

const FILE_BYTES_MAX: u64 = 64 << 10;

/// Shorter keys can be guessed.
const KEY_CHARS_MIN: usize = 16;

/// Begins a line with the hash of a key.
const HASH_PREFIX: &str = "sha256:";

/// The keys in force.
#[derive(Clone, Debug)]
pub struct ApiKeys(Option<FollowedFile<Arc<[OperatorKey]>, KeyFileError>>);

impl ApiKeys {
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

/// The keys, one a line.
fn read(path: &Path) -> Result<Arc<[OperatorKey]>, KeyFileError> {
    let text =
        small_file::read(path, FILE_BYTES_MAX).map_err(|source| KeyFileError::Unreadable {
            path: path.to_owned(),
            source,
        })?;
    let text = String::from_utf8_lossy(&text);
    let no_key = |line| KeyFileError::NoKey {
        path: path.to_owned(),
        line,
    };
    let mut keys = Vec::new();
    for (number, line) in (1..).zip(text.lines().map(str::trim)) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let key = StoredKey {
            id: format!("line-{number}").parse()?,
            hash: hash(line).ok_or_else(|| no_key(number))?,
            expires_unix_s: None,
        };
        let role = Role::Read;
        keys.push(OperatorKey { key, role });
    }
    // An empty list would admit no client, which a file that is not written yet does not mean.
    if keys.is_empty() {
        return Err(no_key(1));
    }
    Ok(keys.into())
}

fn hash(line: &str) -> Option<KeyHash> {
    if let Some(hash) = line.strip_prefix(HASH_PREFIX) {
        return hash.parse().ok();
    }
    let is_key = line.len() >= KEY_CHARS_MIN && line.bytes().all(|byte| byte.is_ascii_graphic());
    KeyHash::of(line.as_bytes()).filter(|_| is_key)
}

#[cfg(test)]
mod tests {
    use tokio_util::task::TaskTracker;
    use warmroute_process::followed_file::CHECK_PERIOD;

    use super::*;

    #[test]
    fn each_line_is_a_key_or_a_hash() {
        let path = std::env::temp_dir().join(format!("wr-key-{}", uuid::Uuid::new_v4()));
        assert!(ApiKeys::load(Some(path.clone())).is_err());
        assert_eq!(ApiKeys::load(None).unwrap().keys(), None);
        let (old, new) = ("0123456789abcdef", "fedcba9876543210");
        let hash_of = |key: &str| KeyHash::of(key.as_bytes()).unwrap();
        let hashed = format!("{old}\nsha256:{}\n", hash_of(new).to_hex());
        for (text, expected) in [
            ("0123456789abcdef", Some(vec![old])),
            (" 0123456789abcdef \n", Some(vec![old])),
            (
                "0123456789abcdef\n\nfedcba9876543210\r\n",
                Some(vec![old, new]),
            ),
            (&hashed, Some(vec![old, new])),
            (
                "# scraper of the metrics\n0123456789abcdef",
                Some(vec![old]),
            ),
            ("0123456789abcdef\nscraper of the metrics", None),
            ("0123456789abcdef\nshort", None),
            ("0123456789abcdef\nsha256:0123456789abcdef", None),
            ("0123456789abcde", None),
            ("\n", None),
            ("", None),
        ] {
            std::fs::write(&path, text).unwrap();
            let hashes = |keys: Arc<[OperatorKey]>| keys.iter().map(|one| one.key.hash).collect();
            let keys: Option<Vec<_>> = read(&path).ok().map(hashes);
            let expected = expected.map(|keys| keys.into_iter().map(hash_of).collect());
            assert_eq!(keys, expected, "{text:?}");
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
        let key = ApiKeys::load(Some(path.clone())).unwrap();
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
