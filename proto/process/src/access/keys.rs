//! Keys: secrets of 256 random bits, of which a file holds the SHA-256 only.

use std::fmt;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom as _, SystemRandom};
use subtle::ConstantTimeEq as _;

/// Begins each generated key, so that scanners for leaked secrets find it.
pub const KEY_PREFIX: &str = "wr-";

/// Longest key in bytes. A longer one is refused before it is hashed.
const KEY_BYTES_MAX: usize = 256;

const ID_BYTES_MAX: usize = 64;

/// SHA-256 of a key. Not shown by `Debug`: that of a weak key can be inverted.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyHash([u8; 32]);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("sha256 is not a SHA-256 of 64 hexadecimal digits")]
pub struct KeyHashError;

impl KeyHash {
    /// The hash of a key that a client sent; `None` if it is too long to be one.
    #[must_use]
    pub fn of(key: &[u8]) -> Option<Self> {
        if key.len() > KEY_BYTES_MAX {
            return None;
        }
        let hash = digest(&SHA256, key);
        hash.as_ref().try_into().ok().map(Self)
    }

    /// Compares in constant time.
    #[must_use]
    pub fn matches(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }

    /// 64 hexadecimal digits.
    #[must_use]
    pub fn to_hex(&self) -> String {
        hex(&self.0)
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

impl FromStr for KeyHash {
    type Err = KeyHashError;

    fn from_str(text: &str) -> Result<Self, KeyHashError> {
        let mut hash = [0; 32];
        if text.len() != 2 * hash.len() || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(KeyHashError);
        }
        for (at, byte) in hash.iter_mut().enumerate() {
            let digits = &text[2 * at..2 * at + 2];
            *byte = u8::from_str_radix(digits, 16).map_err(|_| KeyHashError)?;
        }
        Ok(Self(hash))
    }
}

/// A key as a file holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredKey {
    /// Names the key in logs.
    pub id: KeyId,
    pub hash: KeyHash,
    /// The second, since the Unix epoch, from which on it is refused.
    pub expires_unix_s: Option<i64>,
}

impl StoredKey {
    #[must_use]
    pub fn is_expired(&self, now_unix_s: i64) -> bool {
        self.expires_unix_s.is_some_and(|end| end <= now_unix_s)
    }
}

/// An operator's name of a key: letters, digits, `.`, `_` and `-`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(std::sync::Arc<str>);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a name of 1 to {ID_BYTES_MAX} letters, digits, '.', '_' and '-'")]
pub struct KeyIdError(String);

impl KeyId {
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for KeyId {
    type Err = KeyIdError;

    fn from_str(text: &str) -> Result<Self, KeyIdError> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if (1..=ID_BYTES_MAX).contains(&text.len()) && text.bytes().all(plain) {
            return Ok(Self(text.into()));
        }
        Err(KeyIdError(text.to_owned()))
    }
}

/// A new key and its hash.
pub fn generate() -> Result<(String, KeyHash), ring::error::Unspecified> {
    let mut secret = [0; 32];
    SystemRandom::new().fill(&mut secret)?;
    let key = format!("{KEY_PREFIX}{}", hex(&secret));
    let hash = KeyHash::of(key.as_bytes()).ok_or(ring::error::Unspecified)?;
    Ok((key, hash))
}

/// Seconds since the Unix epoch. Keys expire by the wall clock, as certificates do.
#[must_use]
#[expect(
    clippy::disallowed_methods,
    reason = "an expiry is a point of the wall clock"
)]
pub fn now_unix_s() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
    })
}

fn hex(bytes: &[u8]) -> String {
    let digit = |four: u8| char::from_digit(four.into(), 16).unwrap_or('0');
    let both = |byte: &u8| [digit(byte >> 4), digit(byte & 15)];
    bytes.iter().flat_map(both).collect()
}
