//! What a replica holds of each router, for people and for comparing replicas at equal numbers.

use serde::{Serialize, Serializer};
use warmroute_proto::load::LoadDigest;
use warmroute_proto::{Generation, RecordNumber, RouterId};

use super::counts::ReplicaCounts;
use crate::RouterLoad;

/// Everything that one replica knows of itself and the others, of one moment.
#[derive(Clone, Debug, Serialize)]
pub struct ReplicaStatus {
    #[serde(serialize_with = "shown")]
    pub router: RouterId,
    /// None before it was taken.
    pub incarnation: Option<Generation>,
    pub is_ready: bool,
    /// It does not hear its own heartbeats.
    pub is_deaf: bool,
    /// Peers that live.
    pub peers: usize,
    /// The largest difference in requests between a view and what its router last said it had. Messages
    /// under way are a part of it.
    pub divergence: u64,
    pub counts: ReplicaCounts,
    /// Its own first, then the others in the order of their ids.
    pub replicas: Vec<RouterView>,
}

/// What is held of one router. Of two replicas that both say `own` or `following` with equal
/// incarnation and number, digest and sources are equal.
#[derive(Clone, Debug, Serialize)]
pub struct RouterView {
    #[serde(serialize_with = "shown")]
    pub router: RouterId,
    pub standing: ViewStatus,
    pub incarnation: Option<Generation>,
    /// None before the first, and where no number is claimed.
    pub number: Option<RecordNumber>,
    #[serde(flatten)]
    pub digest: DigestFields,
    /// The last heartbeat at whose number this view stood.
    pub compared: Option<DigestComparison>,
    pub silent_ms: u64,
    pub sources: Vec<RouterLoad>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ViewStatus {
    Own,
    Following,
    /// Its open slots are on their way; what is shown is the last that was known.
    Lacking,
    Dead,
}

/// A router's digest and the view's, both at this number.
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
