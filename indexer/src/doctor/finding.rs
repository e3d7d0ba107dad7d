//! Findings by stable code, each with its severity, cause, effect on requests, and what to run.

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

/// Every code with its texts. Labels are stable: scripts use them.
macro_rules! codes {
    ($($code:ident = $word:literal, $severity:ident,
       cause: $cause:literal, effect: $effect:literal, run: $run:literal;)*) => {
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
            pub const fn cause(self) -> &'static str {
                match self {
                    $(Self::$code => $cause,)*
                }
            }

            /// The effect on requests.
            #[must_use]
            pub const fn effect(self) -> &'static str {
                match self {
                    $(Self::$code => $effect,)*
                }
            }

            /// What to run. Words in capitals are for the operator to fill in.
            #[must_use]
            pub fn run(self, namespace: &str) -> String {
                let run = match self {
                    $(Self::$code => $run,)*
                };
                run.replace("{ns}", namespace)
            }
        }
    };
}

codes! {
    NatsUnreachable = "nats_unreachable", Grave,
        cause: "no server of --nats-url answers: stopped, hanging, or at another address",
        effect: "indexers answer no router, and routers do not see each other's new load: \
                 requests are routed by load and prediction",
        run: "systemctl status nats-server; curl http://NATS:8222/healthz";
    PlaneUnread = "plane_unread", Grave,
        cause: "NATS does not answer this request: JetStream is off (as after a full disk), has \
                no leader, or this user lacks a permission",
        effect: "processes that cannot read it are not ready, and requests are routed by load; \
                 what rests on it is not judged here",
        run: "curl http://NATS:8222/healthz; df -h STORE_DIR; journalctl -u nats-server. After a \
              full disk make room, then restart nats-server: it writes nothing before";
    StoreRefuses = "store_refuses", Grave,
        cause: "leases that are renewed each 2 s stand still together and do not expire: the \
                server stores nothing (full disk, max_file_store, no leader)",
        effect: "shims lose their leases and send nothing, so that no cache is credited: \
                 requests are routed by load and prediction",
        run: "curl http://NATS:8222/healthz; df -h STORE_DIR; curl http://NATS:8222/jsz. Make \
              room, then restart nats-server: it writes nothing before";
    StreamMissing = "stream_missing", Grave,
        cause: "it was deleted, or `init` has not run for this namespace",
        effect: "shims and indexers are not ready, and requests are routed by load",
        run: "warmroute-indexer init --nats-url URL --namespace {ns}; the shims restore its \
              content";
    StreamDiffers = "stream_differs", Grave,
        cause: "a setting was changed, or the server is too old",
        effect: "no process starts on it",
        run: "nats stream edit sets it back; or delete the stream, then warmroute-indexer init \
              --nats-url URL --namespace {ns}";
    IndexersDiffer = "indexers_differ", Grave,
        cause: "one of these indexers is wrong",
        effect: "routers may credit blocks that an engine does not hold",
        run: "keep their logs, then restart the one that differs from the shim";
    MirrorDiffers = "mirror_differs", Grave,
        cause: "the indexer's content is not the shim's at the same number",
        effect: "routers may credit blocks that this engine does not hold",
        run: "run doctor again: the indexer should request a generation within seconds; if not, \
              keep its log and restart it";
    ProbeShort = "probe_short", Grave,
        cause: "the engine has less than the index credits",
        effect: "requests are sent there for a cache that it does not have",
        run: "run doctor --probe again; if it stays, keep the shim's log and restart the shim";
    GenerationBehind = "generation_behind", Grave,
        cause: "the registry lost its end, as by a restored older copy",
        effect: "a later shim could take a generation that was used already",
        run: "restart the worker's shim, which takes a higher generation";
    IndexerOtherLog = "indexer_other_log", Grave,
        cause: "the stream was recreated and the indexer has not noticed",
        effect: "it answers by the content of the old log",
        run: "run doctor again; if it lasts, restart the indexer";
    IndexerAhead = "indexer_ahead", Grave,
        cause: "the log lost its end",
        effect: "the indexer may credit blocks of lost records, until it notices within seconds",
        run: "run doctor again; if it lasts, restart the indexer";
    ModelOnlyPrefill = "model_only_prefill", Grave,
        cause: "all its workers have the role prefill, and none answers",
        effect: "each request for the model gets 503",
        run: "start a worker with the role decode or both, or correct --role of the shims";
    NoIndexer = "no_indexer", Grave,
        cause: "no indexer is registered",
        effect: "requests are routed by load and prediction",
        run: "start warmroute-indexer --nats-url URL --namespace {ns}";
    IndexerSilent = "indexer_silent", Warning,
        cause: "it is registered and does not answer: killed less than 6 s ago, stopped, or \
                overloaded",
        effect: "routers ask another indexer, or route by load and prediction",
        run: "curl http://INDEXER:8090/health; read its log; restart it";
    IndexersMissing = "indexers_missing", Warning,
        cause: "fewer indexers answer than --expect-indexers",
        effect: "with one indexer less, routers may be without an index while another restarts",
        run: "start the missing ones, or correct --expect-indexers";
    RoutersMissing = "routers_missing", Warning,
        cause: "fewer routers are registered than --expect-routers: one that crashed or hangs \
                leaves after 6 s",
        effect: "clients of the missing ones get no answer until the balancer notices",
        run: "curl http://ROUTER:29000/health of each; restart the missing ones, or correct \
              --expect-routers";
    WorkersMissing = "workers_missing", Warning,
        cause: "fewer workers are registered than --expect-workers: a crashed node's leaves \
                after 6 s",
        effect: "the fleet has less capacity",
        run: "curl http://SHIM:8091/readyz of each; start the missing ones, or correct \
              --expect-workers";
    ModelOnlyDecode = "model_only_decode", Warning,
        cause: "it has workers with the role decode, and none with the role prefill",
        effect: "no request is split: each is served by one worker",
        run: "start prefill workers, or correct --role of the shims";
    RouterSilent = "router_silent", Warning,
        cause: "its entry is not renewed while others are: it is stopped or hangs",
        effect: "its clients get no answer until the balancer notices; the others drop its load \
                 after 2.5 s",
        run: "curl http://ROUTER:29000/health; read its log; restart it";
    WorkerLost = "worker_lost", Warning,
        cause: "its registration expired without drain or deregistration, and its engine does \
                not answer: the node, or engine and shim, crashed",
        effect: "its requests broke or were repeated elsewhere; its capacity and cache are missing",
        run: "look at the node; start engine and shim again. The finding ends when the name \
              registers, or after an hour";
    WorkerUnreachable = "worker_unreachable", Warning,
        cause: "the registered address does not answer this router: a wrong --advertise-url, a \
                firewall, or a hanging engine",
        effect: "this router sends it no requests",
        run: "from the router's machine: curl URL/health; correct the shim's --advertise-url";
    IndexerNotReady = "indexer_not_ready", Warning,
        cause: "it is starting, cut off from NATS, or without a permission",
        effect: "routers ask another indexer, or route by load and prediction",
        run: "curl http://INDEXER:8090/readyz; a WARN in its log names a permission to grant";
    IndexerBehind = "indexer_behind", Warning,
        cause: "it does not keep up with the log: too little processor time, or a slow disk of \
                NATS",
        effect: "sources are credited by what they held some seconds ago, or not at all",
        run: "curl http://INDEXER:8090/readyz; give it processors; look at the disk of NATS";
    ShimSilent = "shim_silent", Warning,
        cause: "it is registered and sends no heartbeat: stopped, starved, or killed less than 6 \
                s ago",
        effect: "its worker is chosen by load, without its cache",
        run: "curl http://SHIM:8091/health; read its log; restart it";
    ForeignHeartbeats = "foreign_heartbeats", Warning,
        cause: "a user that may publish there reports on another worker",
        effect: "none: indexers ignore these heartbeats",
        run: "find the user of these subjects in nats.conf and change its password";
    ShimWithoutLease = "shim_without_lease", Warning,
        cause: "it reports on its worker without holding the lock",
        effect: "indexers may take turns between two senders",
        run: "run doctor again after 6 s; if it stays, look in its log for a permission to \
              grant, else stop it";
    TwoShims = "two_shims", Warning,
        cause: "two processes have this --worker-id",
        effect: "the worker's credit starts again each time that the lock changes hands",
        run: "stop one of them";
    EngineUnhealthy = "engine_unhealthy", Warning,
        cause: "GET /health of the engine fails at its shim",
        effect: "routers leave it out",
        run: "curl URL/health; read the engine's log; restart the engine";
    SourceDemoted = "source_demoted", Warning,
        cause: "the engine contradicted the index's credit three times at this router",
        effect: "this router ignores the index's credit there",
        run: "warmroute-indexer doctor --probe --namespace {ns}; keep the shim's log; restart \
              the shim if it lasts";
    CreditContradicted = "credit_contradicted", Warning,
        cause: "engines keep reporting other cached tokens than an `exact` index credits; the \
                likely cause is named",
        effect: "such requests are not called exact and are credited by the reports",
        run: "look at the named cause; it ends by itself when they agree";
    WorkerUnregistered = "worker_unregistered", Warning,
        cause: "its engine answers this router and no shim registers it",
        effect: "it is chosen by load, without its cache",
        run: "start the shim; or look in its log for `the server refuses the credentials` and \
              the engine's key";
    RouterCheckFailed = "router_check_failed", Warning,
        cause: "the router's tokenizer, chat template or block size is not the engine's",
        effect: "this worker's cache is not used for such prompts",
        run: "compare the model's files of router and engine; curl http://ROUTER:29000/workers \
              shows the difference";
    ModelWithoutTokenizer = "model_without_tokenizer", Warning,
        cause: "the router has no tokenizer for this model",
        effect: "its prompts in text are routed by what was sent, without the index",
        run: "name its files by --tokenizer, `models` or `models_dir`, or choose --policy approx";
    RoutersDiffer = "routers_differ", Warning,
        cause: "routers decide by different flags or settings",
        effect: "they work against each other",
        run: "compare what each logs at its start";
    DrainedReturned = "drained_returned", Warning,
        cause: "the worker was drained, and another one runs under its name",
        effect: "it gets no requests",
        run: "curl -X POST -H 'X-Warmroute-Admin: 1' \
              http://ROUTER:29000/admin/workers/NAME/undrain; a drain with ?until=restart ends \
              by itself";
    NothingCredited = "nothing_credited", Warning,
        cause: "no source of the fleet is credited on this tier: the sources' findings have the \
                cause",
        effect: "requests are routed without this tier's cache",
        run: "look at the sources' findings, and at --assume for a connector's tier";
    SourceUnproven = "source_unproven", Warning,
        cause: "the shim itself does not know its engine's cache: its replays get no answer (a \
                wrong replay endpoint), or the engine hangs",
        effect: "the worker is chosen by load, without its cache",
        run: "curl http://SHIM:8091/metrics | grep replays_unanswered; compare \
              --kv-replay-endpoint with the engine's replay_endpoint";
    SourceUnknown = "source_unknown", Warning,
        cause: "no_proof: nothing came from its shim for 5 s; shim_gone: it has no shim; memory: \
                --max-memory is reached",
        effect: "the worker is chosen by load, without its cache",
        run: "curl http://SHIM:8091/readyz; start the shim; for memory raise --max-memory of \
              each indexer";
    SourceStale = "source_stale", Warning,
        cause: "records of its shim do not arrive, or a gap is open: a permission, a limit of \
                the stream or account",
        effect: "the worker is chosen by load, without its cache",
        run: "read the WARN of the shim's log, or its last generation's reason; restart the shim \
              if it names none";
    SourceCatchingUp = "source_catching_up", Warning,
        cause: "its image is under way: a full outbox, or a slow disk of NATS, if this lasts",
        effect: "the worker is chosen by load, without its cache",
        run: "curl http://SHIM:8091/metrics | grep outbox_bytes; look at the disk of NATS";
    TierUncredited = "tier_uncredited", Warning,
        cause: "its GPU tier is credited and this tier is not; the shim's log names the reason \
                once",
        effect: "this tier's blocks are not used for routing",
        run: "read the shim's log";
    SourceBeginsAgain = "source_begins_again", Warning,
        cause: "it begins one generation after the other",
        effect: "it has no credit while each image is under way",
        run: "curl http://SHIM:8091/metrics | grep resyncs_total names the reason; undecodable \
              or two_prefixes: its engine's events, not NATS";
    SourcePartial = "source_partial", Warning,
        cause: "blocks from before the shim's start, or of an event that it did not see or \
                cannot read, are missing",
        effect: "blocks that the engine holds are not used for routing",
        run: "give the shim --state-dir, and once: curl -X POST URL/reset_prefix_cache";
    StreamResized = "stream_resized", Warning,
        cause: "a size differs from what `init` made",
        effect: "images or snapshots may be dropped too early",
        run: "nats stream edit sets it back, or write the meant value into the stream's metadata";
    LogTooSmall = "log_too_small", Warning,
        cause: "the log's max_bytes is below four images of all sources",
        effect: "an image could be gone before its readers have it, and is sent again",
        run: "warmroute-indexer init --nats-url URL --namespace {ns} --max-bytes BYTES --resize";
    StoreFull = "store_full", Warning,
        cause: "it is nearly as large as its max_bytes",
        effect: "a full registry or snapshot store takes nothing new",
        run: "warmroute-indexer init --nats-url URL --namespace {ns} --resize, or nats stream \
              edit --max-bytes";
    CopyAway = "copy_away", Warning,
        cause: "a NATS server is down or behind",
        effect: "none yet: one more failure stops the stream",
        run: "curl http://SERVER:8222/healthz; bring it back before another one fails";
    SnapshotUnreadable = "snapshot_unreadable", Warning,
        cause: "a snapshot is torn or gone",
        effect: "a starting indexer uses the older one, or the log: it is ready later",
        run: "none: the next snapshot replaces it. If it comes again, look at the disk of NATS";
    SnapshotMisfit = "snapshot_misfit", Warning,
        cause: "it is of another log, or of records that the log lost",
        effect: "a starting indexer does not use it: it is ready later",
        run: "none: the next snapshot replaces it";
    SnapshotBehindLog = "snapshot_behind_log", Warning,
        cause: "the log dropped records that follow it",
        effect: "a starting indexer requests an image of every source",
        run: "raise the log's max_bytes, or lower --snapshot-every-bytes";
    SnapshotOld = "snapshot_old", Warning,
        cause: "no indexer writes snapshots",
        effect: "a starting indexer is ready later",
        run: "curl http://INDEXER:8090/metrics | grep snapshots_total, by outcome";
    SnapshotMissing = "snapshot_missing", Warning,
        cause: "the log was trimmed, and there is no snapshot",
        effect: "a starting indexer requests an image of every source",
        run: "curl http://INDEXER:8090/metrics | grep snapshots_total, by outcome";
    ProbeUncredited = "probe_uncredited", Warning,
        cause: "the engine cached a prompt that the index does not find: block size, hash seed \
                or events differ",
        effect: "this worker's cache is not used",
        run: "curl http://SHIM:8091/readyz; compare the engine's block size and hash seed";
    ProbeSilent = "probe_silent", Warning,
        cause: "the engine could not be probed from here",
        effect: "none",
        run: "curl URL/health from this machine";
    NotCompared = "not_compared", Warning,
        cause: "the indexer is ready and does not know a registered source",
        effect: "routers that ask it choose this worker by load",
        run: "run doctor again; if it lasts, restart the indexer";
    RegistryUnreadable = "registry_unreadable", Warning,
        cause: "a newer version wrote the entry, or it is damaged",
        effect: "its process is invisible to older ones",
        run: "upgrade this tool, or restart the entry's process";
    PermissionMissing = "permission_missing", Warning,
        cause: "the server refuses this to the user of a process",
        effect: "what it allows does not work there; a router routes as without an index, an \
                 indexer or shim is not ready",
        run: "give the user what deploy/nats/nats.conf gives it, and reload nats-server";
    CredentialsRefused = "credentials_refused", Warning,
        cause: "a process offers credentials that the server refuses",
        effect: "it reaches nothing: its worker is chosen by load, or not known",
        run: "allow the user again, or give the process other credentials; its log has `the \
              server refuses the credentials`";
    MonitorUnread = "monitor_unread", Warning,
        cause: "a URL of --nats-monitor does not answer as the monitoring port of a server: a \
                wrong address, a firewall, or a stopped server",
        effect: "none; clients that this server refuses are not found here",
        run: "curl URL/connz; correct --nats-monitor, or set http_port in nats.conf";
    AnswersTooLarge = "answers_too_large", Warning,
        cause: "answers exceed max_payload of the NATS servers",
        effect: "routers decide such prompts without this index",
        run: "raise max_payload, or shorten workers' names";
    ApiOverloaded = "api_overloaded", Warning,
        cause: "dumps or queries over HTTP find no free slot",
        effect: "none for routers, whose queries have places of their own",
        run: "find the client that sends them";
    SourceWithoutEvents = "source_without_events", Note,
        cause: "no event of its engine was seen",
        effect: "it is routed by what the routers sent there (`approximate`)",
        run: "none if it should publish none; else set its --kv-events-config and let the shim \
              reach the endpoint";
    SourceUnverified = "source_unverified", Note,
        cause: "losses cannot be seen: no replay_endpoint, an attention whose hits events do not \
                determine, an unknown event, or for seconds a reset",
        effect: "it is credited",
        run: "give the engine a replay_endpoint in --kv-events-config; the shim's log names \
              other causes and what to assume";
    TierUnverified = "tier_unverified", Note,
        cause: "its connector is not known to publish removals",
        effect: "it is credited",
        run: "read the shim's log: it names what to assume";
    SourceGone = "source_gone", Note,
        cause: "its worker left the registry half a minute ago or earlier",
        effect: "none if it was taken out",
        run: "none";
    OneIndexer = "one_indexer", Note,
        cause: "one indexer runs",
        effect: "routers have no index while it restarts",
        run: "start a second warmroute-indexer --namespace {ns}";
    NoRouter = "no_router", Note,
        cause: "no router is registered in this namespace",
        effect: "none is served through it",
        run: "start warmroute-router --nats-url URL --namespace {ns}";
    ClockSkew = "clock_skew", Note,
        cause: "two machines' clocks differ",
        effect: "none: nothing decides by them; event_to_visible_seconds is off by that",
        run: "set them by NTP";
    VersionsDiffer = "versions_differ", Note,
        cause: "an upgrade is under way",
        effect: "none",
        run: "finish the upgrade";
}

/// A finding, and the items that it concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub code: Code,
    /// The items with their details, in order, each once.
    pub about: Vec<String>,
    /// Findings that have this one as their cause, and how many items they have.
    pub explains: Vec<(Code, usize)>,
}

/// Faults of the server or the streams, that have others as their consequence.
const ROOTS: [Code; 3] = [Code::PlaneUnread, Code::StoreRefuses, Code::StreamMissing];

/// What each of [`ROOTS`] can cause.
const CONSEQUENCES: [Code; 20] = [
    Code::NoIndexer,
    Code::IndexerSilent,
    Code::IndexersMissing,
    Code::RoutersMissing,
    Code::WorkersMissing,
    Code::RouterSilent,
    Code::WorkerLost,
    Code::WorkerUnregistered,
    Code::IndexerNotReady,
    Code::IndexerBehind,
    Code::ShimSilent,
    Code::ShimWithoutLease,
    Code::NothingCredited,
    Code::SourceUnproven,
    Code::SourceUnknown,
    Code::SourceStale,
    Code::SourceCatchingUp,
    Code::SnapshotOld,
    Code::NoRouter,
    Code::ClockSkew,
];

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

    /// Consequences are no findings of their own beside their cause.
    pub(crate) fn worst_first(self) -> Vec<Finding> {
        let finding = |((_, code), about)| Finding {
            code,
            about,
            explains: Vec::new(),
        };
        let mut all: Vec<Finding> = self.by_code.into_iter().map(finding).collect();
        if let Some(root) = all.iter().position(|one| ROOTS.contains(&one.code)) {
            let is_consequence = |one: &Finding| CONSEQUENCES.contains(&one.code);
            let consequences = all.iter().filter(|one| is_consequence(one));
            let explains = consequences.map(|one| (one.code, one.about.len()));
            all[root].explains = explains.collect();
            all.retain(|one| !is_consequence(one));
        }
        all
    }
}
