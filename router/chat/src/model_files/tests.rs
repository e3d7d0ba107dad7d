use tempfile::TempDir;

use super::*;

struct Scratch(TempDir);

impl Scratch {
    fn new(files: &[(&str, &str)]) -> Self {
        let dir = TempDir::new().unwrap();
        for (file, content) in [("tokenizer.json", "{}")].iter().chain(files) {
            let file = dir.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, content).unwrap();
        }
        Self(dir)
    }

    fn read(&self) -> ModelFiles {
        read(self.0.path()).unwrap()
    }
}

fn named(entries: &[(&str, &str)]) -> TemplateSources {
    TemplateSources::Named(
        entries
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect(),
    )
}

#[test]
fn a_file_of_another_form_is_named_in_its_error() {
    let error_of = |file: &str| {
        let scratch = Scratch::new(&[(file, "")]);
        fs::remove_file(scratch.0.path().join("tokenizer.json")).unwrap();
        let error = read(scratch.0.path()).unwrap_err();
        assert!(error.to_string().contains(file), "{error}");
        error
    };
    for file in [
        "tekken.json",
        "tokenizer.model",
        "tiktoken.model",
        "qwen.tiktoken",
    ] {
        let error = error_of(file);
        assert!(
            matches!(error, ModelFileError::Conversion { .. }),
            "{error}"
        );
    }
    for file in ["vocab.json", "spiece.model"] {
        let error = error_of(file);
        assert!(matches!(error, ModelFileError::OtherForm { .. }), "{error}");
    }
}

fn object(json: Value) -> Map<String, Value> {
    let Value::Object(map) = json else {
        panic!("an object")
    };
    map
}

#[test]
fn added_tokens_beside_a_tokenizer_json_are_declared() {
    let tokenizer = r#"{"added_tokens": [{"id": 1, "content": "<old>", "special": true}]}"#;
    let config = r#"{"eos_token": "<end>", "additional_special_tokens": ["<extra>"]}"#;
    let added = r#"{"<old>": 1, "<end>": 2, "<extra>": 3, "<plain>": 4}"#;
    let files = [
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config),
        ("added_tokens.json", added),
    ];
    let token = |content: &str, special: bool| {
        let normalized = !special;
        serde_json::json!({"content": content, "special": special, "normalized": normalized})
    };
    let expected = serde_json::json!({"2": token("<end>", true), "3": token("<extra>", true),
        "4": token("<plain>", false)});
    let read = Scratch::new(&files).read();
    assert_eq!(read.config["added_tokens_decoder"], expected);
    let listed = ("tokenizer_config.json", r#"{"added_tokens_decoder": {}}"#);
    let read = Scratch::new(&[files[0], files[2], listed]).read();
    assert_eq!(read.config["added_tokens_decoder"], serde_json::json!({}));
}

#[test]
fn the_rule_of_mistral_models_is_repaired_where_transformers_does() {
    let vocab: Map<String, Value> = (0..100_001)
        .map(|id| (format!("t{id}"), id.into()))
        .collect();
    let definition = |rules: Value, vocab: Map<String, Value>| {
        let model = serde_json::json!({"type": "BPE", "vocab": vocab, "merges": []});
        let definition = serde_json::json!({"added_tokens": [], "model": model,
            "pre_tokenizer": rules});
        definition.to_string()
    };
    let byte_level = serde_json::json!({"type": "ByteLevel", "use_regex": false});
    let sequence = serde_json::json!({"type": "Sequence", "pretokenizers":
        [{"type": "Split", "pattern": {"Regex": "wrong"}}, byte_level]});
    let read = |definition: &str, config: &str, model: &str| {
        let files = [
            ("tokenizer.json", definition),
            ("tokenizer_config.json", config),
            ("config.json", model),
        ];
        let read = Scratch::new(&files).read().tokenizer;
        serde_json::from_slice::<Value>(&read).unwrap()["pre_tokenizer"].clone()
    };
    let (wants, old) = (
        r#"{"fix_mistral_regex": true}"#,
        r#"{"model_type": "mistral3", "transformers_version": "4.57.1"}"#,
    );
    for rules in [&sequence, &byte_level] {
        let large = definition(rules.clone(), vocab.clone());
        let repaired = read(&large, wants, old);
        let parts = repaired["pretokenizers"].as_array().unwrap();
        assert_eq!((parts.len(), &parts[1]), (2, &byte_level));
        assert!(
            parts[0]["pattern"]["Regex"]
                .as_str()
                .unwrap()
                .starts_with(r"[^\r\n")
        );
        let small = definition(
            rules.clone(),
            vocab
                .iter()
                .take(9)
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect(),
        );
        assert_eq!(read(&small, wants, old), *rules);
        assert_eq!(read(&large, "{}", old), *rules);
        for model in [
            r#"{"model_type": "llama", "transformers_version": "4.57.1"}"#,
            r#"{"model_type": "mistral3", "transformers_version": "5.0.0"}"#,
        ] {
            assert_eq!(read(&large, wants, model), *rules, "{model}");
        }
    }
}

#[test]
fn a_class_with_rules_of_its_own_is_named() {
    let named = |tokenizer: Value, model: Value| {
        legacy::rules_of(&Configurations {
            tokenizer: object(tokenizer),
            model: object(model),
        })
    };
    let none = || serde_json::json!({});
    for (tokenizer, model, expected) in [
        (
            serde_json::json!({"tokenizer_class": "Qwen2TokenizerFast"}),
            none(),
            Some("tokenizer_class Qwen2Tokenizer"),
        ),
        (
            serde_json::json!({"tokenizer_class": "PreTrainedTokenizerFast"}),
            serde_json::json!({"model_type": "qwen2"}),
            Some("model_type qwen2"),
        ),
        (
            serde_json::json!({"tokenizer_class": "PreTrainedTokenizerFast"}),
            serde_json::json!({"model_type": "llama"}),
            None,
        ),
        (none(), none(), None),
    ] {
        assert_eq!(named(tokenizer, model).as_deref(), expected);
    }
}

#[test]
fn another_form_is_read_only_without_a_tokenizer_json_and_up_to_its_bound() {
    let scratch = Scratch::new(&[("tekken.json", ""), ("tokenizer.model", "")]);
    assert_eq!(scratch.read().tokenizer, b"{}");
    fs::remove_file(scratch.0.path().join("tokenizer.json")).unwrap();
    let file = fs::File::create(scratch.0.path().join("tekken.json")).unwrap();
    file.set_len((64 << 20) + 1).unwrap();
    let error = read(scratch.0.path()).unwrap_err();
    assert!(matches!(error, ModelFileError::TooLarge { .. }), "{error}");
}

/// Without them the router would cut their names into pieces.
#[test]
fn added_tokens_that_no_configuration_lists_are_an_error() {
    let tekken = include_str!("../../testdata/tokenizer_files/tekken.json");
    let added = ("added_tokens.json", "{}");
    let listed = ("tokenizer_config.json", r#"{"added_tokens_decoder": {}}"#);
    for (files, is_read) in [
        (vec![("tekken.json", tekken), added], false),
        (vec![("tekken.json", tekken), added, listed], true),
    ] {
        let scratch = Scratch::new(&files);
        fs::remove_file(scratch.0.path().join("tokenizer.json")).unwrap();
        match read(scratch.0.path()) {
            Ok(_) => assert!(is_read),
            Err(error) => assert!(!is_read && error.to_string().contains(added.0), "{error}"),
        }
    }
}

#[test]
fn mistrals_form_has_neither_templates_nor_a_configuration() {
    let tekken = include_str!("../../testdata/tokenizer_files/tekken.json");
    let scratch = Scratch::new(&[("tekken.json", tekken), CONFIG, JINJA]);
    fs::remove_file(scratch.0.path().join("tokenizer.json")).unwrap();
    let files = scratch.read();
    assert_eq!(files.templates, TemplateSources::None);
    assert!(files.config.is_empty());
}

#[test]
fn a_digest_covers_templates_and_rules() {
    let scratch = Scratch::new(&[("own.jinja", "own"), CONFIG]);
    let mut source = ModelSource {
        path: scratch.0.path().to_owned(),
        ..ModelSource::default()
    };
    let plain = source.read().unwrap();
    assert_eq!(plain.digest(), source.read().unwrap().digest());
    source.chat_template = Some(scratch.0.path().join("own.jinja"));
    let own = source.read().unwrap();
    assert_eq!(own.templates, TemplateSources::Single("own".into()));
    source.rules.default_kwargs = Some("{}".into());
    let ruled = source.read().unwrap();
    assert!(plain.digest() != own.digest() && own.digest() != ruled.digest());
    source.chat_template = Some(scratch.0.path().join("absent.jinja"));
    assert!(source.read().is_err());
}

/// As vLLM 0.32 decides it.
#[test]
fn a_model_with_a_renderer_of_its_own_has_no_template() {
    let architecture = |name: &str| format!(r#"{{"architectures":["Other","{name}"]}}"#);
    let renderer = |config: &str, files: &[&str]| {
        let mut all: Vec<(&str, &str)> = files.iter().map(|name| (*name, "{}")).collect();
        all.extend([("config.json", config), CONFIG]);
        match Scratch::new(&all).read().templates {
            TemplateSources::OwnRenderer(name) => name,
            templates @ (TemplateSources::None
            | TemplateSources::Single(_)
            | TemplateSources::Named(_)) => {
                assert_eq!(templates, TemplateSources::Single("configured".into()));
                "template"
            }
        }
    };
    for (name, expected) in [
        ("DeepseekV32ForCausalLM", "deepseek_v32"),
        ("DeepseekV4ForCausalLM", "deepseek_v4"),
        ("DeepseekV41ForCausalLM", "deepseek_v41"),
        ("KimiK3ForConditionalGeneration", "kimi_k3"),
        ("InklingForConditionalGeneration", "inkling"),
        ("DeepseekV3ForCausalLM", "template"),
        ("MistralForCausalLM", "template"),
    ] {
        assert_eq!(renderer(&architecture(name), &[]), expected, "{name}");
    }
    assert_eq!(renderer(r#"{"model_type":"gpt_oss"}"#, &[]), "harmony");
    for (files, expected) in [
        (&["tekken.json", "params.json"][..], "mistral"),
        (
            &["tokenizer.model.v3", "consolidated-1.safetensors"],
            "mistral",
        ),
        (&["tekken.json", "model.safetensors"], "template"),
        (&["tokenizer.model", "params.json"], "template"),
        (&["consolidated.safetensors", "params.json"], "template"),
    ] {
        assert_eq!(renderer("{}", files), expected, "{files:?}");
    }
}

#[test]
fn a_template_of_the_settings_replaces_a_renderer_that_can_be_switched_off() {
    let templates = |config: &str| {
        let scratch = Scratch::new(&[("own.jinja", "own"), ("config.json", config)]);
        let source = ModelSource {
            path: scratch.0.path().to_owned(),
            chat_template: Some(scratch.0.path().join("own.jinja")),
            ..ModelSource::default()
        };
        source.read().unwrap().templates
    };
    assert_eq!(
        templates(r#"{"architectures":["DeepseekV32ForCausalLM"]}"#),
        TemplateSources::Single("own".into())
    );
    assert_eq!(
        templates(r#"{"model_type":"gpt_oss"}"#),
        TemplateSources::OwnRenderer("harmony")
    );
}

const CONFIG: (&str, &str) = ("tokenizer_config.json", r#"{"chat_template":"configured"}"#);
const JINJA: (&str, &str) = ("chat_template.jinja", "file");
const EXTRA: (&str, &str) = ("additional_chat_templates/tool_use.jinja", "tools");

/// A name, files with their contents, and the templates expected.
type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], TemplateSources);

#[test]
fn template_files_come_before_the_configuration() {
    let legacy = ("chat_template.json", r#"{"chat_template":"legacy"}"#);
    let list = (
        "tokenizer_config.json",
        r#"{"chat_template":[{"name":"default","template":"d"},{"name":"rag","template":"r"}]}"#,
    );
    let single = |text: &str| TemplateSources::Single(text.to_owned());
    let cases: [Case<'_>; 7] = [
        ("none", &[], TemplateSources::None),
        ("config", &[CONFIG], single("configured")),
        ("jinja", &[CONFIG, legacy, JINJA], single("file")),
        ("legacy", &[CONFIG, legacy], single("legacy")),
        ("list", &[list], named(&[("default", "d"), ("rag", "r")])),
        (
            "extra",
            &[CONFIG, JINJA, EXTRA],
            named(&[("default", "file"), ("tool_use", "tools")]),
        ),
        (
            "only_extra",
            &[CONFIG, EXTRA],
            named(&[("tool_use", "tools")]),
        ),
    ];
    for (name, files, expected) in cases {
        assert_eq!(Scratch::new(files).read().templates, expected, "{name}");
    }
}

#[test]
fn the_map_of_special_tokens_counts_only_without_a_list_by_id() {
    let map = (
        "special_tokens_map.json",
        r#"{"eos_token":"new","pad_token":"pad"}"#,
    );
    let old = ("tokenizer_config.json", r#"{"eos_token":"old"}"#);
    let config = Scratch::new(&[old, map]).read().config;
    assert_eq!(
        (config["eos_token"].as_str(), config["pad_token"].as_str()),
        (Some("new"), Some("pad"))
    );
    let listed = (
        "tokenizer_config.json",
        r#"{"eos_token":"old","added_tokens_decoder":{}}"#,
    );
    let config = Scratch::new(&[listed, map]).read().config;
    assert_eq!(config["eos_token"].as_str(), Some("old"));
    assert!(!config.contains_key("pad_token"));
}

#[test]
fn broken_files_are_named() {
    let scratch = Scratch::new(&[("tokenizer_config.json", "{")]);
    let error = read(scratch.0.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json"), "{error}");
    let scratch = Scratch::new(&[("tokenizer_config.json", r#"{"chat_template":5}"#)]);
    assert!(matches!(
        read(scratch.0.path()),
        Err(ModelFileError::Json { .. })
    ));
}
