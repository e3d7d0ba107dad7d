//! The three streams of a namespace: names, required configuration, and differences to it.
//!
//! Pure. The registry has the layout of a NATS key-value bucket and the snapshots that of an object
//! store, so that NATS' own tools show them.

use std::fmt::Debug;
use std::time::Duration;

use async_nats::jetstream::stream::{
    Config, DiscardPolicy, Info, PersistenceMode, RetentionPolicy, StorageType,
};

use super::config::{InitConfig, SetupDifference};
use warmroute_proto::codec::RECORD_BYTES_MAX;
use warmroute_proto::load::{ANSWER_BYTES_MAX, FRAME_BYTES_MAX};
use warmroute_proto::roster::PART_BYTES_MAX;
use warmroute_proto::subject::{Subjects, encode_name};
use warmroute_proto::view::PAGE_BYTES_MAX;
use warmroute_proto::{Namespace, StreamIdentity};

/// Metadata: the random half of a log's identity, 16 hex digits.
const NONCE: &str = "warmroute-nonce";

/// Metadata: the sizes that `init` set, to detect later changes.
const MADE_REPLICAS: &str = "warmroute-replicas";
const MADE_MAX_BYTES: &str = "warmroute-max-bytes";
const MADE_MAX_AGE_SECS: &str = "warmroute-max-age-secs";

/// The shortest that the server accepts. No message has an id.
const DUPLICATE_WINDOW: Duration = Duration::from_millis(100);

/// More than the largest message that a stream keeps, a chunk of a snapshot.
const STORED_BYTES_MAX: i32 = 1 << 20;

/// How long a key's end stays visible to disconnected watchers.
pub(super) const MARKER_TTL: Duration = Duration::from_secs(60);

/// Entries are a few hundred bytes each.
const REGISTRY_BYTES: i64 = 64 << 20;

/// The smallest limit of a payload that takes every message which is not cut to that limit: a page
/// or part and one row that crosses its end, with headers. A query of a million tokens in blocks of
/// 16 fits too.
const PAYLOAD_BYTES_MIN: usize = largest(&[
    RECORD_BYTES_MAX,
    FRAME_BYTES_MAX,
    ANSWER_BYTES_MAX,
    PART_BYTES_MAX,
    PAGE_BYTES_MAX,
]) + (64 << 10);

const fn largest(sizes: &[usize]) -> usize {
    match sizes {
        [] => 0,
        [first, rest @ ..] => {
            let rest = largest(rest);
            if *first > rest { *first } else { rest }
        }
    }
}

/// The first release with per-message TTL on every layer.
const SERVER_MIN: (u64, u64) = (2, 11);

#[derive(Clone, Debug)]
pub(super) struct Layout {
    records: String,
    bucket: String,
    ping: String,
}

/// How sizes are compared.
#[derive(Clone, Copy)]
pub(super) enum Sizes<'a> {
    /// Any size, but bounded.
    Bounded,
    Of(&'a InitConfig),
}

impl Layout {
    pub(super) fn new(namespace: &Namespace) -> Self {
        let token = encode_name(namespace.as_str());
        Self {
            records: format!("wr.{token}.kv.>"),
            bucket: bucket(&token),
            ping: Subjects::new(namespace).round_trip(),
        }
    }

    /// A subject without a server.
    pub(super) fn ping(&self) -> String {
        self.ping.clone()
    }

    pub(super) fn log(&self) -> String {
        self.bucket.clone()
    }

    pub(super) fn registry(&self) -> String {
        format!("KV_{}", self.bucket)
    }

    pub(super) fn snapshots(&self) -> String {
        format!("OBJ_{}", self.bucket)
    }

    pub(super) fn bucket(&self) -> &str {
        &self.bucket
    }

    /// Prefix of every key's subject.
    pub(super) fn key_prefix(&self) -> String {
        format!("$KV.{}.", self.bucket)
    }

    pub(super) fn wanted(&self, init: &InitConfig, nonce: u64) -> [Config; 3] {
        [
            self.wanted_log(init, nonce),
            self.wanted_registry(init),
            self.wanted_snapshots(init),
        ]
        .map(with_sizes)
    }

    fn wanted_log(&self, init: &InitConfig, nonce: u64) -> Config {
        Config {
            subjects: vec![self.records.clone()],
            max_bytes: signed(init.max_bytes),
            max_age: init.max_age,
            discard: DiscardPolicy::Old,
            metadata: [(NONCE.to_owned(), format!("{nonce:016x}"))].into(),
            description: Some("warmroute: records".to_owned()),
            ..common(self.log(), init)
        }
    }

    fn wanted_registry(&self, init: &InitConfig) -> Config {
        Config {
            subjects: vec![format!("{}>", self.key_prefix())],
            max_bytes: REGISTRY_BYTES,
            max_messages_per_subject: 1,
            discard: DiscardPolicy::New,
            allow_rollup: true,
            deny_delete: true,
            allow_message_ttl: true,
            subject_delete_marker_ttl: Some(MARKER_TTL),
            description: Some("warmroute: registry".to_owned()),
            ..common(self.registry(), init)
        }
    }

    fn wanted_snapshots(&self, init: &InitConfig) -> Config {
        let bucket = &self.bucket;
        Config {
            subjects: vec![format!("$O.{bucket}.C.>"), format!("$O.{bucket}.M.>")],
            max_bytes: signed(init.snapshots_max_bytes),
            max_age: init.snapshots_max_age,
            discard: DiscardPolicy::New,
            allow_rollup: true,
            description: Some("warmroute: snapshots".to_owned()),
            ..common(self.snapshots(), init)
        }
    }
}

fn common(name: String, init: &InitConfig) -> Config {
    Config {
        name,
        max_messages: -1,
        max_messages_per_subject: -1,
        max_consumers: -1,
        retention: RetentionPolicy::Limits,
        storage: StorageType::File,
        num_replicas: init.replicas,
        duplicate_window: DUPLICATE_WINDOW,
        allow_direct: true,
        ..Config::default()
    }
}

/// Adds the sizes to the metadata.
fn with_sizes(mut config: Config) -> Config {
    let sizes = sizes(&config).map(|(name, _, value)| (name.to_owned(), value));
    config.metadata.extend(sizes);
    config
}

/// Sizes by the metadata's name and the field's.
fn sizes(config: &Config) -> [(&'static str, &'static str, String); 3] {
    [
        (
            MADE_REPLICAS,
            "num_replicas",
            config.num_replicas.to_string(),
        ),
        (MADE_MAX_BYTES, "max_bytes", config.max_bytes.to_string()),
        (
            MADE_MAX_AGE_SECS,
            "max_age, in seconds,",
            config.max_age.as_secs().to_string(),
        ),
    ]
}

/// The stream with the wanted bounds where they are higher. `None`: none is.
pub(super) fn enlarged(is: &Config, wanted: &Config) -> Option<Config> {
    let max_bytes = is.max_bytes.max(wanted.max_bytes);
    let max_age = is.max_age.max(wanted.max_age);
    let is_bounded = is.max_bytes > 0 && !is.max_age.is_zero();
    let grows = is_bounded && (max_bytes, max_age) != (is.max_bytes, is.max_age);
    grows.then(|| {
        with_sizes(Config {
            max_bytes,
            max_age,
            ..is.clone()
        })
    })
}

/// The sizes that differ from those of `init`. Streams without this metadata have none.
pub(super) fn resized(is: &Config) -> Vec<SetupDifference> {
    let mut faults = Differences::of(&is.name);
    for (name, field, value) in sizes(is) {
        if let Some(made) = is.metadata.get(name)
            && *made != value
        {
            faults.add(field, value, made);
        }
    }
    faults.list
}

/// Names of buckets allow fewer characters than tokens. The mapping is injective.
fn bucket(token: &str) -> String {
    if !token.contains('=') {
        return format!("wr_{token}");
    }
    let hex: String = token.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("wrx_{hex}")
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// A log's creation time and random number; `None` if `init` did not create it.
pub(super) fn identity(info: &Info) -> Option<StreamIdentity> {
    let nonce = u64::from_str_radix(info.config.metadata.get(NONCE)?, 16).ok()?;
    let created_unix_ns = u64::try_from(info.created.unix_timestamp_nanos()).ok()?;
    Some(StreamIdentity {
        created_unix_ns,
        nonce,
    })
}

/// All differences of a stream to the required configuration.
pub(super) fn stream_differences(
    is: &Config,
    wanted: &Config,
    sizes: Sizes,
) -> Vec<SetupDifference> {
    let mut faults = Differences::of(&is.name);
    faults.equal("subjects", &is.subjects, &wanted.subjects);
    faults.equal("retention", &is.retention, &wanted.retention);
    faults.equal("discard", &is.discard, &wanted.discard);
    faults.equal("storage", &is.storage, &wanted.storage);
    faults.equal("max_msgs", &is.max_messages, &wanted.max_messages);
    let (per_subject, must_be) = (is.max_messages_per_subject, wanted.max_messages_per_subject);
    faults.equal("max_msgs_per_subject", &per_subject, &must_be);
    // Each tail and each watch is a consumer.
    faults.equal("max_consumers", &is.max_consumers, &wanted.max_consumers);
    faults.equal("allow_direct", &is.allow_direct, &wanted.allow_direct);
    faults.equal(
        "allow_msg_ttl",
        &is.allow_message_ttl,
        &wanted.allow_message_ttl,
    );
    faults.equal("sealed", &is.sealed, &false);
    faults.equal("no_ack", &is.no_ack, &false);
    let per_subject = is.discard_new_per_subject;
    faults.equal("discard_new_per_subject", &per_subject, &false);
    let counter = is.allow_message_counter;
    faults.equal("allow_msg_counter", &counter, &false);
    if wanted.allow_rollup {
        faults.equal("allow_rollup_hdrs", &is.allow_rollup, &true);
    }
    if (1..STORED_BYTES_MAX).contains(&is.max_message_size) {
        let must_be = format!("-1, or at least {STORED_BYTES_MAX}");
        faults.add("max_msg_size", is.max_message_size, must_be);
    }
    let moved = is.mirror.is_some() || is.sources.is_some() || is.subject_transform.is_some();
    faults.equal("mirror, sources or transform", &moved, &false);
    if is.persist_mode == Some(PersistenceMode::Async) {
        faults.add(
            "persist_mode",
            "async",
            "default: async loses acknowledged writes",
        );
    }
    if is.duplicate_window > DUPLICATE_WINDOW {
        faults.add("duplicate_window", is.duplicate_window, DUPLICATE_WINDOW);
    }
    if wanted.metadata.contains_key(NONCE) && !is.metadata.contains_key(NONCE) {
        faults.add("metadata", "without identity", "as `init` writes it");
    }
    let marker = is.subject_delete_marker_ttl.unwrap_or_default();
    if wanted.subject_delete_marker_ttl.is_some() && marker < Duration::from_secs(1) {
        faults.add("subject_delete_marker_ttl", marker, "at least 1s");
    }
    faults.sizes(is, wanted, sizes);
    faults.list
}

/// Differences of the server to the required version and limits.
pub(super) fn server_differences(version: &str, max_payload: usize) -> Vec<SetupDifference> {
    let mut faults = Differences::of("server");
    let mut numbers = version.split('.').map_while(|part| part.parse().ok());
    let release = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if release < SERVER_MIN {
        faults.add("version", version, "2.11 or later");
    }
    if max_payload < PAYLOAD_BYTES_MIN {
        let must_be = format!("at least {PAYLOAD_BYTES_MIN}");
        faults.add("max_payload", max_payload, must_be);
    }
    faults.list
}

/// Sizes that `init` refuses to create.
pub(super) fn init_differences(init: &InitConfig) -> Vec<SetupDifference> {
    let mut faults = Differences::of("init");
    if init.max_bytes == 0 {
        faults.add("max_bytes", 0, "positive");
    }
    if init.max_age.is_zero() {
        faults.add("max_age", init.max_age, "positive");
    }
    if init.snapshots_max_bytes == 0 {
        faults.add("snapshots_max_bytes", 0, "positive");
    }
    if init.snapshots_max_age < init.max_age {
        let must_be = format!("at least max_age ({:?})", init.max_age);
        faults.add("snapshots_max_age", init.snapshots_max_age, must_be);
    }
    if !(1..=5).contains(&init.replicas) {
        faults.add("replicas", init.replicas, "1 to 5");
    }
    faults.list
}

pub(super) fn missing(stream: &str) -> SetupDifference {
    SetupDifference {
        of: stream.to_owned(),
        field: "stream",
        is: "missing".to_owned(),
        must_be: "created by `init`".to_owned(),
    }
}

struct Differences {
    of: String,
    list: Vec<SetupDifference>,
}

impl Differences {
    fn of(of: &str) -> Self {
        Self {
            of: of.to_owned(),
            list: Vec::new(),
        }
    }

    fn add(&mut self, field: &'static str, is: impl Debug, must_be: impl Debug) {
        let plain = |text: String| text.trim_matches('"').to_owned();
        self.list.push(SetupDifference {
            of: self.of.clone(),
            field,
            is: plain(format!("{is:?}")),
            must_be: plain(format!("{must_be:?}")),
        });
    }

    fn equal<T: PartialEq + Debug>(&mut self, field: &'static str, is: &T, must_be: &T) {
        if is != must_be {
            self.add(field, is, must_be);
        }
    }

    fn sizes(&mut self, is: &Config, wanted: &Config, sizes: Sizes) {
        match sizes {
            Sizes::Bounded => {
                if is.max_bytes <= 0 {
                    self.add("max_bytes", is.max_bytes, "bounded");
                }
                // Only the registry has no age.
                if wanted.max_age.is_zero() != is.max_age.is_zero() {
                    let must_be = if wanted.max_age.is_zero() {
                        "unbounded"
                    } else {
                        "bounded"
                    };
                    self.add("max_age", is.max_age, must_be);
                }
            }
            Sizes::Of(init) => {
                self.equal("num_replicas", &is.num_replicas, &init.replicas);
                self.equal("max_bytes", &is.max_bytes, &wanted.max_bytes);
                self.equal("max_age", &is.max_age, &wanted.max_age);
            }
        }
    }
}

#[cfg(test)]
mod tests;
