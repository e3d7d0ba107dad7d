//! Addresses of the engines' names.
//!
//! The system's resolver blocks a thread, for many seconds where a name server does not answer, and
//! cannot be interrupted. So each name is looked up once at a time, however many requests wait for
//! it, and on threads that do nothing else for requests.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::vec;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use hyper_util::client::legacy::connect::dns::Name;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tower::Service;

type Addresses = Result<Vec<SocketAddr>, Arc<io::Error>>;
type ResolveFn = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// Clones share their lookups.
#[derive(Clone)]
pub(crate) struct EngineNames(Arc<NameLookups>);

struct NameLookups {
    /// Those in progress, at most one thread each.
    pending: Mutex<HashMap<String, Shared<BoxFuture<'static, Addresses>>>>,
    resolve: Box<ResolveFn>,
    /// Its threads look up names. `None`: those of the request's runtime do.
    runtime: Option<Handle>,
}

impl EngineNames {
    /// Names are looked up on threads of the current runtime.
    pub(crate) fn new() -> Self {
        Self::resolved_by(|name| Ok((name, 0).to_socket_addrs()?.collect()))
    }

    fn resolved_by(
        resolve: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(NameLookups {
            pending: Mutex::default(),
            resolve: Box::new(resolve),
            runtime: Handle::try_current().ok(),
        }))
    }

    fn lookup(&self, name: &str) -> Shared<BoxFuture<'static, Addresses>> {
        let mut pending = self.pending();
        if let Some(lookup) = pending.get(name) {
            return lookup.clone();
        }
        let (sender, found) = oneshot::channel();
        let (names, key) = (self.clone(), name.to_owned());
        let work = move || {
            let addresses = (names.0.resolve)(&key).map_err(Arc::new);
            names.pending().remove(&key);
            // All requests may be gone.
            drop(sender.send(addresses));
        };
        let runtime = self.0.runtime.clone().unwrap_or_else(Handle::current);
        drop(runtime.spawn_blocking(work));
        let ended = |_| Err(Arc::new(io::Error::other("the router ends")));
        let lookup = async move { found.await.unwrap_or_else(ended) }
            .boxed()
            .shared();
        pending.insert(name.to_owned(), lookup.clone());
        lookup
    }

    fn pending(&self) -> MutexGuard<'_, HashMap<String, Shared<BoxFuture<'static, Addresses>>>> {
        let pending = self.0.pending.lock();
        pending.unwrap_or_else(PoisonError::into_inner)
    }
}

impl Service<Name> for EngineNames {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let lookup = self.lookup(name.as_str());
        Box::pin(async move {
            let addresses = lookup.await;
            let addresses = addresses.map_err(|error| io::Error::new(error.kind(), error))?;
            Ok(addresses.into_iter())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::str::FromStr as _;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const ADDRESS: SocketAddr =
        SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

    async fn addresses(mut names: EngineNames, name: &str) -> io::Result<Vec<SocketAddr>> {
        let found = names.call(Name::from_str(name).unwrap()).await;
        found.map(Iterator::collect)
    }

    /// One name server does not answer: requests for its name take one thread.
    #[tokio::test]
    async fn a_name_that_does_not_resolve_takes_one_thread() {
        let (calls, answer) = (Arc::new(AtomicUsize::new(0)), Arc::new(Barrier::new(2)));
        let (counted, answered) = (Arc::clone(&calls), Arc::clone(&answer));
        let names = EngineNames::resolved_by(move |name| {
            counted.fetch_add(1, Ordering::Relaxed);
            if name == "slow" {
                answered.wait();
                return Err(io::Error::from(io::ErrorKind::TimedOut));
            }
            Ok(vec![ADDRESS])
        });
        let waiting: Vec<_> = (0..100).map(|_| names.lookup("slow")).collect();
        // Others are not held up.
        for number in 1..=100 {
            let name = format!("fast-{number}");
            let found = addresses(names.clone(), &name).await;
            assert_eq!(found.unwrap(), [ADDRESS]);
        }
        assert_eq!(calls.load(Ordering::Relaxed), 101);
        answer.wait();
        for lookup in waiting {
            assert_eq!(lookup.await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
        // Nothing is kept: an address may change.
        assert!(names.pending().is_empty());
        assert!(addresses(names.clone(), "fast-1").await.is_ok());
        assert_eq!(calls.load(Ordering::Relaxed), 102);
    }

    #[tokio::test]
    async fn the_systems_names_are_found() {
        let found = addresses(EngineNames::new(), "localhost").await.unwrap();
        assert!(found.iter().all(|address| address.ip().is_loopback()));
        assert!(!found.is_empty());
    }
}
