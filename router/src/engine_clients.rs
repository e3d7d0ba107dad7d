//! HTTP clients of probes and other requests that no client waits for, by engines' addresses. A
//! socket of this host (`unix:/PATH`) has a client of its own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::Method;
use reqwest::{Client, ClientBuilder, RequestBuilder};
use warmroute_process::tls::{SOCKET_URL, socket_of};

/// Clients of sockets that are kept; above the workers of one router.
const SOCKETS_MAX: usize = 2048;

/// Whether an address may name a socket. A registered worker's may not: its shim could let a router
/// send requests to any local service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketRule {
    Allowed,
    Refused,
}

/// Clones share connections.
#[derive(Clone)]
pub(crate) struct EngineClients(Arc<ClientSet>);

struct ClientSet {
    plain: Client,
    build: Box<dyn Fn() -> ClientBuilder + Send + Sync>,
    sockets: Mutex<BTreeMap<PathBuf, Client>>,
    rule: SocketRule,
}

impl EngineClients {
    pub(crate) fn new(
        rule: SocketRule,
        build: impl Fn() -> ClientBuilder + Send + Sync + 'static,
    ) -> reqwest::Result<Self> {
        Ok(Self(Arc::new(ClientSet {
            plain: build().build()?,
            build: Box::new(build),
            sockets: Mutex::default(),
            rule,
        })))
    }

    /// The client of URLs.
    pub(crate) fn plain(&self) -> &Client {
        &self.0.plain
    }

    /// The client of an engine's address.
    pub(crate) fn client(&self, address: &str) -> Client {
        let socket = self.socket(address);
        let own = socket.and_then(|path| self.0.socket_client(path));
        own.unwrap_or_else(|| self.0.plain.clone())
    }

    pub(crate) fn get(&self, address: &str, path: &str) -> RequestBuilder {
        self.request(Method::GET, address, path)
    }

    /// Fails to build if the address is neither a URL nor a socket that is allowed.
    pub(crate) fn request(&self, method: Method, address: &str, path: &str) -> RequestBuilder {
        let url = match self.socket(address) {
            Some(_) => SOCKET_URL,
            None => address,
        };
        self.client(address).request(method, format!("{url}{path}"))
    }

    fn socket<'a>(&self, address: &'a str) -> Option<&'a Path> {
        match self.0.rule {
            SocketRule::Allowed => socket_of(address),
            SocketRule::Refused => None,
        }
    }
}

impl ClientSet {
    fn socket_client(&self, path: &Path) -> Option<Client> {
        let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = sockets.get(path) {
            return Some(client.clone());
        }
        // Those of workers that have left.
        if sockets.len() >= SOCKETS_MAX {
            sockets.clear();
        }
        let client = (self.build)().unix_socket(path).build().ok()?;
        sockets.insert(path.to_owned(), client.clone());
        Some(client)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::engine_clients;

    #[test]
    fn a_socket_has_a_client_of_its_own_where_it_is_allowed() {
        let url = |clients: &EngineClients, address| {
            let request = clients.get(address, "/health").build().ok()?;
            Some(request.url().to_string())
        };
        let clients = engine_clients();
        let shown = Some("http://localhost/health".to_owned());
        assert_eq!(url(&clients, "unix:/run/a"), shown);
        assert_eq!(url(&clients, "unix:/run/a"), shown);
        let shown = Some("http://h:1/health".to_owned());
        assert_eq!(url(&clients, "http://h:1"), shown);
        assert_eq!(clients.0.sockets.lock().unwrap().len(), 1);
        let build = || {
            warmroute_process::tls::EngineTls::system()
                .unwrap()
                .client()
        };
        let refusing = EngineClients::new(SocketRule::Refused, build).unwrap();
        assert_eq!(url(&refusing, "unix:/run/a"), None);
        assert_eq!(url(&refusing, "http://h:1"), shown);
    }
}
