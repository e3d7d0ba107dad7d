//! An encoder of our own for byte pair encoding, with or without byte-level pre-tokenizer: a text
//! is split into words, and each word is looked up or merged. It is exact by construction for the
//! definitions that it accepts, and compared with the reference as a check (ADR 18).
//!
//! Unlike the reference it needs no memory beyond the ids and bounded tables of words, works on any
//! part of a text between two seams, and does bounded work for each byte.

mod automaton;
mod case_folds;
mod char_classes;
mod merge;
mod pattern;
mod split;
mod word_cache;

use std::collections::{HashMap, HashSet};

use rustc_hash::FxBuildHasher;
use serde_json::{Map, Value};
use unicode_normalization_alignments::char::{canonical_combining_class, decompose_canonical};
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization as _, is_nfc_quick};

use super::TextEncodeError;
use merge::{MergeScratch, MergeTable, pair_of};
#[cfg(test)]
pub(super) use split::UNMATCHED_BYTES_MAX;
use split::{PatternSplitter, WordSpan};
use word_cache::WordCache;

/// Longest word that is merged: 64 KiB take about ten milliseconds.
pub(super) const WORD_BYTES_MAX: usize = 64 << 10;

/// Longest run of marks that is sorted, which takes about 20 bytes for each of its bytes.
const MARKS_BYTES_MAX: usize = 16 << 10;

/// Most segments have fewer words.
const WORDS_RESERVED: usize = 512;

/// The blank of SentencePiece.
const BLANK: char = '▁';

type TokenTable = HashMap<Box<[u8]>, u32, FxBuildHasher>;

/// A model of byte pair encoding with what comes before it.
#[derive(Debug)]
pub(super) struct BpeEncoder {
    normalizer: TextNormalizer,
    words: WordRule,
    /// Tokens that stand for the whole word with their text.
    tokens: TokenTable,
    token_bytes_max: usize,
    merges: MergeTable,
    symbols: SymbolTable,
    recent_words: WordCache,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TextNormalizer {
    None,
    Nfc,
    /// A blank becomes `▁`.
    Blanks,
}

#[derive(Debug)]
enum WordRule {
    Pattern(Box<PatternSplitter>),
    Blanks {
        boundary: BlankBoundary,
        lead: LeadingBlank,
    },
}

/// Where a text in the manner of SentencePiece is cut into words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlankBoundary {
    /// Before each blank: the pre-tokenizer cuts there.
    Each,
    /// Before a blank after another character: no merge joins those.
    AfterText,
}

/// Where a `▁` is put before a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeadingBlank {
    Never,
    Always,
    /// Unless the piece begins with a blank.
    UnlessBlank,
    /// Likewise, and only before the first piece.
    UnlessBlankFirst,
}

/// Where a piece lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PiecePlace {
    TextStart,
    AfterToken,
}

/// The tokens that merging starts with.
#[derive(Debug)]
enum SymbolTable {
    Bytes(Box<[u32; 256]>),
    /// A character, or its bytes.
    Chars {
        chars: HashMap<char, u32, FxBuildHasher>,
        bytes: Box<[u32; 256]>,
    },
}

/// What precedes a segment's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SegmentLead {
    None,
    Blank,
}

/// Memory that is used again for every segment.
#[derive(Debug, Default)]
pub(super) struct BpeScratch {
    words: Vec<WordSpan>,
    merging: MergeScratch,
    text: String,
}

impl BpeEncoder {
    /// The encoder of a `tokenizer.json`; `None` if it has parts that this encoder does not know.
    pub(super) fn new(definition: &Value) -> Option<Self> {
        let model = definition["model"].as_object()?;
        let get = |name: &str| model.get(name).filter(|value| !value.is_null());
        let is_known = model.get("type").is_some_and(|kind| kind == "BPE")
            && get("dropout").is_none_or(|dropout| dropout == 0.0)
            && get("continuing_subword_prefix").is_none_or(|prefix| prefix == "")
            && get("end_of_word_suffix").is_none_or(|suffix| suffix == "");
        if !is_known {
            return None;
        }
        let vocab = model.get("vocab")?.as_object()?;
        let (normalizer, words) = text_rules(definition)?;
        let symbols = match words {
            WordRule::Pattern(_) => SymbolTable::byte_level(vocab)?,
            WordRule::Blanks { boundary, .. } => {
                if boundary == BlankBoundary::AfterText && joins_text_and_blank(model) {
                    return None;
                }
                SymbolTable::chars(vocab, get("byte_fallback")? == true)?
            }
        };
        let is_shared = shared_ids(vocab)?;
        // The reference takes a pair for another one that gives the same id: with shared ids the
        // order of merges would not decide alone.
        let merges = MergeTable::new(model.get("merges")?, |token| {
            id(vocab.get(token)?).filter(|id| !is_shared.contains(id))
        })?;
        let mut encoder = Self {
            normalizer,
            words,
            tokens: TokenTable::default(),
            token_bytes_max: 0,
            merges,
            symbols,
            recent_words: WordCache::default(),
        };
        let whole = get("ignore_merges").is_some_and(|ignore| ignore == true);
        if whole && matches!(encoder.words, WordRule::Blanks { .. }) {
            return None;
        }
        encoder.learn_tokens(vocab, whole)?;
        Some(encoder)
    }

    /// Keeps the tokens that a word of their text becomes: all of them if the model looks words up
    /// first, otherwise those that merging leads to.
    fn learn_tokens(&mut self, vocab: &Map<String, Value>, whole: bool) -> Option<()> {
        let mut scratch = MergeScratch::default();
        let byte_of = byte_level_alphabet();
        let mut ids = Vec::new();
        for (token, number) in vocab {
            let token_id = id(number)?;
            let text: Box<[u8]> = match &self.symbols {
                SymbolTable::Bytes(_) => {
                    let bytes = token.chars().map(|c| byte_of.get(&c).copied());
                    let Some(bytes) = bytes.collect() else {
                        continue;
                    };
                    bytes
                }
                SymbolTable::Chars { .. } => token.as_bytes().into(),
            };
            ids.clear();
            if text.len() <= WORD_BYTES_MAX {
                self.merge(&text, &mut ids, &mut scratch);
            }
            if whole || ids == [token_id] {
                self.token_bytes_max = self.token_bytes_max.max(text.len());
                self.tokens.insert(text, token_id);
            }
        }
        Some(())
    }

    /// Bytes of the longest token.
    pub(super) const fn token_bytes_max(&self) -> usize {
        self.token_bytes_max
    }

    /// The text as the model sees it, if it differs. Only of a whole piece.
    pub(super) fn normalized(&self, piece: &str) -> Result<Option<String>, TextEncodeError> {
        if self.normalizer != TextNormalizer::Nfc || is_surely_nfc(piece) {
            return Ok(None);
        }
        if has_long_marks(piece) {
            return Err(TextEncodeError::LongPart);
        }
        Ok(Some(piece.nfc().map(|(c, _)| c).collect()))
    }

    /// Whether normalization leaves an added token's text as it is.
    pub(super) fn keeps(&self, token: &str) -> bool {
        match self.normalizer {
            TextNormalizer::None => true,
            TextNormalizer::Nfc => self
                .normalized(token)
                .is_ok_and(|text| text.is_none_or(|text| text == token)),
            TextNormalizer::Blanks => false,
        }
    }

    /// What precedes a piece.
    pub(super) fn lead(&self, piece: &str, place: PiecePlace) -> SegmentLead {
        let WordRule::Blanks { lead, .. } = &self.words else {
            return SegmentLead::None;
        };
        let is_blank = piece.starts_with([' ', BLANK]);
        let leads = match lead {
            LeadingBlank::Never => false,
            LeadingBlank::Always => true,
            LeadingBlank::UnlessBlank => !is_blank,
            LeadingBlank::UnlessBlankFirst => !is_blank && place == PiecePlace::TextStart,
        };
        if leads {
            SegmentLead::Blank
        } else {
            SegmentLead::None
        }
    }

    /// Whether a piece may be cut before the character at `at`: both parts then have the words that
    /// the piece has.
    pub(super) fn is_seam(&self, piece: &str, at: usize) -> bool {
        match &self.words {
            WordRule::Pattern(splitter) => splitter.is_seam(piece.as_bytes(), at),
            WordRule::Blanks { boundary, .. } => {
                let (before, after) = piece.split_at(at);
                after.starts_with([' ', BLANK])
                    && !before.is_empty()
                    && (*boundary == BlankBoundary::Each || !before.ends_with([' ', BLANK]))
            }
        }
    }

    /// Appends the ids of a segment: a whole piece, or a part of one between seams. Stops at the end
    /// of a word after about `until` bytes. Returns the bytes that it has encoded; the rest is a
    /// segment of its own.
    pub(super) fn encode(
        &self,
        segment: &str,
        lead: SegmentLead,
        until: usize,
        ids: &mut Vec<u32>,
        scratch: &mut BpeScratch,
    ) -> Result<usize, TextEncodeError> {
        let BpeScratch {
            words,
            merging,
            text,
        } = scratch;
        words.clear();
        words.reserve(segment.len().min(WORDS_RESERVED));
        let encoded;
        let text = match &self.words {
            WordRule::Pattern(splitter) => {
                let split = splitter.split(segment.as_bytes(), until, words);
                encoded = split.ok_or(TextEncodeError::LongPart)?;
                segment
            }
            WordRule::Blanks { boundary, .. } => {
                encoded = self.end_at_blank(segment, until)?;
                text.clear();
                text.extend((lead == SegmentLead::Blank).then_some(BLANK));
                let part = segment[..encoded].chars();
                text.extend(part.map(|c| if c == ' ' { BLANK } else { c }));
                split_at_blanks(text, *boundary, words);
                text
            }
        };
        let mut recent = self.recent_words.lock();
        for (start, end) in words.iter() {
            let (start, end) = (*start as usize, *end as usize);
            if let Some(table) = &recent
                && table.append(text.as_bytes(), start, end, ids)
            {
                continue;
            }
            let word = &text.as_bytes()[start..end];
            let first = ids.len();
            match self.tokens.get(word) {
                Some(id) => ids.push(*id),
                None if word.len() > WORD_BYTES_MAX => return Err(TextEncodeError::LongWord),
                None => self.merge(word, ids, merging),
            }
            if let Some(table) = &mut recent {
                table.put(word, &ids[first..]);
            }
        }
        Ok(encoded)
    }

    /// The first end of a word at `until` or later, in a segment that is split at blanks. A word
    /// without an end near is refused before its rest is looked at.
    fn end_at_blank(&self, segment: &str, until: usize) -> Result<usize, TextEncodeError> {
        let from = segment.ceil_char_boundary(until);
        let window = segment.ceil_char_boundary(from + WORD_BYTES_MAX + 1);
        let blanks = segment[from..window].match_indices([' ', BLANK]);
        let mut blanks = blanks.map(|(at, _)| from + at);
        match blanks.find(|at| self.is_seam(segment, *at)) {
            Some(end) => Ok(end),
            None if window < segment.len() => Err(TextEncodeError::LongWord),
            None => Ok(segment.len()),
        }
    }

    fn merge(&self, word: &[u8], ids: &mut Vec<u32>, scratch: &mut MergeScratch) {
        let start = ids.len();
        match &self.symbols {
            SymbolTable::Bytes(bytes) => {
                ids.extend(word.iter().map(|byte| bytes[usize::from(*byte)]));
            }
            SymbolTable::Chars { chars, bytes } => {
                let text = std::str::from_utf8(word).unwrap_or("");
                for (at, c) in text.char_indices() {
                    match chars.get(&c) {
                        Some(id) => ids.push(*id),
                        None => {
                            let all = &word[at..at + c.len_utf8()];
                            ids.extend(all.iter().map(|byte| bytes[usize::from(*byte)]));
                        }
                    }
                }
            }
        }
        self.merges.apply(ids, start, scratch);
    }
}

/// Whether a quick check shows that a text is in form C. Characters below U+0300 are stable, and
/// compose only with those from there on: each run of the latter is checked by itself.
fn is_surely_nfc(text: &str) -> bool {
    unstable_runs(text).all(|run| is_nfc_quick(run.chars()) == IsNormalized::Yes)
}

/// Whether a text has a run of marks that is too long to be sorted: normalization holds all of it.
fn has_long_marks(text: &str) -> bool {
    let is_long = |run: &str| {
        let mut marks = 0;
        run.chars().any(|c| {
            marks = if is_mark(c) { marks + c.len_utf8() } else { 0 };
            marks > MARKS_BYTES_MAX
        })
    };
    unstable_runs(text).any(|run| run.len() > MARKS_BYTES_MAX && is_long(run))
}

/// Whether a character decomposes into marks alone, which are sorted with those next to them.
fn is_mark(c: char) -> bool {
    let mut is_mark = true;
    decompose_canonical(c, |part| is_mark &= canonical_combining_class(part) != 0);
    is_mark
}

/// The runs of characters from U+0300 on.
fn unstable_runs(text: &str) -> impl Iterator<Item = &str> {
    const FIRST_UNSTABLE: char = '\u{300}';
    let mut rest = text;
    std::iter::from_fn(move || {
        let run = &rest[first_unstable(rest.as_bytes())?..];
        let end = run.find(|c| c < FIRST_UNSTABLE).unwrap_or(run.len());
        let (run, after) = run.split_at(end);
        rest = after;
        Some(run)
    })
}

/// Where the first character from U+0300 on begins.
fn first_unstable(text: &[u8]) -> Option<usize> {
    const PART: usize = 64;
    let is_unstable = |byte: &u8| *byte >= 0xcc;
    // A part's maximum takes a few vector instructions.
    let max = |part: &[u8]| part.iter().fold(0, |max, &byte| byte.max(max));
    let part = text.chunks(PART).position(|part| is_unstable(&max(part)))?;
    let at = text[part * PART..].iter().position(is_unstable)?;
    Some(part * PART + at)
}

fn id(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

/// The ids that several tokens have.
fn shared_ids(vocab: &Map<String, Value>) -> Option<HashSet<u32>> {
    let (mut known, mut shared) = (HashSet::with_capacity(vocab.len()), HashSet::new());
    for number in vocab.values() {
        let id = id(number)?;
        if !known.insert(id) {
            shared.insert(id);
        }
    }
    Some(shared)
}

/// How a text becomes words.
fn text_rules(definition: &Value) -> Option<(TextNormalizer, WordRule)> {
    let normalizer = &definition["normalizer"];
    let parts: Vec<&Value> = if normalizer.is_null() {
        Vec::new()
    } else if normalizer["type"] == "Sequence" {
        normalizer["normalizers"].as_array()?.iter().collect()
    } else {
        vec![normalizer]
    };
    let replaces = |part: &Value| {
        part["type"] == "Replace"
            && part["pattern"]["String"] == " "
            && part["content"] == BLANK.to_string()
    };
    let prepends = |part: &Value| part["type"] == "Prepend" && part["prepend"] == BLANK.to_string();
    let pre_tokenizer = &definition["pre_tokenizer"];
    match parts[..] {
        [] if pre_tokenizer["type"] == "Metaspace" => metaspace(pre_tokenizer),
        [] => PatternSplitter::new(pre_tokenizer)
            .map(|splitter| (TextNormalizer::None, WordRule::Pattern(Box::new(splitter)))),
        [nfc] if nfc["type"] == "NFC" => PatternSplitter::new(pre_tokenizer)
            .map(|splitter| (TextNormalizer::Nfc, WordRule::Pattern(Box::new(splitter)))),
        [replace] if replaces(replace) => blanks(pre_tokenizer, LeadingBlank::Never),
        [prepend, replace] if prepends(prepend) && replaces(replace) => {
            blanks(pre_tokenizer, LeadingBlank::Always)
        }
        _ => None,
    }
}

/// A normalizer that replaces blanks. A split at blanks after it finds none.
fn blanks(pre_tokenizer: &Value, lead: LeadingBlank) -> Option<(TextNormalizer, WordRule)> {
    let finds_nothing = pre_tokenizer.is_null()
        || pre_tokenizer["type"] == "Split" && pre_tokenizer["pattern"]["String"] == " ";
    let boundary = BlankBoundary::AfterText;
    finds_nothing.then_some((TextNormalizer::Blanks, WordRule::Blanks { boundary, lead }))
}

fn metaspace(pre_tokenizer: &Value) -> Option<(TextNormalizer, WordRule)> {
    let lead = match pre_tokenizer["prepend_scheme"].as_str()? {
        "always" => LeadingBlank::UnlessBlank,
        "first" => LeadingBlank::UnlessBlankFirst,
        "never" => LeadingBlank::Never,
        _ => return None,
    };
    let boundary = if pre_tokenizer["split"] == false {
        BlankBoundary::AfterText
    } else {
        BlankBoundary::Each
    };
    let rule = WordRule::Blanks { boundary, lead };
    (pre_tokenizer["replacement"] == BLANK.to_string()).then_some((TextNormalizer::None, rule))
}

/// Whether a merge joins a `▁` to text before it.
fn joins_text_and_blank(model: &Map<String, Value>) -> bool {
    let joins = |merge: &Value| {
        pair_of(merge).is_none_or(|(left, right)| {
            let text = format!("{left}{right}");
            text.trim_start_matches(BLANK).contains(BLANK)
        })
    };
    let merges = model.get("merges").and_then(Value::as_array);
    merges.is_none_or(|merges| merges.iter().any(joins))
}

fn split_at_blanks(text: &str, boundary: BlankBoundary, words: &mut Vec<WordSpan>) {
    let mut start = 0;
    for (at, _) in text.match_indices(BLANK) {
        let is_word = boundary == BlankBoundary::Each || !text[..at].ends_with(BLANK);
        if at > start && is_word {
            words.push((start as u32, at as u32));
            start = at;
        }
    }
    if start < text.len() {
        words.push((start as u32, text.len() as u32));
    }
}

/// The byte that each character of a byte-level vocabulary stands for.
pub(crate) fn byte_level_alphabet() -> HashMap<char, u8> {
    let is_own = |byte: &u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let own = (0..=255_u8)
        .filter(is_own)
        .map(|byte| (char::from(byte), byte));
    let others = (0..=255_u8).filter(|byte| !is_own(byte));
    let others = (0x100_u32..).zip(others);
    let others = others.filter_map(|(code, byte)| Some((char::from_u32(code)?, byte)));
    own.chain(others).collect()
}

impl SymbolTable {
    fn byte_level(vocab: &Map<String, Value>) -> Option<Self> {
        let mut bytes = Box::new([0; 256]);
        for (c, byte) in byte_level_alphabet() {
            bytes[usize::from(byte)] = id(vocab.get(c.encode_utf8(&mut [0; 4]) as &str)?)?;
        }
        Some(Self::Bytes(bytes))
    }

    /// Needs the `▁` and a token for each byte, so that every text has tokens.
    fn chars(vocab: &Map<String, Value>, falls_back_to_bytes: bool) -> Option<Self> {
        let mut bytes = Box::new([0; 256]);
        for (byte, slot) in (0_u8..=255).zip(bytes.iter_mut()) {
            *slot = id(vocab.get(&format!("<0x{byte:02X}>"))?)?;
        }
        let mut chars = HashMap::with_hasher(FxBuildHasher);
        for (token, number) in vocab {
            let mut all = token.chars();
            if let (Some(c), None) = (all.next(), all.next()) {
                chars.insert(c, id(number)?);
            }
        }
        let is_complete = falls_back_to_bytes && chars.contains_key(&BLANK);
        is_complete.then_some(Self::Chars { chars, bytes })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Marks, characters that compose with others before them, and stable ones between them.
    const MIXED: [char; 11] = [
        'a', 'é', '\u{300}', '\u{301}', '\u{316}', '\u{327}', '\u{340}', '\u{1100}', '\u{1161}',
        '가', '→',
    ];

    proptest! {
        #[test]
        fn runs_are_in_form_c_as_their_text_is(
            mixed in prop::collection::vec(prop::sample::select(&MIXED), 0..12),
            stable in 0..130_usize,
        ) {
            let text: String = std::iter::repeat_n(' ', stable).chain(mixed).collect();
            let whole = is_nfc_quick(text.chars()) == IsNormalized::Yes;
            prop_assert_eq!(is_surely_nfc(&text), whole);
        }
    }

    /// Normalization gives a text of these alone only at its end.
    #[test]
    fn marks_are_what_normalization_holds() {
        for c in '\0'..=char::MAX {
            let taken = std::cell::Cell::new(0);
            let text = [c, c, 'a', 'a'];
            let chars = text.into_iter().inspect(|_| taken.set(taken.get() + 1));
            let mut decomposed = chars.nfd();
            decomposed.next();
            let is_held = taken.get() > 2;
            assert_eq!(is_mark(c), is_held, "{c:?}");
        }
    }
}
