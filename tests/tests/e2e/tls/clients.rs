//! Ports that ask clients for a certificate.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use super::certificates::{Authority, PemPair};
use super::{ENGINES, Router, flag, folder};
use crate::fleet::{Flags, Fleet, Mode};

const PORTS: [&str; 2] = ["port", "admin_port"];

/// Rarely, `reqwest` waits without end when a server refuses its certificate.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// A client with this certificate that trusts the authority of a file.
fn client_of(ca: &Path, pair: &PemPair) -> reqwest::Client {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(ca).unwrap())
        .unwrap();
    let chain = CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![chain], key)
        .unwrap();
    let client = reqwest::Client::builder().tls_backend_preconfigured(config);
    // Each request is a handshake.
    client.no_proxy().pool_max_idle_per_host(0).build().unwrap()
}

/// By port: whether the router serves this client.
async fn serves(router: &Router, client: &reqwest::Client) -> [bool; 2] {
    let serves = async |port: &str| {
        let url = format!("https://127.0.0.1:{}/health", router.process.said[port]);
        let answer = client.get(url).timeout(REQUEST_TIMEOUT).send().await;
        answer.is_ok_and(|answer| answer.status().is_success())
    };
    let [public, admin] = PORTS;
    [serves(public).await, serves(admin).await]
}

#[tokio::test(flavor = "multi_thread")]
async fn both_ports_serve_clients_with_a_certificate_of_the_authority_in_force() {
    let fleet = Fleet::start(Mode::Embedded, ENGINES, Flags::default()).await;
    let dir = folder(&fleet, "clients");
    let (servers, clients, others) = (Authority::new(), Authority::new(), Authority::new());
    let ca = servers.write(&dir, "ca.crt");
    servers.issue().write(&dir, "server");
    clients.write(&dir, "clients.crt");
    let table = "certificate = \"server.crt\"\nkey = \"server.key\"\nclient_ca = \"clients.crt\"\n";
    let settings = format!("[tls]\n{table}[admin.tls]\n{table}");
    fs::write(dir.join("router.toml"), settings).unwrap();
    let (member, other) = (
        client_of(&ca, &clients.issue()),
        client_of(&ca, &others.issue()),
    );
    let engine = flag(&fleet, &fleet.engine(0, ""), "");
    let router = Router::start(dir, Some(ca), &[engine]).await;

    assert_eq!(serves(&router, &member).await, [true; 2]);
    assert_eq!(serves(&router, &other).await, [false; 2]);
    assert_eq!(serves(&router, &router.client).await, [false; 2]);

    others.write(&router.dir, "clients.crt");
    let is_replaced = async |_: &Fleet| serves(&router, &other).await == [true; 2];
    fleet.until("the new authority counts", is_replaced).await;
    assert_eq!(serves(&router, &member).await, [false; 2]);
    assert_eq!(serves(&router, &router.client).await, [false; 2]);
}
