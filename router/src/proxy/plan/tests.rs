use std::path::Path;

use serde_json::json;

use super::*;
use crate::fleet::Parity;
use crate::openai::SpecialTokens;
use crate::tokenize::CivilTime;

fn trust(proven: bool) -> PromptTrust {
    PromptTrust {
        proven,
        mismatched: Vec::new(),
    }
}

fn inputs() -> PlanInputs {
    let model = CatalogModel {
        parent: None,
        adapter: false,
        max_model_len: Some(1000),
        block_size: BlockSize::new(16),
        parity: Parity {
            chat: trust(true),
            chat_with_tools: trust(true),
            text: trust(true),
        },
    };
    let adapter = CatalogModel {
        adapter: true,
        ..model.clone()
    };
    let blind = CatalogModel {
        block_size: None,
        ..model.clone()
    };
    let models = [("m", model), ("a", adapter), ("blind", blind)];
    let catalog = ModelCatalog {
        incomplete: false,
        models: models.map(|(name, model)| (name.to_owned(), model)).into(),
        usable: true,
    };
    PlanInputs {
        catalog: Arc::new(catalog),
        tokenizer: None,
        policy: Policy::Kv,
        now: CivilTime::from_unix(0),
    }
}

fn completion(body: &serde_json::Value) -> Plan {
    let text = body.to_string();
    plan(PromptRoute::Completions, text.as_bytes(), &inputs()).unwrap()
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

/// With the token ids of the engine's chat route, and the seed of adapter and salt.
#[test]
fn chats_and_texts_are_hashed_with_adapter_and_salt() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
    let tokenizer = Arc::new(Tokenizer::load(&fixture).unwrap());
    let inputs = PlanInputs {
        tokenizer: Some(Arc::clone(&tokenizer)),
        ..inputs()
    };
    let text = "A question of several blocks. ".repeat(10);
    let messages = json!([{"role": "user", "content": text}]);
    let body = json!({"model": "m", "messages": messages}).to_string();
    let request = openai::parse(PromptRoute::ChatCompletions, body.as_bytes()).unwrap();
    let openai::PromptSource::Chat(parts) = &request.prompt else {
        panic!("a chat")
    };
    let chat = tokenizer.encode_chat(parts, inputs.now).unwrap();
    let plain = tokenizer.encode(&text, SpecialTokens::Add).unwrap();
    for (model, lora) in [("m", None), ("a", Some("a"))] {
        for salt in [None, Some("s"), Some("t")] {
            let seed = Seed::new(lora, salt);
            let mut body = json!({"model": model, "messages": messages, "cache_salt": salt});
            let planned = plan(
                PromptRoute::ChatCompletions,
                body.to_string().as_bytes(),
                &inputs,
            );
            assert_eq!(planned.unwrap().prompt.blocks(), hashes(&chat, seed));
            body["prompt"] = json!(text);
            let planned = plan(
                PromptRoute::Completions,
                body.to_string().as_bytes(),
                &inputs,
            );
            assert_eq!(planned.unwrap().prompt.blocks(), hashes(&plain, seed));
        }
    }
}

/// Parity of texts proves nothing for chats, nor for chats with tools.
#[test]
fn prompts_without_proven_parity_are_routed_by_load() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
    let tokenizer = Arc::new(Tokenizer::load(&fixture).unwrap());
    let text = "A question of several blocks. ".repeat(10);
    let messages = json!([{"role": "user", "content": text}]);
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {}}});
    let asked = [
        (
            PromptRoute::Completions,
            json!({"model": "m", "prompt": text}),
        ),
        (
            PromptRoute::ChatCompletions,
            json!({"model": "m", "messages": messages}),
        ),
        (
            PromptRoute::ChatCompletions,
            json!({"model": "m", "messages": messages, "tools": [tool]}),
        ),
    ];
    for trusted in [
        [true, false, false],
        [false, true, false],
        [false, false, true],
    ] {
        let mut inputs = PlanInputs {
            tokenizer: Some(Arc::clone(&tokenizer)),
            ..inputs()
        };
        let models = &mut Arc::make_mut(&mut inputs.catalog).models;
        let [text, chat, chat_with_tools] = trusted;
        models.get_mut("m").unwrap().parity = Parity {
            chat: trust(chat),
            chat_with_tools: trust(chat_with_tools),
            text: trust(text),
        };
        for ((route, body), trusted) in asked.iter().zip(trusted) {
            let plan = plan(*route, body.to_string().as_bytes(), &inputs).unwrap();
            let why = (!trusted).then_some("parity");
            assert_eq!(plan.unhashed, why, "{body}");
            assert_eq!(plan.prompt.blocks().is_empty(), !trusted, "{body}");
        }
    }
}

/// One worker with another template does not end cache routing for its model.
#[test]
fn a_mismatched_worker_is_named_and_the_prompt_is_hashed() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
    let mut inputs = PlanInputs {
        tokenizer: Some(Arc::new(Tokenizer::load(&fixture).unwrap())),
        ..inputs()
    };
    let models = &mut Arc::make_mut(&mut inputs.catalog).models;
    models.get_mut("m").unwrap().parity.text.mismatched = vec!["odd".into()];
    let planned = |body: serde_json::Value| {
        let body = body.to_string();
        plan(PromptRoute::Completions, body.as_bytes(), &inputs).unwrap()
    };
    let text = planned(json!({"model": "m", "prompt": "Several words. ".repeat(20)}));
    assert_eq!(text.unhashed, None);
    assert_eq!(text.mismatched, ["odd".into()]);
    let tokens = planned(json!({"model": "m", "prompt": tokens(40)}));
    assert!(
        tokens.mismatched.is_empty(),
        "the client's token ids are the engine's"
    );
}

#[test]
fn the_longest_of_several_prompts_decides_and_all_count() {
    let body = json!({"model": "m", "prompt": [tokens(5), tokens(48), tokens(7)]});
    let plan = completion(&body);
    assert_eq!(plan.prompt.tokens(), 60);
    assert_eq!(plan.prompt.blocks(), hashes(&tokens(32), Seed::PLAIN));
    assert_eq!(plan.prompt.credit_max(), 2);
    assert!(!plan.single);
}

#[test]
fn prompts_that_cannot_be_hashed_are_routed_by_load_with_a_reason() {
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

/// No tokens, no hashes, and so no index query.
#[test]
fn policies_that_use_no_caches_do_not_tokenize() {
    for policy in [Policy::RoundRobin, Policy::LeastLoad, Policy::Random] {
        let inputs = PlanInputs { policy, ..inputs() };
        for prompt in [json!("text"), json!(tokens(40))] {
            let body = json!({"model": "m", "prompt": prompt}).to_string();
            let plan = plan(PromptRoute::Completions, body.as_bytes(), &inputs).unwrap();
            assert_eq!(plan.unhashed, Some("policy"));
            assert!(plan.prompt.blocks().is_empty());
        }
    }
}

#[test]
fn a_prompt_with_requested_logprobs_has_no_credit() {
    let body = json!({"model": "m", "prompt": tokens(40), "prompt_logprobs": 1});
    assert_eq!(completion(&body).prompt.credit_max(), 0);
}

#[test]
fn an_unknown_model_is_not_the_same_as_no_worker() {
    let body = br#"{"model":"none","prompt":[1]}"#;
    let error = plan(PromptRoute::Completions, body, &inputs()).err();
    assert_eq!(error, Some(ProxyError::UnknownModel("none".to_owned())));
    let empty = PlanInputs {
        catalog: Arc::default(),
        ..inputs()
    };
    let error = plan(PromptRoute::Completions, body, &empty).err();
    assert_eq!(error, Some(ProxyError::NoWorker));
}
