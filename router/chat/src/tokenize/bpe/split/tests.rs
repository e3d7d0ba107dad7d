use std::ops::Range;

use serde_json::json;

use super::super::automaton::tests::SEEN_BYTES;
use super::*;

const LLAMA: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

fn splitter(expression: &str) -> PatternSplitter {
    PatternSplitter::of_expressions(&[expression]).unwrap()
}

#[test]
fn seams_are_where_no_match_and_no_lookahead_can_cross() {
    let (llama, gpt2) = (splitter(LLAMA), splitter(GPT2));
    let is_seam = |splitter: &PatternSplitter, pair: &str| {
        splitter.is_seam(pair.as_bytes(), pair.chars().next().unwrap().len_utf8())
    };
    for pair in [
        "a ", "é ", "a1", "1a", "1 ", "\na", "\n1", "中。", "a\n", "。 ", "\n!",
    ] {
        assert!(is_seam(&llama, pair), "{pair:?}");
    }
    for pair in [
        "ab", " a", "  ", " \n", "\n ", "\n\n", "12", "。中", "!\n", "'s",
    ] {
        assert!(!is_seam(&llama, pair), "{pair:?}");
    }
    // A lookahead decides whether the newline belongs to the blanks before it.
    assert!(!is_seam(&gpt2, "\na") && is_seam(&gpt2, "a "));
    // Digits are left unmatched, and so they are one word.
    let partial = splitter(r"\p{L}+|\s");
    assert!(!is_seam(&partial, "1!") && is_seam(&partial, "1a"));
}

/// With each character at each place of a contraction, and alone. The engine takes `ſ` for `s`.
#[test]
fn contractions_are_the_engines_with_every_character() {
    contractions_are_the_engines(0..2);
}

#[test]
#[ignore = "long: ./test.sh --all"]
fn contractions_are_the_engines_with_characters_of_further_planes() {
    contractions_are_the_engines(2..0x11);
}

fn contractions_are_the_engines(planes: Range<u32>) {
    for contractions in ["(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)"] {
        let own = PatternSplitter::of_expressions(&[contractions]).unwrap();
        let engine = tokenizers::utils::SysRegex::new(contractions).unwrap();
        for plane in planes.clone() {
            let codes = plane << 16..(plane + 1) << 16;
            let text = codes
                .filter_map(char::from_u32)
                .map(|c| format!("{c} '{c}s '{c} '{c}l 'l{c} 'r{c} '{c}e 'v{c} {c}s {c}ll 'm\n"));
            let text: String = text.collect();
            let mut words = Vec::new();
            own.split(text.as_bytes(), text.len(), &mut words).unwrap();
            let mut expected = Vec::new();
            let mut last = 0;
            for (start, end) in engine.find_iter(&text) {
                expected.extend((start > last).then_some((last as u32, start as u32)));
                expected.push((start as u32, end as u32));
                last = end;
            }
            expected.extend((last < text.len()).then_some((last as u32, text.len() as u32)));
            assert!(words == expected, "{contractions}, plane {plane}");
        }
    }
}

/// The first alternative looks for a sign behind all digits, which took a text of digits the square
/// of its length.
#[test]
fn matching_looks_at_little_text_for_each_byte() {
    const BYTES: usize = 64 << 10;
    let percent = [r"\p{N}+%|\p{N}|[^\p{N}]+"];
    let second = [r"[^a]+", percent[0]];
    for expressions in [&percent[..], &second[..]] {
        let splitter = PatternSplitter::of_expressions(expressions).unwrap();
        for (digits, is_split) in [(1, true), (100, true), (5000, false), (2 << 20, false)] {
            let text = format!("{} ", "7".repeat(digits)).repeat(BYTES.div_ceil(digits));
            SEEN_BYTES.set(0);
            let mut words = Vec::new();
            let end = splitter.split(text.as_bytes(), BYTES, &mut words);
            assert_eq!(end.is_some(), is_split, "{digits} digits");
            let most = 70 * BYTES + 3 * text.len();
            assert!(SEEN_BYTES.get() < most, "{digits}: {}", SEEN_BYTES.get());
            if is_split {
                let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
                let ends: Vec<usize> = ends.take(words.len()).collect();
                assert!(words.iter().map(|(_, end)| *end as usize).eq(ends));
            }
        }
    }
    for (name, expression) in [("llama", LLAMA), ("gpt-2", GPT2)] {
        for unit in [
            "\n  \n   ",
            "a\n                    b",
            "'ll!! \u{301}",
            "1234",
            "\n\n\n",
            " ",
        ] {
            let text = unit.repeat(BYTES);
            SEEN_BYTES.set(0);
            let mut words = Vec::new();
            let split = splitter(expression).split(text.as_bytes(), text.len(), &mut words);
            assert_eq!(split, Some(text.len()), "{name} {unit:?}");
            assert!(SEEN_BYTES.get() < 3 * text.len(), "{name} {unit:?}");
        }
    }
}

#[test]
fn pre_tokenizers_with_other_parts_are_not_split_here() {
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false});
    let split = json!({"type": "Split", "pattern": {"Regex": LLAMA}, "behavior": "Isolated",
        "invert": false});
    let of =
        |parts: Value| PatternSplitter::new(&json!({"type": "Sequence", "pretokenizers": parts}));
    assert!(of(json!([split, byte_level])).is_some());
    let mut removed = split.clone();
    removed["behavior"] = "Removed".into();
    let mut prefixed = byte_level.clone();
    prefixed["add_prefix_space"] = true.into();
    for parts in [
        json!([split]),
        json!([byte_level]),
        json!([removed, byte_level]),
        json!([split, prefixed]),
        json!([{"type": "Digits", "individual_digits": true}, byte_level]),
    ] {
        assert!(of(parts.clone()).is_none(), "{parts}");
    }
}
