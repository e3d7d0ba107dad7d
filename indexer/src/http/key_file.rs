//! The key of `--api-key-file`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use warmroute_process::access::keys::{KeyHash, KeyIdError, StoredKey};
use warmroute_process::access::{OperatorKey, Role};

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

/// Shorter keys can be guessed.
const KEY_CHARS_MIN: usize = 16;

/// The key on the file's first line; none without a file.
pub fn read_key_file(path: Option<&Path>) -> Result<Arc<[OperatorKey]>, KeyFileError> {
    let Some(path) = path else {
        return Ok([].into());
    };
    let text = std::fs::read_to_string(path).map_err(|source| KeyFileError::Unreadable {
        path: path.to_owned(),
        source,
    })?;
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
    use super::*;

    #[test]
    fn the_first_line_is_the_key() {
        let path = std::env::temp_dir().join(format!("wr-key-{}", uuid::Uuid::new_v4()));
        assert!(read_key_file(Some(&path)).is_err());
        assert!(read_key_file(None).unwrap().is_empty());
        for (text, key) in [
            ("0123456789abcdef\nmore", Some("0123456789abcdef")),
            (" 0123456789abcdef ", Some("0123456789abcdef")),
            ("0123456789abcde", None),
            ("", None),
        ] {
            std::fs::write(&path, text).unwrap();
            let keys = read_key_file(Some(&path)).ok();
            let hash = keys.map(|keys| keys[0].key.hash);
            assert_eq!(
                hash,
                key.and_then(|key| KeyHash::of(key.as_bytes())),
                "{text:?}"
            );
        }
        std::fs::remove_file(&path).unwrap();
    }
}
