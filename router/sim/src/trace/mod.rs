//! A trace of requests, from a recording or in Mooncake's form.
//!
//! A prompt is a list of numbered pieces of equal length. Equal leading numbers are equal tokens;
//! the last pieces may be the request's own. The expansion to tokens depends on the numbers only.
//!
//! A trace is either open (times since its beginning) or made of sessions (times since the previous
//! answer).

mod mooncake;
mod recorded;
#[cfg(test)]
mod tests;

use std::ops::Range;

use warmroute_route::SessionKey;

/// Longest prompt and longest answer. Each token of a replayed prompt takes 4 bytes.
const TOKENS_MAX: u32 = 1 << 24;

/// Delays and time stamps are below a year.
const MILLIS_MAX: f64 = 365.0 * 86_400_000.0;

/// A trace, in the order in which requests or sessions start.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Every piece has its own range of token ids.
    piece_tokens: u32,
    pub(crate) requests: Vec<TraceRequest>,
    /// Requests of each session; empty for an open trace.
    pub(crate) sessions: Vec<Range<usize>>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TraceRequest {
    /// Since the trace began; in a session, since the previous answer.
    pub(crate) millis: f64,
    pub(crate) input_tokens: u32,
    pub(crate) output_tokens: u32,
    /// Piece numbers.
    pieces: Box<[u32]>,
    /// Pieces at the end that no other request has.
    own: usize,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TraceError {
    #[error("line {line}: {what}")]
    Line { line: usize, what: String },
    #[error("it has no requests")]
    Empty,
    #[error("it has too many different blocks: {pieces} of {piece_tokens} tokens")]
    TooManyPieces { pieces: usize, piece_tokens: u32 },
    #[error("no request is for the model {model}, but for {known}")]
    UnknownModel { model: String, known: String },
    #[error("it has blocks of {one} and of {other} tokens: choose one engine's models by --model")]
    BlockSizes { one: u32, other: u32 },
}

impl Trace {
    /// Number of requests, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "no trace is empty")]
    #[must_use]
    pub const fn len(&self) -> usize {
        self.requests.len()
    }

    #[must_use]
    pub(crate) const fn piece_tokens(&self) -> u32 {
        self.piece_tokens
    }

    /// Requests a second of an open trace; 1 if all arrive at one time.
    pub(crate) fn rate(&self) -> f64 {
        let ends = self.requests.first().zip(self.requests.last());
        let millis = ends.map_or(0.0, |(first, last)| last.millis - first.millis);
        if millis > 0.0 {
            self.requests.len() as f64 * 1000.0 / millis
        } else {
            1.0
        }
    }

    #[must_use]
    pub(crate) const fn has_sessions(&self) -> bool {
        !self.sessions.is_empty()
    }

    /// The session of a request; `None` in an open trace.
    pub(crate) fn session(&self, request: usize) -> Option<SessionKey> {
        let place = self
            .sessions
            .partition_point(|session| session.end <= request);
        self.sessions.get(place)?;
        SessionKey::named(&place.to_string())
    }

    /// The tokens of a request's prompt. Each piece counts up from its own first token, so that no
    /// two pieces share a block.
    #[must_use]
    pub(crate) fn prompt(&self, request: usize) -> Vec<u32> {
        let asked = &self.requests[request];
        let piece_tokens = self.piece_tokens;
        let mut prompt = Vec::with_capacity(asked.pieces.len() * piece_tokens as usize);
        for &piece in &asked.pieces {
            let first = piece.wrapping_mul(piece_tokens);
            prompt.extend((0..piece_tokens).map(|at| first.wrapping_add(at)));
        }
        prompt.truncate(asked.input_tokens as usize);
        prompt
    }

    /// Checks that every piece has token ids of its own, and that there is a request.
    fn checked(self, pieces: usize) -> Result<Self, TraceError> {
        let piece_tokens = self.piece_tokens;
        if pieces as u64 * u64::from(piece_tokens) > u64::from(u32::MAX) {
            return Err(TraceError::TooManyPieces {
                pieces,
                piece_tokens,
            });
        }
        if self.requests.is_empty() {
            return Err(TraceError::Empty);
        }
        Ok(self)
    }
}
