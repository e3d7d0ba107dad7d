//! The certificate of one port, and what it asks of clients.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ring::digest;
use rustls::ServerConfig;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::{HTTP1, HTTP2, TlsError, certificates, crypto, expiry, private_key, read, roots};

/// The files of a port's TLS, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerTlsFiles {
    /// The server's certificate first, then those between it and its authority.
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// Authorities of clients: each client must present a certificate of one. `None`: it need not
    /// present any.
    pub client_ca: Option<PathBuf>,
}

/// TLS of one port. Equal where the files have equal bytes. Not shown by `Debug`.
#[derive(Clone)]
pub struct ServerTls {
    config: Arc<ServerConfig>,
    expires_unix_s: Option<i64>,
    content: [u8; 32],
    /// The authorities of clients, in PEM.
    client_ca: Option<Arc<[u8]>>,
}

impl PartialEq for ServerTls {
    fn eq(&self, other: &Self) -> bool {
        self.content == other.content
    }
}

impl Eq for ServerTls {}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerTls")
            .field("expires_unix_s", &self.expires_unix_s)
            .finish_non_exhaustive()
    }
}

impl ServerTls {
    /// Reads the files. Fails unless certificate and key belong together.
    pub fn load(files: &ServerTlsFiles) -> Result<Self, TlsError> {
        let certificate_pem = read(&files.certificate)?;
        let key_pem = read(&files.key)?;
        let mut content = digest::Context::new(&digest::SHA256);
        let mut note = |bytes: &[u8]| {
            content.update(&(bytes.len() as u64).to_le_bytes());
            content.update(bytes);
        };
        note(&certificate_pem);
        note(&key_pem);
        let chain = certificates(&files.certificate, &certificate_pem)?;
        let expiries: Option<Vec<i64>> = chain.iter().map(|one| expiry::not_after(one)).collect();
        let expires_unix_s = expiries.and_then(|all| all.into_iter().min());
        let versions =
            ServerConfig::builder_with_provider(crypto()).with_safe_default_protocol_versions()?;
        let mut client_ca = None;
        let clients = match &files.client_ca {
            Some(path) => {
                let pem = read(path)?;
                note(&pem);
                client_ca = Some(pem.as_slice().into());
                versions.with_client_cert_verifier(client_verifier(path, &pem)?)
            }
            None => versions.with_no_client_auth(),
        };
        let key = private_key(&files.key, &key_pem)?;
        let config = clients.with_single_cert(chain, key);
        let mut config = config.map_err(|error| TlsError::Pair {
            certificate: files.certificate.clone(),
            key: files.key.clone(),
            error,
        })?;
        config.alpn_protocols = [HTTP2, HTTP1].map(<[u8]>::to_vec).into();
        if files.client_ca.is_some() {
            // A resumed session is not asked for its certificate, which may have expired since.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        let mut digest = [0; 32];
        digest.copy_from_slice(content.finish().as_ref());
        Ok(Self {
            config: Arc::new(config),
            expires_unix_s,
            content: digest,
            client_ca,
        })
    }

    /// The earliest end of the chain's certificates, in seconds since 1970. `None`: unreadable.
    #[must_use]
    pub const fn expires_unix_s(&self) -> Option<i64> {
        self.expires_unix_s
    }

    /// Whether both let in the same clients: only their own certificates may differ.
    #[must_use]
    pub fn admits_as(&self, other: &Self) -> bool {
        self.client_ca == other.client_ca
    }

    /// The handshake with a client. Takes as long as the client likes.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let acceptor = TlsAcceptor::from(Arc::clone(&self.config));
        acceptor.accept(stream).await
    }
}

/// Whether a handshake ended with HTTP/2. A client without ALPN speaks HTTP/1.1.
#[must_use]
pub fn agreed_on_http2(stream: &TlsStream<TcpStream>) -> bool {
    stream.get_ref().1.alpn_protocol() == Some(HTTP2)
}

fn client_verifier(path: &Path, pem: &[u8]) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let roots = Arc::new(roots(path, pem)?);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, crypto()).build();
    verifier.map_err(|error| TlsError::Verifier {
        path: path.to_owned(),
        error,
    })
}
