//! A short-lived consumer of a stream. Its user keeps the position.
//!
//! Ephemeral, without acknowledgements, in the memory of the server. After an error, silence beyond
//! two heartbeats or a missing delivery it is [`Pulled::Broken`], and its user opens another one at
//! its own position. The client's own ordered consumer does not do: it is silent for seconds after
//! a reconnect, and continues silently in another stream of that name.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{HeaderMap, Message, StatusCode, Subscriber};
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

use super::core::{JetStreamError, NatsCore, OutgoingMessage, unavailable};
use crate::PlaneError;

const HEARTBEAT: Duration = Duration::from_secs(2);

/// Two heartbeats and a margin.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// A request for messages expires after this and is repeated.
const EXPIRES: Duration = Duration::from_secs(30);

/// The server deletes a consumer without requests after this.
const INACTIVE: Duration = Duration::from_secs(60);

/// Messages of a request. The server sends them as fast as it reads its store, and closes a connection
/// that has 64 MiB unsent: half as many again as a request has may be on their way, of 64 KiB each.
/// A bound in bytes would not do: at it the server forgets a subject of [`Start::LastPerSubject`].
pub(super) const BATCH_MAX: usize = 500;

/// First message of a consumer.
#[derive(Clone, Copy)]
pub(super) enum Start {
    First,
    At(u64),
    /// The newest message of every subject, then new ones.
    LastPerSubject,
}

pub(super) struct Pull {
    core: Arc<NatsCore>,
    stream: String,
    name: String,
    inbox: String,
    deliveries: Subscriber,
    batch: usize,
    /// Requested and not delivered yet.
    outstanding: usize,
    count: DeliveryCount,
    silent_at: Instant,
    /// Messages for this consumer when it was created.
    pub(super) pending_at_start: u64,
}

pub(super) enum Pulled {
    Message(Delivery),
    /// The server is alive and has no message.
    Idle,
    Broken,
}

pub(super) struct Delivery {
    pub(super) subject: String,
    pub(super) headers: Option<HeaderMap>,
    pub(super) payload: Bytes,
    pub(super) sequence: u64,
    pub(super) stored_unix_ns: u64,
    /// Messages after this one.
    pub(super) pending: u64,
}

impl Pull {
    pub(super) async fn open(
        core: &Arc<NatsCore>,
        stream: String,
        filter: Option<&str>,
        start: Start,
        batch_max: usize,
    ) -> Result<Self, JetStreamError> {
        #[derive(Deserialize)]
        struct Created {
            #[serde(default)]
            num_pending: u64,
        }
        core.check_up().map_err(JetStreamError::Plane)?;
        let inbox = core.client.new_inbox();
        let subscribed = core.client.subscribe(inbox.clone()).await;
        let deliveries = subscribed.map_err(|error| JetStreamError::Plane(unavailable(error)))?;
        let name = unique(&inbox);
        let mut api = format!("CONSUMER.CREATE.{stream}.{name}");
        if let Some(filter) = filter {
            api = format!("{api}.{filter}");
        }
        let body = json!({
            "stream_name": stream,
            "action": "create",
            "config": config(&name, filter, start),
        });
        let created: Created = core.api(&api, &body).await?;
        Ok(Self {
            core: Arc::clone(core),
            stream,
            name,
            inbox,
            deliveries,
            batch: batch_max.min(core.queue_max / 2).max(1),
            outstanding: 0,
            count: DeliveryCount(0),
            silent_at: Instant::now() + SILENCE_MAX,
            pending_at_start: created.num_pending,
        })
    }

    /// Cancel-safe.
    pub(super) async fn next(&mut self) -> Pulled {
        loop {
            if self.outstanding <= self.batch / 2 && self.ask().await.is_err() {
                return Pulled::Broken;
            }
            let message = tokio::select! {
                // A message that waits refutes the silence, which a busy reader only assumed.
                biased;
                message = self.deliveries.next() => message,
                () = sleep_until(self.silent_at) => None,
            };
            let Some(message) = message else {
                return Pulled::Broken;
            };
            if let Some(pulled) = self.take(message) {
                return pulled;
            }
        }
    }

    /// A message that is already here.
    pub(super) fn next_ready(&mut self) -> Option<Pulled> {
        let message = self.deliveries.next().now_or_never()??;
        Some(self.take(message).unwrap_or(Pulled::Idle))
    }

    async fn ask(&mut self) -> Result<(), PlaneError> {
        let body = json!({
            "batch": self.batch,
            "expires": nanos(EXPIRES),
            "idle_heartbeat": nanos(HEARTBEAT),
        });
        let (stream, name) = (&self.stream, &self.name);
        let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}");
        let request = OutgoingMessage::new(subject, Bytes::from(body.to_string()));
        self.core.send(request, Some(self.inbox.clone())).await?;
        self.outstanding += self.batch;
        Ok(())
    }

    /// `None` for messages that the user need not know.
    fn take(&mut self, message: Message) -> Option<Pulled> {
        self.silent_at = Instant::now() + SILENCE_MAX;
        match message.status {
            None | Some(StatusCode::OK) => {
                self.outstanding = self.outstanding.saturating_sub(1);
                Some(self.deliver(message))
            }
            Some(StatusCode::IDLE_HEARTBEAT) => Some(Pulled::Idle),
            // A request expired; what it did not deliver is requested again.
            Some(StatusCode::NOT_FOUND | StatusCode::TIMEOUT) => {
                let rest = message.headers.as_ref();
                let rest = rest.and_then(|headers| headers.get("Nats-Pending-Messages"));
                let rest = rest.and_then(|rest| rest.as_str().parse().ok());
                let rest = rest.unwrap_or(self.batch);
                self.outstanding = self.outstanding.saturating_sub(rest);
                None
            }
            Some(_) => Some(Pulled::Broken),
        }
    }

    fn deliver(&mut self, message: Message) -> Pulled {
        let origin = message.reply.as_deref().and_then(Origin::parse);
        let Some(origin) = origin.filter(|origin| self.count.continues_with(origin)) else {
            return Pulled::Broken;
        };
        Pulled::Message(Delivery {
            subject: message.subject.into_string(),
            headers: message.headers,
            payload: message.payload,
            sequence: origin.sequence,
            stored_unix_ns: origin.stored_unix_ns,
            pending: origin.pending,
        })
    }
}

/// Deletes the consumer, which the server would do a minute later.
impl Drop for Pull {
    fn drop(&mut self) {
        if self.core.link.is_up() {
            let (stream, name) = (&self.stream, &self.name);
            let subject = format!("$JS.API.CONSUMER.DELETE.{stream}.{name}");
            let client = self.core.client.clone();
            self.core
                .spawn(async move { client.publish(subject, Bytes::new()).await });
        }
    }
}

fn config(name: &str, filter: Option<&str>, start: Start) -> Value {
    let mut config = json!({
        "name": name,
        "ack_policy": "none",
        "replay_policy": "instant",
        "inactive_threshold": nanos(INACTIVE),
        "num_replicas": 1,
        "mem_storage": true,
    });
    if let Some(filter) = filter {
        config["filter_subject"] = filter.into();
    }
    match start {
        Start::First => config["deliver_policy"] = "all".into(),
        Start::LastPerSubject => config["deliver_policy"] = "last_per_subject".into(),
        Start::At(sequence) => {
            config["deliver_policy"] = "by_start_sequence".into();
            config["opt_start_seq"] = sequence.into();
        }
    }
    config
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The random end of an inbox.
pub(super) fn unique(inbox: &str) -> String {
    inbox.rsplit('.').next().unwrap_or(inbox).to_owned()
}

/// Metadata in a delivery's reply subject:
/// `$JS.ACK.<stream>.<consumer>.<tries>.<sequence>.<delivery>.<time>.<pending>`, or with
/// `<domain>.<account>` before the stream and perhaps a token at the end.
#[derive(Debug, PartialEq, Eq)]
struct Origin {
    sequence: u64,
    delivery: u64,
    stored_unix_ns: u64,
    pending: u64,
}

/// The consumer's own count of deliveries. A gap in it is a message that our queue dropped; a gap
/// in the stream's sequence alone is a message that the log dropped, which its reader detects.
struct DeliveryCount(u64);

impl DeliveryCount {
    const fn continues_with(&mut self, origin: &Origin) -> bool {
        self.0 += 1;
        origin.delivery == self.0
    }
}

impl Origin {
    fn parse(reply: &str) -> Option<Self> {
        let tokens: Vec<&str> = reply.strip_prefix("$JS.ACK.")?.split('.').collect();
        let numbers = match tokens.len() {
            7 => tokens.get(3..7)?,
            9.. => tokens.get(5..9)?,
            _ => return None,
        };
        let [sequence, delivery, stored_unix_ns, pending] = numbers else {
            return None;
        };
        Some(Self {
            sequence: sequence.parse().ok()?,
            delivery: delivery.parse().ok()?,
            stored_unix_ns: stored_unix_ns.parse().ok()?,
            pending: pending.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_origin_of_a_delivery_is_read() {
        let expected = Origin {
            sequence: 1451,
            delivery: 501,
            stored_unix_ns: 1_700_000_000_000_000_001,
            pending: 12,
        };
        let check = |reply: &str| assert_eq!(Origin::parse(reply).as_ref(), Some(&expected));
        check("$JS.ACK.wr_t.c.1.1451.501.1700000000000000001.12");
        check("$JS.ACK.hub.hash.wr_t.c.1.1451.501.1700000000000000001.12");
        check("$JS.ACK._.hash.wr_t.c.1.1451.501.1700000000000000001.12.token");
        let mut count = DeliveryCount(500);
        assert!(
            count.continues_with(&expected),
            "whatever the stream's sequence"
        );
        assert!(!count.continues_with(&expected), "twice");
        let mut count = DeliveryCount(499);
        assert!(!count.continues_with(&expected), "one is missing");
        for foreign in ["", "$JS.ACK.", "$JS.ACK.a.b.1.x.1.1.1", "$JS.ACK.a.b.1.1.1"] {
            assert_eq!(Origin::parse(foreign), None, "{foreign}");
        }
    }
}
