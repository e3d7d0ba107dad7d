//! HTTP clients for engines, with or without TLS.
//!
//! The authorities may change while clients use them: each handshake asks for those in force. No
//! session is resumed, because that would skip the question.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use ring::digest;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use super::{HTTP1, TlsError, crypto, read, roots};

/// The authorities of engines. Two files are equal if they have equal bytes.
#[derive(Clone, Default)]
pub enum Authorities {
    /// Those of the system, read at the first handshake.
    #[default]
    System,
    /// Those of a file, and no others.
    File {
        verifier: Arc<WebPkiServerVerifier>,
        content: [u8; 32],
    },
}

impl PartialEq for Authorities {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::System, Self::System) => true,
            (Self::File { content, .. }, Self::File { content: other, .. }) => content == other,
            (Self::System, Self::File { .. }) | (Self::File { .. }, Self::System) => false,
        }
    }
}

impl Eq for Authorities {}

impl fmt::Debug for Authorities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::System => "System",
            Self::File { .. } => "File",
        })
    }
}

impl Authorities {
    /// Reads a bundle in PEM.
    pub fn load(path: &Path) -> Result<Self, TlsError> {
        let pem = read(path)?;
        let verifier = verifier(roots(path, &pem)?);
        let verifier = verifier.map_err(|error| TlsError::BadCertificate {
            path: path.to_owned(),
            error,
        })?;
        let mut content = [0; 32];
        content.copy_from_slice(digest::digest(&digest::SHA256, &pem).as_ref());
        Ok(Self::File { verifier, content })
    }
}

/// TLS towards engines.
#[derive(Clone, Debug)]
pub struct EngineTls(ClientConfig);

impl EngineTls {
    /// `authorities` is asked at each handshake.
    pub fn new(
        authorities: impl Fn() -> Authorities + Send + Sync + 'static,
    ) -> Result<Self, TlsError> {
        let crypto = crypto();
        let verifier = Arc::new(EngineVerifier {
            crypto: Arc::clone(&crypto),
            authorities: Box::new(authorities),
        });
        let versions =
            ClientConfig::builder_with_provider(crypto).with_safe_default_protocol_versions()?;
        let mut config = versions
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_no_client_auth();
        config.alpn_protocols = vec![HTTP1.to_vec()];
        config.resumption = Resumption::disabled();
        Ok(Self(config))
    }

    /// With the system's authorities.
    pub fn system() -> Result<Self, TlsError> {
        Self::new(Authorities::default)
    }

    /// With the authorities of a file, or with the system's.
    pub fn of_file(ca: Option<&Path>) -> Result<Self, TlsError> {
        let authorities = ca.map(Authorities::load).transpose()?.unwrap_or_default();
        Self::new(move || authorities.clone())
    }

    /// For another client of HTTP/1.1.
    #[must_use]
    pub fn config(&self) -> ClientConfig {
        self.0.clone()
    }

    /// A client of HTTP/1.1 that uses no proxy and follows no redirect.
    pub fn client(&self) -> reqwest::ClientBuilder {
        reqwest::Client::builder()
            .tls_backend_preconfigured(self.0.clone())
            .http1_only()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
    }
}

/// What stands for a socket's address in the URL of a request.
pub const SOCKET_URL: &str = "http://localhost";

/// Bytes of a socket's path that the system takes.
const SOCKET_PATH_MAX: usize = 107;

/// The socket of an address `unix:/PATH` or `unix:///PATH`.
#[must_use]
pub fn socket_of(address: &str) -> Option<&Path> {
    let path = address.strip_prefix("unix:")?;
    let path = path.strip_prefix("//").unwrap_or(path);
    let is_path = path.starts_with('/') && path.len() <= SOCKET_PATH_MAX && !path.contains('\0');
    is_path.then(|| Path::new(path))
}

/// Why TLS failed, if that is why a request was not sent.
#[must_use]
pub fn failure_of(error: &reqwest::Error) -> Option<String> {
    let mut next = error.source();
    while let Some(cause) = next {
        if let Some(found) = cause.downcast_ref::<rustls::Error>() {
            return Some(found.to_string());
        }
        // What an I/O error contains is not its source.
        let contained = cause.downcast_ref().and_then(io::Error::get_ref);
        next = match contained {
            Some(contained) => Some(contained),
            None => cause.source(),
        };
    }
    None
}

/// Checks a certificate by the authorities in force.
struct EngineVerifier {
    crypto: Arc<CryptoProvider>,
    authorities: Box<dyn Fn() -> Authorities + Send + Sync>,
}

impl fmt::Debug for EngineVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineVerifier({:?})", (self.authorities)())
    }
}

impl EngineVerifier {
    fn in_force(&self) -> Result<Arc<WebPkiServerVerifier>, rustls::Error> {
        match (self.authorities)() {
            Authorities::System => SYSTEM.clone(),
            Authorities::File { verifier, .. } => Ok(verifier),
        }
    }
}

/// The system's authorities, read once.
static SYSTEM: LazyLock<Result<Arc<WebPkiServerVerifier>, rustls::Error>> = LazyLock::new(|| {
    let found = rustls_native_certs::load_native_certs();
    for error in found.errors {
        tracing::warn!(%error, "certificate authority of the system not read");
    }
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    verifier(roots)
});

fn verifier(roots: RootCertStore) -> Result<Arc<WebPkiServerVerifier>, rustls::Error> {
    let built = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), crypto()).build();
    built.map_err(|error| rustls::Error::General(format!("authorities of engines: {error}")))
}

impl ServerCertVerifier for EngineVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verifier = self.in_force()?;
        verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.crypto.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.crypto.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let algorithms = &self.crypto.signature_verification_algorithms;
        algorithms.supported_schemes()
    }
}
