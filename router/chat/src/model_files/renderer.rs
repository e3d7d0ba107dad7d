//! Models whose chats vLLM renders by code of its own in place of a template, as vLLM 0.32 decides
//! it from a model's files.

use serde_json::{Map, Value};

/// gpt-oss: no flag of the engine makes its chats use a template, although `/tokenize` uses one.
pub(super) const HARMONY: &str = "harmony";

/// Its tokenizer mode by a model's `architectures`.
const OF_ARCHITECTURE: &[(&str, &str)] = &[
    ("DeepseekV32ForCausalLM", "deepseek_v32"),
    ("DeepseekV4ForCausalLM", "deepseek_v4"),
    ("DeepseekV4ForConditionalGeneration", "deepseek_v4"),
    ("DeepseekV41ForCausalLM", "deepseek_v41"),
    ("InklingForCausalLM", "inkling"),
    ("InklingForConditionalGeneration", "inkling"),
    ("KimiK3ForConditionalGeneration", "kimi_k3"),
];

/// The renderer of a model with this `config.json` and these files; `None` for a template.
pub(super) fn of_model(config: &Map<String, Value>, files: &[String]) -> Option<&'static str> {
    if config
        .get("model_type")
        .is_some_and(|kind| kind == "gpt_oss")
    {
        return Some(HARMONY);
    }
    let architectures = config.get("architectures").and_then(Value::as_array);
    let named = |(name, _): &&(&str, &str)| {
        architectures.is_some_and(|known| known.iter().any(|one| one.as_str() == Some(*name)))
    };
    let own = OF_ARCHITECTURE.iter().find(named);
    own.map(|(_, mode)| *mode)
        .or_else(|| is_of_mistral(files).then_some("mistral"))
}

/// Mistral's own form. The engine asks for its weights, which need not be here: `params.json` comes
/// with them.
fn is_of_mistral(files: &[String]) -> bool {
    let has = |is_it: fn(&str) -> bool| files.iter().any(|name| is_it(name));
    has(|name| name == "tekken.json" || name.starts_with("tokenizer.model.v"))
        && has(|name| {
            let is_weights = name.starts_with("consolidated") && name.ends_with(".safetensors");
            is_weights || name == "params.json"
        })
}
