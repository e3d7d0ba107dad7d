//! OwnState messages on their way out: how far they are sent, and when the next frame may leave.
//!
//! A message on an idle router leaves at once. While messages keep coming, one frame leaves per
//! [`FRAME_PAUSE`] with all that came since. What nobody announced leaves with them, or after
//! [`LAZY_DELAY`].

use std::time::Instant;

use bytes::Bytes;
use warmroute_proto::RecordNumber;
use warmroute_proto::codec::{self, EncodeError};
use warmroute_proto::load::LoadFrame;

use super::{FRAME_PAUSE, LAZY_DELAY};

#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// The first number that was not sent.
    pub(super) next: RecordNumber,
    last: Option<Instant>,
    due: Option<Instant>,
    looked: Option<Instant>,
}

impl Outbox {
    /// Something was written. True: it may leave now; else [`Self::due`] says when.
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

    /// Time to look at what was written without a word.
    pub(super) fn is_stale(&self, now: Instant) -> bool {
        self.looked.is_none_or(|looked| now >= looked + LAZY_DELAY)
    }

    /// All that was written is looked at.
    pub(super) const fn looked(&mut self, now: Instant) {
        self.due = None;
        self.looked = Some(now);
    }

    pub(super) const fn left(&mut self, now: Instant) {
        self.last = Some(now);
    }
}

/// Messages as one broadcast.
pub(super) fn frame(messages: &[Bytes]) -> Result<Bytes, EncodeError> {
    if let [alone] = messages {
        return Ok(alone.clone());
    }
    let messages = messages.iter().map(|message| message.to_vec()).collect();
    codec::encode(&LoadFrame { messages }).map(Bytes::from)
}
