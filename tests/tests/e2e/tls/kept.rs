//! Clients that keep their connections while a port's certificate is replaced.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::{Body, to_bytes};
use futures_util::future::join_all;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::{ENGINES, prompt, router_with_tls};
use crate::fleet::{Flags, Fleet, Mode};

/// Clients of HTTP/1.1 with a connection each.
const KEEPERS: usize = 4;

/// Requests in parallel on the connection of HTTP/2.
const STREAMS: usize = 6;

/// The public port of a router, and what its clients saw.
struct TlsPort {
    port: String,
    ca: PathBuf,
    stop: AtomicBool,
    /// By client: the certificate of the connection of its last answer.
    shown: Vec<Mutex<Vec<u8>>>,
}

impl TlsPort {
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// A new connection, with the certificate that it showed.
    async fn connect(&self, protocol: &[u8]) -> (TokioIo<TlsStream<TcpStream>>, Vec<u8>) {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_file(&self.ca).unwrap())
            .unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_safe_default_protocol_versions().unwrap();
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![protocol.to_vec()];
        let address = format!("127.0.0.1:{}", self.port);
        let stream = TcpStream::connect(address).await.unwrap();
        let connector = TlsConnector::from(Arc::new(config));
        let name = "localhost".try_into().unwrap();
        let stream = connector.connect(name, stream).await.unwrap();
        let session = stream.get_ref().1;
        assert_eq!(session.alpn_protocol(), Some(protocol));
        let certificate = session.peer_certificates().unwrap()[0].to_vec();
        (TokioIo::new(stream), certificate)
    }

    /// Reads an answer to its end.
    async fn complete(&self, client: usize, certificate: &[u8], answer: Response<Incoming>) {
        assert_eq!(answer.status(), StatusCode::OK);
        let body = to_bytes(Body::new(answer.into_body()), usize::MAX).await;
        let body = body.unwrap();
        assert!(body.ends_with(b"data: [DONE]\n\n"), "{body:?}");
        let shown = &self.shown[client];
        *shown.lock().unwrap_or_else(PoisonError::into_inner) = certificate.to_vec();
    }

    fn has_shown_to_all(&self, certificate: &[u8]) -> bool {
        let is_last = |shown: &Mutex<Vec<u8>>| {
            *shown.lock().unwrap_or_else(PoisonError::into_inner) == certificate
        };
        self.shown.iter().all(is_last)
    }

    /// Sends one request after the other. Returns the connections that it needed.
    async fn keep_http1(&self, client: usize) -> usize {
        let mut opened = 0;
        while !self.is_stopped() {
            let (stream, certificate) = self.connect(b"http/1.1").await;
            let (mut sender, connection) = http1::handshake(stream).await.unwrap();
            let _connection = driven(connection);
            opened += 1;
            while !self.is_stopped() && sender.ready().await.is_ok() {
                let request = Request::post("/v1/completions").header("host", "localhost");
                let answer = sender.send_request(with_prompt(request)).await.unwrap();
                self.complete(client, &certificate, answer).await;
            }
        }
        opened
    }

    /// Keeps `STREAMS` requests in flight. Returns the connections that it needed.
    async fn keep_http2(&self, client: usize) -> usize {
        let mut opened = 0;
        while !self.is_stopped() {
            let (stream, certificate) = self.connect(b"h2").await;
            let (sender, connection) = http2::handshake(TokioExecutor::new(), stream)
                .await
                .unwrap();
            let _connection = driven(connection);
            opened += 1;
            let stream = async || {
                let mut sender = sender.clone();
                while !self.is_stopped() && sender.ready().await.is_ok() {
                    let request = Request::post("https://localhost/v1/completions");
                    match sender.try_send_request(with_prompt(request)).await {
                        Ok(answer) => self.complete(client, &certificate, answer).await,
                        // The connection takes no more, and the request was not sent.
                        Err(refused) => assert!(refused.message().is_some(), "{refused:?}"),
                    }
                }
            };
            join_all((0..STREAMS).map(|_| stream())).await;
        }
        opened
    }
}

/// Drives a connection until dropped.
fn driven(connection: impl Future + Send + 'static) -> AbortOnDropHandle<()> {
    let connection = async move {
        connection.await;
    };
    AbortOnDropHandle::new(TaskTracker::new().spawn(connection))
}

fn with_prompt(request: hyper::http::request::Builder) -> Request<String> {
    let request = request.header("content-type", "application/json");
    request.body(prompt(20).to_string()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn kept_connections_end_with_an_answer_when_certificates_are_replaced() {
    let fleet = Fleet::start(Mode::Embedded, ENGINES, Flags::default()).await;
    let (router, authority) = router_with_tls(&fleet, "kept").await;
    let port = TlsPort {
        port: router.process.said["port"].to_string(),
        ca: router.dir.join("ca.crt"),
        stop: AtomicBool::new(false),
        shown: (0..=KEEPERS).map(|_| Mutex::default()).collect(),
    };
    let changes = async {
        let first = CertificateDer::from_pem_file(router.dir.join("server.crt")).unwrap();
        let all_saw = async |_: &Fleet| port.has_shown_to_all(&first);
        fleet.until("all clients are served", all_saw).await;
        for year in [2041, 2042] {
            let pair = authority.issue_until(year);
            pair.write(&router.dir, "server");
            let new = CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap();
            let all_saw = async |_: &Fleet| port.has_shown_to_all(&new);
            fleet.until("the new certificate serves all", all_saw).await;
            assert_eq!(port.connect(b"h2").await.1, new.to_vec());
        }
        port.stop.store(true, Ordering::Relaxed);
    };
    let http1 = join_all((0..KEEPERS).map(|client| port.keep_http1(client)));
    let (opened, shared, ()) = tokio::join!(http1, port.keep_http2(KEEPERS), changes);
    // One more for each change.
    assert_eq!((opened, shared), (vec![3; KEEPERS], 3));
}
