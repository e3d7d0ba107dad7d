//! A trace of requests: one JSON object a line; `hash_ids` identify a prompt's pieces of 512
//! tokens.
//!
//! Equal leading ids are equal tokens. The last piece may be shorter; tokens after the last id
//! belong to that request alone. The expansion to tokens depends on the ids only.
//!
//! A trace is either open (`timestamp`) or made of sessions (`session_id`, and `delay` after the
//! previous answer).

use std::ops::Range;

use rustc_hash::FxHashMap;
use serde::Deserialize;

/// Tokens of one id.
const PIECE_TOKENS: u32 = 512;

/// Every piece has its own range of token ids.
const PIECES_MAX: usize = (u32::MAX / PIECE_TOKENS) as usize;

/// Delays and time stamps are below a year.
const MILLIS_MAX: f64 = 365.0 * 86_400_000.0;

/// A trace, in the order in which requests or sessions start.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Trace {
    pub(super) requests: Vec<TraceRequest>,
    /// Requests of each session; empty for an open trace.
    pub(super) sessions: Vec<Range<usize>>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct TraceRequest {
    /// Since the trace began; in a session, since the previous answer.
    pub(super) millis: f64,
    pub(super) input_tokens: u32,
    pub(super) output_tokens: u32,
    /// Piece numbers; the last piece may be the request's own.
    pieces: Box<[u32]>,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(super) enum TraceError {
    #[error("line {line}: {what}")]
    Line { line: usize, what: String },
    #[error("it has no requests")]
    Empty,
    #[error("it names more than {PIECES_MAX} different pieces")]
    TooManyPieces,
}

#[derive(Deserialize)]
struct TraceRow {
    timestamp: Option<f64>,
    session_id: Option<u64>,
    delay: Option<f64>,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum TraceKind {
    Open,
    Sessions,
}

/// Numbers pieces in the order of their first use.
#[derive(Default)]
struct PieceNumbers {
    numbers: FxHashMap<u64, u32>,
    next: u32,
}

impl Trace {
    /// Parses a trace. Blank lines are ignored.
    pub(super) fn parse(text: &str) -> Result<Self, TraceError> {
        let mut pieces = PieceNumbers::default();
        let mut kind = None;
        let mut open = Vec::new();
        let mut sessions: Vec<Vec<TraceRequest>> = Vec::new();
        let mut places: FxHashMap<u64, usize> = FxHashMap::default();
        for (line, text) in (1..).zip(text.lines()) {
            if text.trim().is_empty() {
                continue;
            }
            let wrong = |what: String| TraceError::Line { line, what };
            let row: TraceRow =
                serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
            let found = row.kind().map_err(wrong)?;
            if *kind.get_or_insert(found) != found {
                let what = "a trace has either time stamps or sessions, not both";
                return Err(wrong(what.to_owned()));
            }
            match row.session_id {
                None => open.push(row.request(&mut pieces).map_err(wrong)?),
                Some(id) => {
                    let place = *places.entry(id).or_insert(sessions.len());
                    if place == sessions.len() {
                        sessions.push(Vec::new());
                    } else if row.delay.is_none() {
                        return Err(wrong("a session's later request needs a delay".to_owned()));
                    }
                    sessions[place].push(row.request(&mut pieces).map_err(wrong)?);
                }
            }
        }
        if pieces.next as usize > PIECES_MAX {
            return Err(TraceError::TooManyPieces);
        }
        open.sort_by(|one: &TraceRequest, other| one.millis.total_cmp(&other.millis));
        let trace = Self::of(open, sessions);
        if trace.requests.is_empty() {
            return Err(TraceError::Empty);
        }
        Ok(trace)
    }

    #[must_use]
    pub(super) const fn has_sessions(&self) -> bool {
        !self.sessions.is_empty()
    }

    fn of(open: Vec<TraceRequest>, sessions: Vec<Vec<TraceRequest>>) -> Self {
        let mut trace = Self {
            requests: open,
            sessions: Vec::new(),
        };
        for session in sessions {
            let start = trace.requests.len();
            trace.requests.extend(session);
            trace.sessions.push(start..trace.requests.len());
        }
        trace
    }
}

impl TraceRow {
    fn kind(&self) -> Result<TraceKind, String> {
        match (self.timestamp, self.session_id) {
            (Some(_), None) => Ok(TraceKind::Open),
            (None, Some(_)) => Ok(TraceKind::Sessions),
            (Some(_), Some(_)) => Err("both timestamp and session_id".to_owned()),
            (None, None) => Err("neither timestamp nor session_id".to_owned()),
        }
    }

    fn request(self, pieces: &mut PieceNumbers) -> Result<TraceRequest, String> {
        let millis = self.timestamp.or(self.delay).unwrap_or_default();
        if !(0.0..=MILLIS_MAX).contains(&millis) {
            return Err(format!("{millis} ms is no time"));
        }
        if self.input_length == 0 || self.output_length == 0 {
            return Err("a request has at least one token in and one out".to_owned());
        }
        let named = self.hash_ids.len();
        let whole = (self.input_length / PIECE_TOKENS) as usize;
        let all = self.input_length.div_ceil(PIECE_TOKENS) as usize;
        if named != whole && named != all {
            return Err(format!(
                "{named} hash_ids for {} tokens; one stands for {PIECE_TOKENS}",
                self.input_length
            ));
        }
        let mut numbers: Vec<u32> = self.hash_ids.iter().map(|&id| pieces.number(id)).collect();
        if named < all {
            numbers.push(pieces.fresh());
        }
        Ok(TraceRequest {
            millis,
            input_tokens: self.input_length,
            output_tokens: self.output_length,
            pieces: numbers.into(),
        })
    }
}

impl PieceNumbers {
    fn number(&mut self, id: u64) -> u32 {
        let next = self.next;
        let number = *self.numbers.entry(id).or_insert(next);
        if number == next {
            self.next = next.saturating_add(1);
        }
        number
    }

    fn fresh(&mut self) -> u32 {
        let number = self.next;
        self.next = number.saturating_add(1);
        number
    }
}

impl TraceRequest {
    /// The prompt's tokens. Each piece counts up from its own first token, so that no two pieces
    /// share a block.
    #[must_use]
    pub(super) fn prompt(&self) -> Vec<u32> {
        let tokens = self.input_tokens as usize;
        let mut prompt = Vec::with_capacity(self.pieces.len() * PIECE_TOKENS as usize);
        for &piece in &self.pieces {
            let first = piece.wrapping_mul(PIECE_TOKENS);
            prompt.extend((0..PIECE_TOKENS).map(|at| first.wrapping_add(at)));
        }
        prompt.truncate(tokens);
        prompt
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(lines: &[&str]) -> Result<Trace, String> {
        Trace::parse(&lines.join("\n")).map_err(|error| error.to_string())
    }

    fn open(at: u32, input: u32, ids: &[u64]) -> String {
        format!(
            r#"{{"timestamp":{at},"input_length":{input},"output_length":3,"hash_ids":{ids:?}}}"#
        )
    }

    #[test]
    fn equal_ids_are_equal_tokens_and_what_is_beyond_them_is_the_requests_own() {
        let (one, other) = (open(0, 1100, &[7, 9]), open(5, 1100, &[7, 9]));
        let trace = parse(&[&one, &other]).unwrap();
        let (one, other) = (trace.requests[0].prompt(), trace.requests[1].prompt());
        assert_eq!(one.len(), 1100);
        assert_eq!(one[..1024], other[..1024]);
        assert!(one[1024..].iter().all(|token| !other.contains(token)));
        let distinct: std::collections::BTreeSet<_> = one.iter().collect();
        assert_eq!(distinct.len(), 1100, "no two blocks of a prompt are alike");
    }

    #[test]
    fn a_last_piece_that_is_named_is_shared_as_far_as_it_goes() {
        let (short, long) = (open(0, 600, &[1, 2]), open(1, 1024, &[1, 2]));
        let trace = parse(&[&short, &long]).unwrap();
        let (short, long) = (trace.requests[0].prompt(), trace.requests[1].prompt());
        assert_eq!(short[..], long[..600]);
    }

    #[test]
    fn open_requests_are_put_in_order() {
        let trace = parse(&[&open(9, 1, &[]), "", &open(3, 2, &[])]).unwrap();
        let inputs: Vec<u32> = trace.requests.iter().map(|r| r.input_tokens).collect();
        assert_eq!(inputs, [2, 1]);
        assert!(!trace.has_sessions());
    }

    #[test]
    fn sessions_are_gathered_from_between_each_other() {
        let row = |id: u32, delay: &str| {
            format!(
                r#"{{"session_id":{id},"input_length":1,"output_length":{},"hash_ids":[]{delay}}}"#,
                id + 1
            )
        };
        let later = r#","delay":250"#;
        let trace = parse(&[&row(5, ""), &row(6, ""), &row(5, later)]).unwrap();
        assert_eq!(trace.sessions, [0..2, 2..3]);
        assert_eq!(trace.requests[1].millis, 250.0);
        assert_eq!(trace.requests[2].output_tokens, 7);
        let wrong = parse(&[&row(5, ""), &row(5, "")]).unwrap_err();
        assert!(wrong.starts_with("line 2: "), "{wrong}");
    }

    #[test]
    fn another_shape_fails_with_its_line() {
        let good = open(0, 1, &[]);
        for (bad, says) in [
            ("[1, 2]".to_owned(), "line 2: invalid"),
            ("{\"timestamp\": 1}".to_owned(), "line 2: missing field"),
            (open(1, 1024, &[1]), "line 2: 1 hash_ids for 1024 tokens"),
            (open(1, 0, &[]), "line 2: a request has at least one token"),
            (
                good.replace("\"timestamp\":0", "\"at\":0"),
                "line 2: neither",
            ),
            (good.replace(":0,", ":-4,"), "line 2: -4 ms"),
            (
                good.replace("timestamp", "session_id"),
                "line 2: a trace has",
            ),
        ] {
            let error = parse(&[&good, &bad]).unwrap_err();
            assert!(error.starts_with(says), "{error}");
        }
        assert_eq!(parse(&[""]).unwrap_err(), "it has no requests");
    }
}
