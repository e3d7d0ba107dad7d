//! Added tokens: they are found in a text before anything else, leftmost first, then longest. The
//! text between them is encoded piece by piece.

use aho_corasick::{AhoCorasick, Input, MatchKind};

/// The added tokens of a tokenizer.
#[derive(Debug)]
pub(super) struct AddedTokens {
    /// Found in the text as it is.
    pub raw: TokenMatcher,
    /// Found in each piece after its normalization.
    pub normalized: TokenMatcher,
}

#[derive(Debug)]
pub(super) struct TokenMatcher {
    matcher: Option<AhoCorasick>,
    tokens: Vec<AddedTokenRule>,
}

#[derive(Clone, Copy, Debug)]
struct AddedTokenRule {
    id: u32,
    /// It takes the blanks before it.
    strips_left: bool,
    strips_right: bool,
}

/// An added token and the bytes that it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FoundToken {
    pub start: usize,
    pub end: usize,
    pub id: u32,
}

impl AddedTokens {
    /// `None` if a token requires a word boundary, or may begin inside the blanks that another one
    /// takes: such texts cannot be cut at tokens.
    pub(super) fn new(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let tokens = tokenizer.get_added_tokens_decoder();
        let mut tokens: Vec<_> = tokens.into_iter().collect();
        tokens.sort_unstable_by_key(|(id, _)| *id);
        let takes_blanks = tokens.iter().any(|(_, token)| token.rstrip);
        let is_plain = |token: &tokenizers::AddedToken| {
            let begins_blank = token.content.starts_with(char::is_whitespace);
            !(token.single_word || token.content.is_empty() || takes_blanks && begins_blank)
        };
        if !tokens.iter().all(|(_, token)| is_plain(token)) {
            return None;
        }
        let (normalized, raw): (Vec<_>, Vec<_>) =
            tokens.into_iter().partition(|(_, token)| token.normalized);
        Some(Self {
            raw: TokenMatcher::new(raw)?,
            normalized: TokenMatcher::new(normalized)?,
        })
    }
}

impl TokenMatcher {
    fn new(tokens: Vec<(u32, tokenizers::AddedToken)>) -> Option<Self> {
        let rules = tokens.iter().map(|(id, token)| AddedTokenRule {
            id: *id,
            strips_left: token.lstrip,
            strips_right: token.rstrip,
        });
        let rules = rules.collect();
        let mut matcher = None;
        if !tokens.is_empty() {
            let texts = tokens.iter().map(|(_, token)| &token.content);
            let mut builder = AhoCorasick::builder();
            builder.match_kind(MatchKind::LeftmostLongest);
            matcher = Some(builder.build(texts).ok()?);
        }
        Some(Self {
            matcher,
            tokens: rules,
        })
    }

    /// The next token from `from` on, where the last one ended.
    pub(super) fn next(&self, text: &str, from: usize) -> Option<FoundToken> {
        let found = self
            .matcher
            .as_ref()?
            .find(Input::new(text).range(from..))?;
        let rule = self.tokens[found.pattern().as_usize()];
        let (mut start, mut end) = (found.start(), found.end());
        if rule.strips_left {
            start = from + text[from..start].trim_end().len();
        }
        if rule.strips_right {
            end = text.len() - text[end..].trim_start().len();
        }
        Some(FoundToken {
            start,
            end,
            id: rule.id,
        })
    }
}
