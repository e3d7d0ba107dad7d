use std::path::Path;

use proptest::prelude::*;

use super::*;

fn fixture(name: &str) -> (tokenizers::Tokenizer, PieceEncoder) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(name);
    let definition = std::fs::read(path.join("tokenizer.json")).unwrap();
    let tokenizer = tokenizers::Tokenizer::from_bytes(&definition).unwrap();
    let pieces = PieceEncoder::new(&tokenizer, &definition).expect("can be cut");
    (tokenizer, pieces)
}

fn check(tokenizer: &tokenizers::Tokenizer, pieces: &PieceEncoder, text: &str) {
    for special in [SpecialTokens::Omit, SpecialTokens::Add] {
        let expected = encode_whole(tokenizer, text, special).unwrap();
        for cache in ["cold", "warm"] {
            let ids = pieces.encode(tokenizer, text, special).unwrap();
            assert_eq!(ids, expected, "{cache}, {special:?}: {text:?}");
        }
    }
}

/// Texts with added tokens, parts of them and blanks around them.
fn delimited_text() -> impl Strategy<Value = String> {
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
fn byte_level_and_metaspace_tokenizers_can_be_cut() {
    for name in ["tiny", "tiny_sp"] {
        let (tokenizer, pieces) = fixture(name);
        for text in [
            "",
            " ",
            "<|im_start|>",
            "a<|im_end|><|im_end|> b",
            "<s> x</s>",
            "x <unk>",
        ] {
            check(&tokenizer, &pieces, text);
        }
    }
}

#[test]
fn tokenizers_that_look_across_a_cut_are_not_cached() {
    let (tokenizer, _) = fixture("tiny_sp");
    let refused = |change: fn(&mut Value)| {
        let text = serde_json::to_string(&tokenizer).unwrap();
        let mut definition: Value = serde_json::from_str(&text).unwrap();
        change(&mut definition);
        let definition = serde_json::to_vec(&definition).unwrap();
        let tokenizer = tokenizers::Tokenizer::from_bytes(&definition).unwrap();
        PieceEncoder::new(&tokenizer, &definition).is_none()
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
fn a_token_that_takes_blanks_stays_inside_its_piece() {
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
    let pieces = PieceEncoder::new(&tokenizer, &definition).unwrap();
    for text in [
        "a<|im_end|>  \n <|im_start|> b",
        "x  <tool_call> <|im_end|>  <tool_call>y",
        "<|im_end|> ",
    ] {
        check(&tokenizer, &pieces, text);
    }
}

#[test]
fn memory_is_bounded_and_used_pieces_stay() {
    let mut cache = PieceCache::default();
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
    fn cutting_changes_no_id(text in delimited_text()) {
        thread_local! {
            static FIXTURES: [(tokenizers::Tokenizer, PieceEncoder); 2] =
                ["tiny", "tiny_sp"].map(fixture);
        }
        FIXTURES.with(|fixtures| {
            for (tokenizer, pieces) in fixtures {
                check(tokenizer, pieces, &text);
            }
        });
    }
}
