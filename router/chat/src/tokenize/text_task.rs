//! Encodes one text in steps: added tokens, the pieces between them, and segments of pieces.
//!
//! Segments end at seams that the text around them decides, so that a text which appears inside
//! another one is cut alike, and its segments are found in the cache.

use super::added::{AddedTokens, FoundToken, TokenMatcher};
use super::bpe::{BpeEncoder, BpeScratch, PiecePlace, SegmentLead};
use super::segment_cache::{CacheScope, SegmentKey};
use super::{EncoderKind, TextEncodeError, Tokenizer};
use crate::openai::SpecialTokens;

/// Segments below are encoded faster than looked up.
const CACHED_BYTES_MIN: usize = 64;

/// Text without a seam in so many bytes is encoded in parts of about this length, and not cached.
const SEGMENT_BYTES_MAX: usize = 64 << 10;

/// Bytes before a seam that decide whether it is an end.
const RECENT: usize = 4;

/// Where segments end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CutRule {
    /// Bytes before a segment's first possible end. At least 4 where ends are chosen.
    pub bytes_min: usize,
    /// Bytes after which a segment ends at the next seam.
    pub bytes_max: usize,
    /// One in this number of possible ends is chosen, by the bytes before it.
    pub one_in: u32,
}

impl CutRule {
    /// Segments of 256 bytes to 4 KiB, half a KiB of prose on average: about half a segment is
    /// encoded again where a text leaves an earlier one.
    pub(super) const CACHE: Self = Self {
        bytes_min: 256,
        bytes_max: 4 << 10,
        one_in: 64,
    };
    /// For comparisons with the reference.
    pub(super) const EVERY_SEAM: Self = Self {
        bytes_min: 1,
        bytes_max: 1,
        one_in: 1,
    };
}

/// What is left after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskState {
    More,
    Done,
}

/// The encoding of one text, which may be paused after each step.
#[derive(Debug)]
pub struct TextTask<T> {
    text: T,
    special: SpecialTokens,
    tokens_max: usize,
    cache_scope: CacheScope,
    cuts: CutRule,
    /// The one in use when the task began.
    encoder: EncoderKind,
    at: usize,
    token: NextToken,
    piece: Option<PieceTask>,
    last: Option<LastSegment>,
    ids: Vec<u32>,
    scratch: BpeScratch,
}

/// The last segment that the cache has, and the one that followed it in an earlier text.
#[derive(Clone, Copy, Debug)]
struct LastSegment {
    key: SegmentKey,
    next: SegmentKey,
}

/// The next added token, searched once.
#[derive(Clone, Copy, Debug)]
enum NextToken {
    Unknown,
    Known(Option<FoundToken>),
}

/// A piece between two tokens that match the text as it is.
#[derive(Debug)]
struct PieceTask {
    /// Its range in the text.
    start: usize,
    end: usize,
    /// Its text, if normalization has changed it.
    changed: Option<String>,
    /// Positions are relative to the piece.
    at: usize,
    token: NextToken,
    lead: Option<SegmentLead>,
}

impl NextToken {
    fn of(&mut self, tokens: &TokenMatcher, text: &str, from: usize) -> Option<FoundToken> {
        match *self {
            Self::Known(found) => found,
            Self::Unknown => {
                let found = tokens.next(text, from);
                *self = Self::Known(found);
                found
            }
        }
    }
}

impl<T: AsRef<str>> TextTask<T> {
    pub(super) fn new(tokenizer: &Tokenizer, text: T, special: SpecialTokens) -> Self {
        Self {
            text,
            special,
            tokens_max: usize::MAX,
            cache_scope: CacheScope::default(),
            cuts: CutRule::CACHE,
            encoder: tokenizer.encoder(),
            at: 0,
            token: NextToken::Unknown,
            piece: None,
            last: None,
            ids: Vec::new(),
            scratch: BpeScratch::default(),
        }
    }

    /// Fails once the text has more tokens.
    #[must_use]
    pub fn with_tokens_max(self, tokens_max: usize) -> Self {
        Self { tokens_max, ..self }
    }

    /// Shares cached ids with texts of the same scope only.
    #[must_use]
    pub fn with_cache_scope(self, cache_scope: CacheScope) -> Self {
        Self {
            cache_scope,
            ..self
        }
    }

    #[must_use]
    pub(super) fn with_cuts(self, cuts: CutRule) -> Self {
        Self { cuts, ..self }
    }

    /// Bytes of the text that are not encoded yet.
    pub fn bytes_left(&self) -> usize {
        let within = self
            .piece
            .as_ref()
            .map_or(0, |piece| piece.start + piece.at);
        self.text.as_ref().len().saturating_sub(self.at.max(within))
    }

    /// The ids so far.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    pub fn into_ids(self) -> Vec<u32> {
        self.ids
    }

    pub fn text(&self) -> &str {
        self.text.as_ref()
    }

    /// Encodes at least `bytes` more, up to the end of a segment.
    pub fn step(
        &mut self,
        tokenizer: &Tokenizer,
        bytes: usize,
    ) -> Result<TaskState, TextEncodeError> {
        let Some(split) = tokenizer.splitting(self.encoder) else {
            self.ids = tokenizer.encode_by_reference(self.text.as_ref(), self.special)?;
            return self.checked(TaskState::Done);
        };
        if self.at == 0 && self.piece.is_none() && self.ids.is_empty() {
            self.ids.reserve(self.text.as_ref().len() * 2 / 5 + 8);
            self.surround(&split.before);
        }
        let until = self.bytes_left().saturating_sub(bytes);
        loop {
            if self.piece.is_some() {
                self.step_piece(tokenizer, &split.added)?;
            } else if self.at < self.text.as_ref().len() {
                self.next_piece(&split.added);
            } else {
                self.surround(&split.after);
                return self.checked(TaskState::Done);
            }
            self.checked(TaskState::More)?;
            if self.bytes_left() <= until && self.bytes_left() > 0 {
                return Ok(TaskState::More);
            }
        }
    }

    fn checked(&self, state: TaskState) -> Result<TaskState, TextEncodeError> {
        if self.ids.len() > self.tokens_max {
            return Err(TextEncodeError::TooManyTokens);
        }
        Ok(state)
    }

    fn surround(&mut self, ids: &[u32]) {
        if self.special == SpecialTokens::Add {
            self.ids.extend_from_slice(ids);
        }
    }

    /// Begins the piece at the current position, or takes the token there.
    fn next_piece(&mut self, added: &AddedTokens) {
        let text = self.text.as_ref();
        let token = self.token.of(&added.raw, text, self.at);
        let end = token.map_or(text.len(), |token| token.start);
        if self.at < end {
            self.piece = Some(PieceTask {
                start: self.at,
                end,
                changed: None,
                at: 0,
                token: NextToken::Unknown,
                lead: None,
            });
        } else if let Some(token) = token {
            self.ids.push(token.id);
            self.at = token.end;
            self.token = NextToken::Unknown;
        }
    }

    /// Encodes one segment of the current piece.
    fn step_piece(
        &mut self,
        tokenizer: &Tokenizer,
        added: &AddedTokens,
    ) -> Result<(), TextEncodeError> {
        let Some(piece) = &mut self.piece else {
            return Ok(());
        };
        let raw = &self.text.as_ref()[piece.start..piece.end];
        let own = tokenizer
            .own
            .as_ref()
            .filter(|_| self.encoder == EncoderKind::Own);
        let ended = match own {
            None => {
                tokenizer.append_by_reference(raw, self.cache_scope, &mut self.ids)?;
                true
            }
            Some(own) => {
                if piece.at == 0 && piece.changed.is_none() {
                    piece.changed = own.normalized(raw)?;
                }
                let changed = piece.changed.take();
                let text = changed.as_deref().unwrap_or(raw);
                let step = SegmentStep {
                    tokenizer,
                    own,
                    added,
                    cache_scope: self.cache_scope,
                    cuts: self.cuts,
                    last: &mut self.last,
                    scratch: &mut self.scratch,
                    ids: &mut self.ids,
                };
                step.run(text, piece)?;
                let ended = piece.at >= text.len();
                piece.changed = changed;
                ended
            }
        };
        if ended {
            self.at = piece.end;
            self.piece = None;
        }
        Ok(())
    }
}

/// One step inside a piece.
struct SegmentStep<'s> {
    tokenizer: &'s Tokenizer,
    own: &'s BpeEncoder,
    added: &'s AddedTokens,
    cache_scope: CacheScope,
    cuts: CutRule,
    last: &'s mut Option<LastSegment>,
    scratch: &'s mut BpeScratch,
    ids: &'s mut Vec<u32>,
}

impl SegmentStep<'_> {
    fn run(mut self, text: &str, piece: &mut PieceTask) -> Result<(), TextEncodeError> {
        let token = piece.token.of(&self.added.normalized, text, piece.at);
        let end = token.map_or(text.len(), |token| token.start);
        if piece.at >= end {
            if let Some(token) = token {
                self.ids.push(token.id);
                piece.at = token.end;
                piece.token = NextToken::Unknown;
                piece.lead = None;
            }
            return Ok(());
        }
        let rest = &text[piece.at..end];
        let lead = *piece.lead.get_or_insert_with(|| {
            let is_first = piece.start == 0 && piece.at == 0;
            let place = if is_first {
                PiecePlace::TextStart
            } else {
                PiecePlace::AfterToken
            };
            self.own.lead(rest, place)
        });
        let encoded = match self.follow(rest, lead) {
            Some(found) => found,
            None => {
                let length = segment_length(self.own, rest, self.cuts);
                self.encode(&rest[..length], lead)?
            }
        };
        // A step that encoded nothing would be repeated without end.
        if encoded == 0 {
            return Err(TextEncodeError::LongPart);
        }
        piece.at += encoded;
        piece.lead = Some(SegmentLead::None);
        Ok(())
    }

    /// Takes the segment that followed the last one before, without a search for its end, if the
    /// text has it here and it ends here. Returns its bytes.
    fn follow(&mut self, rest: &str, lead: SegmentLead) -> Option<usize> {
        let LastSegment { next, .. } = (*self.last)?;
        let (own, cuts) = (self.own, self.cuts);
        let may_be_cached = rest.len() >= CACHED_BYTES_MIN && cuts == CutRule::CACHE;
        if lead != SegmentLead::None || next == SegmentKey::default() || !may_be_cached {
            return None;
        }
        let is_here = |kept: &[u8]| {
            rest.as_bytes().starts_with(kept)
                && (kept.len() == rest.len() || is_end(own, rest, kept.len(), cuts))
        };
        let found = self.tokenizer.cache.append(next, self.ids, is_here)?;
        *self.last = Some(LastSegment {
            key: next,
            next: found.next,
        });
        Some(found.bytes)
    }

    /// Returns the bytes that were encoded.
    fn encode(self, segment: &str, lead: SegmentLead) -> Result<usize, TextEncodeError> {
        let cache = &self.tokenizer.cache;
        if !(CACHED_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&segment.len()) {
            let until = SEGMENT_BYTES_MAX;
            return self
                .own
                .encode(segment, lead, until, self.ids, self.scratch);
        }
        let variant = match lead {
            SegmentLead::None => 0,
            SegmentLead::Blank => 1,
        };
        let key = cache.key(segment, self.cache_scope, variant);
        let found = cache.append(key, self.ids, |kept| kept == segment.as_bytes());
        let encoded = match found {
            Some(found) => found.bytes,
            None => {
                let start = self.ids.len();
                let until = segment.len();
                let encoded = self
                    .own
                    .encode(segment, lead, until, self.ids, self.scratch)?;
                cache.put(key, segment, &self.ids[start..]);
                encoded
            }
        };
        if let Some(last) = self.last.filter(|last| last.next != key && variant == 0) {
            cache.set_next(last.key, key);
        }
        let next = found.map_or_else(SegmentKey::default, |found| found.next);
        *self.last = Some(LastSegment { key, next });
        Ok(encoded)
    }
}

fn is_chosen(recent: &[u8], cuts: CutRule) -> bool {
    const PRIME: u32 = 0x9e37_79b1;
    let recent = recent.first_chunk().copied().map_or(0, u32::from_be_bytes);
    recent.wrapping_mul(PRIME) <= u32::MAX / cuts.one_in
}

fn is_seam(own: &BpeEncoder, text: &str, at: usize) -> bool {
    text.is_char_boundary(at) && own.is_seam(text, at)
}

/// Whether a known segment ends there in this text too. It has no earlier end: its bytes are those
/// in which none was found.
fn is_end(own: &BpeEncoder, text: &str, at: usize, cuts: CutRule) -> bool {
    let recent = text.as_bytes().get(at.saturating_sub(RECENT)..at);
    (cuts.bytes_min..cuts.bytes_max).contains(&at)
        && recent.is_some_and(|recent| is_chosen(recent, cuts))
        && is_seam(own, text, at)
}

/// The length of the segment at the start of a text: all of it, if no seam is near.
fn segment_length(own: &BpeEncoder, text: &str, cuts: CutRule) -> usize {
    let ends_max = text.len().min(SEGMENT_BYTES_MAX);
    let chosen_max = cuts.bytes_max.min(ends_max);
    let before = text.as_bytes().get(cuts.bytes_min.saturating_sub(RECENT)..);
    let chosen = (cuts.bytes_min..chosen_max)
        .zip(before.unwrap_or_default().windows(RECENT))
        .find(|&(at, recent)| is_chosen(recent, cuts) && is_seam(own, text, at));
    let any_from = cuts.bytes_max.max(cuts.bytes_min);
    let end = chosen.map(|(at, _)| at);
    end.or_else(|| (any_from..ends_max).find(|at| is_seam(own, text, *at)))
        .unwrap_or(text.len())
}

#[cfg(test)]
mod tests;
