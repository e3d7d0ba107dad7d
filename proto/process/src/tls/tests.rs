//! Servers with TLS and clients of engines, over loopback.

mod certificates;

use std::convert::Infallible;
use std::fs;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use axum::routing::get;
use bytes::Bytes;
use hyper::body::{Body as _, Frame, Incoming};
use prometheus::IntGauge;
use rustls::HandshakeKind;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::*;
use crate::server::{ClientRules, ConnectionFiles, ConnectionMetrics, Http2, Server, Shutdown};
use certificates::{Authority, PemPair};

/// A folder that ends with its test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("wr-tls-{}", Uuid::new_v4()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn server(&self, pair: &PemPair, clients: Option<&Authority>) -> ServerTls {
        let [certificate, key] = pair.write(&self.0, "server");
        let client_ca = clients.map(|clients| clients.write(&self.0, "clients.crt"));
        ServerTls::load(&ServerTlsFiles {
            certificate,
            key,
            client_ca,
        })
        .unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// A port with TLS, whose certificate can be replaced.
struct Port {
    address: SocketAddr,
    open: IntGauge,
    tls: Arc<Mutex<ServerTls>>,
    shutdown: Shutdown,
}

impl Port {
    async fn start(tls: ServerTls, connections_max: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (connections, shutdown) = (ConnectionMetrics::hidden().unwrap(), Shutdown::default());
        let tls = Arc::new(Mutex::new(tls));
        let current = Arc::clone(&tls);
        let server = Server {
            listener,
            router: Router::new()
                .route("/", get(|| async { "served" }))
                .route("/events", get(events)),
            connections_max,
            files: ConnectionFiles::default(),
            connections: connections.clone(),
            clients: ClientRules {
                http2: Http2::Offered,
                tls: Arc::new(move || Some(current.lock().unwrap().clone())),
                ..ClientRules::default()
            },
        };
        let tasks = TaskTracker::new();
        tasks.spawn(server.run(shutdown.clone(), tasks.clone()));
        Self {
            address,
            open: connections.open,
            tls,
            shutdown,
        }
    }

    async fn ask(&self, client: &reqwest::Client) -> reqwest::Result<String> {
        let url = format!("https://{}/", self.address);
        client.get(url).send().await?.text().await
    }

    fn end(self) {
        self.shutdown.force.cancel();
        self.shutdown.stop.cancel();
    }
}

/// One event, and after a pause the end.
async fn events() -> Body {
    let pause = Box::pin(tokio::time::sleep(Duration::from_millis(200)));
    Body::new(Events(Some("event"), pause))
}

struct Events(Option<&'static str>, Pin<Box<tokio::time::Sleep>>);

impl hyper::body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.0.take() {
            Some(event) => Poll::Ready(Some(Ok(Frame::data(event.into())))),
            None => self.1.as_mut().poll(context).map(|()| None),
        }
    }
}

/// Opens no connection twice.
fn client(tls: &EngineTls) -> reqwest::Client {
    tls.client().pool_max_idle_per_host(0).build().unwrap()
}

#[tokio::test]
async fn a_certificate_is_replaced_for_later_connections() {
    let (dir, old, new) = (Folder::new(), Authority::new(), Authority::new());
    let trust = |authority: &Authority| {
        let ca = authority.write(&dir.0, "ca.crt");
        client(&EngineTls::of_file(Some(&ca)).unwrap())
    };
    let (by_old, by_new) = (trust(&old), trust(&new));
    let port = Port::start(dir.server(&old.issue(), None), 8).await;
    assert_eq!(port.ask(&by_old).await.unwrap(), "served");
    let refused = port.ask(&by_new).await.unwrap_err();
    assert!(refused.is_connect());
    let why = failure_of(&refused).unwrap();
    assert!(why.contains("UnknownIssuer"), "{why}");
    *port.tls.lock().unwrap() = dir.server(&new.issue(), None);
    assert_eq!(port.ask(&by_new).await.unwrap(), "served");
    assert!(port.ask(&by_old).await.is_err());
    port.end();
}

/// A client whose authority was removed could otherwise go on for ever.
#[tokio::test]
async fn an_open_connection_ends_with_its_next_answer_when_certificates_are_replaced() {
    let (dir, authority) = (Folder::new(), Authority::new());
    let ca = authority.write(&dir.0, "ca.crt");
    let config = rustls::ClientConfig::builder_with_provider(crypto())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots(&ca, &read(&ca).unwrap()).unwrap())
        .with_no_client_auth();
    let port = Port::start(dir.server(&authority.issue(), None), 8).await;
    let stream = TcpStream::connect(port.address).await.unwrap();
    let connector = TlsConnector::from(Arc::new(config));
    let name = port.address.ip().into();
    let mut stream = connector.connect(name, stream).await.unwrap();
    let request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
    for _ in 0..2 {
        stream.write_all(request).await.unwrap();
        let mut answer = vec![0; 1024];
        let read = stream.read(&mut answer).await.unwrap();
        assert!(answer[..read].ends_with(b"served"));
    }
    let clients = Authority::new();
    *port.tls.lock().unwrap() = dir.server(&authority.issue(), Some(&clients));
    stream.write_all(request).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.contains("connection: close"), "{answer}");
    assert!(answer.ends_with("served"), "{answer}");
    port.end();
}

/// `:status: 200` in the static table of HPACK.
const OK: u8 = 0x88;

type Http2Client = hyper::client::conn::http2::SendRequest<String>;

/// A connection of a client that speaks nothing else.
async fn http2_stream(port: &Port, ca: &Path) -> TlsStream<TcpStream> {
    let mut config = rustls::ClientConfig::builder_with_provider(crypto())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots(ca, &read(ca).unwrap()).unwrap())
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = TcpStream::connect(port.address).await.unwrap();
    let connector = TlsConnector::from(Arc::new(config));
    let name = port.address.ip().into();
    let stream = connector.connect(name, stream).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    stream
}

/// Also returns the connection's end.
async fn http2_client(port: &Port, ca: &Path) -> (Http2Client, JoinHandle<hyper::Result<()>>) {
    let stream = hyper_util::rt::TokioIo::new(http2_stream(port, ca).await);
    let executor = hyper_util::rt::TokioExecutor::new();
    let handshake = hyper::client::conn::http2::handshake(executor, stream);
    let (client, connection) = handshake.await.unwrap();
    (client, TaskTracker::new().spawn(connection))
}

async fn http2_answer(client: &mut Http2Client, path: &str) -> Incoming {
    let uri = format!("https://s{path}");
    let request = Request::builder().uri(uri).body(String::new());
    let answer = client.send_request(request.unwrap()).await.unwrap();
    assert_eq!(answer.status(), 200);
    answer.into_body()
}

/// A connection whose frames the test writes and reads itself.
async fn bare_http2_client(port: &Port, ca: &Path) -> TlsStream<TcpStream> {
    let mut client = http2_stream(port, ca).await;
    let preface = [
        &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
        &frame(4, 0, 0, &[]),
    ];
    client.write_all(&preface.concat()).await.unwrap();
    client
}

/// Head and payload of the next frame.
async fn next_frame(client: &mut TlsStream<TcpStream>) -> ([u8; 9], Vec<u8>) {
    let mut head = [0; 9];
    client.read_exact(&mut head).await.unwrap();
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    let mut payload = vec![0; length as usize];
    client.read_exact(&mut payload).await.unwrap();
    (head, payload)
}

/// The next piece of an answer; `None` at its end.
async fn piece(body: &mut Incoming) -> Option<Bytes> {
    let frame = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await?;
    frame.unwrap().into_data().ok()
}

/// Without a limit before the preface such a connection would hold up each shutdown.
#[tokio::test]
async fn a_client_of_http2_that_sends_nothing_ends_with_the_port() {
    let (dir, authority) = (Folder::new(), Authority::new());
    let ca = authority.write(&dir.0, "ca.crt");
    let port = Port::start(dir.server(&authority.issue(), None), 8).await;
    let mut silent = http2_stream(&port, &ca).await;
    port.shutdown.stop.cancel();
    let read = timeout(Duration::from_secs(20), silent.read_u8()).await;
    assert!(read.expect("the connection ends").is_err());
    port.end();
}

/// GOAWAY would end all streams of clients that take it for the connection's end.
#[tokio::test]
async fn a_connection_of_http2_outlives_the_certificate_that_it_began_with() {
    let (dir, authority) = (Folder::new(), Authority::new());
    let ca = authority.write(&dir.0, "ca.crt");
    let port = Port::start(dir.server(&authority.issue(), None), 8).await;
    let mut client = bare_http2_client(&port, &ca).await;
    assert_eq!(http2_status(&mut client, 1).await, OK);
    *port.tls.lock().unwrap() = dir.server(&authority.issue(), None);
    for stream in [3, 5, 7] {
        assert_eq!(http2_status(&mut client, stream).await, OK);
    }
    // Its answers end the connection where GOAWAY was sent before: kind 7.
    client
        .write_all(&frame(6, 0, 0, b"ping-odd"))
        .await
        .unwrap();
    let mut kinds = Vec::new();
    while kinds.last() != Some(&6) {
        kinds.push(next_frame(&mut client).await.0[3]);
    }
    assert!(!kinds.contains(&7), "{kinds:?}");
    port.end();
}

/// A connection is one for many requests; other authorities of clients end it as they end one of
/// HTTP/1.1.
#[tokio::test]
async fn clients_may_speak_http2_with_tls_until_other_clients_are_let_in() {
    let (dir, authority) = (Folder::new(), Authority::new());
    let ca = authority.write(&dir.0, "ca.crt");
    let port = Port::start(dir.server(&authority.issue(), None), 8).await;
    let (mut client, ended) = http2_client(&port, &ca).await;
    let mut stream = http2_answer(&mut client, "/events").await;
    assert_eq!(piece(&mut stream).await.unwrap(), "event");
    let mut other = http2_answer(&mut client, "/").await;
    assert_eq!(piece(&mut other).await.unwrap(), "served");
    assert_eq!(port.open.get(), 1);
    *port.tls.lock().unwrap() = dir.server(&authority.issue(), Some(&Authority::new()));
    let mut last = http2_answer(&mut client, "/").await;
    assert_eq!(piece(&mut last).await.unwrap(), "served");
    // Open streams go on to their end.
    assert!(piece(&mut stream).await.is_none_or(|end| end.is_empty()));
    let ended = timeout(Duration::from_secs(60), ended).await;
    ended.expect("the connection ends").unwrap().unwrap();
    port.end();
}

/// A frame of HTTP/2: RFC 9113, section 4.1.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let [_, length @ ..] = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = length.to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Asks for `/` by a stream, and returns the answer's first encoded field, its status.
async fn http2_status(client: &mut TlsStream<TcpStream>, stream: u32) -> u8 {
    let get = frame(1, 0x5, stream, b"\x82\x87\x84\x01\x01s");
    client.write_all(&get).await.unwrap();
    loop {
        let (head, payload) = next_frame(client).await;
        if (head[3], head[8]) == (1, stream as u8) {
            return payload[0];
        }
    }
}

/// It acknowledges nothing, so that hyper accepts its streams after GOAWAY.
#[tokio::test]
async fn a_client_of_http2_that_ignores_the_end_gets_nothing_by_former_certificates() {
    let (dir, authority) = (Folder::new(), Authority::new());
    let ca = authority.write(&dir.0, "ca.crt");
    let port = Port::start(dir.server(&authority.issue(), None), 8).await;
    let mut client = bare_http2_client(&port, &ca).await;
    assert_eq!(http2_status(&mut client, 1).await, OK);
    *port.tls.lock().unwrap() = dir.server(&authority.issue(), Some(&Authority::new()));
    assert_eq!(http2_status(&mut client, 3).await, OK);
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_ne!(http2_status(&mut client, 5).await, OK);
    port.end();
}

#[tokio::test]
async fn authorities_of_engines_are_asked_at_each_handshake() {
    let (dir, own, other) = (Folder::new(), Authority::new(), Authority::new());
    let load =
        |authority: &Authority| Authorities::load(&authority.write(&dir.0, "ca.crt")).unwrap();
    let (own_ca, other_ca) = (load(&own), load(&other));
    assert_ne!(own_ca, other_ca);
    let trusted = Arc::new(Mutex::new(Authorities::System));
    let in_force = Arc::clone(&trusted);
    let client = client(&EngineTls::new(move || in_force.lock().unwrap().clone()).unwrap());
    let port = Port::start(dir.server(&own.issue(), None), 8).await;
    for (authorities, is_served) in [
        (Authorities::System, false),
        (own_ca.clone(), true),
        (other_ca, false),
        (own_ca, true),
    ] {
        *trusted.lock().unwrap() = authorities;
        assert_eq!(port.ask(&client).await.is_ok(), is_served);
    }
    port.end();
}

#[tokio::test]
async fn a_client_needs_a_certificate_of_its_authority() {
    let (dir, servers, clients) = (Folder::new(), Authority::new(), Authority::new());
    let port = Port::start(dir.server(&servers.issue(), Some(&clients)), 8).await;
    let ca = servers.write(&dir.0, "ca.crt");
    let roots = roots(&ca, &read(&ca).unwrap()).unwrap();
    let ask = async |pair: Option<PemPair>| {
        let config = rustls::ClientConfig::builder_with_provider(crypto())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots.clone());
        let config = match pair {
            Some(pair) => {
                let [certificate, key] = pair.write(&dir.0, "client");
                let chain = certificates(&certificate, &read(&certificate).unwrap()).unwrap();
                let key = private_key(&key, &read(&key).unwrap()).unwrap();
                config.with_client_auth_cert(chain, key).unwrap()
            }
            None => config.with_no_client_auth(),
        };
        let client = reqwest::Client::builder().tls_backend_preconfigured(config);
        // Rarely `reqwest` waits without end when a server refuses its certificate.
        let client = client.timeout(Duration::from_secs(5));
        port.ask(&client.build().unwrap()).await.ok()
    };
    assert_eq!(ask(Some(clients.issue())).await.as_deref(), Some("served"));
    assert_eq!(ask(Some(servers.issue())).await, None);
    assert_eq!(ask(None).await, None);
    port.end();
}

/// A resumed session would not be asked for its certificate again.
#[tokio::test]
async fn a_client_is_asked_for_its_certificate_at_each_connection() {
    let (dir, servers, clients) = (Folder::new(), Authority::new(), Authority::new());
    let ca = servers.write(&dir.0, "ca.crt");
    let [certificate, key] = clients.issue().write(&dir.0, "client");
    let chain = certificates(&certificate, &read(&certificate).unwrap()).unwrap();
    let key = private_key(&key, &read(&key).unwrap()).unwrap();
    let config = rustls::ClientConfig::builder_with_provider(crypto())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots(&ca, &read(&ca).unwrap()).unwrap())
        .with_client_auth_cert(chain, key)
        .unwrap();
    let connector = TlsConnector::from(Arc::new(config));
    for (required, second) in [
        (None, HandshakeKind::Resumed),
        (Some(&clients), HandshakeKind::Full),
    ] {
        let port = Port::start(dir.server(&servers.issue(), required), 8).await;
        for expected in [HandshakeKind::Full, second] {
            let stream = TcpStream::connect(port.address).await.unwrap();
            let name = port.address.ip().into();
            let mut stream = connector.connect(name, stream).await.unwrap();
            let request = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
            stream.write_all(request).await.unwrap();
            let mut answer = Vec::new();
            drop(stream.read_to_end(&mut answer).await);
            assert!(answer.ends_with(b"served"));
            assert_eq!(stream.get_ref().1.handshake_kind(), Some(expected));
        }
        port.end();
    }
}

/// A client that begins a handshake and does not go on.
async fn silent(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&[0x16, 3, 1]).await.unwrap();
    stream
}

#[tokio::test(start_paused = true)]
async fn a_handshake_without_end_is_closed_after_its_time() {
    let (dir, authority) = (Folder::new(), Authority::new());
    let port = Port::start(dir.server(&authority.issue(), None), 8).await;
    let mut stream = silent(port.address).await;
    // Time passes while nothing else happens.
    assert_eq!(stream.read(&mut [0; 16]).await.unwrap_or(0), 0);
    while port.open.get() > 0 {
        tokio::task::yield_now().await;
    }
    port.end();
}

#[tokio::test]
async fn handshakes_without_end_keep_no_client_out() {
    let (dir, authority) = (Folder::new(), Authority::new());
    let ca = authority.write(&dir.0, "ca.crt");
    let client = client(&EngineTls::of_file(Some(&ca)).unwrap());
    let port = Port::start(dir.server(&authority.issue(), None), 4).await;
    let mut flood = Vec::new();
    for _ in 0..32 {
        flood.push(silent(port.address).await);
        assert!(port.open.get() <= 5);
    }
    for _ in 0..8 {
        assert_eq!(port.ask(&client).await.unwrap(), "served");
    }
    port.end();
}

#[tokio::test]
async fn a_client_without_tls_gets_no_answer() {
    let (dir, authority) = (Folder::new(), Authority::new());
    let port = Port::start(dir.server(&authority.issue(), None), 8).await;
    let mut stream = TcpStream::connect(port.address).await.unwrap();
    let request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    drop(stream.read_to_end(&mut answer).await);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    port.end();
}

#[test]
fn a_bad_pair_is_refused_with_its_reason() {
    let (dir, authority) = (Folder::new(), Authority::new());
    let pair = authority.issue();
    let load = |certificate: &str, key: &str| {
        let mixed = PemPair {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
        };
        let [certificate, key] = mixed.write(&dir.0, "pair");
        let loaded = ServerTls::load(&ServerTlsFiles {
            certificate,
            key,
            client_ca: None,
        });
        loaded.map_err(|error| error.to_string())
    };
    let loaded = load(&pair.certificate, &pair.key).unwrap();
    assert!(loaded.expires_unix_s().is_some());
    assert!(!format!("{loaded:?}").contains("BEGIN"));
    assert_eq!(load(&pair.certificate, &pair.key).unwrap(), loaded);
    let other = authority.issue();
    assert_ne!(load(&other.certificate, &other.key).unwrap(), loaded);
    for (certificate, key, why) in [
        (&*pair.certificate, &*other.key, "do not belong together"),
        (&pair.certificate[..80], &*pair.key, "no certificate in PEM"),
        (&*pair.certificate, "", "no private key in PEM"),
    ] {
        let refused = load(certificate, key).unwrap_err();
        assert!(refused.contains(why), "{refused}");
    }
    let pipe = dir.0.join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    let refused = Authorities::load(&pipe).unwrap_err().to_string();
    assert!(refused.contains("named pipe"), "{refused}");
    let missing = ServerTlsFiles {
        certificate: dir.0.join("none"),
        key: dir.0.join("none"),
        client_ca: None,
    };
    let refused = ServerTls::load(&missing).unwrap_err().to_string();
    assert!(refused.contains("none"), "{refused}");
}
