//! Encodes a text piece by piece, remembering pieces: in a conversation all but the last few
//! messages have been seen before.
//!
//! Why it is exact: a tokenizer first cuts out the added tokens that match unnormalised text (the
//! leftmost, of these the longest), and normalises, splits and merges each piece between them on
//! its own. So a text may be cut at such a token and its pieces encoded alone, if nothing looks over
//! the cut: the token takes no blanks beside it, no token asks for a word boundary, and the
//! pre-tokenizer treats the first piece like any other. Other tokenizers are not cached.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use super::{EncodeError, encode_plain};

/// Memory of one tokenizer's pieces: some 10,000 messages of 2 KiB.
const CACHE_BYTES_MAX: usize = 64 << 20;
/// A larger piece is not kept: it would push out hundreds of others.
const PIECE_BYTES_MAX: usize = 1 << 20;
/// Map entry, allocations and their headers, roughly.
const ENTRY_BYTES: usize = 128;

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    pub hit_bytes: u64,
    pub miss_bytes: u64,
    pub kept_bytes: usize,
}

pub(super) struct Segments {
    marks: Marks,
    /// What the post-processor puts before and behind a text.
    around: (Vec<u32>, Vec<u32>),
    cache: Mutex<Cache>,
}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segments")
            .field("marks", &self.marks.tokens.len())
            .finish_non_exhaustive()
    }
}

impl Segments {
    /// Nothing if this tokenizer cannot be cut exactly.
    pub(super) fn new(tokenizer: &tokenizers::Tokenizer, definition: &[u8]) -> Option<Self> {
        let definition: Value = serde_json::from_slice(definition).ok()?;
        if !is_local(&definition) {
            return None;
        }
        let marks = Marks::new(tokenizer)?;
        let around = around(tokenizer)?;
        Some(Self {
            marks,
            around,
            cache: Mutex::default(),
        })
    }

    /// The ids of a text without surrounding special tokens.
    pub(super) fn encode(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        text: &str,
    ) -> Result<Vec<u32>, EncodeError> {
        let pieces = self.marks.cut(text);
        let mut found: Vec<Option<Arc<[u32]>>> = {
            let mut cache = self.locked();
            let look_up = |piece: &Piece<'_>| match piece {
                Piece::Text(text) => cache.get(text),
                Piece::Mark(_) => None,
            };
            pieces.iter().map(look_up).collect()
        };
        let mut fresh = Vec::new();
        for (piece, found) in pieces.iter().zip(&mut found) {
            if let (Piece::Text(text), None) = (piece, &found) {
                let ids: Arc<[u32]> = encode_plain(tokenizer, text, false)?.into();
                fresh.push((*text, Arc::clone(&ids)));
                *found = Some(ids);
            }
        }
        if !fresh.is_empty() {
            let mut cache = self.locked();
            for (text, ids) in fresh {
                cache.put(text, ids);
            }
        }
        let mut out = Vec::with_capacity(text.len() / 4 + 8);
        for (piece, found) in pieces.iter().zip(&found) {
            match (piece, found) {
                (Piece::Mark(id), _) => out.push(*id),
                (Piece::Text(_), found) => out.extend(found.iter().flat_map(|ids| ids.iter())),
            }
        }
        Ok(out)
    }

    /// The ids with the post-processor's special tokens around them.
    pub(super) fn surround(&self, ids: Vec<u32>) -> Vec<u32> {
        let (before, behind) = &self.around;
        if before.is_empty() && behind.is_empty() {
            return ids;
        }
        [before.as_slice(), &ids, behind].concat()
    }

    pub(super) fn stats(&self) -> CacheStats {
        let cache = self.locked();
        CacheStats {
            kept_bytes: cache.young_bytes + cache.old_bytes,
            ..cache.stats
        }
    }

    fn locked(&self) -> MutexGuard<'_, Cache> {
        // The cache is consistent between any two statements that can panic.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether each piece between added tokens is encoded on its own.
fn is_local(definition: &Value) -> bool {
    let dropout = &definition["model"]["dropout"];
    let random = !dropout.is_null() && dropout.as_f64() != Some(0.0);
    !random && !looks_at_position(&definition["pre_tokenizer"])
}

/// A metaspace that is put before the first piece only.
fn looks_at_position(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer {
        Value::Object(map) => {
            map.get("prepend_scheme")
                .is_some_and(|scheme| scheme == "first")
                || map.values().any(looks_at_position)
        }
        Value::Array(list) => list.iter().any(looks_at_position),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// What stands around the ids of a text when special tokens are added.
fn around(tokenizer: &tokenizers::Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    const PROBE: &str = "probe text";
    let plain = encode_plain(tokenizer, PROBE, false).ok()?;
    let whole = encode_plain(tokenizer, PROBE, true).ok()?;
    let at = whole
        .windows(plain.len().max(1))
        .position(|window| window == plain)?;
    Some((whole[..at].to_vec(), whole[at + plain.len()..].to_vec()))
}

enum Piece<'t> {
    Text(&'t str),
    Mark(u32),
}

/// The added tokens that match unnormalised text.
struct Marks {
    /// By first byte, longer ones first.
    tokens: Vec<Mark>,
    /// For each first byte the range of `tokens`.
    by_first: [(u16, u16); 256],
}

struct Mark {
    text: String,
    id: u32,
    /// False if it takes blanks beside it: then the text is not cut there.
    cuts: bool,
}

impl Marks {
    fn new(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let mut tokens = Vec::new();
        for (id, token) in tokenizer.get_added_tokens_decoder() {
            if token.single_word || token.content.is_empty() {
                return None;
            }
            if !token.normalized {
                let cuts = !(token.lstrip || token.rstrip);
                tokens.push(Mark {
                    text: token.content,
                    id,
                    cuts,
                });
            }
        }
        tokens.sort_by(|a, b| {
            let first = |mark: &Mark| mark.text.as_bytes().first().copied();
            first(a)
                .cmp(&first(b))
                .then(b.text.len().cmp(&a.text.len()))
                .then(a.id.cmp(&b.id))
        });
        let mut by_first = [(0, 0); 256];
        for (at, mark) in tokens.iter().enumerate() {
            let at = u16::try_from(at).ok()?;
            let range = &mut by_first[usize::from(*mark.text.as_bytes().first()?)];
            *range = if range.1 == 0 {
                (at, at + 1)
            } else {
                (range.0, at + 1)
            };
        }
        Some(Self { tokens, by_first })
    }

    /// The longest token at the beginning of these bytes.
    fn matching(&self, bytes: &[u8]) -> Option<&Mark> {
        let (from, to) = self.by_first[usize::from(*bytes.first()?)];
        let candidates = &self.tokens[usize::from(from)..usize::from(to)];
        candidates
            .iter()
            .find(|mark| bytes.starts_with(mark.text.as_bytes()))
    }

    fn cut<'t>(&self, text: &'t str) -> Vec<Piece<'t>> {
        let bytes = text.as_bytes();
        let mut pieces = Vec::new();
        let (mut piece_start, mut at) = (0, 0);
        while at < bytes.len() {
            let Some(mark) = self.matching(&bytes[at..]) else {
                at += 1;
                continue;
            };
            let end = at + mark.text.len();
            if mark.cuts {
                if piece_start < at {
                    pieces.push(Piece::Text(&text[piece_start..at]));
                }
                pieces.push(Piece::Mark(mark.id));
                piece_start = end;
            }
            at = end;
        }
        if piece_start < bytes.len() {
            pieces.push(Piece::Text(&text[piece_start..]));
        }
        pieces
    }
}

/// Two generations: what is used stays in the young one; when that has filled its half, the old one
/// is forgotten and the young one becomes old.
#[derive(Default)]
struct Cache {
    young: HashMap<Box<str>, Arc<[u32]>>,
    old: HashMap<Box<str>, Arc<[u32]>>,
    young_bytes: usize,
    old_bytes: usize,
    stats: CacheStats,
}

impl Cache {
    fn get(&mut self, text: &str) -> Option<Arc<[u32]>> {
        let found = match self.young.get(text) {
            Some(ids) => Some(Arc::clone(ids)),
            None => self.old.remove_entry(text).map(|(text, ids)| {
                self.old_bytes -= entry_bytes(&text, &ids);
                self.insert(text, Arc::clone(&ids));
                ids
            }),
        };
        let counted = if found.is_some() {
            &mut self.stats.hit_bytes
        } else {
            &mut self.stats.miss_bytes
        };
        *counted += text.len() as u64;
        found
    }

    fn put(&mut self, text: &str, ids: Arc<[u32]>) {
        if text.len() <= PIECE_BYTES_MAX && !self.young.contains_key(text) {
            self.insert(text.into(), ids);
        }
    }

    fn insert(&mut self, text: Box<str>, ids: Arc<[u32]>) {
        let bytes = entry_bytes(&text, &ids);
        if self.young_bytes + bytes > CACHE_BYTES_MAX / 2 {
            self.old = std::mem::take(&mut self.young);
            self.old_bytes = std::mem::take(&mut self.young_bytes);
        }
        self.young_bytes += bytes;
        self.young.insert(text, ids);
    }
}

fn entry_bytes(text: &str, ids: &[u32]) -> usize {
    text.len() + size_of_val(ids) + ENTRY_BYTES
}

#[cfg(test)]
mod tests;
