//! Server-sent events, observed while the proxy forwards their bytes unchanged.
//!
//! [`SseSplitter`] finds the ends of events in chunks of any size. An event inside one chunk is a
//! slice of that chunk; one that spans chunks is assembled in a bounded buffer, and a larger one is
//! reported without its bytes. [`StreamObserver`] derives what the proxy needs: the first token,
//! the number of output chunks, the reported usage. Neither changes, delays or validates the
//! stream.

use std::borrow::Cow;
use std::sync::LazyLock;

use memchr::memmem::Finder;

use super::usage::{self, TokenUsage};

/// Bytes kept of an event that spans chunks. A chat's events have some hundred bytes, with log
/// probabilities of many alternatives some ten thousand.
const EVENT_BYTES_MAX: usize = 256 * 1024;

/// Events that `/v1/responses` sends before the first token.
const EARLY_EVENTS: [&[u8]; 4] = [
    b"response.created",
    b"response.queued",
    b"response.in_progress",
    b"ping",
];

/// Events after which nothing follows.
const LAST_EVENTS: [&[u8]; 4] = [
    b"message_stop",
    b"response.completed",
    b"response.incomplete",
    b"response.failed",
];

/// Events that say that the answer failed.
const ERROR_EVENTS: [&[u8]; 2] = [b"error", b"response.failed"];

/// Searched in every event: preparing the search takes longer than the search.
static USAGE_KEY: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""usage""#));

/// One event, without the empty line that ended it.
#[derive(Debug, PartialEq, Eq)]
pub enum SseEvent<'a> {
    Whole(&'a [u8]),
    /// The size in bytes of an event beyond the buffer.
    Oversized(usize),
}

/// The lines of an event that the proxy reads.
#[derive(Debug, Default)]
struct EventFields<'a> {
    name: Option<&'a [u8]>,
    data: Option<Cow<'a, [u8]>>,
}

/// Finds the ends of events: an empty line, ended by `\n` or `\r\n`.
#[derive(Debug, Default)]
pub struct SseSplitter {
    /// The beginning of the unfinished event.
    pending: Vec<u8>,
    /// Bytes of that event, including those not kept.
    pending_len: usize,
    ends: EventEnds,
}

/// Where events end in bytes that come in chunks.
#[derive(Debug, Default)]
pub(super) struct EventEnds(LineState);

/// The content of the current line so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LineState {
    #[default]
    Empty,
    /// Only a carriage return: an empty line if a newline follows.
    Return,
    Content,
}

impl SseSplitter {
    /// Takes the next bytes; calls `on_event` for each event that they complete.
    pub fn push(&mut self, chunk: &[u8], mut on_event: impl FnMut(SseEvent<'_>)) {
        let mut rest = chunk;
        while let Some(end) = self.ends.next_end(rest) {
            let (head, tail) = rest.split_at(end);
            self.complete(head, &mut on_event);
            rest = tail;
        }
        if !rest.is_empty() {
            self.keep(rest);
        }
    }

    /// Takes the end of the stream; the last event may lack its empty line.
    pub fn finish(&mut self, mut on_event: impl FnMut(SseEvent<'_>)) {
        if self.pending_len > 0 {
            self.complete(&[], &mut on_event);
        }
    }

    /// Bytes kept of the unfinished event.
    pub fn buffered(&self) -> usize {
        self.pending.len()
    }

    fn complete(&mut self, head: &[u8], on_event: &mut impl FnMut(SseEvent<'_>)) {
        let in_one_chunk = self.pending_len == 0;
        if !in_one_chunk {
            self.keep(head);
        }
        let bytes = if in_one_chunk { head } else { &self.pending };
        if self.pending.len() < self.pending_len {
            on_event(SseEvent::Oversized(self.pending_len));
        } else if let event = trim_line_ends(bytes)
            && !event.is_empty()
        {
            on_event(SseEvent::Whole(event));
        }
        self.pending_len = 0;
        self.pending.clear();
        // A rare large event must not hold its memory for the rest of a long stream.
        self.pending.shrink_to(4096);
    }

    fn keep(&mut self, bytes: &[u8]) {
        let whole_so_far = self.pending.len() == self.pending_len;
        self.pending_len += bytes.len();
        if whole_so_far && self.pending_len <= EVENT_BYTES_MAX {
            self.pending.extend_from_slice(bytes);
        } else {
            self.pending.clear();
        }
    }
}

impl EventEnds {
    /// Offset after the next empty line, if these bytes contain its end. Updates the line state.
    pub(super) fn next_end(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
            let newline = memchr::memchr(b'\n', rest);
            let line = &rest[..newline.unwrap_or(rest.len())];
            self.0 = match (self.0, line) {
                (state, []) => state,
                (LineState::Empty, [b'\r']) => LineState::Return,
                (LineState::Empty | LineState::Return | LineState::Content, _) => {
                    LineState::Content
                }
            };
            at += newline? + 1;
            let ended = std::mem::take(&mut self.0);
            if ended != LineState::Content {
                return Some(at);
            }
        }
        None
    }
}

/// An event's text without the line ends around it.
pub(super) fn trim_line_ends(mut event: &[u8]) -> &[u8] {
    while let [rest @ .., b'\n' | b'\r'] = event {
        event = rest;
    }
    while let [b'\n' | b'\r', rest @ ..] = event {
        event = rest;
    }
    event
}

impl<'a> SseEvent<'a> {
    /// The event's `data` lines joined by newlines; `None` for a comment (a keep-alive).
    pub fn data(&self) -> Option<Cow<'a, [u8]>> {
        self.fields().data
    }

    fn fields(&self) -> EventFields<'a> {
        let mut fields = EventFields::default();
        let SseEvent::Whole(bytes) = self else {
            return fields;
        };
        let mut rest: Option<&'a [u8]> = Some(bytes);
        while let Some(bytes) = rest {
            let newline = memchr::memchr(b'\n', bytes);
            let line = &bytes[..newline.unwrap_or(bytes.len())];
            rest = newline.map(|at| &bytes[at + 1..]);
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if let Some(value) = line.strip_prefix(b"data:") {
                fields.add_data(value.strip_prefix(b" ").unwrap_or(value));
            } else if let Some(name) = line.strip_prefix(b"event:") {
                fields.name = Some(name.trim_ascii());
            }
        }
        fields
    }
}

impl<'a> EventFields<'a> {
    fn add_data(&mut self, line: &'a [u8]) {
        self.data = Some(match self.data.take() {
            None => Cow::Borrowed(line),
            Some(before) => {
                let mut joined = before.into_owned();
                joined.push(b'\n');
                joined.extend_from_slice(line);
                Cow::Owned(joined)
            }
        });
    }
}

/// What a stream has carried so far.
#[derive(Debug, Default)]
pub struct StreamObserver {
    splitter: SseSplitter,
    seen: StreamTotals,
}

#[derive(Debug, Default)]
struct StreamTotals {
    output_chunks: u64,
    usage: Option<TokenUsage>,
    done: bool,
    failed: bool,
    /// Events and comments that are neither output nor sent before the first token.
    others: u64,
}

impl StreamObserver {
    /// Takes the next bytes. Returns true if they contain the first output: the engine sends
    /// nothing before its first token, so the first data event marks the end of prefill.
    pub fn push(&mut self, chunk: &[u8]) -> bool {
        let before = self.seen.output_chunks;
        self.splitter.push(chunk, |event| self.seen.add(&event));
        before == 0 && self.seen.output_chunks > 0
    }

    /// Takes the end of the stream.
    pub fn finish(&mut self) {
        self.splitter.finish(|event| self.seen.add(&event));
    }

    /// Data events with output: without `[DONE]`, the closing usage chunk and errors.
    pub fn output_chunks(&self) -> u64 {
        self.seen.output_chunks
    }

    /// The last usage reported.
    pub fn usage(&self) -> Option<TokenUsage> {
        self.seen.usage
    }

    /// Whether the engine has reported an error in the stream.
    pub fn failed(&self) -> bool {
        self.seen.failed
    }

    /// Whether nothing has come but the beginning of an answer without output.
    pub fn is_at_start(&self) -> bool {
        let seen = &self.seen;
        seen.output_chunks == 0 && seen.others == 0 && !seen.failed && !seen.done
    }

    /// Whether the stream is complete (`[DONE]`).
    pub fn done(&self) -> bool {
        self.seen.done
    }
}

impl StreamTotals {
    fn add(&mut self, event: &SseEvent<'_>) {
        if matches!(event, SseEvent::Oversized(_)) {
            self.output_chunks += 1;
            return;
        }
        let EventFields { name, data } = event.fields();
        if name.is_some_and(|name| LAST_EVENTS.contains(&name)) {
            self.done = true;
        }
        let Some(data) = data else {
            self.others += 1;
            return;
        };
        if data.as_ref() == b"[DONE]" {
            self.done = true;
            return;
        }
        if name.is_some_and(|name| ERROR_EVENTS.contains(&name)) || is_error(&data) {
            self.failed = true;
            return;
        }
        // Generated text has its quotation marks escaped, so these bytes are a key or a whole string.
        if USAGE_KEY.find(&data).is_some()
            && let Some(usage) = TokenUsage::from_json(&data)
        {
            self.usage = Some(usage);
            if usage::has_no_choices(&data) {
                self.others += 1;
                return;
            }
        }
        if name.is_some_and(|name| EARLY_EVENTS.contains(&name)) {
            self.others += u64::from(name == Some(b"ping"));
        } else {
            self.output_chunks += 1;
        }
    }
}

/// Whether JSON is an error in place of an answer, by its first member: engines write
/// `{"error":{…}}`, `{"object":"error",…}` or `{"type":"error",…}`. The value of `error` in an
/// answer's own fields is null.
pub fn is_error(json: &[u8]) -> bool {
    let rest = json.trim_ascii_start();
    let Some(rest) = rest.strip_prefix(b"{").map(<[u8]>::trim_ascii_start) else {
        return false;
    };
    let value_of = |name: &[u8]| {
        let rest = rest.strip_prefix(name)?.trim_ascii_start();
        Some(rest.strip_prefix(b":")?.trim_ascii_start())
    };
    let names_error = |value: &[u8]| {
        [&br#""error""#[..], br#""response.failed""#]
            .iter()
            .any(|name| value.starts_with(name))
    };
    let kind = value_of(br#""object""#).or_else(|| value_of(br#""type""#));
    kind.is_some_and(names_error)
        || value_of(br#""error""#).is_some_and(|value| !value.starts_with(b"null"))
}

#[cfg(test)]
mod tests;
