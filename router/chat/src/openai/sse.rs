//! Server-sent events, watched while their bytes pass by unchanged.
//!
//! [`SseSplitter`] finds where events end, whatever the chunks are cut like. An event inside one
//! chunk is a slice of that chunk; one that spans chunks is put together in a buffer of bounded
//! size, and an event larger than the buffer is reported without its bytes. [`StreamWatch`] is what
//! the proxy wants to know: first token, number of output chunks, the reported usage.
//! Neither changes, delays or validates the stream.

use std::borrow::Cow;

use super::usage::Usage;

/// Bytes kept of an event that spans chunks. A chunk of a chat is some hundred bytes; one with log
/// probabilities of many alternatives some ten thousand.
const EVENT_BYTES_MAX: usize = 256 * 1024;

/// One event, without the empty line that ended it.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    Whole(&'a [u8]),
    /// Too large to be kept; this many bytes.
    Oversized(usize),
}

/// Finds the ends of events: an empty line, ended by `\n` or `\r\n`.
#[derive(Debug, Default)]
pub struct SseSplitter {
    /// The beginning of an event whose end has not been seen.
    pending: Vec<u8>,
    /// Bytes of that event, also those not kept.
    pending_len: usize,
    line: Line,
}

/// What the current line consists of so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Line {
    #[default]
    Empty,
    /// A carriage return only: an empty line if a newline follows.
    Return,
    Content,
}

impl SseSplitter {
    /// Takes the next bytes and reports each event that they complete.
    pub fn push(&mut self, chunk: &[u8], mut on_event: impl FnMut(Event<'_>)) {
        let mut rest = chunk;
        while let Some(end) = self.event_end(rest) {
            let (head, tail) = rest.split_at(end);
            self.complete(head, &mut on_event);
            rest = tail;
        }
        if !rest.is_empty() {
            self.keep(rest);
        }
    }

    /// The stream has ended; what is left may be an event whose last line was not ended.
    pub fn finish(&mut self, mut on_event: impl FnMut(Event<'_>)) {
        if self.pending_len > 0 {
            self.complete(&[], &mut on_event);
        }
    }

    /// Bytes held back of the unfinished event.
    pub fn buffered(&self) -> usize {
        self.pending.len()
    }

    /// Offset behind the next empty line, if it ends in these bytes. Updates the line state.
    fn event_end(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
            let newline = rest.iter().position(|&byte| byte == b'\n');
            let line = &rest[..newline.unwrap_or(rest.len())];
            self.line = match (self.line, line) {
                (state, []) => state,
                (Line::Empty, [b'\r']) => Line::Return,
                (Line::Empty | Line::Return | Line::Content, _) => Line::Content,
            };
            at += newline? + 1;
            let ended = std::mem::take(&mut self.line);
            if ended != Line::Content {
                return Some(at);
            }
        }
        None
    }

    fn complete(&mut self, head: &[u8], on_event: &mut impl FnMut(Event<'_>)) {
        if self.pending_len == 0 {
            let event = trim_line_ends(head);
            if !event.is_empty() {
                on_event(Event::Whole(event));
            }
            return;
        }
        self.keep(head);
        if self.pending.len() < self.pending_len {
            on_event(Event::Oversized(self.pending_len));
        } else {
            let event = trim_line_ends(&self.pending);
            if !event.is_empty() {
                on_event(Event::Whole(event));
            }
        }
        self.pending_len = 0;
        self.pending.clear();
        // A rare large event must not hold its memory for the rest of an hour of stream.
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

/// An event's text without the line ends around it.
fn trim_line_ends(mut event: &[u8]) -> &[u8] {
    while let [rest @ .., b'\n' | b'\r'] = event {
        event = rest;
    }
    while let [b'\n' | b'\r', rest @ ..] = event {
        event = rest;
    }
    event
}

impl<'a> Event<'a> {
    /// The event's `data` lines joined by newlines; nothing for a comment (a keep-alive).
    pub fn data(&self) -> Option<Cow<'a, [u8]>> {
        let Event::Whole(bytes) = self else {
            return None;
        };
        let mut data: Option<Cow<'a, [u8]>> = None;
        for line in bytes.split(|&byte| byte == b'\n') {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let Some(value) = line.strip_prefix(b"data:") else {
                continue;
            };
            let value = value.strip_prefix(b" ").unwrap_or(value);
            data = Some(match data {
                None => Cow::Borrowed(value),
                Some(before) => {
                    let mut joined = before.into_owned();
                    joined.push(b'\n');
                    joined.extend_from_slice(value);
                    Cow::Owned(joined)
                }
            });
        }
        data
    }
}

/// What a stream has shown so far.
#[derive(Debug, Default)]
pub struct StreamWatch {
    splitter: SseSplitter,
    output_chunks: u64,
    usage: Option<Usage>,
    done: bool,
}

impl StreamWatch {
    /// Takes the next bytes. True if the first output is among them: the engine sends nothing
    /// before it has a token, so the first data event marks the end of prefill.
    pub fn push(&mut self, chunk: &[u8]) -> bool {
        let before = self.output_chunks;
        let Self {
            splitter,
            output_chunks,
            usage,
            done,
        } = self;
        splitter.push(chunk, |event| see(&event, output_chunks, usage, done));
        before == 0 && self.output_chunks > 0
    }

    /// The stream has ended.
    pub fn finish(&mut self) {
        let Self {
            splitter,
            output_chunks,
            usage,
            done,
        } = self;
        splitter.finish(|event| see(&event, output_chunks, usage, done));
    }

    /// Data events that carry output: neither `[DONE]` nor the closing usage chunk nor an error.
    pub fn output_chunks(&self) -> u64 {
        self.output_chunks
    }

    /// The last usage reported.
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// Whether `[DONE]` came: the stream is complete.
    pub fn done(&self) -> bool {
        self.done
    }
}

fn see(event: &Event<'_>, chunks: &mut u64, usage: &mut Option<Usage>, done: &mut bool) {
    let data = match event {
        Event::Oversized(_) => {
            *chunks += 1;
            return;
        }
        Event::Whole(_) => event.data(),
    };
    let Some(data) = data else { return };
    if data.as_ref() == b"[DONE]" {
        *done = true;
        return;
    }
    // In generated text quotation marks are escaped, so these bytes are a key of the chunk itself.
    if contains(&data, br#""usage":"#)
        && let Some(found) = Usage::from_json(&data)
    {
        *usage = Some(found);
        if contains(&data, br#""choices":[]"#) {
            return;
        }
    }
    if !data.starts_with(br#"{"error""#) {
        *chunks += 1;
    }
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack
        .windows(needle.len())
        .any(|window| window == needle)
}

#[cfg(test)]
mod tests;
