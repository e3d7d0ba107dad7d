//! Following the log: a supervised consumer at our own position, and the proof that it is our log.
//!
//! A consumer cannot be trusted across anything: a stream that was deleted and made again, rolled
//! back or refilled continues without an error. So after every opening, every reconnect and every
//! [`CHECK`] the tail compares the log's identity, its last position, and when the message at its own
//! position was stored. If one of them shows another log the tail ends; if the server only cannot be
//! asked, it tries again.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::core::{ApiError, Core};
use super::layout;
use super::link::count;
use super::pull::{Delivery, Pull, Pulled, Start};
use crate::{LogMessage, LogStatus, LogTail, PlaneError};
use warmroute_proto::{LogPosition, StreamIdentity};

const CHECK: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_millis(200);

struct Tail {
    core: Arc<Core>,
    identity: StreamIdentity,
    position: LogPosition,
    /// When the message at `position` was stored, once we know.
    stored_unix_ns: Option<u64>,
    batch_max: usize,
    pull: Option<Pull>,
    check_at: Instant,
    epochs: watch::Receiver<u64>,
}

enum Verdict {
    Same,
    Another,
    Unknown,
}

pub(super) async fn tail(
    core: Arc<Core>,
    after: LogPosition,
    batch_max: usize,
) -> Result<LogTail, PlaneError> {
    let status = status(&core).await?;
    let tail = Tail {
        identity: status.identity,
        position: after,
        stored_unix_ns: None,
        batch_max: batch_max.max(1),
        pull: None,
        check_at: Instant::now(),
        epochs: core.link.epochs(),
        core,
    };
    Ok(Box::pin(stream::unfold(tail, |mut tail| async move {
        let batch = tail.next().await?;
        Some((batch, tail))
    })))
}

pub(super) async fn status(core: &Core) -> Result<LogStatus, PlaneError> {
    let name = core.layout.log();
    let asked = core.stream_info_and_time(&name).await;
    let (info, now_unix_ns) = asked.map_err(|error| match error {
        ApiError::Server(fault) if fault.is_stream_missing() => {
            PlaneError::Unavailable(format!("there is no stream {name}"))
        }
        ApiError::Server(_) | ApiError::Plane(_) => error.into(),
    })?;
    let identity = layout::identity(&info)
        .ok_or_else(|| PlaneError::Unavailable(format!("stream {name} has no identity")))?;
    let last = LogPosition(info.state.last_sequence);
    let first = match info.state.messages {
        0 => last.next(),
        _ => LogPosition(info.state.first_sequence),
    };
    Ok(LogStatus {
        identity,
        first,
        last,
        now_unix_ns,
    })
}

pub(super) async fn at(
    core: &Core,
    position: LogPosition,
) -> Result<Option<LogMessage>, PlaneError> {
    // The server takes 0 for "not given" and calls the question malformed.
    if position == LogPosition(0) {
        return Ok(None);
    }
    let message = core.message_at(&core.layout.log(), position.0).await?;
    Ok(message.map(read))
}

pub(super) async fn last_on(core: &Core, subject: &str) -> Result<Option<LogMessage>, PlaneError> {
    let message = core.newest(&core.layout.log(), subject).await?;
    Ok(message.map(read))
}

fn read(message: async_nats::jetstream::message::StreamMessage) -> LogMessage {
    LogMessage {
        position: LogPosition(message.sequence),
        subject: message.subject.into_string(),
        payload: message.payload,
        stored_unix_ns: u64::try_from(message.time.unix_timestamp_nanos()).unwrap_or(0),
    }
}

impl Tail {
    /// The next messages; none when this log is no more.
    async fn next(&mut self) -> Option<Vec<LogMessage>> {
        loop {
            if self.epochs.has_changed().unwrap_or(false) {
                self.reopen();
            }
            if self.pull.is_none() {
                match self.open().await {
                    Verdict::Same => {}
                    Verdict::Another => return None,
                    Verdict::Unknown => {
                        self.reopen();
                        sleep(RETRY).await;
                    }
                }
                continue;
            }
            if self.check_at <= Instant::now() {
                match self.check().await {
                    Verdict::Same | Verdict::Unknown => self.check_at = Instant::now() + CHECK,
                    Verdict::Another => return None,
                }
            }
            if let Some(batch) = self.wait().await {
                return Some(batch);
            }
        }
    }

    /// Waits for whatever comes first; the loop looks again at the rest.
    async fn wait(&mut self) -> Option<Vec<LogMessage>> {
        let pull = self.pull.as_mut()?;
        let pulled = tokio::select! {
            // After a reconnect nothing of the old consumer is believed.
            biased;
            _ = self.epochs.changed() => Pulled::Broken,
            pulled = pull.next() => pulled,
            () = sleep_until(self.check_at) => Pulled::Idle,
        };
        let mut batch = Vec::new();
        let mut pulled = Some(pulled);
        while let Some(one) = pulled {
            match one {
                Pulled::Message(delivery) => self.take(delivery, &mut batch),
                Pulled::Idle => {}
                Pulled::Broken => {
                    self.reopen();
                    break;
                }
            }
            if batch.len() >= self.batch_max || batch.is_empty() {
                break;
            }
            pulled = self.pull.as_mut().and_then(Pull::next_ready);
        }
        (!batch.is_empty()).then_some(batch)
    }

    fn take(&mut self, delivery: Delivery, batch: &mut Vec<LogMessage>) {
        let position = LogPosition(delivery.sequence);
        if position <= self.position {
            return;
        }
        self.position = position;
        self.stored_unix_ns = Some(delivery.stored_unix_ns);
        let lag = &self.core.link.counters.tail_lag;
        lag.store(delivery.pending, std::sync::atomic::Ordering::Relaxed);
        batch.push(LogMessage {
            position,
            subject: delivery.subject,
            payload: delivery.payload,
            stored_unix_ns: delivery.stored_unix_ns,
        });
    }

    fn reopen(&mut self) {
        self.pull = None;
    }

    /// A new consumer first, then the proof: made the other way round, the log could change between.
    async fn open(&mut self) -> Verdict {
        self.epochs.borrow_and_update();
        let start = Start::At(self.position.next().0);
        let log = self.core.layout.log();
        let Ok(pull) = Pull::open(&self.core, log, None, start).await else {
            // Perhaps there is another log already, which does not let us in.
            return match self.check().await {
                Verdict::Another => Verdict::Another,
                Verdict::Same | Verdict::Unknown => Verdict::Unknown,
            };
        };
        count(&self.core.link.counters.tails_reopened);
        self.pull = Some(pull);
        let verdict = self.check().await;
        self.check_at = Instant::now() + CHECK;
        verdict
    }

    async fn check(&mut self) -> Verdict {
        let Ok(status) = status(&self.core).await else {
            return Verdict::Unknown;
        };
        if status.identity != self.identity || status.last < self.position {
            return Verdict::Another;
        }
        let Ok(message) = at(&self.core, self.position).await else {
            return Verdict::Unknown;
        };
        // None proves nothing: it may have fallen off the end, or a slow copy of the log answered.
        let Some(message) = message else {
            return Verdict::Same;
        };
        match self.stored_unix_ns {
            Some(stored) if stored != message.stored_unix_ns => Verdict::Another,
            Some(_) | None => {
                self.stored_unix_ns = Some(message.stored_unix_ns);
                Verdict::Same
            }
        }
    }
}
