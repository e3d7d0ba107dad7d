//! Chat templates of one model, rendered as vLLM and transformers render them.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::Environment;
use minijinja::value::{Value, ValueKind};

use super::content_format::{ContentFormat, detect};
use super::messages::{self, member};
use super::python::{self, CivilTime};
use crate::openai::{ChatParts, Generation};

/// Characters that a rendered chat may have. The largest bodies that engines take are smaller.
const TEXT_BYTES_MAX: usize = 64 << 20;
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Why there is no text. None of it is the client's fault for certain: the engine decides.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RenderError {
    #[error("the model has no chat template")]
    NoTemplate,
    /// The engine refuses templates from clients unless told otherwise.
    #[error("the request brings its own chat template")]
    RequestTemplate,
    #[error("`{0}` is not what the engine accepts")]
    Invalid(&'static str),
    #[error("`{0}` has a form that cannot be reproduced here")]
    Unsupported(&'static str),
    /// The template raised an error, ran too long or wrote too much.
    #[error("the template failed: {0}")]
    Template(String),
}

/// A template could not be compiled; the name is `default` or one of several.
#[derive(Debug, thiserror::Error)]
#[error("chat template `{name}`: {source}")]
pub struct TemplateError {
    pub name: String,
    pub source: minijinja::Error,
}

#[derive(Debug)]
struct Facts {
    format: ContentFormat,
    knows_developer: bool,
    mentions_content: bool,
}

/// One model's templates, by name, and its special tokens.
#[derive(Debug)]
pub struct ChatTemplates {
    env: Environment<'static>,
    facts: BTreeMap<String, Facts>,
    /// The only template there is, as opposed to a set of named ones.
    single: bool,
    special_tokens: BTreeMap<String, String>,
}

impl ChatTemplates {
    /// A model with one template.
    pub fn single(
        source: String,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self, TemplateError> {
        let sources = BTreeMap::from([(DEFAULT.to_owned(), source)]);
        Ok(Self {
            single: true,
            ..Self::named(sources, special_tokens)?
        })
    }

    /// A model with several: `tool_use` serves requests with tools, `default` the others.
    pub fn named(
        sources: BTreeMap<String, String>,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self, TemplateError> {
        let failed = |name: &str, source| TemplateError {
            name: name.to_owned(),
            source,
        };
        let mut env = python::environment().map_err(|error| failed(DEFAULT, error))?;
        let mut facts = BTreeMap::new();
        for (name, source) in sources {
            let plain = python::without_generation_tags(&source).into_owned();
            let found = Facts {
                format: detect(&plain),
                knows_developer: plain.contains("\"developer\"") || plain.contains("'developer'"),
                mentions_content: source.contains("content"),
            };
            env.add_template_owned(name.clone(), plain)
                .map_err(|error| failed(&name, error))?;
            facts.insert(name, found);
        }
        Ok(Self {
            env,
            facts,
            single: false,
            special_tokens,
        })
    }

    /// The form of content that the template for plain requests wants.
    pub fn content_format(&self) -> Option<ContentFormat> {
        self.facts.get(DEFAULT).map(|facts| facts.format)
    }

    fn choose(&self, chat: &ChatParts<'_>, tools: &Value) -> Result<(&str, &Facts), RenderError> {
        let name = match &chat.template {
            Some(name) if !self.single && self.facts.contains_key(name.as_ref()) => name.as_ref(),
            Some(_) => return Err(RenderError::RequestTemplate),
            None if !self.single && !tools.is_none() && self.facts.contains_key(TOOL_USE) => {
                TOOL_USE
            }
            None => DEFAULT,
        };
        self.facts
            .get_key_value(name)
            .map(|(name, f)| (name.as_str(), f))
            .ok_or(RenderError::NoTemplate)
    }

    /// The text that the engine would make of this chat at this time.
    pub fn render(&self, chat: &ChatParts<'_>, now: CivilTime) -> Result<String, RenderError> {
        if chat.generation == Generation::Contradiction {
            return Err(RenderError::Invalid("continue_final_message"));
        }
        let arguments = Arguments::read(chat)?;
        let (name, facts) = self.choose(chat, &arguments.tools)?;
        let mut conversation = messages::conversation(chat.messages, facts.format)?;
        if !facts.knows_developer {
            conversation = messages::without_developer_role(conversation);
        }
        let continued = match chat.generation {
            Generation::ContinueFinal if !facts.mentions_content => {
                return Err(RenderError::Invalid("continue_final_message"));
            }
            Generation::ContinueFinal => Some(mark_final(&mut conversation)?),
            Generation::Prompt | Generation::Nothing | Generation::Contradiction => None,
        };
        let add_prompt = chat.generation == Generation::Prompt;
        let context = self.context(conversation, arguments, add_prompt, now);
        let text = self.run(name, context)?;
        match continued {
            None => Ok(text),
            Some(last) => cut_at_mark(text, &last),
        }
    }

    fn context(
        &self,
        conversation: Vec<Value>,
        arguments: Arguments,
        add_prompt: bool,
        now: CivilTime,
    ) -> Value {
        let mut members: Vec<(Value, Value)> = Vec::with_capacity(16);
        let mut put = |name: &str, value: Value| members.push((Value::from(name), value));
        put("strftime_now", python::strftime_now(now));
        for (name, token) in &self.special_tokens {
            put(name, Value::from(token.as_str()));
        }
        for (name, value) in arguments.others {
            put(&name, value);
        }
        put("messages", Value::from(conversation));
        put("tools", arguments.tools);
        put("documents", arguments.documents);
        put("add_generation_prompt", Value::from(add_prompt));
        Value::from_pairs(members)
    }

    fn run(&self, name: &str, context: Value) -> Result<String, RenderError> {
        let failed = |error: minijinja::Error| RenderError::Template(error.to_string());
        let template = self.env.get_template(name).map_err(failed)?;
        let mut out = BoundedText(Vec::new());
        // A template is the operator's, its input is anybody's: no input may take the process down.
        let result = catch_unwind(AssertUnwindSafe(|| {
            template.render_captured_to(context, &mut out).map(|_| ())
        }));
        match result {
            Ok(done) => done.map_err(failed)?,
            Err(_) => {
                return Err(RenderError::Template(
                    "the template engine panicked".to_owned(),
                ));
            }
        }
        String::from_utf8(out.0).map_err(|error| RenderError::Template(error.to_string()))
    }
}

/// Output of a template, refused beyond a bound.
struct BoundedText(Vec<u8>);

impl io::Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > TEXT_BYTES_MAX {
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a template gets beside the conversation.
struct Arguments {
    tools: Value,
    documents: Value,
    others: Vec<(String, Value)>,
}

/// Names that mean something to the engine's own call rather than to a template.
const RESERVED: &[&str] = &[
    "chat_template",
    "tokenize",
    "messages",
    "conversation",
    "conversations",
    "model_config",
    "tokenizer",
    "return_dict",
    "return_assistant_tokens_mask",
];
/// Names that the engine takes for its call and that change nothing in the text.
const CONSUMED: &[&str] = &[
    "add_generation_prompt",
    "continue_final_message",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "tokenizer_kwargs",
];

impl Arguments {
    fn read(chat: &ChatParts<'_>) -> Result<Self, RenderError> {
        let none = || Value::from(());
        let mut read = Self {
            tools: none(),
            documents: none(),
            others: Vec::new(),
        };
        if let Some(tools) = chat.tools {
            read.tools = messages::tools(tools)?;
        }
        if let Some(raw) = chat.template_kwargs {
            read.template_arguments(&messages::read_json("chat_template_kwargs", raw)?)?;
        }
        if let Some(documents) = chat.documents {
            read.documents = messages::read_json("documents", documents)?;
        }
        if let Some(effort) = &chat.reasoning_effort {
            read.set("reasoning_effort", Value::from(effort.as_ref()));
            if !read
                .others
                .iter()
                .any(|(name, _)| name == "enable_thinking")
                && !chat_sets(chat, "enable_thinking")
            {
                read.set("enable_thinking", Value::from(effort != "none"));
            }
        }
        Ok(read)
    }

    /// The request's own arguments. vLLM drops null and "auto", as if they had not been sent.
    fn template_arguments(&mut self, arguments: &Value) -> Result<(), RenderError> {
        const NAME: &str = "chat_template_kwargs";
        if arguments.kind() != ValueKind::Map {
            return Err(RenderError::Invalid(NAME));
        }
        for key in arguments
            .try_iter()
            .map_err(|_| RenderError::Invalid(NAME))?
        {
            let name = key.as_str().unwrap_or("");
            if RESERVED.contains(&name) {
                return Err(RenderError::Unsupported(NAME));
            }
            let Some(value) = member(arguments, name).filter(|v| v.as_str() != Some("auto")) else {
                continue;
            };
            match name {
                "tools" => self.tools = value,
                "documents" => self.documents = value,
                _ if CONSUMED.contains(&name) => {}
                _ => self.set(name, value),
            }
        }
        Ok(())
    }

    fn set(&mut self, name: &str, value: Value) {
        self.others.retain(|(known, _)| known != name);
        self.others.push((name.to_owned(), value));
    }
}

/// Whether the request names an argument, with whatever value.
fn chat_sets(chat: &ChatParts<'_>, name: &str) -> bool {
    chat.template_kwargs
        .and_then(|raw| serde_json::from_str::<Value>(raw.get()).ok())
        .and_then(|arguments| arguments.get_attr(name).ok())
        .is_some_and(|value| !value.is_undefined())
}

/// Appends the mark to the last message's text and returns that text.
fn mark_final(conversation: &mut [Value]) -> Result<String, RenderError> {
    const INVALID: RenderError = RenderError::Invalid("continue_final_message");
    let last = conversation.last_mut().ok_or(INVALID)?;
    let content = last.get_attr("content").map_err(|_| INVALID)?;
    let (text, marked) = match content.as_str() {
        Some(text) => (
            text.to_owned(),
            Value::from(format!("{text}{CONTINUE_TAG}")),
        ),
        None => mark_last_part(&content).ok_or(INVALID)?,
    };
    *last = with_member(last, "content", marked);
    Ok(text)
}

fn mark_last_part(content: &Value) -> Option<(String, Value)> {
    let mut parts: Vec<Value> = content.try_iter().ok()?.collect();
    let part = parts
        .iter_mut()
        .rev()
        .find(|part| member(part, "text").is_some())?;
    let text = member(part, "text")?.as_str()?.to_owned();
    *part = with_member(part, "text", Value::from(format!("{text}{CONTINUE_TAG}")));
    Some((text, Value::from(parts)))
}

/// A copy of an object with one member's value changed.
fn with_member(object: &Value, name: &str, value: Value) -> Value {
    let keys = object.try_iter().into_iter().flatten();
    let members = keys.map(|key| {
        let kept = if key.as_str() == Some(name) {
            value.clone()
        } else {
            object.get_item(&key).unwrap_or_default()
        };
        (key, kept)
    });
    Value::from_pairs(members.collect::<Vec<_>>())
}

/// Ends the text where the last message's own text ended.
fn cut_at_mark(mut text: String, last: &str) -> Result<String, RenderError> {
    let is_space = python::is_space;
    let mark = CONTINUE_TAG.trim_end();
    let at = text
        .rfind(mark)
        .filter(|_| text.contains(last.trim_matches(is_space)));
    let at = at.ok_or(RenderError::Invalid("continue_final_message"))?;
    let kept_space = text[at..].starts_with(CONTINUE_TAG);
    text.truncate(at);
    if !kept_space {
        let trimmed = python::strip_end(&text).len();
        text.truncate(trimmed);
    }
    Ok(text)
}
