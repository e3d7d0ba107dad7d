//! Tails the log by consumers at a position of its own, and checks that the log is still the same.
//!
//! A stream that was deleted and created again, rolled back or refilled continues without an error.
//! So after every opening, every reconnect and every [`CHECK`] the tail compares the log's
//! identity, its last position, and when the message at the tail's position was stored. If one of
//! them shows another log, the tail ends; if the server does not answer, the check is repeated.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::core::{JetStreamError, NatsCore};
use super::layout;
use super::link::count;
use super::pull::{BATCH_MAX, Delivery, Pull, Pulled, Start};
use crate::{LogMessage, LogStatus, LogTail, PlaneError};
use warmroute_proto::{LogPosition, StreamIdentity};

const CHECK: Duration = Duration::from_secs(5);
/// Delay before a consumer that could not be created is tried again.
const REOPEN_DELAY: Duration = Duration::from_millis(200);

struct Tail {
    core: Arc<NatsCore>,
    identity: StreamIdentity,
    position: LogPosition,
    /// When the message at `position` was stored, once known.
    stored_unix_ns: Option<u64>,
    batch_max: usize,
    pull: Option<Pull>,
    check_at: Instant,
    epochs: watch::Receiver<u64>,
}

enum LogCheck {
    Same,
    Another,
    Unknown,
}

pub(super) async fn tail(
    core: Arc<NatsCore>,
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

pub(super) async fn status(core: &NatsCore) -> Result<LogStatus, PlaneError> {
    let name = core.layout.log();
    let asked = core.stream_info_and_time(&name).await;
    let (info, now_unix_ns) = asked.map_err(|error| match error {
        JetStreamError::Server(fault) if fault.is_stream_missing() => {
            PlaneError::Unavailable(format!("there is no stream {name}"))
        }
        JetStreamError::Server(_) | JetStreamError::Plane(_) => error.into(),
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
    core: &NatsCore,
    position: LogPosition,
) -> Result<Option<LogMessage>, PlaneError> {
    // The server reads 0 as "not given" and calls the request malformed.
    if position == LogPosition(0) {
        return Ok(None);
    }
    let message = core.message_at(&core.layout.log(), position.0).await?;
    Ok(message.map(read))
}

pub(super) async fn last_on(
    core: &NatsCore,
    subject: &str,
) -> Result<Option<LogMessage>, PlaneError> {
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
    /// The next messages, or `None` once this log no longer exists.
    async fn next(&mut self) -> Option<Vec<LogMessage>> {
        loop {
            if self.epochs.has_changed().unwrap_or(false) {
                self.reopen();
            }
            if self.pull.is_none() {
                match self.open().await {
                    LogCheck::Same => {}
                    LogCheck::Another => return None,
                    LogCheck::Unknown => {
                        self.reopen();
                        sleep(REOPEN_DELAY).await;
                    }
                }
                continue;
            }
            if self.check_at <= Instant::now() {
                match self.check().await {
                    LogCheck::Same | LogCheck::Unknown => self.check_at = Instant::now() + CHECK,
                    LogCheck::Another => return None,
                }
            }
            if let Some(batch) = self.wait().await {
                return Some(batch);
            }
        }
    }

    /// Waits for messages, a reconnect or the next check, whichever is first.
    async fn wait(&mut self) -> Option<Vec<LogMessage>> {
        let pull = self.pull.as_mut()?;
        let pulled = tokio::select! {
            // After a reconnect the old consumer is not read.
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

    /// Opens a consumer, then checks the log: in the other order the log could change in between.
    async fn open(&mut self) -> LogCheck {
        self.epochs.borrow_and_update();
        let start = Start::At(self.position.next().0);
        let log = self.core.layout.log();
        let Ok(pull) = Pull::open(&self.core, log, None, start, BATCH_MAX).await else {
            // Another log may have replaced this one and deny the consumer.
            return match self.check().await {
                LogCheck::Another => LogCheck::Another,
                LogCheck::Same | LogCheck::Unknown => LogCheck::Unknown,
            };
        };
        count(&self.core.link.counters.tails_reopened);
        self.pull = Some(pull);
        let verdict = self.check().await;
        self.check_at = Instant::now() + CHECK;
        verdict
    }

    async fn check(&mut self) -> LogCheck {
        let Ok(status) = status(&self.core).await else {
            return LogCheck::Unknown;
        };
        if status.identity != self.identity || status.last < self.position {
            return LogCheck::Another;
        }
        let Ok(message) = at(&self.core, self.position).await else {
            return LogCheck::Unknown;
        };
        // A missing message proves nothing: the log may have dropped it, or a slow copy answered.
        let Some(message) = message else {
            return LogCheck::Same;
        };
        match self.stored_unix_ns {
            Some(stored) if stored != message.stored_unix_ns => LogCheck::Another,
            Some(_) | None => {
                self.stored_unix_ns = Some(message.stored_unix_ns);
                LogCheck::Same
            }
        }
    }
}
