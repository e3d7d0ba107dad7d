//! Requests to the server: one inbox for all answers, the JetStream API, direct reads, acknowledged
//! writes.
//!
//! The client's own request multiplexer keeps an entry for every answer that never arrives and
//! fails no request at a disconnect; this one does both. While the connection is down nothing is
//! queued: a message that is sent long after its sender gave up is worse than an error.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
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
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::layout::Layout;
use super::link::{NatsLink, POLL, count};
use super::supervision::{INBOX_PROBE, InboxProbe};
use crate::{PlaneError, after_arrivals};
use warmroute_proto::codec::MESSAGE_BYTES_MAX;

/// Time-out of acknowledgements and of answers of the API.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Bound on pending answers; further requests wait.
const IN_FLIGHT_MAX: usize = 4096;

/// Header of replies with an error instead of a payload.
pub(super) const ERROR_HEADER: &str = "Warmroute-Error";

/// How a message shows that those sent before it have reached the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoundTrip {
    /// The log's stream is asked for.
    Stream,
    /// A request that no process serves is refused.
    Ping,
}

pub(super) struct NatsCore {
    pub(super) client: Client,
    pub(super) link: Arc<NatsLink>,
    pub(super) layout: Layout,
    round_trip: RoundTrip,
    pub(super) queue_max: usize,
    /// `<inbox>.<unique>.`, before the token of each request.
    inbox: String,
    tokens: AtomicU64,
    in_flight: Arc<Semaphore>,
    tasks: TaskTracker,
    runtime: Handle,
    pub(super) stop: CancellationToken,
    /// Stops the tasks with the last user of the plane.
    _stop: DropGuard,
}

/// A message to send.
pub(super) struct OutgoingMessage {
    pub(super) subject: String,
    pub(super) headers: Option<HeaderMap>,
    pub(super) payload: Bytes,
}

impl OutgoingMessage {
    pub(super) const fn new(subject: String, payload: Bytes) -> Self {
        Self {
            subject,
            headers: None,
            payload,
        }
    }
}

/// Why a call of the JetStream API failed.
#[derive(Debug)]
pub(super) enum JetStreamError {
    Plane(PlaneError),
    Server(ServerFault),
}

/// An error of the JetStream API.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct ServerFault {
    #[serde(default)]
    pub(super) err_code: u64,
    #[serde(default)]
    pub(super) description: String,
}

impl ServerFault {
    const STREAM_NOT_FOUND: u64 = 10059;
    const NAME_IN_USE: u64 = 10058;
    const NO_STORAGE: u64 = 10047;
    const WRONG_LAST_SEQUENCE: [u64; 2] = [10071, 10164];
    /// Incomplete results, cluster not available, node is not the leader.
    const NO_LEADER: [u64; 3] = [10004, 10008, 10009];

    pub(super) const fn is_stream_missing(&self) -> bool {
        self.err_code == Self::STREAM_NOT_FOUND
    }

    /// Whether the cluster only lacks a leader: a retry helps.
    pub(super) fn is_transient(&self) -> bool {
        Self::NO_LEADER.contains(&self.err_code)
    }

    /// Whether the server cannot reserve a stream's bytes.
    pub(super) const fn is_without_room(&self) -> bool {
        self.err_code == Self::NO_STORAGE
    }

    pub(super) const fn is_name_in_use(&self) -> bool {
        self.err_code == Self::NAME_IN_USE
    }
}

impl From<JetStreamError> for PlaneError {
    fn from(error: JetStreamError) -> Self {
        match error {
            JetStreamError::Plane(error) => error,
            JetStreamError::Server(ServerFault {
                err_code,
                description,
            }) => Self::Unavailable(format!("{description} ({err_code})")),
        }
    }
}

pub(super) fn unavailable(why: impl ToString) -> PlaneError {
    PlaneError::Unavailable(why.to_string())
}

impl NatsCore {
    pub(super) async fn start(
        client: Client,
        link: Arc<NatsLink>,
        layout: Layout,
        round_trip: RoundTrip,
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
            round_trip,
            queue_max,
            tokens: AtomicU64::new(0),
            in_flight: Arc::new(Semaphore::new(IN_FLIGHT_MAX)),
            stop: stop.clone(),
            _stop: stop.clone().drop_guard(),
            inbox,
        };
        let dispatch = dispatch_answers(answers, core.inbox.len(), Arc::clone(&link));
        core.spawn(stop.clone().run_until_cancelled_owned(dispatch));
        let poll = poll_state(client, link);
        core.spawn(stop.clone().run_until_cancelled_owned(poll));
        let core = Arc::new(core);
        let probe = probe_inbox(Arc::downgrade(&core));
        core.spawn(stop.run_until_cancelled_owned(probe));
        Ok(core)
    }

    /// Runs a task that is short or ends with the plane. Works outside a runtime, as in a
    /// destructor.
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

    /// Most bytes of a payload.
    pub(super) fn payload_max(&self) -> usize {
        self.client.max_payload().min(MESSAGE_BYTES_MAX)
    }

    pub(super) fn check_size(&self, payload: &Bytes) -> Result<(), PlaneError> {
        let max = self.payload_max();
        if payload.len() > max {
            return Err(self.too_large(payload.len()));
        }
        Ok(())
    }

    fn too_large(&self, bytes: usize) -> PlaneError {
        let max = self.payload_max();
        if bytes <= MESSAGE_BYTES_MAX {
            self.link.limit_exceeded(bytes, max);
        }
        PlaneError::TooLarge { bytes, max }
    }

    /// Sends a message that has no answer.
    pub(super) async fn send(
        &self,
        message: OutgoingMessage,
        reply: Option<String>,
    ) -> Result<(), PlaneError> {
        self.check_size(&message.payload)?;
        let bytes = message.payload.len();
        let OutgoingMessage {
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
            PublishErrorKind::MaxPayloadExceeded => self.too_large(bytes),
            PublishErrorKind::InvalidSubject | PublishErrorKind::Send => unavailable(error),
        })
    }

    /// Sends a message that has an answer. When this returns, its order after earlier messages is
    /// fixed. The time-out begins now, not when the answer is awaited.
    pub(super) async fn ask(
        &self,
        message: OutgoingMessage,
        time_out: Duration,
    ) -> Result<PendingReply, PlaneError> {
        self.check_up()?;
        self.check_size(&message.payload)?;
        let deadline = Instant::now() + time_out;
        let late = |_| unavailable("the connection does not keep up");
        let permit = Arc::clone(&self.in_flight).acquire_owned();
        let permit = timeout_at(deadline, permit).await.map_err(late)?;
        let permit = permit.map_err(unavailable)?;
        let token = self.tokens.fetch_add(1, Ordering::Relaxed);
        let awaited = PendingReply {
            answer: self.link.await_answer(token, permit),
            link: Arc::clone(&self.link),
            token,
            deadline,
        };
        let reply = [&*self.inbox, &token.to_string()].concat();
        let sent = timeout_at(deadline, self.send(message, Some(reply))).await;
        sent.map_err(late)??;
        Ok(awaited)
    }

    /// One call of the JetStream API.
    pub(super) async fn api<T: DeserializeOwned>(
        &self,
        subject: &str,
        body: &serde_json::Value,
    ) -> Result<T, JetStreamError> {
        decode(&self.api_answer(subject, body).await?)
    }

    async fn api_answer(
        &self,
        subject: &str,
        body: &serde_json::Value,
    ) -> Result<Bytes, JetStreamError> {
        let payload = if body.is_null() {
            Bytes::new()
        } else {
            Bytes::from(body.to_string())
        };
        let message = OutgoingMessage::new(format!("$JS.API.{subject}"), payload);
        let answer = async { self.ask(message, ANSWER_TIMEOUT).await?.answer().await };
        let answer = answer.await.map_err(JetStreamError::Plane)?;
        Ok(answer.payload)
    }

    pub(super) async fn stream_info(&self, stream: &str) -> Result<Info, JetStreamError> {
        Ok(self.stream_info_and_time(stream).await?.0)
    }

    /// Stream info with the clock of the stream's leader, in nanoseconds since the Unix epoch, or 0
    /// if the server does not report it.
    pub(super) async fn stream_info_and_time(
        &self,
        stream: &str,
    ) -> Result<(Info, u64), JetStreamError> {
        #[derive(Deserialize)]
        struct Timed {
            #[serde(default)]
            ts: String,
        }
        let subject = format!("STREAM.INFO.{stream}");
        let answer = self.api_answer(&subject, &serde_json::Value::Null).await?;
        let Timed { ts } = decode(&answer)?;
        let time = parse_rfc3339(&ts).map_or(0, |time| time.unix_timestamp_nanos());
        Ok((decode(&answer)?, u64::try_from(time).unwrap_or(0)))
    }

    /// The newest message on a subject, from any copy of the stream.
    pub(super) async fn newest(
        &self,
        stream: &str,
        subject: &str,
    ) -> Result<Option<StreamMessage>, PlaneError> {
        let api = format!("$JS.API.DIRECT.GET.{stream}.{subject}");
        self.direct(OutgoingMessage::new(api, Bytes::new())).await
    }

    pub(super) async fn message_at(
        &self,
        stream: &str,
        sequence: u64,
    ) -> Result<Option<StreamMessage>, PlaneError> {
        let api = format!("$JS.API.DIRECT.GET.{stream}");
        let body = serde_json::json!({ "seq": sequence }).to_string();
        self.direct(OutgoingMessage::new(api, Bytes::from(body)))
            .await
    }

    async fn direct(&self, question: OutgoingMessage) -> Result<Option<StreamMessage>, PlaneError> {
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

    /// Writes a message to a stream.
    pub(super) async fn store(&self, message: OutgoingMessage) -> Result<PendingWrite, PlaneError> {
        let awaited = self.ask(message, ANSWER_TIMEOUT).await?;
        Ok(PendingWrite { awaited })
    }

    /// Returns once all messages sent before have reached the server.
    pub(super) async fn round_trip(&self) -> Result<(), PlaneError> {
        match self.round_trip {
            RoundTrip::Stream => match self.stream_info(&self.layout.log()).await {
                Ok(_) => Ok(()),
                // An answer, too.
                Err(JetStreamError::Server(fault)) if fault.is_stream_missing() => Ok(()),
                Err(error) => Err(error.into()),
            },
            RoundTrip::Ping => {
                let ping = OutgoingMessage::new(self.layout.ping(), Bytes::new());
                self.ask(ping, ANSWER_TIMEOUT).await?.arrival().await?;
                Ok(())
            }
        }
    }

    /// The subject of [`Self::round_trip`].
    fn probe_subject(&self) -> String {
        match self.round_trip {
            RoundTrip::Stream => format!("$JS.API.STREAM.INFO.{}", self.layout.log()),
            RoundTrip::Ping => self.layout.ping(),
        }
    }
}

/// A pending answer.
pub(super) struct PendingReply {
    link: Arc<NatsLink>,
    token: u64,
    answer: oneshot::Receiver<Message>,
    deadline: Instant,
}

impl PendingReply {
    pub(super) async fn answer(self) -> Result<Message, PlaneError> {
        let answer = self.answer_if_served().await?;
        answer.ok_or_else(|| unavailable("no server for this subject"))
    }

    /// `None` if the server knows no process that serves the subject.
    pub(super) async fn answer_if_served(self) -> Result<Option<Message>, PlaneError> {
        let message = self.arrival().await?;
        let is_served = message.status != Some(StatusCode::NO_RESPONDERS);
        Ok(is_served.then_some(message))
    }

    /// What arrives for the request, also if it is the server's refusal.
    async fn arrival(mut self) -> Result<Message, PlaneError> {
        let answer = tokio::select! {
            biased;
            answer = &mut self.answer => answer,
            () = after_arrivals(self.deadline) => {
                count(&self.link.counters.answers_late);
                return Err(unavailable("no answer in time"));
            }
        };
        answer.map_err(|_| unavailable("the connection was lost"))
    }
}

impl Drop for PendingReply {
    fn drop(&mut self) {
        self.link.forget(self.token);
    }
}

/// A write whose acknowledgement is pending.
pub(super) struct PendingWrite {
    awaited: PendingReply,
}

#[derive(Deserialize)]
struct Ack {
    stream: String,
    seq: u64,
}

impl PendingWrite {
    /// The sequence of the write. [`PlaneError::Conflict`] if its condition did not hold.
    pub(super) async fn acknowledged(self, stream: &str) -> Result<u64, PlaneError> {
        let answer = self.awaited.answer().await?;
        match decode::<Ack>(&answer.payload) {
            Ok(ack) if ack.stream == stream => Ok(ack.seq),
            Ok(ack) => Err(unavailable(format!("stored by {} instead", ack.stream))),
            Err(JetStreamError::Server(fault))
                if ServerFault::WRONG_LAST_SEQUENCE.contains(&fault.err_code) =>
            {
                Err(PlaneError::Conflict)
            }
            Err(error) => Err(error.into()),
        }
    }
}

fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, JetStreamError> {
    #[derive(Deserialize)]
    struct Failed {
        error: ServerFault,
    }
    if let Ok(Failed { error }) = serde_json::from_slice(payload) {
        return Err(JetStreamError::Server(error));
    }
    serde_json::from_slice(payload).map_err(|error| {
        let why = format!("unreadable answer: {error}");
        JetStreamError::Plane(PlaneError::Unavailable(why))
    })
}

async fn dispatch_answers(mut answers: Subscriber, prefix: usize, link: Arc<NatsLink>) {
    while let Some(message) = answers.next().await {
        let token = message.subject.get(prefix..).and_then(|t| t.parse().ok());
        if let Some(token) = token {
            link.answered(token, message);
        }
    }
}

async fn poll_state(client: Client, link: Arc<NatsLink>) {
    let mut ticks = tokio::time::interval(POLL);
    loop {
        ticks.tick().await;
        if link.poll(client.connection_state()) {
            count(&link.counters.forced_reconnects);
            tracing::info!("reconnecting to make missing subscriptions again");
            if client.force_reconnect().await.is_err() {
                return;
            }
        }
    }
}

/// Detects an inbox that receives nothing: the client drops error events under load.
async fn probe_inbox(core: Weak<NatsCore>) {
    let mut probe = InboxProbe::default();
    loop {
        sleep(INBOX_PROBE).await;
        let Some(core) = core.upgrade() else {
            return;
        };
        let link = &core.link;
        if link.is_up() && probe.is_due(link.inbox_messages()) {
            // An error is an answer, too; only the inbox counts.
            drop(core.round_trip().await);
        }
        let request = core.probe_subject();
        let received = link.inbox_messages();
        if link.is_publish_refused(&request) {
            probe.end_refused(received);
            link.set_unanswered(false);
        } else if let Some(is_unanswered) = probe.end(received, link.is_up()) {
            link.set_unanswered(is_unanswered);
        }
    }
}
