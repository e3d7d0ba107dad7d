//! Mooncake's form: one JSON object a line; `hash_ids` identify a prompt's pieces of 512 tokens.
//!
//! The last piece may be shorter; tokens after the last id belong to that request alone.

use rustc_hash::FxHashMap;
use serde::Deserialize;

use super::{MILLIS_MAX, TOKENS_MAX, Trace, TraceError, TraceRequest};

/// Tokens of one id.
const PIECE_TOKENS: u32 = 512;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
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
    pub fn parse(text: &str) -> Result<Self, TraceError> {
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
        open.sort_by(|one: &TraceRequest, other| one.millis.total_cmp(&other.millis));
        Self::of(open, sessions).checked(pieces.next as usize)
    }

    fn of(open: Vec<TraceRequest>, sessions: Vec<Vec<TraceRequest>>) -> Self {
        let mut trace = Self {
            piece_tokens: PIECE_TOKENS,
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

    /// The trace in Mooncake's form, line by line.
    ///
    /// An id stands for the prompt up to the end of its 512 tokens, or in the last, shorter place
    /// up to the last whole piece in it. A prompt that ends inside another one's place does not
    /// share that place.
    pub fn mooncake_lines(&self) -> impl Iterator<Item = String> {
        let mut ids = MooncakeIds::default();
        let mut session = 0;
        (0..self.requests.len()).map(move |number| {
            while self
                .sessions
                .get(session)
                .is_some_and(|range| range.end <= number)
            {
                session += 1;
            }
            let asked = &self.requests[number];
            let time = match self.sessions.get(session) {
                None => format!(r#""timestamp":{}"#, asked.millis.round()),
                Some(range) if range.start == number => format!(r#""session_id":{session}"#),
                Some(_) => {
                    let delay = asked.millis.round();
                    format!(r#""session_id":{session},"delay":{delay}"#)
                }
            };
            let (input, output) = (asked.input_tokens, asked.output_tokens);
            let ids = ids.of(asked, self.piece_tokens);
            format!(
                r#"{{{time},"input_length":{input},"output_length":{output},"hash_ids":{ids:?}}}"#
            )
        })
    }
}

/// Numbers (piece, place) pairs in the order of their first use.
#[derive(Default)]
struct MooncakeIds(FxHashMap<(u32, u32), usize>);

impl MooncakeIds {
    fn of(&mut self, asked: &TraceRequest, piece_tokens: u32) -> Vec<usize> {
        let mut ids = Vec::new();
        for place in 0..asked.input_tokens.div_ceil(PIECE_TOKENS) {
            let (start, end) = (place * PIECE_TOKENS, (place + 1) * PIECE_TOKENS);
            let piece = if end <= asked.input_tokens {
                ((end - 1) / piece_tokens) as usize
            } else {
                let named = asked.pieces.len() - asked.own;
                let shared = named.min((asked.input_tokens / piece_tokens) as usize);
                match shared.checked_sub(1) {
                    // A named piece may be shorter than others.
                    _ if piece_tokens == PIECE_TOKENS && named > place as usize => place as usize,
                    Some(last) if (last as u32 + 1) * piece_tokens > start => last,
                    Some(_) | None => break,
                }
            };
            let next = self.0.len();
            ids.push(*self.0.entry((asked.pieces[piece], place)).or_insert(next));
        }
        ids
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
        for tokens in [self.input_length, self.output_length] {
            if tokens > TOKENS_MAX {
                return Err(format!("{tokens} tokens are more than {TOKENS_MAX}"));
            }
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
            own: all - named,
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
