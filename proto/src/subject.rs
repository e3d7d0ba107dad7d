//! Subjects and registry keys: how parts find each other on a plane.
//!
//! `wr.<ns>.kv.<worker>.<rank>` and its siblings. Names are the operator's and may hold dots, spaces
//! or wildcards; each is encoded into one token of `[A-Za-z0-9_-]` and `=XX` escapes, which NATS
//! takes both in subjects and in keys. The encoding is a bijection, so that equal subjects mean
//! equal names.

use std::fmt::Write as _;

use crate::registry::RANKS_MAX;
use crate::{DpRank, Namespace, RouterId, Source, WorkerId};

const ROOT: &str = "wr";

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

/// The name in a token; `None` if no name encodes to it.
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

    /// Log: the records of one source.
    #[must_use]
    pub fn records(&self, source: &Source) -> String {
        format!("{}.kv.{}", self.prefix, source_tokens(source))
    }

    /// Log: the records of all sources.
    #[must_use]
    pub fn all_records(&self) -> String {
        format!("{}.kv.>", self.prefix)
    }

    /// The source whose record subject this is.
    #[must_use]
    pub fn record_source(&self, subject: &str) -> Option<Source> {
        let rest = subject.strip_prefix(&self.prefix)?;
        source_of(rest.strip_prefix(".kv.")?)
    }

    /// Broadcast: the heartbeats of one source.
    #[must_use]
    pub fn heartbeat(&self, source: &Source) -> String {
        format!("{}.hb.{}", self.prefix, source_tokens(source))
    }

    /// Broadcast: the heartbeats of all sources.
    #[must_use]
    pub fn all_heartbeats(&self) -> String {
        format!("{}.hb.>", self.prefix)
    }

    /// The source whose heartbeat subject this is.
    #[must_use]
    pub fn heartbeat_source(&self, subject: &str) -> Option<Source> {
        let rest = subject.strip_prefix(&self.prefix)?;
        source_of(rest.strip_prefix(".hb.")?)
    }

    /// Broadcast: an indexer asks a source's shim for a new generation.
    #[must_use]
    pub fn resync(&self, worker: &WorkerId) -> String {
        format!("{}.resync.{}", self.prefix, encode_name(worker.as_str()))
    }

    /// Request: what does each source hold of these blocks? Any indexer replica answers.
    #[must_use]
    pub fn query(&self) -> String {
        format!("{}.query", self.prefix)
    }

    /// The same of one replica, by [`crate::registry::IndexerEntry::id`].
    #[must_use]
    pub fn query_at(&self, indexer: &str) -> String {
        format!("{}.query.{}", self.prefix, encode_name(indexer))
    }

    /// Broadcast: the routers' load messages.
    #[must_use]
    pub fn load(&self) -> String {
        format!("{}.load", self.prefix)
    }

    /// Request: what did this router say that the asker missed? It answers itself.
    #[must_use]
    pub fn load_requests(&self, router: RouterId) -> String {
        format!("{}.load.{router}", self.prefix)
    }

    /// Registry: the entry of one router, under its own lease.
    #[must_use]
    pub fn router_key(&self, router: RouterId) -> String {
        format!("{}.router.{router}", self.prefix)
    }

    /// Registry: the prefix of all routers' keys.
    #[must_use]
    pub fn router_keys(&self) -> String {
        format!("{}.router.", self.prefix)
    }

    /// The router whose registry key this is.
    #[must_use]
    pub fn key_router(&self, key: &str) -> Option<RouterId> {
        let hex = key.strip_prefix(&self.router_keys())?;
        let bits = u128::from_str_radix(hex, 16).ok()?;
        let router = RouterId(bits.to_be_bytes());
        (router.to_string() == hex).then_some(router)
    }

    /// Registry: the prefix of all keys.
    #[must_use]
    pub fn all_keys(&self) -> String {
        format!("{}.", self.prefix)
    }

    /// Registry: the entry of one worker, under a lease of its shim.
    #[must_use]
    pub fn worker_key(&self, worker: &WorkerId) -> String {
        format!("{}.worker.{}", self.prefix, encode_name(worker.as_str()))
    }

    /// Registry: the prefix of all workers' keys.
    #[must_use]
    pub fn worker_keys(&self) -> String {
        format!("{}.worker.", self.prefix)
    }

    /// The worker whose registry key this is.
    #[must_use]
    pub fn key_worker(&self, key: &str) -> Option<WorkerId> {
        decode_name(key.strip_prefix(&self.worker_keys())?).map(WorkerId::from)
    }

    /// Registry: an operator's last word on one worker. No lease, never deleted.
    #[must_use]
    pub fn drain_key(&self, worker: &WorkerId) -> String {
        format!("{}{}", self.drain_keys(), encode_name(worker.as_str()))
    }

    /// Registry: the prefix of all such words.
    #[must_use]
    pub fn drain_keys(&self) -> String {
        format!("{}.drain.", self.prefix)
    }

    /// The worker that the word under this registry key is on.
    #[must_use]
    pub fn key_drained(&self, key: &str) -> Option<WorkerId> {
        decode_name(key.strip_prefix(&self.drain_keys())?).map(WorkerId::from)
    }

    /// Registry: the generation of one source. No lease, never deleted.
    #[must_use]
    pub fn generation_key(&self, source: &Source) -> String {
        format!("{}.generation.{}", self.prefix, source_tokens(source))
    }

    /// Registry: the entry of one indexer replica, under a lease of its own.
    #[must_use]
    pub fn indexer_key(&self, id: &str) -> String {
        format!("{}{}", self.indexer_keys(), encode_name(id))
    }

    /// The source whose generation key this is.
    #[must_use]
    pub fn key_generation(&self, key: &str) -> Option<Source> {
        let rest = key.strip_prefix(&self.prefix)?;
        source_of(rest.strip_prefix(".generation.")?)
    }

    /// Registry: the prefix of all indexer replicas' keys.
    #[must_use]
    pub fn indexer_keys(&self) -> String {
        format!("{}.indexer.", self.prefix)
    }

    /// The indexer replica whose registry key this is.
    #[must_use]
    pub fn key_indexer(&self, key: &str) -> Option<String> {
        decode_name(key.strip_prefix(&self.indexer_keys())?)
    }

    /// Registry: the pointer to the newest snapshots. No lease.
    #[must_use]
    pub fn snapshot_pointer_key(&self) -> String {
        format!("{}.snapshot.newest", self.prefix)
    }

    /// Registry: the lock of the indexer that writes a snapshot, under a lease.
    #[must_use]
    pub fn snapshot_lease_key(&self) -> String {
        format!("{}.snapshot.writer", self.prefix)
    }

    /// Registry: the lock of the shim that serves a worker, under a lease.
    #[must_use]
    pub fn shim_key(&self, worker: &WorkerId) -> String {
        format!("{}.shim.{}", self.prefix, encode_name(worker.as_str()))
    }

    /// The worker whose shim's lock this is.
    #[must_use]
    pub fn key_shim(&self, key: &str) -> Option<WorkerId> {
        let rest = key.strip_prefix(&self.prefix)?;
        decode_name(rest.strip_prefix(".shim.")?).map(WorkerId::from)
    }
}

fn source_tokens(source: &Source) -> String {
    format!(
        "{}.{}",
        encode_name(source.worker.as_str()),
        source.dp_rank.0
    )
}

/// No rank beyond those that a worker can have: whoever may speak for a worker cannot make up more sources.
fn source_of(tokens: &str) -> Option<Source> {
    let (worker, rank) = tokens.split_once('.')?;
    let rank = rank.parse().ok().filter(|&rank| rank < RANKS_MAX)?;
    let source = Source {
        worker: WorkerId::from(decode_name(worker)?),
        dp_rank: DpRank(rank),
    };
    (source_tokens(&source) == tokens).then_some(source)
}

/// Does a filter select a subject? `*` stands for one token, a trailing `>` for one or more.
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_become_one_token() {
        let check = |name: &str, token: &str| {
            assert_eq!(encode_name(name), token);
            assert_eq!(decode_name(token).as_deref(), Some(name));
        };
        check("worker-0", "worker-0");
        check("w.0.example:8000", "w=2E0=2Eexample=3A8000");
        check("", "=");
        check("=", "=3D");
        check("*>", "=2A=3E");
        check("größe", "gr=C3=B6=C3=9Fe");
        for foreign in ["w.0", "w=2e0", "=4", "=41", "=FF", "w 0"] {
            assert_eq!(decode_name(foreign), None, "{foreign}");
        }
    }

    #[test]
    fn subjects_are_fixed() {
        let subjects = Subjects::new(&Namespace::from("prod"));
        let source = Source {
            worker: WorkerId::from("w.0"),
            dp_rank: DpRank(3),
        };
        assert_eq!(subjects.records(&source), "wr.prod.kv.w=2E0.3");
        assert_eq!(subjects.heartbeat(&source), "wr.prod.hb.w=2E0.3");
        assert_eq!(subjects.resync(&source.worker), "wr.prod.resync.w=2E0");
        assert_eq!(subjects.query(), "wr.prod.query");
        assert_eq!(subjects.query_at("i.0"), "wr.prod.query.i=2E0");
        assert_eq!(subjects.load(), "wr.prod.load");
        let router = RouterId(*b"0123456789abcdef");
        let hex = "30313233343536373839616263646566";
        assert_eq!(
            subjects.load_requests(router),
            format!("wr.prod.load.{hex}")
        );
        let key = subjects.router_key(router);
        assert_eq!(key, format!("wr.prod.router.{hex}"));
        assert_eq!(subjects.key_router(&key), Some(router));
        for foreign in [
            "wr.prod.router.",
            "wr.prod.router.30",
            "wr.prod.router.3031323334353637383961626364656G",
            "wr.prod.router.3031323334353637383961626364656F",
            "wr.test.router.30313233343536373839616263646566",
        ] {
            assert_eq!(subjects.key_router(foreign), None, "{foreign}");
        }
        assert_eq!(subjects.worker_key(&source.worker), "wr.prod.worker.w=2E0");
        assert_eq!(subjects.shim_key(&source.worker), "wr.prod.shim.w=2E0");
        assert_eq!(subjects.indexer_key("i.0"), "wr.prod.indexer.i=2E0");
        let id = subjects.key_indexer("wr.prod.indexer.i=2E0");
        assert_eq!(id.as_deref(), Some("i.0"));
        assert_eq!(subjects.snapshot_pointer_key(), "wr.prod.snapshot.newest");
        assert_eq!(subjects.snapshot_lease_key(), "wr.prod.snapshot.writer");
        let key = subjects.generation_key(&source);
        assert_eq!(key, "wr.prod.generation.w=2E0.3");
        assert_eq!(subjects.key_generation(&key).as_ref(), Some(&source));
        assert_eq!(
            subjects.key_shim("wr.prod.shim.w=2E0").as_ref(),
            Some(&source.worker)
        );
        assert!(key.starts_with(&subjects.all_keys()));
        let heard = subjects.heartbeat_source("wr.prod.hb.w=2E0.3");
        assert_eq!(heard.as_ref(), Some(&source));
        for foreign in ["wr.prod.kv.w=2E0.3", "wr.prod.hb.w.3.0", "wr.test.hb.w.3"] {
            assert_eq!(subjects.heartbeat_source(foreign), None, "{foreign}");
        }
        assert_eq!(subjects.record_source("wr.prod.kv.w=2E0.3"), Some(source));
        for foreign in [
            "wr.prod.kv.w.3.0",
            "wr.prod.kv.w.03",
            "wr.prod.kv.w.-1",
            "wr.prod.kv.w.1024",
            "wr.prod.kv.w",
            "wr.test.kv.w.3",
            "wr.prod.kv..3",
        ] {
            assert_eq!(subjects.record_source(foreign), None, "{foreign}");
        }
        assert!(subjects.record_source("wr.prod.kv.w.1023").is_some());
    }

    #[test]
    fn filters_match_by_token() {
        assert!(matches("a.b", "a.b"));
        assert!(matches("a.*.c", "a.b.c"));
        assert!(matches("a.>", "a.b.c"));
        assert!(!matches("a.>", "a"));
        assert!(!matches("a.b", "a.b.c"));
        assert!(!matches("a.*", "b.b"));
    }

    proptest! {
        #[test]
        fn encoding_is_a_bijection(name in ".{0,40}", token in "[-A-Za-z0-9_=.]{0,12}") {
            let encoded = encode_name(&name);
            prop_assert!(encoded.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-=".contains(&b)));
            let decoded = decode_name(&encoded);
            prop_assert_eq!(decoded.as_deref(), Some(name.as_str()));
            if let Some(name) = decode_name(&token) {
                prop_assert_eq!(encode_name(&name), token);
            }
        }
    }
}
