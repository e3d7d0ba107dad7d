use std::path::Path;

use proptest::prelude::*;

use super::*;

fn fixture(name: &str) -> (tokenizers::Tokenizer, Segments) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(name);
    let definition = std::fs::read(path.join("tokenizer.json")).unwrap();
    let tokenizer = tokenizers::Tokenizer::from_bytes(&definition).unwrap();
    let segments = Segments::new(&tokenizer, &definition).expect("can be cut");
    (tokenizer, segments)
}

fn check(tokenizer: &tokenizers::Tokenizer, segments: &Segments, text: &str) {
    let expected = encode_plain(tokenizer, text, false).unwrap();
    assert_eq!(
        segments.encode(tokenizer, text).unwrap(),
        expected,
        "cold {text:?}"
    );
    assert_eq!(
        segments.encode(tokenizer, text).unwrap(),
        expected,
        "warm {text:?}"
    );
    let expected = encode_plain(tokenizer, text, true).unwrap();
    let ids = segments.encode(tokenizer, text).unwrap();
    assert_eq!(segments.surround(ids), expected, "with special {text:?}");
}

/// Texts with marks, parts of marks and blanks around them.
fn marked_text() -> impl Strategy<Value = String> {
    let words = prop_oneof![
        Just("<|im_start|>".to_owned()),
        Just("<|im_end|>".to_owned()),
        Just("<|im_".to_owned()),
        Just("<s>".to_owned()),
        Just("</s>".to_owned()),
        Just("<unk>".to_owned()),
        Just("[INST]".to_owned()),
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

#[test]
fn both_kinds_of_tokenizers_can_be_cut() {
    for name in ["tiny", "tiny_sp"] {
        let (tokenizer, segments) = fixture(name);
        for text in [
            "",
            " ",
            "<|im_start|>",
            "a<|im_end|><|im_end|> b",
            "<s> x</s>",
            "x <unk>",
        ] {
            check(&tokenizer, &segments, text);
        }
    }
}

#[test]
fn tokenizers_that_look_over_a_cut_are_left_alone() {
    let (tokenizer, _) = fixture("tiny_sp");
    let refused = |change: fn(&mut Value)| {
        let text = serde_json::to_string(&tokenizer).unwrap();
        let mut definition: Value = serde_json::from_str(&text).unwrap();
        change(&mut definition);
        let definition = serde_json::to_vec(&definition).unwrap();
        let tokenizer = tokenizers::Tokenizer::from_bytes(&definition).unwrap();
        Segments::new(&tokenizer, &definition).is_none()
    };
    assert!(!refused(|_| {}));
    assert!(refused(|definition| {
        definition["pre_tokenizer"] = serde_json::json!({"type": "Sequence", "pretokenizers": [
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false}]});
    }));
    assert!(refused(
        |definition| definition["added_tokens"][1]["single_word"] = true.into()
    ));
    assert!(refused(
        |definition| definition["model"]["dropout"] = 0.1.into()
    ));
}

#[test]
fn a_mark_that_takes_blanks_stays_inside_its_piece() {
    let (tokenizer, _) = fixture("tiny");
    let text = serde_json::to_string(&tokenizer).unwrap();
    let mut definition: Value = serde_json::from_str(&text).unwrap();
    for token in definition["added_tokens"].as_array_mut().unwrap() {
        if token["content"] == "<|im_end|>" {
            token["rstrip"] = true.into();
        }
        if token["content"] == "<tool_call>" {
            token["lstrip"] = true.into();
        }
    }
    let definition = serde_json::to_vec(&definition).unwrap();
    let tokenizer = tokenizers::Tokenizer::from_bytes(&definition).unwrap();
    let segments = Segments::new(&tokenizer, &definition).unwrap();
    for text in [
        "a<|im_end|>  \n <|im_start|> b",
        "x  <tool_call> <|im_end|>  <tool_call>y",
        "<|im_end|> ",
    ] {
        check(&tokenizer, &segments, text);
    }
}

#[test]
fn memory_is_bounded_and_used_pieces_stay() {
    let mut cache = Cache::default();
    let ids: Arc<[u32]> = vec![1; 1000].into();
    cache.put("kept", Arc::clone(&ids));
    for i in 0..40_000 {
        cache.put(&format!("{i:-<1000}"), Arc::clone(&ids));
        assert!(cache.young_bytes + cache.old_bytes <= CACHE_BYTES_MAX);
        if i % 1000 == 0 {
            assert!(cache.get("kept").is_some(), "after {i}");
        }
    }
    assert!(cache.get("0".repeat(1000).as_str()).is_none());
    cache.put(&"x".repeat(PIECE_BYTES_MAX + 1), ids);
    assert!(cache.young_bytes + cache.old_bytes <= CACHE_BYTES_MAX);
}

proptest! {
    #[test]
    fn cutting_changes_no_id(text in marked_text()) {
        thread_local! {
            static FIXTURES: [(tokenizers::Tokenizer, Segments); 2] =
                ["tiny", "tiny_sp"].map(fixture);
        }
        FIXTURES.with(|fixtures| {
            for (tokenizer, segments) in fixtures {
                check(tokenizer, segments, &text);
            }
        });
    }
}
