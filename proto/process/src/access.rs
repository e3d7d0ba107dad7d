//! Access to the routes of an operators' port.
//!
//! A port is built from a [`RouteTable`]: a route cannot be added without its [`RouteAccess`], and
//! the check runs before the method and the handler are looked up. With keys, a protected route
//! needs one of sufficient role. Without keys, a port that is bound to loopback serves the machine's
//! users, and any other port serves its open routes only.
//!
//! Browsers are kept from acting for other sites: requests of other origins are refused, a keyless
//! change needs [`CHANGE_HEADER`], which no page of another origin can send, and a keyless port
//! answers to names of loopback only, so that no foreign name can be rebound to it.

mod change_log;
pub mod keys;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;

use crate::server::{HEALTH_PATHS, READY_PATHS};
pub use change_log::{AUDIT_TARGET, ChangeSubject};
use change_log::{LoggedChange, RefusalLog};
use keys::{KeyHash, KeyId, StoredKey, now_unix_s};

/// Must be present, with any value, on a change without a key.
pub const CHANGE_HEADER: HeaderName = HeaderName::from_static("x-warmroute-admin");

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// What a route asks of its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteAccess {
    /// Nothing: probes, metrics, static files.
    Open,
    /// [`Role::Read`], by any method.
    Read,
    /// [`Role::Read`] for `GET` and `HEAD`, [`Role::Operate`] for all others.
    ByMethod,
}

/// What the owner of a key may do. A later one includes the earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    Read,
    /// Change the state of the fleet or of the process.
    Operate,
}

/// An operator's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorKey {
    pub key: StoredKey,
    pub role: Role,
}

/// The clients that reach a listening address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindScope {
    Loopback,
    Network,
}

impl BindScope {
    #[must_use]
    pub fn of(address: SocketAddr) -> Self {
        if address.ip().to_canonical().is_loopback() {
            Self::Loopback
        } else {
            Self::Network
        }
    }
}

/// The keys of a port; `None`: it asks for none. An empty list admits no client.
pub type PortKeys = Option<Arc<[OperatorKey]>>;

/// The rule of one port. The keys are read for each request, so that a removed one is refused from
/// the next request on.
#[derive(Clone)]
pub struct PortAccess {
    bound: BindScope,
    keys: Arc<dyn Fn() -> PortKeys + Send + Sync>,
    refusals: Arc<RefusalLog>,
}

impl PortAccess {
    pub fn new(bound: BindScope, keys: impl Fn() -> PortKeys + Send + Sync + 'static) -> Self {
        Self {
            bound,
            keys: Arc::new(keys),
            refusals: Arc::default(),
        }
    }

    /// Logs what a port without keys does not serve.
    pub fn warn_if_closed(&self, port: &'static str, remedy: &'static str) {
        if self.bound == BindScope::Network && (self.keys)().is_none() {
            tracing::warn!(port, remedy, "no keys: only probes and metrics are served");
        }
    }

    fn admit(&self, needed: Role, head: &RequestHead<'_>) -> Result<Option<KeyId>, AccessRefusal> {
        if head.is_cross_site() {
            return Err(AccessRefusal::CrossSite);
        }
        if let Some(keys) = (self.keys)() {
            let owner = key_of(&keys, head.headers)?;
            if owner.role < needed {
                return Err(AccessRefusal::Role(owner.key.id.clone()));
            }
            return Ok(Some(owner.key.id.clone()));
        }
        match self.bound {
            BindScope::Network => Err(AccessRefusal::NoKeys),
            BindScope::Loopback if !head.is_local_name() => Err(AccessRefusal::ForeignHost),
            BindScope::Loopback => {
                if needed == Role::Operate && !head.headers.contains_key(CHANGE_HEADER) {
                    return Err(AccessRefusal::NoHeader);
                }
                Ok(None)
            }
        }
    }
}

/// Whether a client sent one of these keys, and it has not expired.
#[must_use]
pub fn is_operator(keys: &[OperatorKey], sent: &[u8]) -> bool {
    owner(keys, sent).is_ok()
}

/// The key that a request carries. Compares with every key, each in constant time.
fn key_of<'k>(
    keys: &'k [OperatorKey],
    headers: &HeaderMap,
) -> Result<&'k OperatorKey, AccessRefusal> {
    owner(keys, bearer(headers).ok_or(AccessRefusal::NoKey)?)
}

fn owner<'k>(keys: &'k [OperatorKey], sent: &[u8]) -> Result<&'k OperatorKey, AccessRefusal> {
    let sent = KeyHash::of(sent).ok_or(AccessRefusal::UnknownKey)?;
    let matching = keys.iter().fold(None, |found, one| {
        if one.key.hash.matches(&sent) {
            Some(one)
        } else {
            found
        }
    });
    let owner = matching.ok_or(AccessRefusal::UnknownKey)?;
    if owner.key.is_expired(now_unix_s()) {
        return Err(AccessRefusal::Expired);
    }
    Ok(owner)
}

/// The token of `Authorization: Bearer`, whose scheme has any case.
#[must_use]
pub fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked(b"bearer ".len())?;
    let is_bearer = scheme.eq_ignore_ascii_case(b"bearer ");
    is_bearer.then(|| token.trim_ascii())
}

/// Why a request is not served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum AccessRefusal {
    #[error("a key is needed: send Authorization: Bearer KEY")]
    NoKey,
    #[error("the key is not known")]
    UnknownKey,
    #[error("the key has expired")]
    Expired,
    #[error("the key's role does not permit this")]
    Role(KeyId),
    #[error("this port has no keys and is reached from the network: it serves probes and metrics")]
    NoKeys,
    #[error("a request from a page of another origin")]
    CrossSite,
    #[error("the Host is no name of this machine's loopback")]
    ForeignHost,
    #[error("a change without a key needs the header X-Warmroute-Admin: 1")]
    NoHeader,
}

impl AccessRefusal {
    /// The key that was sent, if it is known.
    const fn key(&self) -> Option<&KeyId> {
        match self {
            Self::Role(key) => Some(key),
            Self::NoKey
            | Self::UnknownKey
            | Self::Expired
            | Self::NoKeys
            | Self::CrossSite
            | Self::ForeignHost
            | Self::NoHeader => None,
        }
    }
}

impl IntoResponse for AccessRefusal {
    fn into_response(self) -> Response {
        let json = (header::CONTENT_TYPE, "application/json");
        let body = format!("{{\"error\":\"{self}\"}}");
        match self {
            Self::NoKey | Self::UnknownKey | Self::Expired => {
                let scheme = (header::WWW_AUTHENTICATE, "Bearer");
                (StatusCode::UNAUTHORIZED, [json, scheme], body).into_response()
            }
            Self::Role(_) | Self::NoKeys | Self::CrossSite | Self::ForeignHost | Self::NoHeader => {
                (StatusCode::FORBIDDEN, [json], body).into_response()
            }
        }
    }
}

/// What is judged of a request.
struct RequestHead<'r> {
    uri: &'r Uri,
    headers: &'r HeaderMap,
}

impl<'r> RequestHead<'r> {
    /// Host and port as the client names them. Only clients that are no browsers send none.
    fn authority(&self) -> Option<&'r str> {
        match self.uri.authority() {
            Some(authority) => Some(authority.as_str()),
            None => {
                let host = self.headers.get(header::HOST)?;
                Some(host.to_str().unwrap_or(""))
            }
        }
    }

    /// A page of another origin sends the request, or a browser does for it. Other ports of this
    /// machine are other origins.
    fn is_cross_site(&self) -> bool {
        let site = self.headers.get(FETCH_SITE).map(|site| site.as_bytes());
        let foreign = !matches!(site, None | Some(b"same-origin" | b"none"));
        let origin = self.headers.get(header::ORIGIN);
        let other = origin.is_some_and(|origin| {
            let origin = origin.to_str().unwrap_or("");
            let host = origin.split_once("://").map(|(_, host)| host);
            host.is_none() || host != self.authority()
        });
        foreign || other
    }

    fn is_local_name(&self) -> bool {
        let Some(authority) = self.authority() else {
            return true;
        };
        let host = match authority.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
            Some(_) | None => authority,
        };
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let ip = bare.parse::<IpAddr>();
        host.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|ip| ip.to_canonical().is_loopback())
    }
}

/// A path with its access and its handlers.
struct ListedRoute<S> {
    path: &'static str,
    access: RouteAccess,
    methods: MethodRouter<S>,
}

/// The routes of a port.
pub struct RouteTable<S = ()>(Vec<ListedRoute<S>>);

impl<S> Default for RouteTable<S> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<S: Clone + Send + Sync + 'static> RouteTable<S> {
    #[must_use]
    pub fn route(
        mut self,
        path: &'static str,
        access: RouteAccess,
        methods: MethodRouter<S>,
    ) -> Self {
        self.0.push(ListedRoute {
            path,
            access,
            methods,
        });
        self
    }

    /// The two probes under all their names.
    #[must_use]
    pub fn probes(self, health: &MethodRouter<S>, ready: &MethodRouter<S>) -> Self {
        let add = |table: Self, paths: &[&'static str], methods: &MethodRouter<S>| {
            let add = |table: Self, path: &&'static str| {
                table.route(path, RouteAccess::Open, methods.clone())
            };
            paths.iter().fold(table, add)
        };
        let table = add(self, &HEALTH_PATHS, health);
        add(table, &READY_PATHS, ready)
    }

    #[must_use]
    pub fn merge(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    #[must_use]
    pub fn with_state<T>(self, state: &S) -> RouteTable<T> {
        let routes = self.0.into_iter().map(|route| ListedRoute {
            path: route.path,
            access: route.access,
            methods: route.methods.with_state(state.clone()),
        });
        RouteTable(routes.collect())
    }

    /// Each path with its access.
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, RouteAccess)> {
        self.0.iter().map(|route| (route.path, route.access))
    }
}

impl RouteTable {
    /// The port's router, which checks each request before anything else.
    pub fn guarded(self, access: &PortAccess) -> Router {
        self.0.into_iter().fold(Router::new(), |router, route| {
            let guard = RouteGuard {
                port: access.clone(),
                access: route.access,
            };
            let methods = route.methods.layer(from_fn_with_state(guard, check));
            router.route(route.path, methods)
        })
    }
}

#[derive(Clone)]
struct RouteGuard {
    port: PortAccess,
    access: RouteAccess,
}

impl RouteGuard {
    /// The role that a request needs; `None`: none.
    fn needed(&self, method: &Method) -> Option<Role> {
        match self.access {
            RouteAccess::Open => None,
            RouteAccess::Read => Some(Role::Read),
            RouteAccess::ByMethod if method.is_safe() => Some(Role::Read),
            RouteAccess::ByMethod => Some(Role::Operate),
        }
    }
}

/// Refuses a request that lacks what its route asks for, and logs changes.
async fn check(State(guard): State<RouteGuard>, mut request: Request, next: Next) -> Response {
    let Some(needed) = guard.needed(request.method()) else {
        return next.run(request).await;
    };
    let head = RequestHead {
        uri: request.uri(),
        headers: request.headers(),
    };
    let admitted = guard.port.admit(needed, &head);
    if needed == Role::Read {
        return match admitted {
            Ok(_) => next.run(request).await,
            Err(refusal) => {
                tracing::debug!(path = request.uri().path(), %refusal, "request refused");
                refusal.into_response()
            }
        };
    }
    let mut change = LoggedChange::of(&request);
    match admitted {
        Ok(key) => change.permitted(key, &mut request),
        Err(refusal) => {
            guard.port.refusals.add(&change, &refusal);
            return refusal.into_response();
        }
    }
    let response = next.run(request).await;
    change.answered(&response);
    response
}

#[cfg(test)]
mod tests;
