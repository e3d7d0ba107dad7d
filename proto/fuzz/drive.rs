//! Checks of the codec that the fuzz target and the tests share.

use warmroute_proto::codec::{Message, decode, encode, seal};
use warmroute_proto::load::{
    LoadAnswer, LoadFrame, LoadHeartbeat, LoadMessage, LoadRequest, RouterEntry,
};
use warmroute_proto::peers::{PeerBeacon, RegistryPage, RegistryPageRequest, RegistryWrite};
use warmroute_proto::query::{HoldAnswer, HoldQuery, IndexAnswer, IndexQuery};
use warmroute_proto::registry::{
    DemotionEntry, DrainEntry, GenerationEntry, IndexerEntry, ResyncRequest, RouterDoubts,
    RouterFacts, RouterMisses, RouterRefusals, ShimEntry, SnapshotLease, WorkerEntry,
};
use warmroute_proto::roster::{
    DeepHolderQuery, HolderAnswer, HolderQuery, RosterPage, RosterPageRequest,
};
use warmroute_proto::snapshot::{SnapshotHead, SnapshotPointer};
use warmroute_proto::subject::{decode_name, encode_name};
use warmroute_proto::tenant_use::{TenantLevels, TenantReport};
use warmroute_proto::view::{ReplicaFaults, ReplicaFaultsRequest, ViewPage, ViewPageRequest};
use warmroute_proto::{Heartbeat, Record};

/// Gives bytes to every decoder: an error, or a message that encodes to the same bytes, so that no
/// two byte strings mean one message. A second time with a checksum, which lets the
/// bytes pass as far as the body.
pub(crate) fn codec(data: &[u8]) {
    messages(data);
    let mut sealed = data.to_vec();
    seal(&mut sealed);
    messages(&sealed);
    if let Ok(token) = std::str::from_utf8(data)
        && let Some(name) = decode_name(token)
    {
        assert_eq!(encode_name(&name), token);
    }
}

/// The number of decoders that accept the bytes.
pub(crate) fn messages(data: &[u8]) -> usize {
    let accepted = [
        canonical::<Record>(data),
        canonical::<Heartbeat>(data),
        canonical::<IndexQuery>(data),
        canonical::<IndexAnswer>(data),
        canonical::<LoadMessage>(data),
        canonical::<WorkerEntry>(data),
        canonical::<GenerationEntry>(data),
        canonical::<ResyncRequest>(data),
        canonical::<LoadHeartbeat>(data),
        canonical::<LoadFrame>(data),
        canonical::<LoadRequest>(data),
        canonical::<LoadAnswer>(data),
        canonical::<RouterEntry>(data),
        canonical::<SnapshotHead>(data),
        canonical::<SnapshotPointer>(data),
        canonical::<IndexerEntry>(data),
        canonical::<SnapshotLease>(data),
        canonical::<ShimEntry>(data),
        canonical::<ViewPageRequest>(data),
        canonical::<ViewPage>(data),
        canonical::<DrainEntry>(data),
        canonical::<HoldQuery>(data),
        canonical::<HoldAnswer>(data),
        canonical::<DemotionEntry>(data),
        canonical::<RouterFacts>(data),
        canonical::<RouterRefusals>(data),
        canonical::<RouterDoubts>(data),
        canonical::<RouterMisses>(data),
        canonical::<RosterPageRequest>(data),
        canonical::<RosterPage>(data),
        canonical::<HolderQuery>(data),
        canonical::<DeepHolderQuery>(data),
        canonical::<HolderAnswer>(data),
        canonical::<ReplicaFaultsRequest>(data),
        canonical::<ReplicaFaults>(data),
        canonical::<TenantReport>(data),
        canonical::<TenantLevels>(data),
        canonical::<RegistryWrite>(data),
        canonical::<PeerBeacon>(data),
        canonical::<RegistryPageRequest>(data),
        canonical::<RegistryPage>(data),
    ];
    accepted.into_iter().filter(|accepted| *accepted).count()
}

fn canonical<M: Message>(data: &[u8]) -> bool {
    let Ok(message) = decode::<M>(data) else {
        return false;
    };
    assert_eq!(encode(&message).unwrap_or_default(), data);
    true
}
