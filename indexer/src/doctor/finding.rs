//! Findings by stable code, each with its severity and advice.

use std::collections::BTreeMap;

use serde::Serialize;
use warmroute_proto::label_enum;

label_enum! {
    /// Severity of a finding, the gravest first.
    #[derive(PartialOrd, Ord, Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Severity {
        /// Parts cannot work, or contradict each other.
        Grave = "grave",
        /// Action is needed.
        Warning = "warning",
        /// No action is needed.
        Note = "note",
    }
}

/// Every code with its label, severity and advice. Labels are stable: scripts use them.
macro_rules! codes {
    ($($code:ident = $word:literal, $severity:ident, $advice:literal;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Code {
            $($code,)*
        }

        impl Code {
            pub const ALL: &[Self] = &[$(Self::$code,)*];

            #[must_use]
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$code => $word,)*
                }
            }

            #[must_use]
            pub const fn severity(self) -> Severity {
                match self {
                    $(Self::$code => Severity::$severity,)*
                }
            }

            #[must_use]
            pub const fn advice(self) -> &'static str {
                match self {
                    $(Self::$code => $advice,)*
                }
            }
        }
    };
}

codes! {
    StreamMissing = "stream_missing", Grave,
        "run `warmroute-indexer init`; the shims restore its content";
    StreamDiffers = "stream_differs", Grave,
        "no part starts on it: set it back with NATS's own tools, or delete it and run `init`";
    IndexersDiffer = "indexers_differ", Grave,
        "one of them is wrong: keep their logs, restart the one that differs from the shim";
    MirrorDiffers = "mirror_differs", Grave,
        "the indexer should ask for a new generation within seconds; if it stays, restart it and \
         keep its log";
    ProbeShort = "probe_short", Grave,
        "the engine has less than is credited: run it again; if it stays, keep the shim's log and \
         restart it";
    GenerationBehind = "generation_behind", Grave,
        "the registry lost its end (an older copy?): restart the worker's shim, which takes a \
         higher generation";
    IndexerOtherLog = "indexer_other_log", Grave,
        "the stream was recreated and the replica has not noticed: restart it if this lasts";
    IndexerAhead = "indexer_ahead", Grave,
        "the log lost its end: the replica finds out within seconds; restart it if this lasts";
    NoIndexer = "no_indexer", Grave,
        "start `warmroute-indexer`: routers decide by load and prediction until then";
    IndexerSilent = "indexer_silent", Warning,
        "it is registered and does not answer: dead less than 6 s ago, stopped or overloaded; \
         look at its /health and log, restart it";
    IndexersMissing = "indexers_missing", Warning,
        "start the missing replicas, or correct --expect-indexers";
    IndexerNotReady = "indexer_not_ready", Warning,
        "it is starting, cut off from NATS, or without a permission: its log has a WARN that names \
         what to grant";
    IndexerBehind = "indexer_behind", Warning,
        "it does not keep up with the log: give it processor time, or look at its disk of NATS";
    ShimSilent = "shim_silent", Warning,
        "no heartbeat came: look whether the shim runs (stopped? starved?), and at its log; its \
         worker is not credited";
    ForeignHeartbeats = "foreign_heartbeats", Warning,
        "indexers ignore them: a user that may publish there reports on another worker; find that \
         user and change its password";
    ShimWithoutLease = "shim_without_lease", Warning,
        "it reports on its worker without holding the lock: it should end within 6 s; if not, \
         its log may name a permission to grant; else stop it";
    TwoShims = "two_shims", Warning,
        "two processes have this --worker-id: stop one of them";
    EngineUnhealthy = "engine_unhealthy", Warning,
        "the engine's /health fails: routers leave it out; look at the engine";
    SourceDemoted = "source_demoted", Warning,
        "this router ignores the index's credit there, because the engine contradicted it three \
         times: compare with --probe, keep the shim's log, restart the shim if this lasts";
    CreditContradicted = "credit_contradicted", Warning,
        "engines keep reporting other cached tokens than an `exact` index credits, so that this router \
         does not call these requests exact and credits by the reports: look at the named cause; it \
         ends by itself when they agree";
    WorkerUnregistered = "worker_unregistered", Warning,
        "its engine answers this router and no shim registers it: start the shim, or look in its log \
         for `the server refuses the credentials` and for the engine's key";
    RouterCheckFailed = "router_check_failed", Warning,
        "the router's tokenizer, chat template or block size is not the engine's, so that this \
         worker's cache is not used: compare the model's files of both";
    ModelWithoutTokenizer = "model_without_tokenizer", Warning,
        "its prompts in text are routed by what was sent, without the index: name its tokenizer in the \
         router's settings file, or choose the policy `approx`";
    RoutersDiffer = "routers_differ", Warning,
        "routers decide by different flags or settings, so that they work against each other: \
         compare what each logs at its start";
    DrainedReturned = "drained_returned", Warning,
        "the worker was drained, and another one runs under its name and gets no requests: undrain \
         it. A drain with ?until=restart ends by itself";
    NothingCredited = "nothing_credited", Warning,
        "no source of the fleet is credited on this tier: look at the sources' findings, and at \
         --assume for a connector's tier";
    SourceUnknown = "source_unknown", Warning,
        "not credited. no_proof: see the shim, of all sources: NATS; shim_gone: start it; memory: \
         raise --max-memory on every replica";
    SourceStale = "source_stale", Warning,
        "not credited, may be wrong: the shim's log names the cause: records that the log does not \
         take (a permission, a limit of the stream or account), or the last generation's reason; \
         restart the shim if it names none";
    SourceCatchingUp = "source_catching_up", Warning,
        "not credited while its image is under way: if this lasts, look at the shim's outbox and \
         at NATS's disk";
    TierUncredited = "tier_uncredited", Warning,
        "its GPU tier is credited and this tier is not: the shim's log names the reason once";
    SourceBeginsAgain = "source_begins_again", Warning,
        "begins one generation after the other: the shim's log and its metric \
         warmroute_shim_resyncs_total name the reason; undecodable or two_prefixes: its engine's \
         events, not NATS";
    SourcePartial = "source_partial", Warning,
        "blocks from before the shim's start, or of an event that it cannot read or did not see (its \
         log names it), are missing: give the shim --state-dir, and clear the engine's cache \
         once (POST /reset_prefix_cache) or restart it";
    StreamResized = "stream_resized", Warning,
        "a stream differs from what `init` made: set it back with `nats stream edit`, or write \
         the meant value into the stream's metadata";
    LogTooSmall = "log_too_small", Warning,
        "an image could be gone before its readers have it: raise the log's max_bytes";
    StoreFull = "store_full", Warning,
        "raise its max_bytes: a full registry or snapshot store takes nothing new";
    CopyAway = "copy_away", Warning,
        "a NATS server is down or behind: bring it back before another one fails";
    SnapshotUnreadable = "snapshot_unreadable", Warning,
        "a starting indexer skips it for the older one, or the log; the next snapshot replaces \
         it. If it comes again, look at NATS's disk";
    SnapshotMisfit = "snapshot_misfit", Warning,
        "it is of another log, or of records that the log lost; the next snapshot replaces it";
    SnapshotBehindLog = "snapshot_behind_log", Warning,
        "the log dropped records that follow it, which makes it useless: raise max_bytes, or \
         write snapshots more often";
    SnapshotOld = "snapshot_old", Warning,
        "no replica writes any: look for warmroute_indexer_snapshots_total by outcome";
    SnapshotMissing = "snapshot_missing", Warning,
        "a starting indexer would ask every source for an image: look for \
         warmroute_indexer_snapshots_total";
    ProbeUncredited = "probe_uncredited", Warning,
        "the engine cached a prompt that the index does not find: block size, hash seed or events \
         differ";
    ProbeSilent = "probe_silent", Warning,
        "the engine could not be probed from here";
    NotCompared = "not_compared", Warning,
        "the indexer is ready and does not know a registered source: restart it if this lasts";
    RegistryUnreadable = "registry_unreadable", Warning,
        "a newer version wrote it, or it is damaged: upgrade this tool, or restart the key's owner";
    PermissionMissing = "permission_missing", Warning,
        "give this user, or the indexer's, what deploy/nats/nats.conf gives it";
    CredentialsRefused = "credentials_refused", Warning,
        "a process offers these credentials and reaches nothing: allow the user again, or give the \
         process others; its own log has `the server refuses the credentials`";
    AnswersTooLarge = "answers_too_large", Warning,
        "routers decide such prompts without this index: raise max_payload of the NATS servers, or \
         shorten workers' names";
    ApiOverloaded = "api_overloaded", Warning,
        "dumps or queries over HTTP find no free slot: find the client that sends them; routers' \
         queries have places of their own";
    SourceWithoutEvents = "source_without_events", Note,
        "no event of its engine was seen: routed by what the routers sent there (`approximate`). If \
         it should publish, set its --kv-events-config and let the shim reach the endpoint";
    SourceUnverified = "source_unverified", Note,
        "credited, but losses cannot be seen: give the engine a replay_endpoint in \
         --kv-events-config; or its attention is such that a hit cannot be computed from events: \
         the shim's log names what to assume; or it sent an event of an unknown type, which a clear of \
         its cache ends. For seconds after a reset of the engine's cache no \
         action is needed";
    TierUnverified = "tier_unverified", Note,
        "credited, but its connector is not known to publish removals: the shim's log names what \
         to assume";
    SourceGone = "source_gone", Note,
        "its worker left the registry half a minute ago or earlier; nothing to do if it was taken out";
    OneIndexer = "one_indexer", Note,
        "run two, so that routers keep an index while one restarts";
    NoRouter = "no_router", Note,
        "no router is registered in this namespace";
    ClockSkew = "clock_skew", Note,
        "nothing decides by these clocks, but event_to_visible_seconds is off by that: set them \
         by NTP";
    VersionsDiffer = "versions_differ", Note,
        "fine during an upgrade; finish it";
}

/// A finding, and the items that it concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub code: Code,
    /// The items with their details, in order, each once.
    pub about: Vec<String>,
}

/// Collects findings, one per code.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    by_code: BTreeMap<(Severity, Code), Vec<String>>,
}

impl Findings {
    pub(crate) fn add(&mut self, code: Code, about: impl Into<String>) {
        let about = about.into();
        let known = self.by_code.entry((code.severity(), code)).or_default();
        if !known.contains(&about) {
            known.push(about);
        }
    }

    pub(crate) fn worst_first(self) -> Vec<Finding> {
        let finding = |((_, code), about)| Finding { code, about };
        self.by_code.into_iter().map(finding).collect()
    }
}
