use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::tokenize::bpe::UNMATCHED_BYTES_MAX;

const CONTRACTIONS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
const REST: &str = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const UPPER: &str = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]";
const LOWER: &str = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]";

/// A tokenizer of a fixture with a changed definition.
pub(in crate::tokenize) fn changed(fixture: &str, change: impl FnOnce(&mut Value)) -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(fixture)
        .join("tokenizer.json");
    let mut definition: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut definition);
    let definition = serde_json::to_vec(&definition).unwrap();
    let reference = tokenizers::Tokenizer::from_bytes(&definition).unwrap();
    Tokenizer::of_reference(reference, &definition).unwrap()
}

fn byte_level(patterns: &[&str], normalizer: &str, use_regex: bool) -> Tokenizer {
    changed("tiny", |definition| {
        let split = |pattern: &&str| {
            json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                "invert": false})
        };
        let mut parts: Vec<Value> = patterns.iter().map(split).collect();
        parts.push(
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": use_regex}),
        );
        definition["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": parts});
        definition["normalizer"] = match normalizer {
            "" => Value::Null,
            kind => json!({ "type": kind }),
        };
    })
}

fn sentence_piece(normalizer: Value, pre_tokenizer: Value) -> Tokenizer {
    changed("tiny_sp", |definition| {
        definition["normalizer"] = normalizer;
        definition["pre_tokenizer"] = pre_tokenizer;
    })
}

/// The families of tokenizers that the own encoder knows.
fn families() -> Vec<(&'static str, Tokenizer)> {
    let word = r"[^\r\n\p{L}\p{N}]?";
    let llama = format!(r"{CONTRACTIONS}|{word}\p{{L}}+|\p{{N}}{{1,3}}|{REST}");
    let qwen = format!(r"{CONTRACTIONS}|{word}\p{{L}}+|\p{{N}}|{REST}");
    let marks = REST.replace(r"\p{L}", r"\p{L}\p{M}");
    let qwen_marks = format!(r"{CONTRACTIONS}|{word}[\p{{L}}\p{{M}}]+|\p{{N}}|{marks}");
    let slashes = REST.replacen(r"[\r\n]*", r"[\r\n/]*", 1);
    let cased = |upper: &str, lower: &str, end: &str| {
        format!("{word}{upper}*{lower}+{end}|{word}{upper}+{lower}*{end}")
    };
    let contracted = format!("{CONTRACTIONS}?");
    let words = cased(UPPER, LOWER, &contracted);
    let o200k = format!(r"{words}|\p{{N}}{{1,3}}|{slashes}");
    let tekken = format!(r"{}|\p{{N}}|{slashes}", cased(UPPER, LOWER, ""));
    let no_han = |set: &str| format!(r"[{set}&&[^\p{{Han}}]]");
    let words = cased(&no_han(UPPER), &no_han(LOWER), &contracted);
    let kimi = format!(r"[\p{{Han}}]+|{words}|\p{{N}}{{1,3}}|{REST}");
    let deepseek_words = [
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
    .join("|");
    let deepseek = [r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", &deepseek_words];
    let replace = || json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prepend = json!({"type": "Prepend", "prepend": "▁"});
    let metaspace = |scheme: &str, split: bool| {
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme,
            "split": split})
    };
    let mut families = vec![
        ("gpt-2", byte_level(&[], "", true)),
        ("llama 3", byte_level(&[&llama], "", false)),
        ("qwen", byte_level(&[&qwen], "NFC", false)),
        ("qwen with marks", byte_level(&[&qwen_marks], "NFC", false)),
        ("o200k", byte_level(&[&o200k], "", false)),
        ("tekken", byte_level(&[&tekken], "", false)),
        ("deepseek", byte_level(&deepseek, "", false)),
        ("kimi", byte_level(&[&kimi], "", false)),
    ];
    let llama2 = json!({"type": "Sequence", "normalizers": [prepend, replace()]});
    families.push(("llama 2", sentence_piece(llama2, Value::Null)));
    let gemma = json!({"type": "Split", "pattern": {"String": " "},
        "behavior": "MergedWithPrevious", "invert": false});
    families.push(("gemma", sentence_piece(replace(), gemma)));
    for (name, scheme, split) in [
        ("metaspace first", "first", false),
        ("metaspace always", "always", false),
        ("metaspace never", "never", true),
    ] {
        families.push((name, sentence_piece(Value::Null, metaspace(scheme, split))));
    }
    let ignoring = changed("tiny", |definition| {
        definition["model"]["ignore_merges"] = true.into();
        for token in definition["added_tokens"].as_array_mut().unwrap() {
            let content = token["content"].as_str().unwrap_or("").to_owned();
            token["normalized"] = content.starts_with("<tool").into();
            token["lstrip"] = (content == "<|im_start|>").into();
            token["rstrip"] = (content == "<|im_end|>").into();
        }
    });
    families.push(("whole words, stripping and normalized tokens", ignoring));
    families
}

fn compare_families(texts: usize, seed: u64) {
    for (name, tokenizer) in families() {
        assert_eq!(tokenizer.encoder(), EncoderKind::Own, "{name}");
        if let Some(text) = tokenizer.compare_generated(texts, seed) {
            let ids = expected(&tokenizer, &text, SpecialTokens::Omit);
            tokenizer.own_differs.store(false, Ordering::Relaxed);
            let ours = tokenizer.encode_at_every_seam(&text, SpecialTokens::Omit);
            let whole = tokenizer.encode(&text, SpecialTokens::Omit);
            panic!("{name}: {text:?}\n reference {ids:?}\n cut {ours:?}\n whole {whole:?}");
        }
        // A text that one of the two refuses is not compared.
        let compared = tokenizer.comparison_counts().equal;
        assert_eq!(compared, texts as u64, "{name}");
    }
}

#[test]
fn generated_texts_have_the_references_ids() {
    compare_families(2_000, 1);
}

/// For `tests/long.sh`, in a release build.
#[test]
#[ignore = "takes minutes"]
fn a_hundred_thousand_texts_have_the_references_ids() {
    compare_families(100_000, 7);
}

/// Texts without a place to be cut near are encoded in parts; where the first of several patterns
/// matches nothing for long, a part may grow.
#[test]
#[ignore = "long: ./test.sh --all"]
fn long_texts_without_seams_have_the_references_ids() {
    const BYTES: usize = 80 << 10;
    let cuts_at_han = ["deepseek", "kimi"];
    for (name, tokenizer) in families() {
        let is_sentence_piece = ["llama 2", "gemma"].contains(&name) || name.contains("metaspace");
        for unit in ["a", " ", "-", "1a", "中1", "aB'", "中a"] {
            // Otherwise the text is one word.
            let has_words = match unit {
                "a" | " " | "-" => false,
                "中a" => cuts_at_han.contains(&name),
                _ => !is_sentence_piece,
            };
            let long = unit.repeat(BYTES / unit.len());
            for text in [format!("1{long}1 a"), long] {
                match tokenizer.encode(&text, SpecialTokens::Omit) {
                    Err(TextEncodeError::LongWord) if !has_words => {}
                    ids => {
                        let expected = expected(&tokenizer, &text, SpecialTokens::Omit);
                        assert_eq!(ids, Ok(expected), "{name} {unit:?}");
                    }
                }
            }
        }
    }
}

/// Texts without such a place only at their start, or with several of them.
#[test]
#[ignore = "long: ./test.sh --all"]
fn text_behind_a_long_word_has_the_references_ids() {
    for (name, tokenizer) in families() {
        let is_sentence_piece = ["llama 2", "gemma"].contains(&name) || name.contains("metaspace");
        if is_sentence_piece {
            let word = "中1".repeat(16_350);
            for blanks in [" ", "▁", "  ▁ "] {
                let rest = format!("{blanks}a b{blanks}").repeat(1000);
                let text = format!("{rest}{word}{rest}{word}{blanks}{word}{rest}");
                for text in [&text, text.trim_start_matches([' ', '▁'])] {
                    let ids = tokenizer.encode(text, SpecialTokens::Omit);
                    let expected = expected(&tokenizer, text, SpecialTokens::Omit);
                    assert!(ids == Ok(expected), "{name} {blanks:?}");
                }
            }
        }
    }
}

/// DeepSeek's first pattern matches digits only.
#[test]
fn a_part_that_the_first_pattern_does_not_match_is_bounded() {
    let mut families = families().into_iter();
    let (_, tokenizer) = families.find(|(name, _)| *name == "deepseek").unwrap();
    for (bytes, expected) in [
        (UNMATCHED_BYTES_MAX, Ok(())),
        (UNMATCHED_BYTES_MAX + 8, Err(TextEncodeError::LongPart)),
    ] {
        let text = "中a".repeat(bytes / 4);
        let ids = tokenizer.encode(&text, SpecialTokens::Omit);
        assert_eq!(ids.map(drop), expected, "{bytes} bytes");
    }
}

/// Without regard to case, `st` is also one character.
#[test]
fn the_reference_encodes_if_letters_fold_to_one() {
    for (end, encoder) in [
        ("(?:st|nd|rd|th)?", EncoderKind::Own),
        ("(?i:nd|rd)?", EncoderKind::Own),
        ("(?i:st|nd|rd|th)?", EncoderKind::Reference),
        ("(?i:ß)?", EncoderKind::Reference),
    ] {
        let pattern = format!(r"\p{{N}}+{end}|[^\p{{N}}]+");
        let tokenizer = byte_level(&[&pattern], "", false);
        assert_eq!(tokenizer.encoder(), encoder, "{end}");
        for text in ["1ﬆ 1st 2ND", "3ẗ ẞ1 1ss 1ß"] {
            let ids = tokenizer.encode(text, SpecialTokens::Omit).unwrap();
            assert_eq!(
                ids,
                expected(&tokenizer, text, SpecialTokens::Omit),
                "{end}"
            );
        }
    }
}

/// A pattern that looks at all digits for each of them.
#[test]
fn a_text_that_takes_a_pattern_too_long_is_refused() {
    let tokenizer = byte_level(&[r"\p{N}+%|\p{N}|[^\p{N}]+"], "", false);
    assert_eq!(tokenizer.encoder(), EncoderKind::Own);
    let special = SpecialTokens::Omit;
    let short = "7".repeat(300) + " and " + &"7".repeat(200) + "% ";
    let ids = tokenizer.encode(&short, special).unwrap();
    assert_eq!(ids, expected(&tokenizer, &short, special));
    let refused = tokenizer.encode(&"7".repeat(2 << 20), special);
    assert_eq!(refused, Err(TextEncodeError::LongPart));
}

fn compare_characters(codes: std::ops::Range<u32>) {
    for (name, tokenizer) in families() {
        let mut chars = codes.clone().filter_map(char::from_u32).peekable();
        while chars.peek().is_some() {
            let block = chars.by_ref().take(512);
            let block: String = block.flat_map(|c| ['x', c, c, ' ', c]).collect();
            let ids = tokenizer.encode_at_every_seam(&block, SpecialTokens::Omit);
            let expected = expected(&tokenizer, &block, SpecialTokens::Omit);
            assert_eq!(ids.unwrap(), expected, "{name}: {block}");
        }
    }
}

#[test]
fn characters_in_context_have_the_references_ids() {
    compare_characters(0..0x1000);
}

/// For `tests/long.sh`, in a release build.
#[test]
#[ignore = "takes minutes"]
fn all_characters_in_context_have_the_references_ids() {
    compare_characters(0..0x11_0000);
}

#[test]
fn a_difference_switches_to_the_reference() {
    let tokenizer = changed("tiny", |_| {});
    let ids = tokenizer.encode("some text", SpecialTokens::Omit).unwrap();
    let compare =
        |ids: &[u32]| tokenizer.compare_with_reference("some text", SpecialTokens::Omit, ids);
    assert_eq!(compare(&ids), ReferenceComparison::Equal);
    assert_eq!(tokenizer.encoder(), EncoderKind::Own);
    assert_eq!(compare(&ids[1..]), ReferenceComparison::Different);
    assert_eq!(tokenizer.encoder(), EncoderKind::Reference);
    assert_eq!(compare(&ids), ReferenceComparison::NotCompared);
    assert_eq!(
        tokenizer.encode("some text", SpecialTokens::Omit).unwrap(),
        ids
    );
}

/// A wrong rank table must not survive the comparison at load.
#[test]
fn a_wrong_encoder_is_found_when_it_is_loaded() {
    let mut tokenizer = changed("tiny", |_| {});
    let other = changed("tiny", |definition| {
        definition["model"]["merges"]
            .as_array_mut()
            .unwrap()
            .swap(0, 40);
    });
    tokenizer.own = other.own;
    assert!(tokenizer.compare_generated(2_000, 3).is_some());
    assert_eq!(tokenizer.encoder(), EncoderKind::Reference);
}

/// Tokens and merges of letters that are rare next to each other.
fn add_merges(definition: &mut Value, merges: &[[&str; 2]]) {
    let model = &mut definition["model"];
    for (number, [left, right]) in (60_000..).zip(merges) {
        model["vocab"][format!("{left}{right}")] = json!(number);
        model["merges"]
            .as_array_mut()
            .unwrap()
            .push(json!([left, right]));
    }
}

/// The reference takes the joint of `XK` and `ZVWF` for that of `XK` and `ZV`, which comes earlier.
#[test]
fn the_reference_encodes_if_merges_have_shared_ids() {
    const MERGES: [[&str; 2]; 9] = [
        ["Q", "J"],
        ["X", "K"],
        ["Z", "V"],
        ["W", "F"],
        ["ZV", "WF"],
        ["XK", "ZV"],
        ["QJ", "XK"],
        ["XK", "ZVWF"],
        ["QJXK", "ZVWF"],
    ];
    let shares = |token: &'static str, with: &'static str| {
        changed("tiny", |definition| {
            add_merges(definition, &MERGES);
            let vocabulary = &mut definition["model"]["vocab"];
            vocabulary["alone"] = json!(60_100);
            vocabulary[token] = vocabulary[with].clone();
        })
    };
    let text = "QJXKZVWF\n".repeat(1200);
    for (token, with, encoder) in [
        ("XKZV", "XKZVWF", EncoderKind::Reference),
        ("another", "XKZVWF", EncoderKind::Reference),
        ("another", "alone", EncoderKind::Own),
    ] {
        let tokenizer = shares(token, with);
        assert_eq!(tokenizer.encoder(), encoder, "{token}, {with}");
        let ids = tokenizer.encode(&text, SpecialTokens::Add).unwrap();
        assert_eq!(ids, expected(&tokenizer, &text, SpecialTokens::Add));
    }
}

/// A tokenizer whose own encoder has two merges of rare letters in another order.
fn with_a_wrong_order() -> Tokenizer {
    let rare = [["Q", "J"], ["J", "X"]];
    let mut tokenizer = changed("tiny", |definition| add_merges(definition, &rare));
    let other = changed("tiny", |definition| {
        add_merges(definition, &rare);
        let merges = definition["model"]["merges"].as_array_mut().unwrap();
        let last = merges.len() - 1;
        merges.swap(last - 1, last);
    });
    tokenizer.own = other.own;
    tokenizer
}

/// What the comparison at load misses, that of a request finds. Wrong ids in the cache are not used
/// after it.
#[test]
fn a_sampled_text_ends_the_use_of_a_wrong_encoder() {
    let tokenizer = with_a_wrong_order();
    assert_eq!(tokenizer.compare_generated(200, 1), None);
    let generated = tokenizer.comparison_counts();
    let text = "QJX\n".repeat(2400);
    let special = SpecialTokens::Add;
    let right = expected(&tokenizer, &text, special);
    let wrong = tokenizer.encode(&text, special).unwrap();
    assert_ne!(wrong, right);
    assert!(tokenizer.cache_stats().kept_bytes > 0);
    // A text that is not sampled changes nothing, and an equal one neither.
    assert_eq!(tokenizer.encode(&text, special).unwrap(), wrong);
    let plain = tokenizer.encode("QJ JX", special).unwrap();
    let compared = tokenizer.compare_with_reference("QJ JX", special, &plain);
    assert_eq!(compared, ReferenceComparison::Equal);
    assert_eq!(tokenizer.encoder(), EncoderKind::Own);
    // A prompt that is being encoded keeps its encoder to its end.
    let mut begun = tokenizer.task(&*text, special);
    assert_eq!(begun.step(&tokenizer, 1), Ok(TaskState::More));
    let compared = tokenizer.compare_with_reference(&text, special, &wrong);
    assert_eq!(compared, ReferenceComparison::Different);
    assert_eq!(tokenizer.encoder(), EncoderKind::Reference);
    while begun.step(&tokenizer, 1).unwrap() == TaskState::More {}
    assert_eq!(begun.into_ids(), wrong);
    for _ in 0..2 {
        assert_eq!(tokenizer.encode(&text, special).unwrap(), right);
    }
    let counts = tokenizer.comparison_counts();
    assert_eq!(counts.equal, generated.equal + 1);
    assert_eq!(counts.different, 1);
}
