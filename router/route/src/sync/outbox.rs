//! Pacing of own messages: how far they are sent, and when the next frame may leave.
//!
//! A message of an idle router leaves immediately. Under load one frame leaves per [`FRAME_PAUSE`]
//! with all messages since the last one. Messages that are not urgent leave with it, or after
//! [`LAZY_DELAY`].

use std::time::Instant;

use bytes::Bytes;
use warmroute_proto::RecordNumber;
use warmroute_proto::codec::{self, EncodeError};
use warmroute_proto::load::LoadFrame;

use super::{FRAME_PAUSE, LAZY_DELAY};

#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// The first unsent number.
    pub(super) next: RecordNumber,
    last: Option<Instant>,
    due: Option<Instant>,
    flushed: Option<Instant>,
}

impl Outbox {
    /// Registers a new message. Returns whether it may leave now; otherwise [`Self::due`] is set.
    pub(super) fn wrote(&mut self, now: Instant) -> bool {
        let free = self.last.is_none_or(|last| now >= last + FRAME_PAUSE);
        if !free {
            self.due = self.last.map(|last| last + FRAME_PAUSE);
        }
        free
    }

    pub(super) const fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Whether unannounced messages have waited for [`LAZY_DELAY`].
    pub(super) fn is_stale(&self, now: Instant) -> bool {
        self.flushed
            .is_none_or(|flushed| now >= flushed + LAZY_DELAY)
    }

    /// All messages up to now are sent.
    pub(super) const fn flushed(&mut self, now: Instant) {
        self.due = None;
        self.flushed = Some(now);
    }

    pub(super) const fn sent(&mut self, now: Instant) {
        self.last = Some(now);
    }
}

/// Encodes messages as one broadcast.
pub(super) fn frame(messages: &[Bytes]) -> Result<Bytes, EncodeError> {
    if let [alone] = messages {
        return Ok(alone.clone());
    }
    let messages = messages.iter().map(|message| message.to_vec()).collect();
    codec::encode(&LoadFrame { messages }).map(Bytes::from)
}
