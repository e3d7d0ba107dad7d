//! Access to the parts of the API that show or compute much: for clients on this machine, or with a
//! key for those that send it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use warmroute_process::server::PeerAddress;

use super::HttpError;

/// The access rule.
#[derive(Clone)]
pub enum Access {
    /// Connections over the loopback interface.
    Loopback,
    /// Requests with `Authorization: Bearer KEY`, from everywhere.
    Key(Arc<str>),
}

#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    #[error("cannot read {path}")]
    Unreadable {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{0} has no key of at least 16 characters on its first line")]
    NoKey(PathBuf),
}

/// Shorter keys can be guessed.
const KEY_CHARS_MIN: usize = 16;

impl Access {
    /// With a file: the key on its first line.
    pub fn read(key_file: Option<&Path>) -> Result<Self, KeyFileError> {
        let Some(path) = key_file else {
            return Ok(Self::Loopback);
        };
        let text = std::fs::read_to_string(path).map_err(|source| KeyFileError::Unreadable {
            path: path.to_owned(),
            source,
        })?;
        let key = text.lines().next().unwrap_or_default().trim();
        if key.chars().count() < KEY_CHARS_MIN {
            return Err(KeyFileError::NoKey(path.to_owned()));
        }
        Ok(Self::Key(key.into()))
    }

    /// Without a known peer a request is not from this machine.
    fn permits(&self, peer: Option<PeerAddress>, headers: &HeaderMap) -> bool {
        match self {
            Self::Loopback => peer.is_some_and(|peer| peer.0.ip().to_canonical().is_loopback()),
            Self::Key(key) => {
                let given = headers.get(AUTHORIZATION).map(|value| value.as_bytes());
                let given = given.and_then(|value| value.strip_prefix(b"Bearer "));
                given.is_some_and(|given| is_equal(given, key.as_bytes()))
            }
        }
    }
}

/// Compares in a time that depends on the lengths only.
fn is_equal(one: &[u8], other: &[u8]) -> bool {
    let pairs = one.iter().zip(other);
    let differing = pairs.fold(0, |differing, (one, other)| differing | (one ^ other));
    one.len() == other.len() && differing == 0
}

pub(super) async fn check(
    State(access): State<Access>,
    request: Request,
    next: Next,
) -> Result<Response, HttpError> {
    let peer = request.extensions().get::<PeerAddress>().copied();
    if access.permits(peer, request.headers()) {
        return Ok(next.run(request).await);
    }
    let (status, message) = match access {
        Access::Loopback => (
            StatusCode::FORBIDDEN,
            "served to this machine only: set --api-key-file to serve others",
        ),
        Access::Key(_) => (
            StatusCode::UNAUTHORIZED,
            "the key of --api-key-file is required as a bearer token",
        ),
    };
    Err(HttpError {
        status,
        message: message.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_key(value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn only_this_machine_or_the_key() {
        let peer = |address: &str| Some(PeerAddress(address.parse().unwrap()));
        let none = HeaderMap::new();
        for (address, permitted) in [
            ("127.0.0.1:1", true),
            ("[::1]:1", true),
            ("[::ffff:127.0.0.1]:1", true),
            ("10.0.0.1:1", false),
            ("[fe80::1]:1", false),
        ] {
            assert_eq!(Access::Loopback.permits(peer(address), &none), permitted);
        }
        assert!(!Access::Loopback.permits(None, &none));
        let key = Access::Key("0123456789abcdef".into());
        assert!(key.permits(peer("10.0.0.1:1"), &with_key("Bearer 0123456789abcdef")));
        for wrong in [
            "Bearer 0123456789abcdeg",
            "Bearer 0123456789abcde",
            "Bearer ",
            "0",
        ] {
            assert!(
                !key.permits(peer("127.0.0.1:1"), &with_key(wrong)),
                "{wrong}"
            );
        }
        assert!(!key.permits(peer("127.0.0.1:1"), &none));
    }
}
