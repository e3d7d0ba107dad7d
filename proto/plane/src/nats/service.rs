//! Request/reply and broadcast over core NATS.
//!
//! Servers of one subject form one queue group. A request without an answer, because it was dropped
//! or its answer is too large, is answered with an error header, so that the requester need not
//! wait.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{HeaderMap, Message, Subject, Subscriber};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use tokio::sync::oneshot;

use super::config::INBOX;
use super::core::{ERROR_HEADER, NatsCore, OutgoingMessage, unavailable};
use super::supervision::next_supervised;
use crate::{Broadcast, PlaneError, PlaneStream, Reply, ServiceRequest};

const QUEUE_GROUP: &str = "wr";

const DROPPED: &str = "dropped";
const TOO_LARGE: &str = "too-large";

pub(super) async fn request(
    core: &NatsCore,
    subject: String,
    payload: Bytes,
    deadline: Duration,
) -> Result<Bytes, PlaneError> {
    let answer = request_if_served(core, subject, payload, deadline).await?;
    answer.ok_or_else(|| unavailable("no server for this subject"))
}

/// `None` if the server knows no process that serves the subject.
pub(super) async fn request_if_served(
    core: &NatsCore,
    subject: String,
    payload: Bytes,
    deadline: Duration,
) -> Result<Option<Bytes>, PlaneError> {
    let awaited = core
        .ask(OutgoingMessage::new(subject, payload), deadline)
        .await?;
    let Some(answer) = awaited.answer_if_served().await? else {
        return Ok(None);
    };
    let error = answer.headers.as_ref().and_then(|h| h.get(ERROR_HEADER));
    match error {
        Some(error) => Err(parse_error(error.as_str())),
        None => Ok(Some(answer.payload)),
    }
}

fn parse_error(text: &str) -> PlaneError {
    let mut words = text.split(' ');
    let number = |word: Option<&str>| word.and_then(|word| word.parse().ok());
    match (words.next(), number(words.next()), number(words.next())) {
        (Some(TOO_LARGE), Some(bytes), Some(max)) => PlaneError::TooLarge { bytes, max },
        _ => unavailable("the request was dropped"),
    }
}

pub(super) async fn serve(
    core: Arc<NatsCore>,
    subject: String,
) -> Result<PlaneStream<ServiceRequest>, PlaneError> {
    core.check_up()?;
    let requests = Subscription::open(&core, subject, SubscriptionMode::QueueGroup).await?;
    core.round_trip().await?;
    let served = Served {
        core,
        requests: Some(requests),
    };
    Ok(Box::pin(stream::unfold(served, |mut served| async move {
        let request = served.next().await?;
        Some((request, served))
    })))
}

/// Whether all subscribers of a subject receive a message, or one of the group.
#[derive(Clone, Copy)]
enum SubscriptionMode {
    Broadcast,
    QueueGroup,
}

impl SubscriptionMode {
    async fn subscribe(self, core: &NatsCore, subject: String) -> Result<Subscriber, PlaneError> {
        let subscribed = match self {
            Self::Broadcast => core.client.subscribe(subject).await,
            Self::QueueGroup => {
                let group = QUEUE_GROUP.to_owned();
                core.client.queue_subscribe(subject, group).await
            }
        };
        subscribed.map_err(unavailable)
    }
}

/// A subscription that is made again after a silence.
struct Subscription {
    subject: String,
    mode: SubscriptionMode,
    subscriber: Subscriber,
}

impl Subscription {
    async fn open(
        core: &NatsCore,
        subject: String,
        mode: SubscriptionMode,
    ) -> Result<Self, PlaneError> {
        Ok(Self {
            subscriber: mode.subscribe(core, subject.clone()).await?,
            subject,
            mode,
        })
    }

    /// The next message. `None` at the end of the connection.
    async fn next(&mut self, core: &NatsCore) -> Option<Message> {
        loop {
            let (subject, mode) = (&self.subject, self.mode);
            let again = || async {
                if !core.link.is_up() {
                    return Ok(None);
                }
                mode.subscribe(core, subject.clone()).await.map(Some)
            };
            let message = next_supervised(&mut self.subscriber, again).await?;
            if is_to(&self.subject, &message.subject) {
                return Some(message);
            }
        }
    }
}

/// Whether a message of this subject was sent to a subscription. The server also delivers what a
/// stream keeps, with the subject that it was stored under, to any subject that a consumer names:
/// a user who may create consumers could so reach subjects on which it may not publish.
fn is_to(subscribed: &str, subject: &str) -> bool {
    let mut tokens = subject.split('.');
    for wanted in subscribed.split('.') {
        match (wanted, tokens.next()) {
            (">", Some(_)) => return true,
            ("*", Some(_)) => {}
            (wanted, found) if found == Some(wanted) => {}
            (_, Some(_) | None) => return false,
        }
    }
    tokens.next().is_none()
}

struct Served {
    core: Arc<NatsCore>,
    requests: Option<Subscription>,
}

impl Served {
    async fn next(&mut self) -> Option<ServiceRequest> {
        loop {
            let message = self.requests.as_mut()?.next(&self.core).await?;
            let Message { reply, payload, .. } = message;
            let Some(to) = reply.and_then(inbox) else {
                continue;
            };
            let (reply, answer) = oneshot::channel();
            let core = Arc::clone(&self.core);
            self.core.spawn(answer_with(core, to, answer));
            let reply = Reply::new(reply);
            return Some(ServiceRequest { payload, reply });
        }
    }
}

/// Refuses requests that arrive in the last moment, so that the requester can ask another server.
impl Drop for Served {
    fn drop(&mut self) {
        let Some(requests) = self.requests.take() else {
            return;
        };
        let mut requests = requests.subscriber;
        let core = Arc::clone(&self.core);
        self.core.spawn(async move {
            if requests.drain().await.is_err() {
                return;
            }
            while let Some(message) = requests.next().await {
                if let Some(to) = message.reply.and_then(inbox) {
                    refuse(&core, to, DROPPED.to_owned()).await;
                }
            }
        });
    }
}

/// Where a request is answered, if that is an inbox. On another subject an answer would be a message
/// of this user, by whose permissions the requester could act: an empty one deletes a stream.
fn inbox(reply: Subject) -> Option<String> {
    let reply = reply.into_string();
    reply.starts_with(INBOX).then_some(reply)
}

async fn answer_with(core: Arc<NatsCore>, to: String, answer: oneshot::Receiver<Bytes>) {
    let Ok(payload) = answer.await else {
        return refuse(&core, to, DROPPED.to_owned()).await;
    };
    let sent = core
        .send(OutgoingMessage::new(to.clone(), payload), None)
        .await;
    if let Err(PlaneError::TooLarge { bytes, max }) = sent {
        refuse(&core, to, format!("{TOO_LARGE} {bytes} {max}")).await;
    }
}

/// Sends a refusal. If it is lost, the requester times out.
async fn refuse(core: &NatsCore, to: String, why: String) {
    let mut headers = HeaderMap::new();
    headers.insert(ERROR_HEADER, why);
    let refusal = OutgoingMessage {
        subject: to,
        headers: Some(headers),
        payload: Bytes::new(),
    };
    drop(core.send(refusal, None).await);
}

pub(super) async fn publish(
    core: &NatsCore,
    subject: String,
    payload: Bytes,
) -> Result<(), PlaneError> {
    core.check_up()?;
    core.send(OutgoingMessage::new(subject, payload), None)
        .await
}

pub(super) async fn subscribe(
    core: Arc<NatsCore>,
    subject: String,
) -> Result<PlaneStream<Broadcast>, PlaneError> {
    core.check_up()?;
    let messages = Subscription::open(&core, subject, SubscriptionMode::Broadcast).await?;
    core.round_trip().await?;
    // The stream keeps the plane alive.
    let start = (core, messages);
    Ok(Box::pin(stream::unfold(
        start,
        |(core, mut messages)| async move {
            let Message {
                subject, payload, ..
            } = messages.next(&core).await?;
            let subject = subject.into_string();
            Some((Broadcast { subject, payload }, (core, messages)))
        },
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_other_subjects_are_not_taken() {
        for (subscribed, subject, is_taken) in [
            ("wr.n.load", "wr.n.load", true),
            ("wr.n.load", "wr.n.load.tenants", false),
            ("wr.n.load", "$O.wr_n.C.x", false),
            ("wr.n.hb.>", "wr.n.hb.w.0", true),
            ("wr.n.hb.>", "wr.n.hb", false),
            ("wr.n.hb.>", "$KV.wr_n.wr.n.hb.w.0", false),
            ("wr.n.hb.*", "wr.n.hb.w", true),
            ("wr.n.hb.*", "wr.n.hb.w.0", false),
        ] {
            assert_eq!(
                is_to(subscribed, subject),
                is_taken,
                "{subscribed} {subject}"
            );
        }
    }

    #[test]
    fn refusals_are_understood() {
        let too_large = PlaneError::TooLarge { bytes: 9, max: 7 };
        assert_eq!(parse_error("too-large 9 7"), too_large);
        for other in ["dropped", "", "too-large", "too-large x 7", "later"] {
            assert!(matches!(parse_error(other), PlaneError::Unavailable(_)));
        }
    }
}
