//! Asking the server: one inbox for all answers, the JetStream API, direct reads, acknowledged writes.
//!
//! The client's own request multiplexer keeps an entry for every answer that never came and fails
//! nothing at a disconnect; ours does both right. While the connection is down nothing is queued:
//! what would be sent after a reconnect, long after its sender gave up, is worse than an error.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_nats::client::PublishErrorKind;
use async_nats::datetime::parse_rfc3339;
use async_nats::jetstream::message::StreamMessage;
use async_nats::jetstream::stream::Info;
use async_nats::{Client, HeaderMap, Message, StatusCode, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::layout::Layout;
use super::link::{LOOK, Link, count};
use crate::PlaneError;
use warmroute_proto::codec::MESSAGE_BYTES_MAX;

/// An acknowledgement or an answer of the API that has not come by now will not come.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Answers awaited at once; beyond, askers wait for their turn.
const IN_FLIGHT_MAX: usize = 4096;

/// Replies that carry an error instead of a payload say so here.
pub(super) const ERROR_HEADER: &str = "Warmroute-Error";

pub(super) struct Core {
    pub(super) client: Client,
    pub(super) link: Arc<Link>,
    pub(super) layout: Layout,
    pub(super) queue_max: usize,
    /// `<inbox>.<unique>.`, before the token of each question.
    inbox: String,
    tokens: AtomicU64,
    in_flight: Arc<Semaphore>,
    tasks: TaskTracker,
    runtime: Handle,
    /// Ends the tasks with the last user of the plane.
    _stop: DropGuard,
}

/// What goes out.
pub(super) struct Outgoing {
    pub(super) subject: String,
    pub(super) headers: Option<HeaderMap>,
    pub(super) payload: Bytes,
}

impl Outgoing {
    pub(super) const fn new(subject: String, payload: Bytes) -> Self {
        Self {
            subject,
            headers: None,
            payload,
        }
    }
}

/// Why the JetStream API did not do it.
#[derive(Debug)]
pub(super) enum ApiError {
    Plane(PlaneError),
    Server(Fault),
}

/// The server's own words.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Fault {
    #[serde(default)]
    pub(super) err_code: u64,
    #[serde(default)]
    pub(super) description: String,
}

impl Fault {
    const STREAM_NOT_FOUND: u64 = 10059;
    const NAME_IN_USE: u64 = 10058;
    const WRONG_LAST_SEQUENCE: [u64; 2] = [10071, 10164];
    /// A cluster answers incompletely, is not available, or is asked at a node that does not lead.
    const NO_LEADER: [u64; 3] = [10004, 10008, 10009];

    pub(super) const fn is_stream_missing(&self) -> bool {
        self.err_code == Self::STREAM_NOT_FOUND
    }

    /// A cluster has no leader at this moment: asking again helps.
    pub(super) fn is_passing(&self) -> bool {
        Self::NO_LEADER.contains(&self.err_code)
    }

    pub(super) const fn is_name_in_use(&self) -> bool {
        self.err_code == Self::NAME_IN_USE
    }
}

impl From<ApiError> for PlaneError {
    fn from(error: ApiError) -> Self {
        match error {
            ApiError::Plane(error) => error,
            ApiError::Server(Fault {
                err_code,
                description,
            }) => Self::Unavailable(format!("{description} ({err_code})")),
        }
    }
}

pub(super) fn unavailable(why: impl ToString) -> PlaneError {
    PlaneError::Unavailable(why.to_string())
}

impl Core {
    pub(super) async fn start(
        client: Client,
        link: Arc<Link>,
        layout: Layout,
        queue_max: usize,
    ) -> Result<Arc<Self>, PlaneError> {
        link.begin(client.statistics());
        let inbox = format!("{}.", client.new_inbox());
        let answers = client
            .subscribe(format!("{inbox}*"))
            .await
            .map_err(unavailable)?;
        let stop = CancellationToken::new();
        let core = Self {
            tasks: TaskTracker::new(),
            runtime: Handle::current(),
            client: client.clone(),
            link: Arc::clone(&link),
            layout,
            queue_max,
            tokens: AtomicU64::new(0),
            in_flight: Arc::new(Semaphore::new(IN_FLIGHT_MAX)),
            _stop: stop.clone().drop_guard(),
            inbox,
        };
        let sort = sort_answers(answers, core.inbox.len(), Arc::clone(&link));
        core.spawn(stop.clone().run_until_cancelled_owned(sort));
        core.spawn(stop.run_until_cancelled_owned(look(client, link)));
        Ok(Arc::new(core))
    }

    /// Runs something short or cancelled with the plane. Works where there is no runtime around, as
    /// in a destructor.
    pub(super) fn spawn(&self, task: impl Future<Output: Send> + Send + 'static) {
        self.tasks.spawn_on(
            async {
                drop(task.await);
            },
            &self.runtime,
        );
    }

    pub(super) fn check_up(&self) -> Result<(), PlaneError> {
        if self.link.is_up() {
            return Ok(());
        }
        Err(unavailable("not connected"))
    }

    /// The most that one message may carry.
    pub(super) fn payload_max(&self) -> usize {
        self.client.max_payload().min(MESSAGE_BYTES_MAX)
    }

    pub(super) fn check_size(&self, payload: &Bytes) -> Result<(), PlaneError> {
        let max = self.payload_max();
        if payload.len() > max {
            let bytes = payload.len();
            return Err(PlaneError::TooLarge { bytes, max });
        }
        Ok(())
    }

    /// Sends without waiting for anything.
    pub(super) async fn send(
        &self,
        message: Outgoing,
        reply: Option<String>,
    ) -> Result<(), PlaneError> {
        self.check_size(&message.payload)?;
        let bytes = message.payload.len();
        let Outgoing {
            subject,
            headers,
            payload,
        } = message;
        let client = &self.client;
        let sent = match (reply, headers) {
            (None, None) => client.publish(subject, payload).await,
            (None, Some(headers)) => client.publish_with_headers(subject, headers, payload).await,
            (Some(reply), None) => client.publish_with_reply(subject, reply, payload).await,
            (Some(reply), Some(headers)) => {
                client
                    .publish_with_reply_and_headers(subject, reply, headers, payload)
                    .await
            }
        };
        sent.map_err(|error| match error.kind() {
            PublishErrorKind::MaxPayloadExceeded => PlaneError::TooLarge {
                bytes,
                max: self.payload_max(),
            },
            PublishErrorKind::InvalidSubject | PublishErrorKind::Send => unavailable(error),
        })
    }

    /// Sends something that is answered. When this returns, its place behind earlier messages is
    /// fixed; the time runs from now on, whenever the answer is asked for.
    pub(super) async fn ask(
        &self,
        message: Outgoing,
        patience: Duration,
    ) -> Result<Awaited, PlaneError> {
        self.check_up()?;
        self.check_size(&message.payload)?;
        let deadline = Instant::now() + patience;
        let late = |_| unavailable("the connection does not keep up");
        let permit = Arc::clone(&self.in_flight).acquire_owned();
        let permit = timeout_at(deadline, permit).await.map_err(late)?;
        let permit = permit.map_err(unavailable)?;
        let token = self.tokens.fetch_add(1, Ordering::Relaxed);
        let awaited = Awaited {
            answer: self.link.await_answer(token, permit),
            link: Arc::clone(&self.link),
            token,
            deadline,
        };
        let reply = format!("{}{token}", self.inbox);
        let sent = timeout_at(deadline, self.send(message, Some(reply))).await;
        sent.map_err(late)??;
        Ok(awaited)
    }

    /// One call of the JetStream API.
    pub(super) async fn api<T: DeserializeOwned>(
        &self,
        subject: &str,
        body: &serde_json::Value,
    ) -> Result<T, ApiError> {
        decode(&self.api_answer(subject, body).await?)
    }

    async fn api_answer(&self, subject: &str, body: &serde_json::Value) -> Result<Bytes, ApiError> {
        let payload = if body.is_null() {
            Bytes::new()
        } else {
            Bytes::from(body.to_string())
        };
        let message = Outgoing::new(format!("$JS.API.{subject}"), payload);
        let answer = async { self.ask(message, ANSWER_TIMEOUT).await?.answer().await };
        let answer = answer.await.map_err(ApiError::Plane)?;
        Ok(answer.payload)
    }

    pub(super) async fn stream_info(&self, stream: &str) -> Result<Info, ApiError> {
        Ok(self.stream_info_and_time(stream).await?.0)
    }

    /// The stream's leader answers, and says what its clock shows, in nanoseconds since the Unix epoch;
    /// 0 if it does not.
    pub(super) async fn stream_info_and_time(&self, stream: &str) -> Result<(Info, u64), ApiError> {
        #[derive(Deserialize)]
        struct Asked {
            #[serde(default)]
            ts: String,
        }
        let subject = format!("STREAM.INFO.{stream}");
        let answer = self.api_answer(&subject, &serde_json::Value::Null).await?;
        let Asked { ts } = decode(&answer)?;
        let time = parse_rfc3339(&ts).map_or(0, |time| time.unix_timestamp_nanos());
        Ok((decode(&answer)?, u64::try_from(time).unwrap_or(0)))
    }

    /// The newest message on a subject, from whichever copy of the stream answers.
    pub(super) async fn newest(
        &self,
        stream: &str,
        subject: &str,
    ) -> Result<Option<StreamMessage>, PlaneError> {
        let api = format!("$JS.API.DIRECT.GET.{stream}.{subject}");
        self.direct(Outgoing::new(api, Bytes::new())).await
    }

    pub(super) async fn message_at(
        &self,
        stream: &str,
        sequence: u64,
    ) -> Result<Option<StreamMessage>, PlaneError> {
        let api = format!("$JS.API.DIRECT.GET.{stream}");
        let body = serde_json::json!({ "seq": sequence }).to_string();
        self.direct(Outgoing::new(api, Bytes::from(body))).await
    }

    async fn direct(&self, question: Outgoing) -> Result<Option<StreamMessage>, PlaneError> {
        let answer = self.ask(question, ANSWER_TIMEOUT).await?.answer().await?;
        match answer.status {
            None | Some(StatusCode::OK) => StreamMessage::try_from(answer)
                .map(Some)
                .map_err(unavailable),
            Some(StatusCode::NOT_FOUND) => Ok(None),
            Some(status) => Err(unavailable(format!(
                "read refused: {status} {}",
                answer.description.unwrap_or_default()
            ))),
        }
    }

    /// Writes to a stream.
    pub(super) async fn store(&self, message: Outgoing) -> Result<Stored, PlaneError> {
        let awaited = self.ask(message, ANSWER_TIMEOUT).await?;
        Ok(Stored { awaited })
    }

    /// Everything sent before this has reached the server.
    pub(super) async fn round_trip(&self) -> Result<(), PlaneError> {
        self.stream_info(&self.layout.log()).await?;
        Ok(())
    }
}

/// An answer to come.
pub(super) struct Awaited {
    link: Arc<Link>,
    token: u64,
    answer: oneshot::Receiver<Message>,
    deadline: Instant,
}

impl Awaited {
    pub(super) async fn answer(mut self) -> Result<Message, PlaneError> {
        match timeout_at(self.deadline, &mut self.answer).await {
            Ok(Ok(message)) if message.status == Some(StatusCode::NO_RESPONDERS) => {
                Err(unavailable("nobody serves this subject"))
            }
            Ok(Ok(message)) => Ok(message),
            Ok(Err(_)) => Err(unavailable("the connection was lost")),
            Err(_) => {
                count(&self.link.counters.answers_late);
                Err(unavailable("no answer in time"))
            }
        }
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        self.link.forget(self.token);
    }
}

/// A write whose acknowledgement is to come.
pub(super) struct Stored {
    awaited: Awaited,
}

#[derive(Deserialize)]
struct Ack {
    stream: String,
    seq: u64,
}

impl Stored {
    /// The sequence that the write got. [`PlaneError::Conflict`] if its condition did not hold.
    pub(super) async fn acknowledged(self, stream: &str) -> Result<u64, PlaneError> {
        let answer = self.awaited.answer().await?;
        match decode::<Ack>(&answer.payload) {
            Ok(ack) if ack.stream == stream => Ok(ack.seq),
            Ok(ack) => Err(unavailable(format!("stored by {} instead", ack.stream))),
            Err(ApiError::Server(fault))
                if Fault::WRONG_LAST_SEQUENCE.contains(&fault.err_code) =>
            {
                Err(PlaneError::Conflict)
            }
            Err(error) => Err(error.into()),
        }
    }
}

fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, ApiError> {
    #[derive(Deserialize)]
    struct Failed {
        error: Fault,
    }
    if let Ok(Failed { error }) = serde_json::from_slice(payload) {
        return Err(ApiError::Server(error));
    }
    serde_json::from_slice(payload).map_err(|error| {
        let why = format!("an answer that makes no sense: {error}");
        ApiError::Plane(PlaneError::Unavailable(why))
    })
}

async fn sort_answers(mut answers: Subscriber, prefix: usize, link: Arc<Link>) {
    while let Some(message) = answers.next().await {
        let token = message.subject.get(prefix..).and_then(|t| t.parse().ok());
        if let Some(token) = token {
            link.answered(token, message);
        }
    }
}

async fn look(client: Client, link: Arc<Link>) {
    let mut ticks = tokio::time::interval(LOOK);
    loop {
        ticks.tick().await;
        link.look(client.connection_state());
    }
}
