//! A Hugging Face tokenizer directory: `tokenizer.json` and a chat template.
//!
//! The template's dialect is Jinja as `transformers` sets it up, with the few of Python's string
//! methods that are common: a template that needs others gets an error. It shares nothing with the
//! router on purpose.

use std::io;
use std::path::Path;

use anyhow::{Context as _, anyhow};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value as JinjaValue};
use minijinja::{AutoEscape, Environment, Error as JinjaError, ErrorKind};
use serde::Serialize;
use serde_json::ser::Formatter;
use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

const TEMPLATE: &str = "chat";
/// Enough different tokens for outputs to differ.
const VOCABULARY_MAX: usize = 512;

pub(in crate::mock) struct HuggingFace {
    tokenizer: Tokenizer,
    templates: Environment<'static>,
    /// Names of special tokens, as templates see them.
    special: Map<String, Value>,
}

impl HuggingFace {
    pub(super) fn load(directory: &Path) -> anyhow::Result<Self> {
        let file = directory.join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(&file)
            .map_err(|error| anyhow!("reading {}: {error}", file.display()))?;
        let config = read_config(&directory.join("tokenizer_config.json"))?;
        let template = match std::fs::read_to_string(directory.join("chat_template.jinja")) {
            Ok(template) => Some(template),
            Err(_) => config["chat_template"].as_str().map(str::to_owned),
        };
        let mut templates = environment()?;
        if let Some(template) = template {
            templates
                .add_template_owned(TEMPLATE, template)
                .context("reading the chat template")?;
        }
        let mut special = Map::new();
        for name in ["bos_token", "eos_token", "pad_token", "unk_token"] {
            let token = &config[name];
            let text = token.as_str().or_else(|| token["content"].as_str());
            if let Some(text) = text {
                special.insert(name.into(), text.into());
            }
        }
        Ok(Self {
            tokenizer,
            templates,
            special,
        })
    }

    /// Tokens that stand for letters.
    pub(super) fn vocabulary(&self) -> Vec<u32> {
        let size = u32::try_from(self.tokenizer.get_vocab_size(false)).unwrap_or(u32::MAX);
        let readable = |&token: &u32| {
            let text = self.decode(token);
            let letters = text.trim();
            !letters.is_empty() && letters.bytes().all(|byte| byte.is_ascii_alphabetic())
        };
        (0..size).filter(readable).take(VOCABULARY_MAX).collect()
    }

    pub(super) fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, String> {
        let encoding = self.tokenizer.encode_fast(text, special);
        let encoding = encoding.map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().to_vec())
    }

    pub(super) fn decode(&self, token: u32) -> String {
        self.tokenizer.decode(&[token], true).unwrap_or_default()
    }

    pub(super) fn render(&self, request: &Value) -> Result<String, JinjaError> {
        let mut context = self.special.clone();
        if let Some(extra) = request["chat_template_kwargs"].as_object() {
            context.extend(extra.clone());
        }
        let messages = request["messages"]
            .as_array()
            .map_or(&[][..], Vec::as_slice);
        let messages: Vec<Value> = messages.iter().map(plain_message).collect();
        context.insert("messages".into(), json!(messages));
        let tools = request["tools"]
            .as_array()
            .filter(|tools| !tools.is_empty());
        context.insert("tools".into(), json!(tools));
        let generation = request["add_generation_prompt"].as_bool().unwrap_or(true);
        context.insert("add_generation_prompt".into(), json!(generation));
        self.templates
            .get_template(TEMPLATE)?
            .render(Serde(&context))
    }
}

fn read_config(file: &Path) -> anyhow::Result<Value> {
    match std::fs::read(file) {
        Ok(text) => {
            let config = serde_json::from_slice(&text);
            config.with_context(|| format!("reading {}", file.display()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Value::Null),
        Err(error) => Err(error).with_context(|| format!("reading {}", file.display())),
    }
}

/// As vLLM prepares it: parts of text become lines, arguments of tool calls become objects.
fn plain_message(message: &Value) -> Value {
    let mut message = message.clone();
    if let Some(parts) = message["content"].as_array() {
        let texts: Vec<&str> = parts
            .iter()
            .filter_map(|part| part["text"].as_str())
            .collect();
        message["content"] = json!(texts.join("\n"));
    }
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let arguments = call["function"]["arguments"].as_str();
        let parsed = arguments.and_then(|text| serde_json::from_str::<Value>(text).ok());
        if let Some(parsed) = parsed {
            call["function"]["arguments"] = parsed;
        }
    }
    message
}

fn environment() -> Result<Environment<'static>, JinjaError> {
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()?;
    let mut environment = Environment::new();
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(|_, value, method, arguments| {
        string_method(value, method, arguments)
    });
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| {
        Err::<JinjaValue, _>(JinjaError::new(ErrorKind::InvalidOperation, message))
    });
    Ok(environment)
}

fn string_method(
    value: &JinjaValue,
    method: &str,
    arguments: &[JinjaValue],
) -> Result<JinjaValue, JinjaError> {
    let unknown = || JinjaError::from(ErrorKind::UnknownMethod);
    let text = value.as_str().ok_or_else(unknown)?;
    let argument = match arguments {
        [] => None,
        [argument] => Some(argument.as_str().ok_or_else(unknown)?),
        [_, _, ..] => return Err(unknown()),
    };
    Ok(match (method, argument) {
        ("strip", None) => text.trim().into(),
        ("lstrip", None) => text.trim_start().into(),
        ("rstrip", None) => text.trim_end().into(),
        ("strip", Some(set)) => text.trim_matches(|c| set.contains(c)).into(),
        ("lstrip", Some(set)) => text.trim_start_matches(|c| set.contains(c)).into(),
        ("rstrip", Some(set)) => text.trim_end_matches(|c| set.contains(c)).into(),
        ("upper", None) => text.to_uppercase().into(),
        ("lower", None) => text.to_lowercase().into(),
        ("startswith", Some(start)) => text.starts_with(start).into(),
        ("endswith", Some(end)) => text.ends_with(end).into(),
        ("split", Some(by)) if !by.is_empty() => text.split(by).map(JinjaValue::from).collect(),
        _ => return Err(unknown()),
    })
}

/// Python's `json.dumps(…, ensure_ascii=False)`; its keyword arguments are ignored.
fn to_json(value: &JinjaValue, _options: Kwargs) -> Result<JinjaValue, JinjaError> {
    let failed = |error: serde_json::Error| {
        JinjaError::new(ErrorKind::BadSerialization, "not serializable").with_source(error)
    };
    let mut text = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, PythonJson);
    value.serialize(&mut serializer).map_err(failed)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    Ok(JinjaValue::from_safe_string(text))
}

/// A space behind every comma and colon.
struct PythonJson;

impl Formatter for PythonJson {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
