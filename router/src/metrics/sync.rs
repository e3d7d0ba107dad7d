//! What replicas said to each other, copied from the sync core at every scrape.

use prometheus::{IntCounter, IntCounterVec, IntGauge};

use super::Maker;
use crate::sync::{Counts, Snapshot};

pub(super) struct SyncCounters {
    messages: IntCounterVec,
    frames: IntCounterVec,
    bytes: IntCounterVec,
    asks: IntCounterVec,
    verdicts: IntCounterVec,
    gaps: IntCounter,
    mismatches: IntCounter,
    repairs: IntCounterVec,
    refused: IntCounterVec,
    releases: IntCounterVec,
    deafs: IntCounter,
    peers: IntGauge,
    divergence: IntGauge,
    incarnation: IntGauge,
}

impl SyncCounters {
    pub(super) fn new(make: &Maker<'_>) -> Result<Self, prometheus::Error> {
        let way = ["direction"];
        Ok(Self {
            messages: make.counters("sync_messages_total", "Load messages", &way)?,
            frames: make.counters("sync_frames_total", "Broadcasts of load messages", &way)?,
            bytes: make.counters("sync_bytes_total", "Bytes of broadcasts", &way)?,
            asks: make.counters(
                "sync_asks_total",
                "Questions about missing messages or slots; echoes, which measure the way",
                &["kind"],
            )?,
            verdicts: make.counters(
                "sync_verdicts_total",
                "Other routers' messages by what became of them",
                &["verdict"],
            )?,
            gaps: make.counter("sync_gaps_total", "Times that messages were missing")?,
            mismatches: make.counter(
                "sync_digest_mismatches_total",
                "Heartbeats whose digest differed from the view at the same number",
            )?,
            repairs: make.counters("sync_repairs_total", "What mended a view", &["kind"])?,
            refused: make.counters("sync_refused_total", "What met a bound", &["what"])?,
            releases: make.counters(
                "sync_releases_total",
                "Routers whose slots were freed at once",
                &["reason"],
            )?,
            deafs: make.counter(
                "sync_deaf_total",
                "Times that this router did not hear its own heartbeats",
            )?,
            peers: make.gauge("sync_peers", "Other routers that live")?,
            divergence: make.gauge(
                "sync_divergence_requests",
                "Largest difference between a view and its router's last heartbeat",
            )?,
            incarnation: make.gauge("sync_incarnation", "This router's incarnation")?,
        })
    }

    pub(super) fn set(&self, snapshot: &Snapshot) {
        let clamp = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let peers = i64::try_from(snapshot.peers).unwrap_or(i64::MAX);
        self.peers.set(peers);
        self.divergence.set(clamp(snapshot.divergence));
        let incarnation = snapshot.incarnation.map_or(0, |life| life.0);
        self.incarnation.set(clamp(incarnation));
        self.set_traffic(&snapshot.counts);
        self.set_repairs(&snapshot.counts);
    }

    fn set_traffic(&self, counts: &Counts) {
        let traffic = counts.traffic;
        copy(
            &self.messages,
            &[("in", traffic.messages_in), ("out", traffic.messages_out)],
        );
        copy(
            &self.frames,
            &[("in", traffic.frames_in), ("out", traffic.frames_out)],
        );
        copy(
            &self.bytes,
            &[("in", traffic.bytes_in), ("out", traffic.bytes_out)],
        );
        copy(
            &self.asks,
            &[
                ("asked", traffic.asks_out),
                ("failed", traffic.asks_failed),
                ("served", traffic.asks_in),
                ("echo_asked", traffic.echoes_out),
                ("echo_served", traffic.echoes_in),
            ],
        );
        let verdicts = counts.verdicts;
        copy(
            &self.verdicts,
            &[
                ("applied", verdicts.applied),
                ("duplicate", verdicts.duplicate),
                ("old", verdicts.old),
                ("ahead", verdicts.ahead),
                ("violation", verdicts.violation),
                ("malformed", verdicts.malformed),
            ],
        );
    }

    fn set_repairs(&self, counts: &Counts) {
        let mended = counts.mended;
        set(&self.gaps, mended.gaps);
        set(&self.mismatches, mended.mismatches);
        set(&self.deafs, counts.deafs);
        copy(
            &self.repairs,
            &[
                ("numbers", mended.by_numbers),
                ("state", mended.by_state),
                ("wrong_state", mended.states_wrong),
                ("cut_taken", mended.cuts),
            ],
        );
        let refused = counts.refused;
        copy(
            &self.refused,
            &[
                ("peer", refused.peers),
                ("waiting", refused.waiting),
                ("state", refused.states),
                ("ask", refused.asks),
                ("unsent", refused.unsent),
            ],
        );
        copy(
            &self.releases,
            &[("silence", counts.deaths), ("goodbye", counts.goodbyes)],
        );
    }
}

fn set(counter: &IntCounter, value: u64) {
    counter.reset();
    counter.inc_by(value);
}

fn copy(counters: &IntCounterVec, values: &[(&str, u64)]) {
    for (label, value) in values {
        let counter = counters.with_label_values(&[*label]);
        set(&counter, *value);
    }
}
