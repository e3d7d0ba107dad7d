//! Compares the own encoder with the reference: on generated texts when a tokenizer is loaded, and
//! on a sample of requests. The first difference switches the model to the reference.

use std::sync::atomic::Ordering;

use super::text_task::CutRule;
use super::{EncoderKind, TaskState, TextEncodeError, Tokenizer};
use crate::openai::SpecialTokens;

/// Texts that both encoders have encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ComparisonCounts {
    pub equal: u64,
    pub different: u64,
}

/// The result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceComparison {
    Equal,
    Different,
    /// The own encoder is not in use, or one of the two refuses the text.
    NotCompared,
}

impl Tokenizer {
    /// Compares the ids of a text with the reference's. A difference ends the use of the own
    /// encoder.
    pub fn compare_with_reference(
        &self,
        text: &str,
        special: SpecialTokens,
        ids: &[u32],
    ) -> ReferenceComparison {
        if self.encoder() == EncoderKind::Reference {
            return ReferenceComparison::NotCompared;
        }
        match self.encode_by_reference(text, special) {
            Ok(expected) if expected == ids => {
                self.compared_equal.fetch_add(1, Ordering::Relaxed);
                ReferenceComparison::Equal
            }
            Ok(_) => {
                self.compared_different.fetch_add(1, Ordering::Relaxed);
                self.own_differs.store(true, Ordering::Relaxed);
                ReferenceComparison::Different
            }
            Err(_) => ReferenceComparison::NotCompared,
        }
    }

    pub fn comparison_counts(&self) -> ComparisonCounts {
        ComparisonCounts {
            equal: self.compared_equal.load(Ordering::Relaxed),
            different: self.compared_different.load(Ordering::Relaxed),
        }
    }

    /// Compares generated texts, cut at every seam. Returns the first one with different ids; the
    /// own encoder is then no longer used.
    pub fn compare_generated(&self, texts: usize, seed: u64) -> Option<String> {
        if self.encoder() == EncoderKind::Reference {
            return None;
        }
        let mut generator = TextGenerator::new(self, seed);
        for number in 0..texts {
            let text = generator.next_text();
            let special = if number % 4 == 0 {
                SpecialTokens::Add
            } else {
                SpecialTokens::Omit
            };
            if self.compare_cut(&text, special) == ReferenceComparison::Different {
                return Some(text);
            }
        }
        None
    }

    /// Like [`Self::compare_with_reference`], with the ids of the text cut at every seam.
    pub fn compare_cut(&self, text: &str, special: SpecialTokens) -> ReferenceComparison {
        match self.encode_at_every_seam(text, special) {
            Ok(ids) => self.compare_with_reference(text, special, &ids),
            Err(_) => ReferenceComparison::NotCompared,
        }
    }

    pub(super) fn encode_at_every_seam(
        &self,
        text: &str,
        special: SpecialTokens,
    ) -> Result<Vec<u32>, TextEncodeError> {
        let mut task = self.task(text, special).with_cuts(CutRule::EVERY_SEAM);
        while task.step(self, 1)? == TaskState::More {}
        Ok(task.into_ids())
    }
}

/// Texts that pre-tokenizers and normalizers treat differently: contractions, runs of blanks and
/// digits, scripts, combining marks, added tokens and parts of them, pieces of the vocabulary.
pub(super) struct TextGenerator {
    state: u64,
    special: Vec<String>,
    vocabulary: Vec<String>,
}

const FRAGMENTS: &[&str] = &[
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    " \n",
    "\n ",
    "\t",
    "\t\t",
    "\u{a0}",
    "\u{3000}",
    "\u{2028}",
    "\u{85}",
    "\u{b}",
    "\u{200b}",
    "\u{feff}",
    "\0",
    "'s",
    "'S",
    "'t",
    "'re",
    "'VE",
    "'m",
    "'ll",
    "'LL",
    "'lL",
    "'d",
    "'ſ",
    "s'ſ'SI",
    "ſ",
    "'",
    "''",
    "’s",
    "the",
    " the",
    "The",
    "THE",
    " iPhone",
    "HTTPServer",
    "fooBar",
    "ǅ",
    "ǆ",
    "ß",
    "ﬀ",
    "K",
    "İ",
    "ı",
    "é",
    "e\u{301}",
    "\u{301}",
    " \u{301}",
    "a\u{308}\u{323}",
    "\u{1e9b}\u{323}",
    "ạ̈",
    "각",
    "\u{1100}\u{1161}\u{11a8}",
    "क्षि",
    "ก็",
    "ا\u{64b}",
    "שָׁ",
    "中文",
    "，",
    "。",
    "日本語のテキスト",
    "カタカナ",
    "ｶﾞ",
    "한국어",
    "Привет",
    "мир",
    "Ελλάδα",
    "🙂",
    "👩‍👩‍👧",
    "🇩🇪",
    "❤️",
    "1",
    "12",
    "123",
    "1234",
    "3.14",
    "٣",
    "Ⅷ",
    "½",
    "²",
    "#",
    "##",
    "!",
    "!?",
    "...",
    "…",
    "//",
    "/",
    "/*",
    "*/",
    "\\",
    "{\"a\":",
    "}",
    "();",
    "=>",
    "_",
    "__init__",
    "-",
    "--",
    "–",
    "$",
    "€",
    "@user",
    "<",
    ">",
    "<|",
    "|>",
    "[",
    "]",
    "▁",
    "▁▁",
    " ▁",
    "http://x.y/z?q=1&r=2",
    "aaaaaaaa",
    "        ",
    "\u{10ffff}",
    "\u{e000}",
    "\u{1d165}",
    "\u{2126}",
    "\u{f900}",
    "\u{0958}",
];

impl TextGenerator {
    pub(super) fn new(tokenizer: &Tokenizer, seed: u64) -> Self {
        let added = tokenizer.reference.get_added_tokens_decoder();
        let mut special: Vec<String> = added.into_values().map(|token| token.content).collect();
        special.sort_unstable();
        let mut generator = Self {
            state: seed | 1,
            special,
            vocabulary: Vec::new(),
        };
        let size = tokenizer.reference.get_vocab_size(false);
        for _ in 0..4096 {
            let id = u32::try_from(generator.below(size)).unwrap_or(0);
            let text = tokenizer.reference.decode(&[id], false);
            generator.vocabulary.extend(text.ok());
        }
        generator
    }

    /// An even number below a bound (xorshift64*).
    fn below(&mut self, bound: usize) -> usize {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        let drawn = self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        usize::try_from(drawn).unwrap_or(0) % bound.max(1)
    }

    fn pick<'a>(&mut self, from: &'a [String]) -> &'a str {
        from.get(self.below(from.len())).map_or("", String::as_str)
    }

    pub(super) fn next_text(&mut self) -> String {
        let mut text = String::new();
        for _ in 0..=self.below(10) {
            self.add_fragment(&mut text);
        }
        text
    }

    fn add_fragment(&mut self, text: &mut String) {
        let (special, vocabulary) = (
            std::mem::take(&mut self.special),
            std::mem::take(&mut self.vocabulary),
        );
        match self.below(16) {
            0..=6 => text.push_str(FRAGMENTS[self.below(FRAGMENTS.len())]),
            7..=9 => text.push_str(self.pick(&vocabulary)),
            10 => {
                let fragment = FRAGMENTS[self.below(FRAGMENTS.len())];
                text.push_str(&fragment.repeat(self.below(6)));
            }
            11 => text.push_str(self.pick(&special)),
            12 => {
                let token = self.pick(&special);
                let end = token.floor_char_boundary(self.below(token.len()));
                text.push_str(&token[..end]);
            }
            13 => text.extend(char::from_u32(self.below(0x11_0000) as u32)),
            14 => text.extend(char::from_u32(self.below(0x3000) as u32)),
            _ => text.extend((0..self.below(8)).map(|_| char::from(b'a' + self.below(26) as u8))),
        }
        (self.special, self.vocabulary) = (special, vocabulary);
    }
}

/// Ids of the reference, for tests.
#[cfg(test)]
pub(super) fn expected(tokenizer: &Tokenizer, text: &str, special: SpecialTokens) -> Vec<u32> {
    super::encode_whole(&tokenizer.reference, text, special).expect("the reference encodes it")
}

#[cfg(test)]
pub(super) mod tests;
