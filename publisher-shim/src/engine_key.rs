//! The key that an engine asks for, from a file or from elsewhere.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use reqwest::header::HeaderValue;
use warmroute_process::small_file;

/// A longer key fits into no header.
const KEY_BYTES_MAX: u64 = 64 << 10;

/// The engine's API key as an `Authorization` header value. `Debug` redacts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineKey(HeaderValue);

#[derive(Debug, thiserror::Error)]
pub enum EngineKeyError {
    #[error("it cannot be read")]
    File(#[from] io::Error),
    #[error("it is empty")]
    Empty,
    #[error("it has characters that a header cannot carry")]
    NotSendable,
}

impl EngineKey {
    /// Reads the key from a file. Trims white space.
    pub fn read(file: &Path) -> Result<Self, EngineKeyError> {
        let text = small_file::read(file, KEY_BYTES_MAX)?;
        Self::parse(&String::from_utf8_lossy(&text))
    }

    /// A key as its text. Trims white space.
    pub fn parse(text: &str) -> Result<Self, EngineKeyError> {
        let key = text.trim();
        if key.is_empty() {
            return Err(EngineKeyError::Empty);
        }
        let value = HeaderValue::from_str(&format!("Bearer {key}"));
        let mut value = value.map_err(|_| EngineKeyError::NotSendable)?;
        value.set_sensitive(true);
        Ok(Self(value))
    }

    /// The value of `Authorization`.
    #[must_use]
    pub const fn header(&self) -> &HeaderValue {
        &self.0
    }
}

/// Where the engine's key comes from: each request asks for the one in force. By default there is
/// none.
#[derive(Clone, Default)]
pub struct EngineKeySource(Option<Arc<KeyOfNow>>);

type KeyOfNow = dyn Fn() -> Option<EngineKey> + Send + Sync;

impl EngineKeySource {
    pub fn new(key: impl Fn() -> Option<EngineKey> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(key)))
    }

    #[must_use]
    pub fn current(&self) -> Option<EngineKey> {
        self.0.as_ref().and_then(|key| key())
    }
}

impl From<EngineKey> for EngineKeySource {
    fn from(key: EngineKey) -> Self {
        Self::new(move || Some(key.clone()))
    }
}

impl fmt::Debug for EngineKeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.current(), f)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn keys_are_redacted_and_validated() {
        let dir = std::env::temp_dir().join(format!("shim-engine-key-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let file = dir.join("key");
        let read = |text: &str| {
            fs::write(&file, text).unwrap();
            EngineKey::read(&file)
        };
        let key = read(" s3cret\n").unwrap();
        assert_eq!(key.0, "Bearer s3cret");
        assert!(!format!("{key:?}").contains("s3cret"));
        assert!(matches!(read(" \n"), Err(EngineKeyError::Empty)));
        assert!(matches!(read("a\nb"), Err(EngineKeyError::NotSendable)));
        fs::remove_dir_all(&dir).unwrap();
        assert!(matches!(
            EngineKey::read(&file),
            Err(EngineKeyError::File(_))
        ));
    }
}
