use std::cell::Cell;
use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;
use crate::tokenize::bpe::char_classes::char_start;
use crate::tokenize::bpe::pattern;
use crate::tokenize::bpe::split::masked;

thread_local! {
    /// Bytes of text that attempts to match have looked at.
    pub(in crate::tokenize::bpe) static SEEN_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// Patterns of the families, and ones whose order, bounds and lookaheads decide.
const PATTERNS: [&str; 14] = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}",
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    concat!(
        r"[\p{Han}]+",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    // The first alternative that matches wins, not the longest.
    "a|ab|abc|B",
    "a{2,4}b?|a+B|a",
    "a*ab|a{3,}1(?!1)|a",
    "a+(?!b)|ab(?!')|[aB]",
    "a(?:b|bB)?|B(?:'|'s)",
    "a?a?a?b|a?B{2}|1{2,}(?!a)",
    r"\s{2,}(?!\S)|\s?a+(?!\s)",
];

const CHARS: [char; 22] = [
    'a', 'b', 'B', 's', 'l', 'L', 'é', 'ǅ', '中', 'の', '\u{301}', '1', '٣', ' ', '\u{a0}', '\n',
    '\r', '\'', '/', '-', '→', '🦀',
];

struct ReadPattern {
    alternatives: Vec<Vec<Node<ClassMask>>>,
    classes: CharClasses,
}

impl ReadPattern {
    fn of(expression: &str) -> Self {
        let pattern = pattern::read(expression).unwrap();
        let (classes, masks) = CharClasses::new(&pattern.sets).unwrap();
        let all = pattern.alternatives.iter();
        let alternatives = all.map(|nodes| masked(nodes, &|set| masks[set])).collect();
        Self {
            alternatives,
            classes,
        }
    }

    fn automaton(&self) -> Option<WordAutomaton> {
        WordAutomaton::new(&self.alternatives, &self.classes)
    }
}

const fn has(set: ClassMask, class: u8) -> bool {
    set >> class & 1 == 1
}

/// The end of the first match, found by backtracking.
fn backtrack(
    classes: &CharClasses,
    nodes: &[Node<ClassMask>],
    text: &[u8],
    at: usize,
) -> Option<usize> {
    let Some((node, rest)) = nodes.split_first() else {
        return Some(at);
    };
    match node {
        Node::Repeat { set, min, max } => {
            let (mut end, mut count) = (at, 0);
            while count < *max
                && let Some((class, length)) = classes.at(text, end)
                && has(*set, class)
            {
                end += length;
                count += 1;
            }
            while count >= *min {
                if let Some(end) = backtrack(classes, rest, text, end) {
                    return Some(end);
                }
                if count == 0 {
                    break;
                }
                end = char_start(text, end - 1);
                count -= 1;
            }
            None
        }
        Node::NotAhead(set) => match classes.at(text, at) {
            Some((class, _)) if has(*set, class) => None,
            _ => backtrack(classes, rest, text, at),
        },
        Node::Group {
            alternatives,
            presence,
        } => alternatives
            .iter()
            .find_map(|nodes| backtrack(classes, nodes, text, at))
            .or_else(|| (*presence == Presence::Optional).then_some(at)),
    }
}

/// Compares the matches of all patterns at each character, and at the text's end.
fn compare(texts: &[String]) {
    static PATTERNS_READ: LazyLock<Vec<(ReadPattern, WordAutomaton)>> = LazyLock::new(|| {
        let read = PATTERNS.iter().map(|expression| {
            let pattern = ReadPattern::of(expression);
            let automaton = pattern.automaton().unwrap();
            (pattern, automaton)
        });
        read.collect()
    });
    for ((pattern, automaton), expression) in PATTERNS_READ.iter().zip(PATTERNS) {
        for text in texts {
            let starts = text.char_indices().map(|(at, _)| at);
            for at in starts.chain([text.len()]) {
                let text = text.as_bytes();
                let mut tried = pattern.alternatives.iter();
                let expected = tried.find_map(|nodes| backtrack(&pattern.classes, nodes, text, at));
                let found = automaton.match_at(&pattern.classes, text, at);
                assert!(found.seen >= found.end.unwrap_or(at) && found.seen <= text.len());
                assert_eq!(found.end, expected, "{expression} {text:?} at {at}");
            }
        }
    }
}

/// All texts of up to `length` of these characters.
fn all_texts(chars: &[char], length: usize) -> Vec<String> {
    let (mut texts, mut from) = (vec![String::new()], 0);
    for _ in 0..length {
        let end = texts.len();
        for at in from..end {
            let longer = chars.iter().map(|c| format!("{}{c}", texts[at]));
            let longer: Vec<String> = longer.collect();
            texts.extend(longer);
        }
        from = end;
    }
    texts
}

#[test]
fn short_texts_match_as_by_backtracking() {
    compare(&all_texts(&['a', 'b', 'B', '1', ' ', '\n', '\''], 5));
    compare(&all_texts(&CHARS, 3));
}

proptest! {
    #[test]
    fn texts_match_as_by_backtracking(
        runs in prop::collection::vec((prop::sample::select(&CHARS), 1..5_usize), 0..40),
    ) {
        let text: String = runs.into_iter().flat_map(|(c, n)| std::iter::repeat_n(c, n)).collect();
        compare(&[text]);
    }
}

#[test]
fn patterns_with_too_many_states_or_an_empty_match_are_refused() {
    for expression in ["a{1,600}", "a*b{300}c{300}", "(?:ab|c?)"] {
        assert!(
            ReadPattern::of(expression).automaton().is_none(),
            "{expression}"
        );
    }
}
