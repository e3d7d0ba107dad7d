//! Special tokens of `tokenizer_config.json`: templates use them by name, and those that
//! `tokenizer.json` lacks are added to the tokenizer, as transformers does at load.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};
use tokenizers::{AddedToken, Result, Tokenizer};

use super::SpecialTokenMap;

/// Named tokens (`bos_token` and so on) as texts.
pub(super) fn named(config: &Map<String, Value>) -> SpecialTokenMap {
    config
        .iter()
        .filter(|(name, _)| name.ends_with("_token"))
        .filter_map(|(name, value)| Some((name.clone(), content(value)?.to_owned())))
        .collect()
}

/// Texts of all special tokens that a configuration names.
pub(crate) fn special_names(config: &Map<String, Value>) -> BTreeSet<String> {
    named(config).into_values().chain(extra(config)).collect()
}

/// Special tokens without a name.
fn extra(config: &Map<String, Value>) -> Vec<String> {
    let lists =
        ["extra_special_tokens", "additional_special_tokens"].map(|name| match config.get(name) {
            Some(Value::Array(list)) => list.iter().collect(),
            Some(Value::Object(map)) => map.values().collect(),
            _ => Vec::new(),
        });
    let texts = lists.into_iter().flatten().filter_map(content);
    texts.map(str::to_owned).collect()
}

/// Adds the tokens that the configuration declares and the tokenizer lacks.
pub(super) fn register(tokenizer: &mut Tokenizer, config: &Map<String, Value>) -> Result<()> {
    let known: Vec<AddedToken> = tokenizer.get_added_tokens_decoder().into_values().collect();
    let mut missing: Vec<AddedToken> = Vec::new();
    for token in declared(config) {
        let is_known = match &token {
            DeclaredToken::Exactly(token) => known.contains(token),
            DeclaredToken::ByName(name) => known.iter().any(|other| other.content == *name),
        };
        let token = match token {
            DeclaredToken::Exactly(token) => token,
            DeclaredToken::ByName(name) => AddedToken::from(name, true),
        };
        if !is_known && !missing.iter().any(|other| other.content == token.content) {
            missing.push(token);
        }
    }
    if !missing.is_empty() {
        tokenizer.add_tokens(missing)?;
    }
    Ok(())
}

enum DeclaredToken {
    /// With all its flags, which must match.
    Exactly(AddedToken),
    /// Any added token of this text will do.
    ByName(String),
}

/// The declared tokens in transformers' order: by id, then the named ones, then the others.
fn declared(config: &Map<String, Value>) -> Vec<DeclaredToken> {
    let mut tokens = Vec::new();
    if let Some(Value::Object(by_id)) = config.get("added_tokens_decoder") {
        let entries = by_id.iter();
        let entries = entries.filter_map(|(id, token)| Some((id.parse().ok()?, full(token)?)));
        let ordered: BTreeMap<u32, AddedToken> = entries.collect();
        tokens.extend(ordered.into_values().map(DeclaredToken::Exactly));
    }
    tokens.extend(named(config).into_values().map(DeclaredToken::ByName));
    tokens.extend(extra(config).into_iter().map(DeclaredToken::ByName));
    tokens
}

/// A token's text, given alone or with flags.
fn content(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

fn full(value: &Value) -> Option<AddedToken> {
    let flag = |name: &str| value.get(name).and_then(Value::as_bool);
    let special = flag("special").unwrap_or(false);
    Some(
        AddedToken::from(content(value)?, special)
            .single_word(flag("single_word").unwrap_or(false))
            .lstrip(flag("lstrip").unwrap_or(false))
            .rstrip(flag("rstrip").unwrap_or(false))
            .normalized(flag("normalized").unwrap_or(!special)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tokenizer() -> Tokenizer {
        let definition = json!({"version": "1.0", "added_tokens": [
            {"id": 3, "content": "<eos>", "single_word": false, "lstrip": false, "rstrip": false,
             "normalized": false, "special": true}],
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<pad>": 2}, "merges": []}});
        Tokenizer::from_bytes(definition.to_string()).unwrap()
    }

    fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        tokenizer
            .encode_fast(text, false)
            .unwrap()
            .get_ids()
            .to_vec()
    }

    #[test]
    fn tokens_only_in_the_configuration_are_added() {
        let config = json!({"eos_token": "<eos>", "pad_token": {"content": "<pad>"},
            "bos_token": null, "add_bos_token": true, "extra_special_tokens": ["<new>"],
            "added_tokens_decoder": {"3": {"content": "<eos>", "special": true}}});
        let Value::Object(config) = config else {
            panic!("an object")
        };
        let mut tokenizer = tokenizer();
        register(&mut tokenizer, &config).unwrap();
        assert_eq!(ids(&tokenizer, "a<pad>b<new><eos>"), [0, 2, 1, 4, 3]);
        let names: Vec<_> = named(&config).into_keys().collect();
        assert_eq!(names, ["eos_token", "pad_token"]);
    }
}
