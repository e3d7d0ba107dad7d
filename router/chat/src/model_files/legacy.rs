//! What transformers does to a `tokenizer.json` by the files beside it.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::convert::Configurations;
use crate::tokenize::special_names;

/// Tokens that a tokenizer must have for its rules to be repaired.
const REPAIRED_TOKENS_MIN: usize = 100_001;
/// Types of models whose older files have a wrong rule.
const REPAIRED_TYPES: &[&str] = &["mistral", "mistral3", "voxtral", "ministral", "pixtral"];
/// The rule that replaces it.
const MISTRAL_RULE: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// Classes whose rules are those of the file.
const GENERIC_CLASSES: &[&str] = &["PreTrainedTokenizer", "TokenizersBackend"];
/// How the types of models begin for which transformers may take another class than the file names.
const OVERRULING_TYPE: &str = "qwen";

/// Adds the tokens of `added_tokens.json` to a configuration that lists none by id. Those of
/// `tokenizer.json` itself keep their flags.
pub(super) fn add_tokens(
    added: Option<Map<String, Value>>,
    tokenizer: &[u8],
    config: &mut Map<String, Value>,
) {
    #[derive(Deserialize)]
    struct Definition {
        #[serde(default)]
        added_tokens: Vec<Known>,
    }
    #[derive(Deserialize)]
    struct Known {
        id: u64,
    }
    let Some(added) = added.filter(|_| !config.contains_key("added_tokens_decoder")) else {
        return;
    };
    // A malformed tokenizer.json is found by its reader.
    let known: Option<Definition> = serde_json::from_slice(tokenizer).ok();
    let known = known.map_or_else(Vec::new, |definition| definition.added_tokens);
    let known: BTreeSet<u64> = known.into_iter().map(|token| token.id).collect();
    let special = special_names(config);
    let entries = added.into_iter().filter_map(|(content, id)| {
        let id = id.as_u64().filter(|id| !known.contains(id))?;
        let is_special = special.contains(&content);
        let token = json!({"content": content, "special": is_special, "normalized": !is_special});
        Some((id.to_string(), token))
    });
    let entries: Map<String, Value> = entries.collect();
    if !entries.is_empty() {
        config.insert("added_tokens_decoder".to_owned(), entries.into());
    }
}

/// The file with the repaired rule, where `fix_mistral_regex` wants it and transformers obeys.
pub(super) fn with_mistral_rules(tokenizer: Vec<u8>, configurations: &Configurations) -> Vec<u8> {
    let wants = configurations.tokenizer.get("fix_mistral_regex") == Some(&Value::Bool(true));
    if !wants || !is_repaired(&configurations.model) {
        return tokenizer;
    }
    repaired(&tokenizer).unwrap_or(tokenizer)
}

/// Whether transformers repairs the tokenizer of such a model.
fn is_repaired(model: &Map<String, Value>) -> bool {
    let text = |name: &str| model.get(name).and_then(Value::as_str);
    let major = text("transformers_version").map(|version| version.split('.').next());
    match major.flatten().and_then(|major| major.parse::<u32>().ok()) {
        Some(5..) => false,
        Some(_) => text("model_type").is_none_or(|kind| REPAIRED_TYPES.contains(&kind)),
        None => !model.is_empty(),
    }
}

fn repaired(tokenizer: &[u8]) -> Option<Vec<u8>> {
    let mut definition: Value = serde_json::from_slice(tokenizer).ok()?;
    let words = definition["model"]["vocab"].as_object()?;
    let added = definition["added_tokens"].as_array()?.iter();
    let added = added.filter_map(|token| token["content"].as_str());
    let tokens = words.len() + added.filter(|token| !words.contains_key(*token)).count();
    let rules = definition
        .get_mut("pre_tokenizer")
        .filter(|rules| !rules.is_null())?;
    if tokens < REPAIRED_TOKENS_MIN {
        return None;
    }
    let split = json!({"type": "Split", "pattern": {"Regex": MISTRAL_RULE},
        "behavior": "Isolated", "invert": false});
    if rules["type"] == "Sequence" {
        *rules["pretokenizers"].get_mut(0)? = split;
    } else {
        let rest = match rules["type"] == "Metaspace" {
            true => json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                "use_regex": false}),
            false => rules.take(),
        };
        *rules = json!({"type": "Sequence", "pretokenizers": [split, rest]});
    }
    serde_json::to_vec(&definition).ok()
}

/// The class or type of model by which transformers may build rules of its own.
pub(super) fn rules_of(configurations: &Configurations) -> Option<String> {
    let Configurations { tokenizer, model } = configurations;
    let class = [tokenizer, model]
        .into_iter()
        .find_map(|config| config.get("tokenizer_class")?.as_str());
    let class = class.map(|class| class.strip_suffix("Fast").unwrap_or(class));
    if let Some(class) = class.filter(|class| !GENERIC_CLASSES.contains(class)) {
        return Some(format!("tokenizer_class {class}"));
    }
    let kind = model.get("model_type").and_then(Value::as_str)?;
    let overrules = kind.starts_with(OVERRULING_TYPE);
    overrules.then(|| format!("model_type {kind}"))
}
