//! Encodes a text piece by piece and caches the pieces: most messages of a conversation were
//! encoded with its previous request.
//!
//! Why the result is exact: a tokenizer first splits off the added tokens that match unnormalised
//! text (leftmost, then longest) and processes each piece between them on its own. So a text may be
//! cut at such a token if nothing looks across the cut: the token takes no adjacent blanks, no
//! token requires a word boundary, and the pre-tokenizer treats the first piece like any other. All
//! other tokenizers are not cached.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;

use super::{TextEncodeError, encode_whole};
use crate::openai::SpecialTokens;

/// Cached bytes per tokenizer: about 10,000 messages of 2 KiB.
const CACHE_BYTES_MAX: usize = 64 << 20;
/// A larger piece is not cached: it would evict hundreds of others.
const PIECE_BYTES_MAX: usize = 1 << 20;
/// Approximate overhead of a cached piece: map entry, allocations and their headers.
const ENTRY_BYTES: usize = 128;

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PieceCacheStats {
    pub hit_bytes: u64,
    pub miss_bytes: u64,
    pub kept_bytes: usize,
}

pub(super) struct PieceEncoder {
    delimiters: Delimiters,
    /// Ids that the post-processor puts before and after a text.
    surrounding: (Vec<u32>, Vec<u32>),
    cache: Mutex<PieceCache>,
}

impl fmt::Debug for PieceEncoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PieceEncoder")
            .field("delimiters", &self.delimiters.tokens.len())
            .finish_non_exhaustive()
    }
}

impl PieceEncoder {
    /// `None` if this tokenizer cannot be cut exactly.
    pub(super) fn new(tokenizer: &tokenizers::Tokenizer, definition: &[u8]) -> Option<Self> {
        let definition: Value = serde_json::from_slice(definition).ok()?;
        if !is_local(&definition) {
            return None;
        }
        Some(Self {
            delimiters: Delimiters::new(tokenizer)?,
            surrounding: surrounding_ids(tokenizer)?,
            cache: Mutex::default(),
        })
    }

    /// The ids of a text. The lock is not held while a piece is encoded.
    pub(super) fn encode(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        text: &str,
        special: SpecialTokens,
    ) -> Result<Vec<u32>, TextEncodeError> {
        let pieces = self.delimiters.cut(text);
        let mut cached: Vec<Option<Arc<[u32]>>> = {
            let mut cache = self.locked();
            let look_up = |piece: &Piece<'_>| match piece {
                Piece::Text(text) => cache.get(text),
                Piece::Delimiter(_) => None,
            };
            pieces.iter().map(look_up).collect()
        };
        let mut misses = Vec::new();
        for (piece, cached) in pieces.iter().zip(&mut cached) {
            if let (Piece::Text(text), None) = (piece, &cached) {
                let ids: Arc<[u32]> = encode_whole(tokenizer, text, SpecialTokens::Omit)?.into();
                misses.push((*text, Arc::clone(&ids)));
                *cached = Some(ids);
            }
        }
        if !misses.is_empty() {
            let mut cache = self.locked();
            for (text, ids) in misses {
                cache.put(text, ids);
            }
        }
        let (before, after) = match special {
            SpecialTokens::Add => (self.surrounding.0.as_slice(), self.surrounding.1.as_slice()),
            SpecialTokens::Omit => (&[][..], &[][..]),
        };
        let mut out = Vec::with_capacity(text.len() / 4 + 8);
        out.extend_from_slice(before);
        for (piece, cached) in pieces.iter().zip(&cached) {
            match piece {
                Piece::Delimiter(id) => out.push(*id),
                Piece::Text(_) => out.extend(cached.iter().flat_map(|ids| ids.iter())),
            }
        }
        out.extend_from_slice(after);
        Ok(out)
    }

    pub(super) fn stats(&self) -> PieceCacheStats {
        let cache = self.locked();
        PieceCacheStats {
            kept_bytes: cache.young_bytes + cache.old_bytes,
            ..cache.stats
        }
    }

    fn locked(&self) -> MutexGuard<'_, PieceCache> {
        // The cache is consistent between any two statements that can panic.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the tokenizer encodes each piece between added tokens on its own.
fn is_local(definition: &Value) -> bool {
    let dropout = &definition["model"]["dropout"];
    let random = !dropout.is_null() && dropout.as_f64() != Some(0.0);
    !random && !depends_on_position(&definition["pre_tokenizer"])
}

/// Whether a metaspace is put before the first piece only.
fn depends_on_position(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer {
        Value::Object(map) => {
            map.get("prepend_scheme")
                .is_some_and(|scheme| scheme == "first")
                || map.values().any(depends_on_position)
        }
        Value::Array(list) => list.iter().any(depends_on_position),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// The ids before and after those of a text when special tokens are added.
fn surrounding_ids(tokenizer: &tokenizers::Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    const PROBE: &str = "probe text";
    let plain = encode_whole(tokenizer, PROBE, SpecialTokens::Omit).ok()?;
    let whole = encode_whole(tokenizer, PROBE, SpecialTokens::Add).ok()?;
    let at = whole
        .windows(plain.len().max(1))
        .position(|window| window == plain)?;
    Some((whole[..at].to_vec(), whole[at + plain.len()..].to_vec()))
}

enum Piece<'t> {
    Text(&'t str),
    Delimiter(u32),
}

/// The added tokens that match unnormalised text.
struct Delimiters {
    matcher: AhoCorasick,
    tokens: Vec<Delimiter>,
}

struct Delimiter {
    id: u32,
    /// False if the token takes adjacent blanks: the text is not cut there.
    cuts: bool,
}

impl Delimiters {
    fn new(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let (mut texts, mut tokens) = (Vec::new(), Vec::new());
        for (id, token) in tokenizer.get_added_tokens_decoder() {
            if token.single_word || token.content.is_empty() {
                return None;
            }
            if !token.normalized {
                let cuts = !(token.lstrip || token.rstrip);
                tokens.push(Delimiter { id, cuts });
                texts.push(token.content);
            }
        }
        let matcher = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(texts)
            .ok()?;
        Some(Self { matcher, tokens })
    }

    fn cut<'t>(&self, text: &'t str) -> Vec<Piece<'t>> {
        let mut pieces = Vec::new();
        let mut start = 0;
        let push_text = |pieces: &mut Vec<Piece<'t>>, text: &'t str| {
            if !text.is_empty() {
                pieces.push(Piece::Text(text));
            }
        };
        for found in self.matcher.find_iter(text) {
            let token = &self.tokens[found.pattern().as_usize()];
            if token.cuts {
                push_text(&mut pieces, &text[start..found.start()]);
                pieces.push(Piece::Delimiter(token.id));
                start = found.end();
            }
        }
        push_text(&mut pieces, &text[start..]);
        pieces
    }
}

/// Two generations: a used piece moves to the young one. When the young one has filled its half, it
/// becomes the old one, and the old one is dropped.
#[derive(Default)]
struct PieceCache {
    young: HashMap<Box<str>, Arc<[u32]>>,
    old: HashMap<Box<str>, Arc<[u32]>>,
    young_bytes: usize,
    old_bytes: usize,
    stats: PieceCacheStats,
}

impl PieceCache {
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
