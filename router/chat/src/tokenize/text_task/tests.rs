use proptest::prelude::*;

use super::super::compare::{expected, tests::changed};
use super::*;

/// Texts with added tokens, parts of them and blanks around them.
fn delimited_text() -> impl Strategy<Value = String> {
    let words = prop_oneof![
        Just("<|im_start|>".to_owned()),
        Just("<|im_end|>".to_owned()),
        Just("<|im_".to_owned()),
        Just("<s>".to_owned()),
        Just("</s>".to_owned()),
        Just("<unk>".to_owned()),
        Just("<tool_call>".to_owned()),
        Just("<｜User｜>".to_owned()),
        Just(" ".to_owned()),
        Just("\n\n".to_owned()),
        Just("▁".to_owned()),
        Just("e\u{301}".to_owned()),
        "[a-z ]{1,8}",
        "\\PC{0,6}",
        any::<String>(),
    ];
    prop::collection::vec(words, 0..12).prop_map(|words| words.concat())
}

fn check(tokenizer: &Tokenizer, text: &str) {
    for special in [SpecialTokens::Omit, SpecialTokens::Add] {
        let expected = expected(tokenizer, text, special);
        for cache in ["cold", "warm"] {
            let ids = tokenizer.encode(text, special).unwrap();
            assert_eq!(ids, expected, "{cache}, {special:?}: {text:?}");
        }
        let ids = tokenizer.encode_at_every_seam(text, special).unwrap();
        assert_eq!(ids, expected, "cut, {special:?}: {text:?}");
    }
}

#[test]
fn texts_are_cut_at_added_tokens() {
    for name in ["tiny", "tiny_sp"] {
        let tokenizer = changed(name, |_| {});
        for text in [
            "",
            " ",
            "<|im_start|>",
            "a<|im_end|><|im_end|> b",
            "<s> x</s>",
            "x <unk>",
        ] {
            check(&tokenizer, text);
        }
    }
}

#[test]
fn the_reference_encodes_what_cannot_be_cut() {
    for change in [
        |definition: &mut serde_json::Value| {
            definition["added_tokens"][1]["single_word"] = true.into();
        },
        |definition: &mut serde_json::Value| {
            definition["pre_tokenizer"] = serde_json::json!({"type": "Whitespace"});
        },
    ] {
        let tokenizer = changed("tiny_sp", change);
        assert_eq!(tokenizer.encoder(), EncoderKind::Reference);
        check(&tokenizer, "a <s> b<s>c");
        let long = "word ".repeat(super::super::REFERENCE_BYTES_MAX / 5 + 1);
        let refused = tokenizer.encode(&long, SpecialTokens::Omit);
        assert_eq!(refused, Err(TextEncodeError::LongText));
    }
}

#[test]
fn tokens_that_take_blanks_are_exact() {
    let tokenizer = changed("tiny", |definition| {
        for token in definition["added_tokens"].as_array_mut().unwrap() {
            let content = token["content"].as_str().unwrap_or("").to_owned();
            token["rstrip"] = (content == "<|im_end|>").into();
            token["lstrip"] = (content == "<tool_call>").into();
        }
    });
    assert_eq!(tokenizer.encoder(), EncoderKind::Own);
    for text in [
        "a<|im_end|>  \n <|im_start|> b",
        "x  <tool_call> <|im_end|>  <tool_call>y",
        "<|im_end|> ",
    ] {
        check(&tokenizer, text);
    }
}

/// One prefix or document in two prompts was encoded twice, since pieces ended at added tokens only.
#[test]
fn a_shared_prefix_or_document_is_found_in_the_cache() {
    let document: String = (0..4000)
        .map(|i| format!("Line {i} of the shared text.\n"))
        .collect();
    for name in ["tiny", "tiny_sp"] {
        let tokenizer = changed(name, |_| {});
        let missed = |text: &str| {
            let before = tokenizer.cache_stats().miss_bytes;
            check(&tokenizer, text);
            tokenizer.cache_stats().miss_bytes - before
        };
        assert!(missed(&document) as usize > document.len() / 2, "{name}");
        let seen = 32 << 10;
        assert!(
            missed(&format!("{document} And another end.")) < seen,
            "{name}"
        );
        assert!(
            missed(&format!("Another question first: {document}")) < seen,
            "{name}"
        );
        let chat = format!("<|im_start|>user\nquestion? {document}<|im_end|>");
        assert!(missed(&chat) < seen, "{name}");
    }
}

/// A text may go on otherwise where an earlier one has the end of a segment: the same bytes are then
/// another word.
#[test]
fn a_text_that_leaves_an_earlier_one_has_its_own_ids() {
    let earlier: String = (0..200).map(|i| format!("Line {i}, it's 中文. ")).collect();
    for name in ["tiny", "tiny_sp"] {
        let tokenizer = changed(name, |_| {});
        let own = tokenizer.own.as_ref().unwrap();
        let encode = |text: &str| tokenizer.encode(text, SpecialTokens::Omit).unwrap();
        let mut end = 0;
        for _ in 0..5 {
            end += segment_length(own, &earlier[end..], CutRule::CACHE);
            for at in [end - 1, end, end + 1].map(|at| earlier.floor_char_boundary(at)) {
                for rest in [
                    "",
                    "x",
                    " x",
                    "'s",
                    "\n",
                    "1",
                    ",",
                    "\u{301}",
                    &earlier[end..],
                ] {
                    encode(&earlier);
                    let text = format!("{}{rest}", &earlier[..at]);
                    let expected = expected(&tokenizer, &text, SpecialTokens::Omit);
                    assert_eq!(encode(&text), expected, "{name}, {at}: {rest:?}");
                }
            }
        }
    }
}

#[test]
fn each_step_is_bounded_and_ends_at_the_limit_of_tokens() {
    let tokenizer = changed("tiny", |_| {});
    let text = "some words of a text\n".repeat(50_000);
    let digits = "1234567".repeat(50_000);
    let whole = tokenizer.encode(&digits, SpecialTokens::Omit).unwrap();
    assert_eq!(whole, expected(&tokenizer, &digits, SpecialTokens::Omit));
    let mut numbers = tokenizer.task(&digits, SpecialTokens::Omit);
    assert_eq!(numbers.step(&tokenizer, 1), Ok(TaskState::More));
    assert!(numbers.bytes_left() > digits.len() - (80 << 10));
    let mut task = tokenizer
        .task(&text, SpecialTokens::Omit)
        .with_tokens_max(100_000);
    let (mut left, mut steps) = (task.bytes_left(), 0);
    let ended = loop {
        match task.step(&tokenizer, 4096) {
            Ok(TaskState::More) => {}
            ended => break ended,
        }
        let encoded = left - task.bytes_left();
        assert!((4096..=4096 + (16 << 10)).contains(&encoded), "{encoded}");
        left = task.bytes_left();
        steps += 1;
    };
    assert_eq!(ended, Err(TextEncodeError::TooManyTokens));
    assert!(steps > 10 && left > text.len() / 2, "{steps} {left}");
}

/// A long word where a segment may end once made one step of all text behind it.
#[test]
fn a_step_ends_behind_a_long_word() {
    let tokenizer = changed("tiny_sp", |_| {});
    let start = "b ".repeat(100) + &"x".repeat(65_400);
    let text = start.clone() + &" a".repeat(500_000);
    let mut task = tokenizer.task(&text, SpecialTokens::Omit);
    assert_eq!(task.step(&tokenizer, 1), Ok(TaskState::More));
    assert_eq!(task.bytes_left(), text.len() - start.len());
    let mut left = task.bytes_left();
    while task.step(&tokenizer, 4096) == Ok(TaskState::More) {
        let encoded = left - task.bytes_left();
        assert!((4096..=4096 + (16 << 10)).contains(&encoded), "{encoded}");
        left = task.bytes_left();
    }
    // Its word and the blank before it.
    let longest = "b ".repeat(100) + &"x".repeat((64 << 10) - 3);
    for (longer, refused) in [("", None), ("x", Some(TextEncodeError::LongWord))] {
        let text = format!("{longest}{longer} {}", "a ".repeat(500_000));
        let mut task = tokenizer.task(&text, SpecialTokens::Omit);
        assert_eq!(task.step(&tokenizer, 1).err(), refused);
    }
}

#[test]
fn a_word_without_end_is_refused_at_once() {
    for name in ["tiny", "tiny_sp"] {
        let tokenizer = changed(name, |_| {});
        for unit in ["a", " ", "中", "!"] {
            let ids = tokenizer.encode(&unit.repeat(20_000), SpecialTokens::Omit);
            assert!(ids.is_ok(), "{name} {unit:?}");
            let refused = tokenizer.encode(&unit.repeat(10 << 20), SpecialTokens::Omit);
            assert_eq!(refused, Err(TextEncodeError::LongWord), "{name} {unit:?}");
        }
    }
}

/// After a line's end `\s*[\r\n]+` looks at all blanks, which are then a word of their own.
#[test]
fn the_longest_run_of_blanks_after_a_line_is_encoded() {
    let tokenizer = changed("tiny", |_| {});
    let text = format!("\n{}x", " ".repeat((64 << 10) + 1));
    let ids = tokenizer.encode(&text, SpecialTokens::Omit);
    assert!(ids == Ok(expected(&tokenizer, &text, SpecialTokens::Omit)));
}

/// Normalization holds a whole run of marks in memory, and sorts it in one step.
#[test]
fn a_run_of_marks_without_end_is_refused() {
    let tokenizer = changed("tiny", |_| {});
    let encode = |text: &str| tokenizer.encode(text, SpecialTokens::Omit);
    for unit in ["\u{301}\u{316}", "\u{344}\u{f73}\u{316}"] {
        for (bytes, is_encoded) in [(16 << 10, true), (18 << 10, false), (8 << 20, false)] {
            let marks = unit.repeat(bytes / unit.len());
            for text in [format!("a{marks}b é"), format!("中{marks}"), marks] {
                let expected = if is_encoded {
                    Ok(expected(&tokenizer, &text, SpecialTokens::Omit))
                } else {
                    Err(TextEncodeError::LongPart)
                };
                assert!(encode(&text) == expected, "{bytes} of {unit:?}");
            }
        }
        // Between other characters runs are short.
        let text = format!("{unit}中").repeat(20_000) + "e\u{301}";
        assert_eq!(
            encode(&text),
            Ok(expected(&tokenizer, &text, SpecialTokens::Omit))
        );
    }
}

proptest! {
    #[test]
    fn cutting_changes_no_id(text in delimited_text()) {
        thread_local! {
            static TOKENIZERS: [Tokenizer; 2] =
                ["tiny", "tiny_sp"].map(|name| changed(name, |_| {}));
        }
        TOKENIZERS.with(|tokenizers| {
            for tokenizer in tokenizers {
                check(tokenizer, &text);
            }
        });
    }
}

/// The rule, byte by byte.
#[test]
fn segments_end_at_the_seams_that_the_bytes_before_them_choose() {
    const PRIME: u32 = 0x9e37_79b1;
    let slow = |own: &BpeEncoder, text: &str, cuts: CutRule| {
        let ends = cuts.bytes_min..text.len().min(SEGMENT_BYTES_MAX);
        let chosen = |at: usize| {
            let recent = text.as_bytes()[..at].iter().rev().take(4).rev();
            let recent = recent.fold(0_u32, |recent, byte| recent << 8 | u32::from(*byte));
            recent.wrapping_mul(PRIME) <= u32::MAX / cuts.one_in || at >= cuts.bytes_max
        };
        let is_end =
            |at: &usize| chosen(*at) && text.is_char_boundary(*at) && own.is_seam(text, *at);
        ends.into_iter().find(is_end).unwrap_or(text.len())
    };
    let prose: String = (0..900).map(|i| format!("Line {i}: é, 中文.\n")).collect();
    let texts = [
        prose.clone(),
        "x".repeat(9000) + &prose,
        "x".repeat(80_000),
        "a b".into(),
    ];
    for name in ["tiny", "tiny_sp"] {
        let tokenizer = changed(name, |_| {});
        let own = tokenizer.own.as_ref().unwrap();
        for cuts in [CutRule::CACHE, CutRule::EVERY_SEAM] {
            for text in &texts {
                let mut rest = text.as_str();
                for _ in 0..60 {
                    let length = segment_length(own, rest, cuts);
                    assert_eq!(length, slow(own, rest, cuts), "{name}, {cuts:?}");
                    rest = &rest[length..];
                    if rest.is_empty() {
                        break;
                    }
                }
            }
        }
    }
}
