//! Views of a replica for operators and for comparing replicas. Field names are part of the HTTP
//! API.

use serde::{Serialize, Serializer};
use warmroute_proto::load::LoadDigest;
use warmroute_proto::{Generation, RecordNumber, RouterId};

use super::counts::ReplicaCounts;
use crate::RouterLoad;

/// Whether a status lists the load on every source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusDetail {
    Summary,
    Sources,
}

/// State of one replica and its views of the others, at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct ReplicaStatus {
    #[serde(serialize_with = "shown")]
    pub router: RouterId,
    /// `None` before the first lease.
    pub incarnation: Option<Generation>,
    pub is_ready: bool,
    /// This router is isolated.
    pub is_deaf: bool,
    /// Number of live peers.
    pub peers: usize,
    /// Largest difference between a view's number of requests and its router's last heartbeat.
    /// Includes messages in flight.
    pub divergence: u64,
    pub counts: ReplicaCounts,
    /// This router first, then the others in the order of their ids.
    pub replicas: Vec<RouterView>,
}

/// View of one router. Two replicas that both report `own` or `following` at equal incarnation and
/// number hold equal digests and sources.
#[derive(Clone, Debug, Serialize)]
pub struct RouterView {
    #[serde(serialize_with = "shown")]
    pub router: RouterId,
    pub standing: ViewStatus,
    pub incarnation: Option<Generation>,
    /// `None` before the first number and in a view that claims none.
    pub number: Option<RecordNumber>,
    #[serde(flatten)]
    pub digest: DigestFields,
    /// The last comparison with a heartbeat at the view's number.
    pub compared: Option<DigestComparison>,
    /// Difference in requests between the view and its last heartbeat, at whatever numbers.
    pub divergence: u64,
    pub silent_ms: u64,
    /// Empty in a [`StatusDetail::Summary`].
    pub sources: Vec<RouterLoad>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ViewStatus {
    Own,
    Following,
    /// Its open slots are being fetched; the view shows the last known load.
    #[serde(rename = "lacking")]
    Fetching,
    Dead,
}

/// A router's digest and the view's digest, at this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DigestComparison {
    pub number: Option<RecordNumber>,
    #[serde(serialize_with = "digest")]
    pub theirs: LoadDigest,
    #[serde(serialize_with = "digest")]
    pub ours: LoadDigest,
}

/// A digest as two fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DigestFields {
    pub active_requests: u64,
    #[serde(serialize_with = "hex")]
    pub digest: u64,
}

impl From<LoadDigest> for DigestFields {
    fn from(digest: LoadDigest) -> Self {
        Self {
            active_requests: digest.count,
            digest: digest.sum,
        }
    }
}

fn shown<S: Serializer>(router: &RouterId, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(router)
}

fn hex<S: Serializer>(sum: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{sum:016x}"))
}

fn digest<S: Serializer>(digest: &LoadDigest, to: S) -> Result<S::Ok, S::Error> {
    DigestFields::from(*digest).serialize(to)
}
