use serde_json::json;

use super::*;
use crate::tokenize::CivilTime;

fn grounds() -> Grounds {
    let model = ModelView {
        parent: None,
        adapter: false,
        max_model_len: Some(1000),
        block_size: BlockSize::new(16),
        chat: true,
        chat_with_tools: true,
        text: true,
    };
    let adapter = ModelView {
        adapter: true,
        ..model.clone()
    };
    let blind = ModelView {
        block_size: None,
        ..model.clone()
    };
    let models = [("m", model), ("a", adapter), ("blind", blind)];
    let view = View {
        models: models.map(|(name, model)| (name.to_owned(), model)).into(),
        usable: true,
    };
    Grounds {
        view: Arc::new(view),
        tokenizer: None,
        now: CivilTime::from_unix(0),
    }
}

fn completion(body: &serde_json::Value) -> Plan {
    let text = body.to_string();
    plan(Route::Completions, text.as_bytes(), &grounds()).unwrap()
}

fn tokens(count: u32) -> Vec<u32> {
    (0..count).collect()
}

fn hashes(tokens: &[u32], seed: Seed) -> Vec<warmroute_proto::LocalHash> {
    local_hashes(tokens, BlockSize::new(16).unwrap(), seed)
}

#[test]
fn token_ids_are_hashed_with_adapter_and_salt() {
    let plain = completion(&json!({"model": "m", "prompt": tokens(40)}));
    assert_eq!(plain.prompt.blocks(), hashes(&tokens(40), Seed::PLAIN));
    assert_eq!((plain.unhashed, plain.single), (None, true));
    let body = json!({"model": "a", "prompt": tokens(40), "cache_salt": "s"});
    let seed = Seed::new(Some("a"), Some("s"));
    assert_eq!(completion(&body).prompt.blocks(), hashes(&tokens(40), seed));
}

#[test]
fn of_several_prompts_the_longest_decides_and_all_count() {
    let body = json!({"model": "m", "prompt": [tokens(5), tokens(48), tokens(7)]});
    let plan = completion(&body);
    assert_eq!(plan.prompt.tokens(), 60);
    assert_eq!(plan.prompt.blocks(), hashes(&tokens(32), Seed::PLAIN));
    assert_eq!(plan.prompt.credit_max(), 2);
    assert!(!plan.single);
}

#[test]
fn what_cannot_be_named_is_routed_by_load_and_says_why() {
    for (body, why) in [
        (json!({"model": "m", "prompt": "text"}), "no_tokenizer"),
        (json!({"model": "blind", "prompt": [1]}), "no_block_size"),
        (
            json!({"model": "m", "prompt": tokens(40), "truncate_prompt_tokens": 8}),
            "truncated",
        ),
        (
            json!({"model": "m", "prompt": "x", "suffix": "y"}),
            "suffix",
        ),
    ] {
        let plan = completion(&body);
        assert_eq!(plan.unhashed, Some(why), "{body}");
        assert!(plan.prompt.blocks().is_empty());
    }
}

#[test]
fn a_prompt_whose_logprobs_are_wanted_has_no_credit() {
    let body = json!({"model": "m", "prompt": tokens(40), "prompt_logprobs": 1});
    assert_eq!(completion(&body).prompt.credit_max(), 0);
}

#[test]
fn an_unknown_model_is_not_the_same_as_no_worker() {
    let body = br#"{"model":"none","prompt":[1]}"#;
    let error = plan(Route::Completions, body, &grounds()).err();
    assert_eq!(error, Some(ApiError::UnknownModel("none".to_owned())));
    let empty = Grounds {
        view: Arc::default(),
        ..grounds()
    };
    let error = plan(Route::Completions, body, &empty).err();
    assert_eq!(error, Some(ApiError::NoWorker));
}
