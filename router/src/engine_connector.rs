//! How connections to engines are opened: `http://HOST:PORT`, `https://HOST:PORT`, and `unix:/PATH`
//! for a socket of this host (vLLM's `--uds`).

use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::Uri;
use futures_util::future::BoxFuture;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{DefaultServerNameResolver, HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use reqwest::Url;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tower::{BoxError, Service};
use warmroute_process::open_files;
use warmroute_process::server::{ConnectionFile, ConnectionFiles};
use warmroute_process::tls::{EngineTls, socket_of};

use crate::engine_clients::SocketRule;
use crate::engine_names::EngineNames;
use crate::settings::LiveSettings;

/// The authority of such a URI is the path of a socket, in hexadecimal digits: authorities are
/// compared without regard to case.
const SOCKET_SCHEME: &str = "unix";

/// An idle connection is probed after so long, and as often again. [`PROBES_MAX`] probes without an
/// answer end it.
const PROBE_INTERVAL: Duration = Duration::from_secs(15);

const PROBES_MAX: u32 = 3;

/// Bytes that the other side does not acknowledge for so long end the connection.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(30);

/// An engine's address that is neither an `http` or `https` URL nor a socket that is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the worker's URL does not parse, or is a socket that is not allowed")]
pub(crate) struct AddressError;

/// The URI of a path at an engine's address.
pub(crate) fn engine_uri(rule: SocketRule, address: &str, path: &str) -> Result<Uri, AddressError> {
    let socket = match rule {
        SocketRule::Allowed => socket_of(address),
        SocketRule::Refused => None,
    };
    let Some(socket) = socket else {
        return http_uri(address, path).or_else(|_| {
            // Probes accept what is not in normal form, as a shim may register it.
            let url = Url::parse(address).map_err(|_| AddressError)?;
            http_uri(url.as_str().trim_end_matches('/'), path)
        });
    };
    let bytes = socket.as_os_str().as_encoded_bytes().iter();
    let digits: String = bytes.map(|byte| format!("{byte:02x}")).collect();
    Uri::try_from(format!("{SOCKET_SCHEME}://{digits}{path}")).map_err(|_| AddressError)
}

/// No other scheme: [`SOCKET_SCHEME`] names any socket of this host.
fn http_uri(address: &str, path: &str) -> Result<Uri, AddressError> {
    let uri = Uri::try_from([address, path].concat()).map_err(|_| AddressError)?;
    match uri.scheme_str() {
        Some("http" | "https") => Ok(uri),
        Some(_) | None => Err(AddressError),
    }
}

/// Whether a URI of [`engine_uri`] names a socket.
pub(crate) fn names_socket(uri: &Uri) -> bool {
    uri.scheme_str() == Some(SOCKET_SCHEME)
}

fn socket_path(uri: &Uri) -> Option<PathBuf> {
    let digits = uri.host().filter(|_| names_socket(uri))?;
    let byte = |at| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..digits.len()).step_by(2).map(byte).collect();
    Some(PathBuf::from(String::from_utf8(bytes?).ok()?))
}

/// Opens connections within the time of the settings in force. Clones are cheap.
#[derive(Clone)]
pub(crate) struct EngineConnector(Arc<ConnectRules>);

struct ConnectRules {
    tcp: HttpsConnector<HttpConnector<EngineNames>>,
    settings: Arc<LiveSettings>,
    opening: ConnectionOpening,
}

/// What a new connection brings about.
pub(crate) struct ConnectionOpening {
    /// Counts it.
    pub files: ConnectionFiles,
    /// Called when it is open.
    pub on_connected: fn(),
}

impl EngineConnector {
    pub(crate) fn new(
        tls: &EngineTls,
        settings: Arc<LiveSettings>,
        opening: ConnectionOpening,
    ) -> Self {
        let mut tcp = HttpConnector::new_with_resolver(EngineNames::new());
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_keepalive(Some(PROBE_INTERVAL));
        tcp.set_keepalive_interval(Some(PROBE_INTERVAL));
        tcp.set_keepalive_retries(Some(PROBES_MAX));
        tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED_MAX));
        let names = Arc::new(DefaultServerNameResolver::default());
        Self(Arc::new(ConnectRules {
            tcp: HttpsConnector::new(tcp, tls.config(), false, names),
            settings,
            opening,
        }))
    }
}

impl Service<Uri> for EngineConnector {
    type Response = EngineStream;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<EngineStream, BoxError>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let rules = Arc::clone(&self.0);
        Box::pin(async move {
            let time_max = rules.settings.current().connect_timeout();
            let file = rules
                .opening
                .files
                .take()
                .ok_or_else(open_files::exhausted)?;
            let connected = timeout(time_max, rules.connect(uri)).await;
            let io = connected.map_err(io::Error::from)??;
            (rules.opening.on_connected)();
            Ok(EngineStream { io, _file: file })
        })
    }
}

impl ConnectRules {
    async fn connect(&self, uri: Uri) -> Result<Pin<Box<dyn EngineIo>>, BoxError> {
        match socket_path(&uri) {
            Some(path) => {
                let stream = UnixStream::connect(path).await?;
                Ok(Box::pin(TokioIo::new(stream)))
            }
            None => match self.tcp.clone().call(uri).await? {
                MaybeHttpsStream::Http(stream) => Ok(Box::pin(stream)),
                MaybeHttpsStream::Https(stream) => Ok(Box::pin(stream)),
            },
        }
    }
}

/// An open connection to an engine.
pub(crate) struct EngineStream {
    io: Pin<Box<dyn EngineIo>>,
    _file: ConnectionFile,
}

trait EngineIo: Read + Write + Send {}

impl<T: Read + Write + Send> EngineIo for T {}

impl Connection for EngineStream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for EngineStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        self.io.as_mut().poll_read(context, buffer)
    }
}

impl Write for EngineStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.io.as_mut().poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io.as_mut().poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io.as_mut().poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.io.as_mut().poll_write_vectored(context, parts)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_uri_names_a_host_or_a_socket_that_is_allowed() {
        let uri = |rule, address: &str| engine_uri(rule, address, "/v1/models?a=b");
        let host = uri(SocketRule::Refused, "https://h:1/base").unwrap();
        assert_eq!(host, "https://h:1/base/v1/models?a=b");
        assert_eq!(socket_path(&host), None);
        let path = "/run/Übung_1.sock";
        let socket = uri(SocketRule::Allowed, &format!("unix:{path}")).unwrap();
        assert_eq!(socket_path(&socket).as_deref(), Some(Path::new(path)));
        assert_eq!(socket.path_and_query().unwrap(), "/v1/models?a=b");
        let longest = format!("unix:/{}", "x".repeat(106));
        let socket = uri(SocketRule::Allowed, &longest).unwrap();
        assert_eq!(socket_path(&socket).unwrap().as_os_str().len(), 107);
        // Two paths are two pools of connections.
        let other = uri(SocketRule::Allowed, "unix:/run/übung_1.sock").unwrap();
        assert_ne!(socket.authority(), other.authority());
        for address in ["unix:/run/a", "unix:///run/a", "unix://2f72756e2f61", "h:1"] {
            assert_eq!(uri(SocketRule::Refused, address), Err(AddressError));
        }
        // The form of a socket's URI is no address.
        let raw = uri(SocketRule::Allowed, "unix://2f72756e2f61");
        assert_eq!(raw, Err(AddressError));
    }

    #[test]
    fn an_address_is_read_as_probes_read_it() {
        for (address, shown) in [
            ("http:/10.0.0.1:8000", "http://10.0.0.1:8000/x"),
            (
                "http://gpu-ä.example:8000",
                "http://xn--gpu--ooa.example:8000/x",
            ),
            ("HTTPS://h", "https://h/x"),
            ("http://[::1]:8000", "http://[::1]:8000/x"),
        ] {
            let uri = engine_uri(SocketRule::Refused, address, "/x").unwrap();
            assert_eq!(uri, shown, "{address}");
        }
    }
}
