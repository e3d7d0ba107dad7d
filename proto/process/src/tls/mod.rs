//! TLS of servers and towards engines: rustls with ring, in its default versions and cipher suites.
//!
//! Certificates are read as values ([`ServerTls`], [`Authorities`]), so that a caller decides when a
//! changed file counts, and a bad one never replaces a good one.

mod engines;
mod expiry;
mod server;

#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::{CryptoProvider, ring as provider};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::VerifierBuilderError;

use crate::small_file;

pub use engines::{Authorities, EngineTls, SOCKET_URL, failure_of, socket_of};
pub use server::{ServerTls, ServerTlsFiles, agreed_on_http2};

/// A bundle of the system's authorities has some 200 KiB.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// The one protocol that engines are spoken to in; servers offer it too.
const HTTP1: &[u8] = b"http/1.1";

/// Offered by servers to clients that can.
const HTTP2: &[u8] = b"h2";

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{path:?}: {error}")]
    Read { path: PathBuf, error: io::Error },
    #[error("{0:?} has more than {FILE_BYTES_MAX} bytes")]
    TooLarge(PathBuf),
    #[error("{0:?} has no certificate in PEM")]
    NoCertificate(PathBuf),
    #[error("{0:?} has no private key in PEM")]
    NoKey(PathBuf),
    #[error("{path:?}: {error}")]
    BadCertificate { path: PathBuf, error: rustls::Error },
    #[error("{certificate:?} and {key:?} do not belong together: {error}")]
    Pair {
        certificate: PathBuf,
        key: PathBuf,
        error: rustls::Error,
    },
    #[error("{path:?}: {error}")]
    Verifier {
        path: PathBuf,
        error: VerifierBuilderError,
    },
    #[error(transparent)]
    Setup(#[from] rustls::Error),
}

fn crypto() -> Arc<CryptoProvider> {
    Arc::new(provider::default_provider())
}

/// The content of a file, bounded.
fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    small_file::read(path, FILE_BYTES_MAX).map_err(|error| {
        let path = path.to_owned();
        if error.kind() == io::ErrorKind::FileTooLarge {
            TlsError::TooLarge(path)
        } else {
            TlsError::Read { path, error }
        }
    })
}

/// The certificates of a file: at least one.
fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let all = all.ok().filter(|all| !all.is_empty());
    all.ok_or_else(|| TlsError::NoCertificate(path.to_owned()))
}

fn private_key(path: &Path, pem: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|_| TlsError::NoKey(path.to_owned()))
}

/// The authorities of a file.
fn roots(path: &Path, pem: &[u8]) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, pem)? {
        let added = roots.add(certificate);
        added.map_err(|error| TlsError::BadCertificate {
            path: path.to_owned(),
            error,
        })?;
    }
    Ok(roots)
}
