//! Addresses to listen on, as operators and Kubernetes write them.

use std::net::{AddrParseError, IpAddr, SocketAddr};
use std::num::ParseIntError;

use anyhow::Context as _;
use tokio::net::TcpListener;

/// Parses the address of a host: an IP address, with or without brackets, or `localhost`.
pub fn host(text: &str) -> Result<IpAddr, AddrParseError> {
    match text.trim_start_matches('[').trim_end_matches(']') {
        "localhost" => Ok(IpAddr::from([127, 0, 0, 1])),
        bare => bare.parse(),
    }
}

/// Parses a port. Kubernetes sets `WARMROUTE_PORT=tcp://…` beside a service named `warmroute`,
/// which is no port of ours: the default holds.
pub fn port(text: &str, default: u16) -> Result<u16, ParseIntError> {
    if text.starts_with("tcp://") || text.starts_with("udp://") {
        return Ok(default);
    }
    text.parse()
}

pub async fn bind(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("listening on {address}"))
}
