use axum::http::HeaderMap;
use std::path::Path;
use warmroute_process::access::keys::KeyHash;

use prometheus::IntGauge;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::*;
use crate::config::Limits;
use crate::fleet::Parity;
use crate::proxy::prompt_jobs::{CompareJob, PlanJob, Rendering};
use crate::proxy::prompt_pool::{PromptJob as _, SHORT_BYTES_MAX};
use crate::settings::{LiveSettings, Settings};
use crate::tenants::{LimitSharing, TenantRefusal, Tenants};
use crate::tokenize::{CivilTime, EncoderKind, ReferenceComparison, TaskState};
use crate::tokenizers::{TokenizerTable, TokenizerVersion};

fn trust(proven: bool) -> PromptTrust {
    PromptTrust {
        proven,
        all_passed: proven,
        mismatched: Vec::new(),
    }
}

fn version() -> Option<TokenizerVersion> {
    TokenizerTable::with(&["m"], bare())
        .of("m")
        .map(|loaded| loaded.version)
}

fn bare() -> Tokenizer {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
    Tokenizer::load(&fixture.join("tokenizer.json")).unwrap()
}

fn table(path: &Path) -> Arc<TokenizerTable> {
    Arc::new(TokenizerTable::with(&["m"], Tokenizer::load(path).unwrap()))
}

fn inputs() -> PlanInputs {
    let model = CatalogModel {
        parent: None,
        base: "m".into(),
        adapter: false,
        max_model_len: Some(1000),
        cuts: vec![BlockSize::new(16).unwrap().into()],
        parity: Parity {
            tokenizer: version(),
            chat: trust(true),
            chat_with_tools: trust(true),
            text: trust(true),
            responses: trust(true),
            messages: trust(true),
            messages_with_tools: trust(true),
        },
        has_prefill: false,
    };
    let adapter = CatalogModel {
        adapter: true,
        ..model.clone()
    };
    let blind = CatalogModel {
        cuts: Vec::new(),
        ..model.clone()
    };
    let models = [("m", model), ("a", adapter), ("blind", blind)];
    let catalog = ModelCatalog {
        incomplete: false,
        models: models.map(|(name, model)| (name.to_owned(), model)).into(),
        usable: true,
        ..ModelCatalog::default()
    };
    PlanInputs {
        catalog: Arc::new(catalog),
        tokenizers: Arc::default(),
        policy: Policy::Kv,
        is_recorded: false,
        answer_models: Arc::new(|_| None),
        tenant: None,
        now: CivilTime::from_unix(0),
        work: PromptWork::Tokenize,
        prompt_bytes_max: 1 << 20,
        sampling: TextSampling::Discard,
        resume: ResumeRule::Off,
        completion_prompts: CompletionPrompts::Text,
        multimodal: MultimodalRule::Load,
    }
}

fn with_tokenizer() -> PlanInputs {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
    let mut inputs = PlanInputs {
        tokenizers: table(&fixture),
        ..inputs()
    };
    let models = &mut Arc::make_mut(&mut inputs.catalog).models;
    models.get_mut("m").unwrap().max_model_len = Some(1 << 20);
    inputs
}

fn budget(bytes: usize) -> BodyBudget {
    let limits = Limits {
        body_bytes: bytes,
        buffered_bytes: bytes,
        connections: 1,
    };
    let held = IntGauge::new("held", "bytes").unwrap();
    BodyBudget::new(&limits, held, TaskTracker::new(), CancellationToken::new())
}

fn chat(text: &str) -> String {
    json!({"model": "m", "messages": [{"role": "user", "content": text}]}).to_string()
}

fn completion(body: &Value) -> Plan {
    let text = body.to_string();
    plan(PromptRoute::Completions, text.as_bytes(), &inputs()).unwrap()
}

/// vLLM caches the prompts of these routes under the names of completions' blocks.
#[test]
fn a_text_has_the_blocks_of_a_completion_on_each_route() {
    let inputs = with_tokenizer();
    let text = "a text of some blocks, ".repeat(40);
    let planned = |route, body: Value| {
        let body = body.to_string();
        plan(route, body.as_bytes(), &inputs).unwrap()
    };
    let completion = planned(
        PromptRoute::Completions,
        json!({"model": "m", "prompt": text}),
    );
    let blocks = completion.prompt.hit_blocks();
    assert!(blocks.len() > 3);
    for (route, body) in [
        (
            PromptRoute::Embeddings,
            json!({"model": "m", "input": text}),
        ),
        (
            PromptRoute::Embeddings,
            json!({"model": "m", "input": [text]}),
        ),
        (
            PromptRoute::Pooling,
            json!({"model": "m", "input": text, "task": "classify"}),
        ),
    ] {
        let plan = planned(route, body);
        assert_eq!((plan.unhashed, plan.prompt.hit_blocks()), (None, blocks));
    }
    let ids = tokens(100);
    let plan = planned(
        PromptRoute::TokenIds,
        json!({"model": "m", "token_ids": ids}),
    );
    let seed = Seed::new(None, None);
    assert_eq!(plan.prompt.hit_blocks(), &hashes(&ids, seed)[..]);
}

/// They are computed one by one: their sum may exceed the model's length.
#[test]
fn several_inputs_count_as_long_as_they_are() {
    let texts = vec!["x".repeat(3000); 10];
    let body = json!({"model": "m", "input": texts}).to_string();
    let plan = plan(PromptRoute::Embeddings, body.as_bytes(), &inputs()).unwrap();
    assert_eq!(plan.unhashed, Some("several_prompts"));
    assert!(plan.prompt.tokens() > 5000, "{}", plan.prompt.tokens());
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

/// A model that a tenant may not use costs no tokens, and no time by which it shows.
#[tokio::test]
async fn a_prompt_for_a_forbidden_model_is_not_encoded() {
    let hash = KeyHash::of(b"k").unwrap().to_hex();
    let rules = format!(
        "[[tenants]]\nname = \"t\"\nmodels = [\"n\"]\n\
         keys = [{{ id = \"k\", sha256 = \"{hash}\" }}]\n"
    );
    let settings = LiveSettings::new(Settings::parse(&rules).unwrap());
    let key = (
        "authorization".parse().unwrap(),
        "Bearer k".parse().unwrap(),
    );
    let mut headers = HeaderMap::from_iter([key]);
    let inputs = PlanInputs {
        tenant: Tenants::new(settings, LimitSharing::Alone)
            .enter(&mut headers)
            .unwrap()
            .visit,
        ..with_tokenizer()
    };
    let limits = WorkLimits {
        budget: None,
        is_cancelled: Arc::new(|| false),
    };
    let body = chat("hello");
    let planning = begin(
        PromptRoute::ChatCompletions,
        body.as_bytes(),
        &inputs,
        &limits,
    );
    let refused = planning.err().expect("no work");
    assert_eq!(refused, ProxyError::Tenant(TenantRefusal::Model));
}

/// With the token ids of the engine's chat route, and the seed of adapter and salt.
#[test]
fn chats_and_texts_are_hashed_with_adapter_and_salt() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
    let tokenizers = table(&fixture);
    let tokenizer = &tokenizers.of("m").unwrap().tokenizer;
    let inputs = PlanInputs {
        tokenizers: Arc::clone(&tokenizers),
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
    let tokenizers = table(&fixture);
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
            tokenizers: Arc::clone(&tokenizers),
            ..inputs()
        };
        let models = &mut Arc::make_mut(&mut inputs.catalog).models;
        let [text, chat, chat_with_tools] = trusted;
        models.get_mut("m").unwrap().parity = Parity {
            tokenizer: version(),
            chat: trust(chat),
            chat_with_tools: trust(chat_with_tools),
            text: trust(text),
            ..Parity::default()
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
        tokenizers: table(&fixture),
        ..inputs()
    };
    let models = &mut Arc::make_mut(&mut inputs.catalog).models;
    models.get_mut("m").unwrap().parity.text.mismatched = vec!["odd".into()];
    let planned = |body: Value| {
        let body = body.to_string();
        plan(PromptRoute::Completions, body.as_bytes(), &inputs).unwrap()
    };
    let text = planned(json!({"model": "m", "prompt": "Several words. ".repeat(20)}));
    assert_eq!(text.unhashed, None);
    assert!(!text.prompt.is_tokenized_by(&"odd".into()));
    let tokens = planned(json!({"model": "m", "prompt": tokens(40)}));
    assert!(
        tokens.prompt.is_tokenized_by(&"odd".into()),
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

#[test]
fn chats_that_the_engine_renders_without_a_template_are_not_hashed() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
    let model = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture.join(name), model.path().join(name)).unwrap();
    }
    std::fs::write(
        model.path().join("config.json"),
        r#"{"model_type":"gpt_oss"}"#,
    )
    .unwrap();
    let inputs = PlanInputs {
        tokenizers: table(model.path()),
        ..inputs()
    };
    let body = chat("x");
    let planned = plan(PromptRoute::ChatCompletions, body.as_bytes(), &inputs).unwrap();
    assert_eq!(planned.unhashed, Some("own_renderer"));
    let body = json!({"model": "m", "prompt": "text"}).to_string();
    let planned = plan(PromptRoute::Completions, body.as_bytes(), &inputs).unwrap();
    assert_eq!(planned.unhashed, None);
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
fn a_recording_has_the_blocks_of_policies_that_use_no_caches() {
    for (policy, blocks) in [(Policy::RoundRobin, 2), (Policy::Approx, 0)] {
        let inputs = PlanInputs {
            policy,
            is_recorded: true,
            ..inputs()
        };
        let body = json!({"model": "m", "prompt": tokens(40)}).to_string();
        let plan = plan(PromptRoute::Completions, body.as_bytes(), &inputs).unwrap();
        assert_eq!(plan.prompt.blocks().len(), blocks);
    }
}

/// Images, a model without a tokenizer, and the policy `approx`.
#[test]
fn a_prompt_without_tokens_is_recognised_by_its_text() {
    let long = "a system prompt of more than a few blocks. ".repeat(10);
    let image = json!({"type": "image_url", "image_url": {"url": "data:,"}});
    let chat = |question: &str, inputs: &PlanInputs| {
        let system = json!({"role": "system", "content": long});
        let content = json!([{"type": "text", "text": question}, image]);
        let user = json!({"role": "user", "content": content});
        let body = json!({"model": "m", "messages": [system, user]}).to_string();
        let plan = plan(PromptRoute::ChatCompletions, body.as_bytes(), inputs).unwrap();
        assert!(plan.prompt.blocks().is_empty());
        plan.prompt
    };
    let common = |one: &Prompt, other: &Prompt| {
        let both = one.sampled().hashes.iter().zip(&other.sampled().hashes);
        both.take_while(|(one, other)| one == other).count()
    };
    let (one, other) = (chat("What is it?", &inputs()), chat("Who?", &inputs()));
    let blocks = long.len() / 64;
    assert!((blocks..=blocks + 2).contains(&common(&one, &other)));
    let approx = PlanInputs {
        policy: Policy::Approx,
        ..inputs()
    };
    for prompt in [json!(long), json!(tokens(40))] {
        let body = json!({"model": "m", "prompt": prompt}).to_string();
        let plan = plan(PromptRoute::Completions, body.as_bytes(), &approx).unwrap();
        assert_eq!(plan.unhashed, Some("policy"));
        assert!(plan.prompt.blocks().is_empty());
        assert!(plan.prompt.credit_max() >= 2);
    }
}

/// One digit a token is half a byte of the guess.
#[test]
fn token_ids_are_counted_where_they_are_not_hashed() {
    for policy in [Policy::Approx, Policy::LeastLoad] {
        let inputs = PlanInputs { policy, ..inputs() };
        for (prompt, suffix, tokens) in [
            (json!(vec![1; 400]), Value::Null, 400..=400),
            (json!([vec![1; 400], vec![2; 300]]), Value::Null, 700..=700),
            // What another field adds is not known.
            (json!(vec![1; 400]), json!("x".repeat(3000)), 900..=1000),
        ] {
            let body = json!({"model": "m", "prompt": prompt, "suffix": suffix}).to_string();
            let plan = plan(PromptRoute::Completions, body.as_bytes(), &inputs).unwrap();
            assert!(tokens.contains(&plan.prompt.tokens()), "{tokens:?}");
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

/// Such a prompt once took 160 bytes of memory a byte, whatever the model's length.
#[test]
fn prompts_beyond_the_flag_or_the_model_are_not_tokenized() {
    let mut inputs = with_tokenizer();
    let why = |inputs: &PlanInputs, words: usize| {
        let text = "word ".repeat(words);
        let completion = json!({"model": "m", "prompt": text}).to_string();
        let completion = plan(PromptRoute::Completions, completion.as_bytes(), inputs).unwrap();
        let chat = plan(PromptRoute::ChatCompletions, chat(&text).as_bytes(), inputs).unwrap();
        assert_eq!(chat.unhashed, completion.unhashed);
        chat.unhashed
    };
    assert_eq!(why(&inputs, 1000), None);
    inputs.prompt_bytes_max = 4000;
    assert_eq!(why(&inputs, 1000), Some("prompt_too_large"));
    inputs.prompt_bytes_max = 1 << 20;
    let models = &mut Arc::make_mut(&mut inputs.catalog).models;
    models.get_mut("m").unwrap().max_model_len = Some(100);
    // Found while it is encoded, and before it is rendered.
    assert_eq!(why(&inputs, 200), Some("prompt_too_large"));
    assert_eq!(why(&inputs, 100_000), Some("prompt_too_large"));
}

#[test]
fn prompt_work_is_charged_to_the_budget_of_bodies() {
    let inputs = with_tokenizer();
    let body = chat(&"word ".repeat(20_000));
    let begun = |budget: &BodyBudget| {
        let limits = WorkLimits {
            budget: Some(budget),
            is_cancelled: Arc::new(|| false),
        };
        begin(
            PromptRoute::ChatCompletions,
            body.as_bytes(),
            &inputs,
            &limits,
        )
        .unwrap()
    };
    let small = budget(400_000);
    let Planning::Ready(refused) = begun(&small) else {
        panic!("without memory nothing is encoded")
    };
    assert_eq!(refused.unhashed, Some("prompt_memory"));
    let large = budget(1_300_000);
    let Planning::Encoding(encoding) = begun(&large) else {
        panic!("its memory is charged")
    };
    assert!(large.charge(200_000).is_none());
    drop(encoding);
    assert!(large.charge(1_200_000).is_some());
}

/// The conversion makes a chat of them, whose memory is charged again before it is rendered.
#[test]
fn a_conversion_to_a_chat_is_charged_to_the_budget_of_bodies() {
    let inputs = with_tokenizer();
    let text = "word ".repeat(4_000);
    let message = json!([{"role": "user", "content": text}]);
    let bodies = [
        (PromptRoute::Responses, json!({"model": "m", "input": text})),
        (
            PromptRoute::Messages,
            json!({"model": "m", "max_tokens": 1, "messages": message}),
        ),
    ];
    for (route, body) in bodies {
        let body = body.to_string();
        let why = |budget: &BodyBudget| {
            let limits = WorkLimits {
                budget: Some(budget),
                is_cancelled: Arc::new(|| false),
            };
            match begin(route, body.as_bytes(), &inputs, &limits).unwrap() {
                Planning::Ready(plan) => plan.unhashed,
                Planning::Encoding(_) => None,
            }
        };
        // Enough for what is done after the conversion only.
        assert_eq!(why(&budget(280_000)), Some("prompt_memory"), "{route:?}");
        assert_eq!(why(&budget(500_000)), None, "{route:?}");
    }
}

/// The reference takes far more memory for a text than the own encoder. What waits for its turn takes
/// none.
#[test]
fn a_step_of_the_reference_encoder_is_charged() {
    let inputs = with_tokenizer();
    let body = chat(&"word ".repeat(4_000));
    let encoded = |budget: &BodyBudget| {
        let limits = WorkLimits {
            budget: Some(budget),
            is_cancelled: Arc::new(|| false),
        };
        let route = PromptRoute::ChatCompletions;
        let begun = begin(route, body.as_bytes(), &inputs, &limits).unwrap();
        let Planning::Encoding(mut encoding) = begun else {
            panic!("the encoding is not charged yet");
        };
        let planned = loop {
            if let Some(planned) = encoding.step(&inputs, 4096) {
                break planned.unwrap();
            }
        };
        drop(encoding);
        planned.unhashed
    };
    let (small, large) = (budget(1_000_000), budget(8_000_000));
    assert_eq!(encoded(&small), None);
    let tokenizer = &inputs.tokenizers.of("m").unwrap().tokenizer;
    let compared = tokenizer.compare_with_reference("word", SpecialTokens::Omit, &[]);
    assert_eq!(compared, ReferenceComparison::Different);
    assert_eq!(
        encoded(&small),
        Some("prompt_memory"),
        "160 bytes for each of 20,000"
    );
    assert_eq!(encoded(&large), None);
    assert_eq!(large.free_bytes(), 8_000_000);
}

#[test]
fn a_sample_with_other_ids_ends_the_use_of_the_own_encoder() {
    let inputs = PlanInputs {
        sampling: TextSampling::Keep,
        ..with_tokenizer()
    };
    let body = chat("some plain words");
    let encoder = || inputs.tokenizers.of("m").unwrap().tokenizer.encoder();
    for (wrong, expected) in [(0, EncoderKind::Own), (1, EncoderKind::Reference)] {
        let planned = plan(PromptRoute::ChatCompletions, body.as_bytes(), &inputs);
        let mut sample = planned.unwrap().sample.expect("a sample");
        sample.ids[0] += wrong;
        assert_eq!(encoder(), EncoderKind::Own);
        assert_eq!(CompareJob::new(sample).step(), TaskState::Done);
        assert_eq!(encoder(), expected);
    }
}

/// Before they are read: the ids of `[1,1` take several times its bytes.
#[test]
fn token_ids_are_charged_to_the_budget_of_bodies() {
    let mut inputs = with_tokenizer();
    inputs.policy = Policy::Kv;
    let ids = vec!["1"; 10_000].join(",");
    let bodies = [
        format!(r#"{{"model":"m","max_tokens":1,"prompt":[{ids}]}}"#),
        format!(r#"{{"model":"m","max_tokens":1,"prompt":[[{ids}]]}}"#),
    ];
    for body in &bodies {
        let why = |budget: &BodyBudget| {
            let limits = WorkLimits {
                budget: Some(budget),
                is_cancelled: Arc::new(|| false),
            };
            let begun = begin(PromptRoute::Completions, body.as_bytes(), &inputs, &limits);
            match begun.unwrap() {
                Planning::Ready(plan) => plan.unhashed,
                Planning::Encoding(_) => panic!("ids are not encoded"),
            }
        };
        assert_eq!(why(&budget(159_999)), Some("prompt_memory"));
        let enough = budget(160_000);
        assert_eq!(why(&enough), None);
        assert_eq!(enough.free_bytes(), 160_000);
    }
}

/// Reading ids takes several times the memory of the body, which the pool's jobs charge.
#[test]
fn a_late_prompt_is_known_by_its_text_and_its_ids_are_not_read() {
    let late = PlanInputs {
        work: PromptWork::Skip,
        ..with_tokenizer()
    };
    let ids = vec!["1"; 10_000].join(",");
    let body = format!(r#"{{"model":"m","max_tokens":1,"prompt":[{ids}]}}"#);
    let planned = plan(PromptRoute::Completions, body.as_bytes(), &late).unwrap();
    assert_eq!(planned.unhashed, Some("prompt_timeout"));
    assert_eq!(
        planned.prompt.tokens() as usize,
        body.len() / BYTES_PER_TOKEN
    );
    let body = chat(&"word ".repeat(20_000));
    let planned = plan(PromptRoute::ChatCompletions, body.as_bytes(), &late).unwrap();
    assert_eq!(planned.unhashed, Some("prompt_timeout"));
}

#[test]
fn a_prompt_of_many_small_values_is_not_rendered() {
    let inputs = with_tokenizer();
    let message = r#"{"role":"user","content":"x"}"#;
    let body = |messages: usize| {
        let messages = vec![message; messages].join(",");
        format!(r#"{{"model":"m","messages":[{messages}]}}"#)
    };
    let why = |messages| {
        let body = body(messages);
        let planned = plan(PromptRoute::ChatCompletions, body.as_bytes(), &inputs);
        planned.unwrap().unhashed
    };
    assert_eq!(why(2_000), None);
    assert_eq!(why(34_000), Some("prompt_memory"));
}

/// The work of clients that had left once delayed those that waited.
#[tokio::test]
async fn work_ends_when_the_client_has_gone() {
    let inputs = with_tokenizer();
    let body = chat(&"word ".repeat(100_000));
    let is_gone = WorkLimits {
        budget: None,
        is_cancelled: Arc::new(|| true),
    };
    let planning = begin(
        PromptRoute::ChatCompletions,
        body.as_bytes(),
        &inputs,
        &is_gone,
    );
    let Ok(Planning::Ready(plan)) = planning else {
        panic!("rendering is given up")
    };
    assert_eq!(plan.unhashed, Some("template_failed"));
    let budget = budget(16 << 20);
    let headers = HeaderMap::new();
    let body = budget.read(&headers, 0, body.into()).await.unwrap();
    let route = PromptRoute::ChatCompletions;
    let (mut job, planned) = PlanJob::new(route, body, inputs, budget, Rendering::Usual);
    assert_eq!((job.step(), job.step()), (TaskState::More, TaskState::More));
    assert!(job.bytes_left() > 300_000);
    drop(planned);
    assert_eq!(job.step(), TaskState::Done);
}

/// Engines read them, as Python does.
#[test]
fn a_chat_with_numbers_of_python_is_forwarded_without_hashes() {
    let inputs = with_tokenizer();
    let tools = |number: &str| {
        format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":"x"}}],"tools":[{{"type":
            "function","function":{{"name":"f","parameters":{{"maximum":{number}}}}}}}]}}"#
        )
    };
    for (number, why) in [
        ("9223372036854775807", None),
        ("18446744073709551615", None),
        ("18446744073709551616", Some("number")),
        ("NaN", Some("number")),
        ("-Infinity", Some("number")),
        ("1e400", Some("number")),
    ] {
        let body = tools(number);
        let plan = plan(PromptRoute::ChatCompletions, body.as_bytes(), &inputs).unwrap();
        assert_eq!((plan.unhashed, plan.rewritten), (why, None), "{number}");
    }
    let option = tools("NaN").replace(
        "\"model\"",
        "\"vllm_xargs\":{\"kv_cache_report_mode\":1},\"model\"",
    );
    for body in [option, tools("nan"), tools("NaN,")] {
        assert!(
            plan(PromptRoute::ChatCompletions, body.as_bytes(), &inputs).is_err(),
            "{body}"
        );
    }
}

/// One step of a slow template occupies its thread for long, and one thread is for short jobs.
#[tokio::test]
async fn a_prompt_with_a_slow_template_is_a_long_job_until_it_is_rendered() {
    let budget = budget(16 << 20);
    let headers = HeaderMap::new();
    let body = chat("hello");
    for (rendering, is_long) in [(Rendering::Usual, false), (Rendering::Long, true)] {
        let body = budget.read(&headers, 0, body.clone().into()).await.unwrap();
        let route = PromptRoute::ChatCompletions;
        let (mut job, planned) =
            PlanJob::new(route, body, with_tokenizer(), budget.clone(), rendering);
        assert_eq!(job.bytes_left() > SHORT_BYTES_MAX, is_long);
        assert_eq!(job.step(), TaskState::More);
        assert!(job.bytes_left() <= SHORT_BYTES_MAX);
        drop(planned);
    }
}

/// They have the blocks of the chat that the engine makes of them, and no trust of other routes.
#[test]
fn responses_and_messages_are_hashed_as_the_engines_chats() {
    let mut inputs = with_tokenizer();
    let text = "A question of several blocks. ".repeat(10);
    let user = json!([{"role": "user", "content": text}]);
    let system = json!({"role": "system", "content": "Be brief."});
    let chat = json!({"model": "m", "messages": [system, user[0]]});
    let with_special =
        json!({"model": "m", "messages": chat["messages"], "add_special_tokens": true});
    let responses = json!({"model": "m", "input": user, "instructions": "Be brief."});
    let messages = json!({"model": "m", "max_tokens": 9, "messages": user, "system": "Be brief."});
    let planned = |route, body: &Value, inputs: &PlanInputs| {
        plan(route, body.to_string().as_bytes(), inputs).unwrap()
    };
    for (route, body, chat) in [
        (PromptRoute::Responses, &responses, &with_special),
        (PromptRoute::Messages, &messages, &chat),
    ] {
        let expected = planned(PromptRoute::ChatCompletions, chat, &inputs);
        let plan = planned(route, body, &inputs);
        assert_eq!(plan.unhashed, None);
        assert!(!plan.prompt.blocks().is_empty());
        assert_eq!(plan.prompt.blocks(), expected.prompt.blocks(), "{body}");
    }
    let models = &mut Arc::make_mut(&mut inputs.catalog).models;
    let parity = &mut models.get_mut("m").unwrap().parity;
    (parity.responses, parity.messages) = (trust(false), trust(false));
    for (route, body) in [
        (PromptRoute::Responses, responses),
        (PromptRoute::Messages, messages),
    ] {
        let plan = planned(route, &body, &inputs);
        assert_eq!(plan.unhashed, Some("parity"));
    }
}

/// Only if all workers are known to have these ids.
#[test]
fn a_text_completion_is_sent_as_ids_where_an_operator_asks() {
    let mut inputs = with_tokenizer();
    let body = br#"{"model":"m","prompt":"hello"}"#;
    let sent = |inputs: &PlanInputs| {
        let plan = plan(PromptRoute::Completions, body, inputs).unwrap();
        assert_eq!(plan.unhashed, None);
        plan.rewritten
            .map(|body| String::from_utf8(body.to_vec()).unwrap())
    };
    assert_eq!(sent(&inputs), None);
    inputs.completion_prompts = CompletionPrompts::TokenIds;
    let ids = inputs.tokenizers.of("m").unwrap();
    let ids = ids.tokenizer.encode("hello", SpecialTokens::Add).unwrap();
    let expected = serde_json::json!({"model": "m", "prompt": ids}).to_string();
    assert_eq!(sent(&inputs), Some(expected));
    let models = &mut Arc::make_mut(&mut inputs.catalog).models;
    models.get_mut("m").unwrap().parity.text.all_passed = false;
    assert_eq!(sent(&inputs), None);
}
