//! Keys with revisions and leases, by raw writes to a key-value bucket.
//!
//! Raw, because the client's `create_with_ttl` creates a key that has expired again without a TTL:
//! a lease that is acquired twice would never expire. A key's revision is its sequence in the
//! bucket's stream. A key that ended leaves a marker for a while, which counts as absent, and whose
//! sequence the next writer has to name.

use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::message::StreamMessage;
use bytes::Bytes;

use super::core::{NatsCore, OutgoingMessage, unavailable};
use super::layout::MARKER_TTL;
use crate::{PlaneError, PutIf, RegistryEntry, Revision};

const EXPECTED: &str = "Nats-Expected-Last-Subject-Sequence";
const OPERATION: &str = "KV-Operation";
const MARKER: &str = "Nats-Marker-Reason";
const TTL: &str = "Nats-TTL";

/// Attempts to create a key, because other writers may write between reading a marker and naming
/// it.
const TRIES: usize = 4;

/// Whether a message is the end of a key instead of a value.
pub(super) fn is_end(headers: Option<&HeaderMap>) -> bool {
    headers.is_some_and(|headers| {
        let operation = headers.get(OPERATION).map(async_nats::HeaderValue::as_str);
        headers.get(MARKER).is_some() || matches!(operation, Some("DEL" | "PURGE"))
    })
}

pub(super) async fn get(core: &NatsCore, key: &str) -> Result<Option<RegistryEntry>, PlaneError> {
    let newest = newest(core, key).await?;
    let value = newest.filter(|message| !is_end(Some(&message.headers)));
    Ok(value.map(|message| RegistryEntry {
        value: message.payload,
        revision: Revision(message.sequence),
    }))
}

async fn newest(core: &NatsCore, key: &str) -> Result<Option<StreamMessage>, PlaneError> {
    let subject = format!("{}{key}", core.layout.key_prefix());
    core.newest(&core.layout.registry(), &subject).await
}

pub(super) async fn put(
    core: &NatsCore,
    key: &str,
    value: Bytes,
    condition: PutIf,
    lease: Option<Duration>,
) -> Result<Revision, PlaneError> {
    let mut headers = HeaderMap::new();
    if let Some(lease) = lease {
        headers.insert(TTL, whole_seconds(lease));
    }
    match condition {
        PutIf::Always => write(core, key, value, headers).await,
        PutIf::Revision(Revision(expected)) => {
            headers.insert(EXPECTED, expected.to_string());
            write(core, key, value, headers).await
        }
        PutIf::Absent => create(core, key, value, headers).await,
    }
}

async fn create(
    core: &NatsCore,
    key: &str,
    value: Bytes,
    mut headers: HeaderMap,
) -> Result<Revision, PlaneError> {
    let mut expected = 0;
    for _ in 0..TRIES {
        headers.insert(EXPECTED, expected.to_string());
        match write(core, key, value.clone(), headers.clone()).await {
            Err(PlaneError::Conflict) => {}
            written => return written,
        }
        expected = match newest(core, key).await? {
            Some(message) if is_end(Some(&message.headers)) => message.sequence,
            Some(_) => return Err(PlaneError::Conflict),
            None => 0,
        };
    }
    Err(unavailable("the key keeps changing"))
}

pub(super) async fn delete(
    core: &NatsCore,
    key: &str,
    revision: Revision,
) -> Result<(), PlaneError> {
    let mut headers = HeaderMap::new();
    headers.insert(OPERATION, "DEL");
    headers.insert(EXPECTED, revision.0.to_string());
    headers.insert(TTL, whole_seconds(MARKER_TTL));
    write(core, key, Bytes::new(), headers).await?;
    Ok(())
}

async fn write(
    core: &NatsCore,
    key: &str,
    value: Bytes,
    headers: HeaderMap,
) -> Result<Revision, PlaneError> {
    let message = OutgoingMessage {
        subject: format!("{}{key}", core.layout.key_prefix()),
        headers: (!headers.is_empty()).then_some(headers),
        payload: value,
    };
    let stored = core.store(message).await?;
    let sequence = stored.acknowledged(&core.layout.registry()).await?;
    Ok(Revision(sequence))
}

/// Rounds up to the server's unit: rounding down would end a lease early.
fn whole_seconds(duration: Duration) -> String {
    let seconds = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
    seconds.max(1).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_are_never_shortened() {
        let check = |millis, seconds| {
            assert_eq!(whole_seconds(Duration::from_millis(millis)), seconds);
        };
        check(0, "1");
        check(1, "1");
        check(1000, "1");
        check(1001, "2");
        check(6000, "6");
    }

    #[test]
    fn ends_are_told_from_values() {
        let with = |name: &'static str, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value);
            is_end(Some(&headers))
        };
        assert!(with(OPERATION, "DEL"));
        assert!(with(OPERATION, "PURGE"));
        assert!(with(MARKER, "MaxAge"));
        assert!(!with(TTL, "6"));
        assert!(!is_end(None));
    }
}
