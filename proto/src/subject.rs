//! Subjects and registry keys of a namespace, such as `wr.<ns>.kv.<worker>.<rank>`.
//!
//! Operators choose names, which may contain dots, spaces or wildcards. Each is encoded into one
//! token of `[A-Za-z0-9_-]` and `=XX` escapes, which NATS accepts both in subjects and in keys. The
//! encoding is a bijection: equal subjects mean equal names.

use std::fmt::Write as _;

use crate::peers::PeerId;
use crate::registry::RANKS_MAX;
use crate::{DpRank, Namespace, RouterId, Source, WorkerId};

const ROOT: &str = "wr";
const DEMOTED: &str = "demoted";
const FACTS: &str = "facts";
const REFUSED: &str = "refused";
const DOUBTED: &str = "doubted";
const MISSED: &str = "missed";
const CORE: &str = "core";
const PUT: &str = "core.put";

/// One name as one subject token. The empty name is `=`.
#[must_use]
pub fn encode_name(name: &str) -> String {
    if name.is_empty() {
        return "=".to_owned();
    }
    let mut token = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' => token.push(char::from(byte)),
            _ => {
                #[expect(
                    clippy::let_underscore_must_use,
                    reason = "writing to a String cannot fail"
                )]
                let _ = write!(token, "={byte:02X}");
            }
        }
    }
    token
}

/// The name that encodes to this token, if there is one.
#[must_use]
pub fn decode_name(token: &str) -> Option<String> {
    let mut name = Vec::with_capacity(token.len());
    let mut rest = token.as_bytes();
    if token != "=" {
        while let [first, tail @ ..] = rest {
            if *first == b'=' {
                let (hex, tail) = tail.split_at_checked(2)?;
                let hex = std::str::from_utf8(hex).ok()?;
                name.push(u8::from_str_radix(hex, 16).ok()?);
                rest = tail;
            } else {
                name.push(*first);
                rest = tail;
            }
        }
    }
    let name = String::from_utf8(name).ok()?;
    (encode_name(&name) == token).then_some(name)
}

/// The subjects and keys of one namespace.
#[derive(Clone, Debug)]
pub struct Subjects {
    prefix: String,
}

impl Subjects {
    #[must_use]
    pub fn new(namespace: &Namespace) -> Self {
        Self {
            prefix: format!("{ROOT}.{}", encode_name(namespace.as_str())),
        }
    }

    /// The namespace's token.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.prefix.get(ROOT.len() + 1..).unwrap_or_default()
    }

    /// Log: the records of one source.
    #[must_use]
    pub fn records(&self, source: &Source) -> String {
        self.with("kv", &source_tokens(source))
    }

    /// Log: the records of all sources.
    #[must_use]
    pub fn all_records(&self) -> String {
        self.with("kv", ">")
    }

    /// The source whose record subject this is.
    #[must_use]
    pub fn record_source(&self, subject: &str) -> Option<Source> {
        source_of(self.rest(subject, "kv")?)
    }

    /// Broadcast: the heartbeats of one source.
    #[must_use]
    pub fn heartbeat(&self, source: &Source) -> String {
        self.with("hb", &source_tokens(source))
    }

    /// Broadcast: the heartbeats of all sources.
    #[must_use]
    pub fn all_heartbeats(&self) -> String {
        self.with("hb", ">")
    }

    /// The source whose heartbeat subject this is.
    #[must_use]
    pub fn heartbeat_source(&self, subject: &str) -> Option<Source> {
        source_of(self.rest(subject, "hb")?)
    }

    /// Broadcast: an indexer asks a worker's shim for a new generation.
    #[must_use]
    pub fn resync(&self, worker: &WorkerId) -> String {
        self.with("resync", &encode_name(worker.as_str()))
    }

    /// Request: an index query to any indexer replica.
    #[must_use]
    pub fn query(&self) -> String {
        format!("{}.query", self.prefix)
    }

    /// Request: an index query to one replica, by [`crate::registry::IndexerEntry::id`].
    #[must_use]
    pub fn query_at(&self, indexer: &str) -> String {
        self.with("query", &encode_name(indexer))
    }

    /// Broadcast: the routers' load messages.
    #[must_use]
    pub fn load(&self) -> String {
        format!("{}.load", self.prefix)
    }

    /// Request: asks one router for load messages that the requester missed.
    #[must_use]
    pub fn load_requests(&self, router: RouterId) -> String {
        format!("{}.load.{router}", self.prefix)
    }

    /// Broadcast: the routers' use by tenants. Beside the load messages, where routers may send.
    #[must_use]
    pub fn tenant_reports(&self) -> String {
        self.with("load", "tenants")
    }

    /// Registry: the entry of one router, under its own lease.
    #[must_use]
    pub fn router_key(&self, router: RouterId) -> String {
        format!("{}.router.{router}", self.prefix)
    }

    /// Registry: the prefix of all routers' keys.
    #[must_use]
    pub fn router_keys(&self) -> String {
        self.with("router", "")
    }

    /// The router whose registry key this is.
    #[must_use]
    pub fn key_router(&self, key: &str) -> Option<RouterId> {
        let hex = self.rest(key, "router")?;
        let bits = u128::from_str_radix(hex, 16).ok()?;
        let router = RouterId(bits.to_be_bytes());
        (router.to_string() == hex).then_some(router)
    }

    /// Registry: the sources that a router demoted. Below the router's own key, where it may write.
    #[must_use]
    pub fn demotion_key(&self, router: RouterId) -> String {
        format!("{}.{DEMOTED}", self.router_key(router))
    }

    /// The router whose demoted sources this key names.
    #[must_use]
    pub fn key_demotion(&self, key: &str) -> Option<RouterId> {
        self.key_router(key.strip_suffix(DEMOTED)?.strip_suffix('.')?)
    }

    /// Registry: what tools compare between routers. Below the router's own key.
    #[must_use]
    pub fn facts_key(&self, router: RouterId) -> String {
        format!("{}.{FACTS}", self.router_key(router))
    }

    /// The router whose facts this key has.
    #[must_use]
    pub fn key_facts(&self, key: &str) -> Option<RouterId> {
        self.key_router(key.strip_suffix(FACTS)?.strip_suffix('.')?)
    }

    /// Registry: what the server refuses a router. Below the router's own key.
    #[must_use]
    pub fn refusals_key(&self, router: RouterId) -> String {
        format!("{}.{REFUSED}", self.router_key(router))
    }

    /// The router whose refusals this key has.
    #[must_use]
    pub fn key_refusals(&self, key: &str) -> Option<RouterId> {
        self.key_router(key.strip_suffix(REFUSED)?.strip_suffix('.')?)
    }

    /// Registry: what engines' reports contradict at a router. Below the router's own key.
    #[must_use]
    pub fn doubts_key(&self, router: RouterId) -> String {
        format!("{}.{DOUBTED}", self.router_key(router))
    }

    /// The router whose doubts this key has.
    #[must_use]
    pub fn key_doubts(&self, key: &str) -> Option<RouterId> {
        self.key_router(key.strip_suffix(DOUBTED)?.strip_suffix('.')?)
    }

    /// Registry: the workers that a router misses. Below the router's own key.
    #[must_use]
    pub fn misses_key(&self, router: RouterId) -> String {
        format!("{}.{MISSED}", self.router_key(router))
    }

    /// The router whose missed workers this key has.
    #[must_use]
    pub fn key_misses(&self, key: &str) -> Option<RouterId> {
        self.key_router(key.strip_suffix(MISSED)?.strip_suffix('.')?)
    }

    /// Registry: the prefix of all keys.
    #[must_use]
    pub fn all_keys(&self) -> String {
        format!("{}.", self.prefix)
    }

    /// Registry: the entry of one worker, under a lease of its shim.
    #[must_use]
    pub fn worker_key(&self, worker: &WorkerId) -> String {
        self.with("worker", &encode_name(worker.as_str()))
    }

    /// Registry: the prefix of all workers' keys.
    #[must_use]
    pub fn worker_keys(&self) -> String {
        self.with("worker", "")
    }

    /// The worker whose registry key this is.
    #[must_use]
    pub fn key_worker(&self, key: &str) -> Option<WorkerId> {
        decode_name(self.rest(key, "worker")?).map(WorkerId::from)
    }

    /// Registry: an operator's drain setting of one worker. No lease.
    #[must_use]
    pub fn drain_key(&self, worker: &WorkerId) -> String {
        self.with("drain", &encode_name(worker.as_str()))
    }

    /// Registry: the prefix of all drain settings.
    #[must_use]
    pub fn drain_keys(&self) -> String {
        self.with("drain", "")
    }

    /// The worker whose drain setting this key has.
    #[must_use]
    pub fn key_drained(&self, key: &str) -> Option<WorkerId> {
        decode_name(self.rest(key, "drain")?).map(WorkerId::from)
    }

    /// Registry: the generation of one source. No lease, never deleted.
    #[must_use]
    pub fn generation_key(&self, source: &Source) -> String {
        self.with("generation", &source_tokens(source))
    }

    /// The source whose generation key this is.
    #[must_use]
    pub fn key_generation(&self, key: &str) -> Option<Source> {
        source_of(self.rest(key, "generation")?)
    }

    /// Registry: the entry of one indexer replica, under its own lease.
    #[must_use]
    pub fn indexer_key(&self, id: &str) -> String {
        self.with("indexer", &encode_name(id))
    }

    /// Registry: the prefix of all indexer replicas' keys.
    #[must_use]
    pub fn indexer_keys(&self) -> String {
        self.with("indexer", "")
    }

    /// The indexer replica whose registry key this is.
    #[must_use]
    pub fn key_indexer(&self, key: &str) -> Option<String> {
        decode_name(self.rest(key, "indexer")?)
    }

    /// Registry: the pointer to the newest snapshots. No lease.
    #[must_use]
    pub fn snapshot_pointer_key(&self) -> String {
        self.with("snapshot", "newest")
    }

    /// Registry: the lease of the indexer that writes a snapshot.
    #[must_use]
    pub fn snapshot_lease_key(&self) -> String {
        self.with("snapshot", "writer")
    }

    /// Registry: the lease of the shim that serves a worker.
    #[must_use]
    pub fn shim_key(&self, worker: &WorkerId) -> String {
        self.with("shim", &encode_name(worker.as_str()))
    }

    /// The worker whose shim's lease this is.
    #[must_use]
    pub fn key_shim(&self, key: &str) -> Option<WorkerId> {
        decode_name(self.rest(key, "shim")?).map(WorkerId::from)
    }

    /// Broadcast: a write of one registry key, on a plane without a log server. `None` for a key of
    /// another namespace.
    #[must_use]
    pub fn registry_write(&self, key: &str) -> Option<String> {
        let key = key.strip_prefix(&self.prefix)?.strip_prefix('.')?;
        Some(self.with(PUT, key))
    }

    /// Broadcast: the writes of all registry keys.
    #[must_use]
    pub fn all_registry_writes(&self) -> String {
        self.with(PUT, ">")
    }

    /// The registry key whose writes this subject carries.
    #[must_use]
    pub fn written_key(&self, subject: &str) -> Option<String> {
        let key = self.rest(subject, PUT)?;
        Some(format!("{}.{key}", self.prefix))
    }

    /// Broadcast: signs of life of the processes of a plane without a log server.
    #[must_use]
    pub fn beacons(&self) -> String {
        self.with(CORE, "beacon")
    }

    /// Request: a part of the registry of any process that has all of it.
    #[must_use]
    pub fn registry_pages(&self) -> String {
        self.with(CORE, "pages")
    }

    /// Request: a part of the registry of one process.
    #[must_use]
    pub fn registry_pages_of(&self, peer: PeerId) -> String {
        self.with(CORE, &format!("pages.{:016x}", peer.0))
    }

    /// Request that no process serves: the server's answer shows that it received what was sent
    /// before.
    #[must_use]
    pub fn round_trip(&self) -> String {
        self.with(CORE, "ping")
    }

    fn with(&self, part: &str, rest: &str) -> String {
        [&self.prefix, part, rest].join(".")
    }

    fn rest<'a>(&self, subject: &'a str, part: &str) -> Option<&'a str> {
        let rest = subject.strip_prefix(&self.prefix)?.strip_prefix('.')?;
        rest.strip_prefix(part)?.strip_prefix('.')
    }
}

fn source_tokens(source: &Source) -> String {
    format!(
        "{}.{}",
        encode_name(source.worker.as_str()),
        source.dp_rank.0
    )
}

/// Refuses ranks that no worker can have: a credential for one worker's subjects cannot create more
/// sources.
fn source_of(tokens: &str) -> Option<Source> {
    let (worker, rank) = tokens.split_once('.')?;
    let rank = rank.parse().ok().filter(|&rank| rank < RANKS_MAX)?;
    let source = Source {
        worker: WorkerId::from(decode_name(worker)?),
        dp_rank: DpRank(rank),
    };
    (source_tokens(&source) == tokens).then_some(source)
}

/// Whether a filter selects a subject. `*` stands for one token, a trailing `>` for one or more.
#[must_use]
pub fn matches(filter: &str, subject: &str) -> bool {
    let mut subject = subject.split('.');
    let mut filter = filter.split('.').peekable();
    while let Some(wanted) = filter.next() {
        match (wanted, subject.next()) {
            (_, None) => return false,
            (">", Some(_)) if filter.peek().is_none() => return true,
            ("*", Some(_)) => {}
            (wanted, Some(token)) if wanted == token => {}
            (_, Some(_)) => return false,
        }
    }
    subject.next().is_none()
}

#[cfg(test)]
mod tests;
