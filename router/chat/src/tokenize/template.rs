//! Chat templates of one model, rendered as vLLM and transformers render them.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use minijinja::value::Value;
use minijinja::{Environment, ErrorKind};

use super::content_format::{ContentFormat, detect};
use super::kwargs::{self, TemplateKwargs};
use super::messages::{self, member};
use super::python::{self, CivilTime, RenderBounds};
use crate::model_files::{TemplateRules, UnusedTools};
use crate::openai::{ChatEnding, ChatParts, ThinkingRequest, ToolChoice};

/// Bytes of a rendered chat. The largest bodies that engines accept are smaller.
const TEXT_BYTES_MAX: usize = 64 << 20;
/// Bytes of a text for each byte of a chat's JSON, beside a fixed number: more takes more memory
/// than a prompt is charged. JSON of tools that a template prints with indentation has about two.
const TEXT_OF_BYTE_MAX: usize = 3;
const TEXT_BYTES_ALLOWED: usize = 1 << 20;
/// Bytes that a template's assignments may copy for each byte of a chat's JSON, beside a fixed number:
/// some tens of milliseconds. A template that appends each system message to one text copies that
/// text at each: 1,000 messages of 100 bytes take 100 MB.
const COPIES_OF_BYTE_MAX: usize = 64;
const COPIES_ALLOWED: usize = 128 << 20;
/// Such bytes of a short rendering: about a millisecond.
const SHORT_COPIES_MAX: usize = 8 << 20;
/// Room for what a template adds to a short chat, so that its text is not moved.
const TEMPLATE_BYTES: usize = 1 << 10;
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";
const KWARGS: &str = "chat_template_kwargs";
const THINKING: &str = "enable_thinking";
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// A chat has no text here. The engine decides whether the client is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RenderError {
    #[error("the model has no chat template")]
    NoTemplate,
    #[error("the engine renders this model's chats by code of its own ({0}), not by a template")]
    OwnRenderer(&'static str),
    /// The engine refuses templates from clients unless it is configured to accept them.
    #[error("the request brings its own chat template")]
    RequestTemplate,
    #[error("the engine does not accept this `{0}`")]
    Invalid(&'static str),
    #[error("the engine's reading of `{0}` cannot be reproduced")]
    Unsupported(&'static str),
    /// Python has numbers that the router has not.
    #[error("`{0}` has a number that cannot be reproduced")]
    Number(&'static str),
    #[error("`{name}` has more than {max} members")]
    TooManyMembers { name: &'static str, max: usize },
    #[error("the template executes too many instructions or copies too much")]
    TooLong,
    /// The template raised an error or wrote too much.
    #[error("the template failed: {0}")]
    Template(String),
}

/// How long a template may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenderBound {
    /// Some milliseconds.
    Short,
    /// As long as any chat needs.
    Long,
}

/// Whether a text is no longer wanted.
pub type IsCancelled = Arc<dyn Fn() -> bool + Send + Sync>;

/// What ends a rendering.
#[derive(Clone)]
pub struct RenderLimits {
    pub bound: RenderBound,
    /// Asked at each output, assignment and turn of a loop.
    pub is_cancelled: IsCancelled,
}

impl RenderLimits {
    /// For a chat with so many bytes of JSON.
    fn of_chat(&self, bytes: usize) -> RenderBounds {
        let text_bytes_max = bytes.saturating_mul(TEXT_OF_BYTE_MAX);
        let text_bytes_max = text_bytes_max.saturating_add(TEXT_BYTES_ALLOWED);
        let (fuel, copies_max) = match self.bound {
            RenderBound::Short => (python::SHORT_FUEL, SHORT_COPIES_MAX),
            RenderBound::Long => {
                let of_bytes = bytes.saturating_mul(COPIES_OF_BYTE_MAX);
                (python::FUEL, COPIES_ALLOWED.saturating_add(of_bytes))
            }
        };
        RenderBounds {
            fuel,
            text_bytes_max: text_bytes_max.min(TEXT_BYTES_MAX),
            copies_max,
            is_cancelled: Arc::clone(&self.is_cancelled),
        }
    }
}

/// A template cannot be compiled. The name of a single template is `default`.
#[derive(Debug, thiserror::Error)]
#[error("chat template `{name}`: {source}")]
pub struct TemplateError {
    pub name: String,
    pub source: minijinja::Error,
}

/// Properties of a template's source that decide what the engine gives it.
#[derive(Debug)]
struct TemplateTraits {
    format: ContentFormat,
    knows_developer: bool,
    mentions_content: bool,
    /// The effort of reasoning may change the text.
    mentions_effort: bool,
}

/// One model's templates, by name, and its special tokens.
#[derive(Debug)]
pub struct ChatTemplates {
    env: Environment<'static>,
    traits: BTreeMap<String, TemplateTraits>,
    /// Whether the model has one template instead of a set of named ones.
    single: bool,
    special_tokens: BTreeMap<String, String>,
    rules: TemplateRules,
    /// Some template refuses system messages behind others.
    wants_system_first: bool,
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

    /// A model with named templates: `tool_use` for requests with tools, `default` for others.
    pub fn named(
        sources: BTreeMap<String, String>,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self, TemplateError> {
        let failed = |name: &str, source| TemplateError {
            name: name.to_owned(),
            source,
        };
        let mut env = python::environment().map_err(|error| failed(DEFAULT, error))?;
        let mut traits = BTreeMap::new();
        let mut has_generation_tags = false;
        for (name, source) in sources {
            let plain = python::without_generation_tags(&source).into_owned();
            let found = TemplateTraits {
                format: detect(&plain),
                knows_developer: plain.contains("\"developer\"") || plain.contains("'developer'"),
                mentions_content: source.contains("content"),
                mentions_effort: source.contains(THINKING) || source.contains("reasoning_effort"),
            };
            has_generation_tags |= plain != source;
            env.add_template_owned(name.clone(), python::prepared(&plain))
                .map_err(|error| failed(&name, error))?;
            traits.insert(name, found);
        }
        // The engine's probe knows no such tags, and takes their error for a refusal.
        let wants_system_first = has_generation_tags || wants_system_first(&env);
        Ok(Self {
            env,
            traits,
            wants_system_first,
            single: false,
            special_tokens,
            rules: TemplateRules::default(),
        })
    }

    /// These templates under an engine's rules.
    #[must_use]
    pub fn with_rules(self, rules: TemplateRules) -> Self {
        Self { rules, ..self }
    }

    /// The form of content that the default template wants.
    pub fn content_format(&self) -> Option<ContentFormat> {
        self.traits.get(DEFAULT).map(|traits| traits.format)
    }

    fn choose(
        &self,
        chat: &ChatParts<'_>,
        tools: &Value,
    ) -> Result<(&str, &TemplateTraits), RenderError> {
        let name = match &chat.template {
            Some(name) if !self.single && self.traits.contains_key(name.as_ref()) => name.as_ref(),
            Some(_) => return Err(RenderError::RequestTemplate),
            None if !self.single && !tools.is_none() && self.traits.contains_key(TOOL_USE) => {
                TOOL_USE
            }
            None => DEFAULT,
        };
        let (name, traits) = self
            .traits
            .get_key_value(name)
            .ok_or(RenderError::NoTemplate)?;
        Ok((name, traits))
    }

    /// The text that the engine renders for this chat at this time.
    pub fn render(&self, chat: &ChatParts<'_>, now: CivilTime) -> Result<String, RenderError> {
        let limits = RenderLimits {
            bound: RenderBound::Long,
            is_cancelled: Arc::new(|| false),
        };
        self.render_within(chat, now, limits)
    }

    /// Like `render`, but fails beyond the limits.
    pub fn render_within(
        &self,
        chat: &ChatParts<'_>,
        now: CivilTime,
        limits: RenderLimits,
    ) -> Result<String, RenderError> {
        if chat.ending == ChatEnding::Contradiction {
            return Err(RenderError::Invalid("continue_final_message"));
        }
        let arguments = TemplateArguments::read(chat, &self.rules)?;
        let (name, traits) = self.choose(chat, &arguments.tools)?;
        if chat.thinking == ThinkingRequest::Disabled && traits.mentions_effort {
            return Err(RenderError::Unsupported("thinking"));
        }
        let merged = chat
            .system_first
            .as_deref()
            .filter(|_| self.wants_system_first);
        let messages = merged.unwrap_or(&chat.messages);
        let mut conversation = messages::conversation(messages, traits.format, chat.api)?;
        if !traits.knows_developer {
            conversation = messages::without_developer_role(conversation);
        }
        let continued = match chat.ending {
            ChatEnding::InsideLastMessage if !traits.mentions_content => {
                return Err(RenderError::Invalid("continue_final_message"));
            }
            ChatEnding::InsideLastMessage => Some(tag_last_message(&mut conversation)?),
            ChatEnding::GenerationPrompt | ChatEnding::LastMessage | ChatEnding::Contradiction => {
                None
            }
        };
        let context = self.context(chat.ending, conversation, arguments, now);
        let bounds = limits.of_chat(chat.bytes());
        let out = BoundedText {
            bytes: Vec::with_capacity(chat.bytes() + TEMPLATE_BYTES),
            bytes_max: bounds.text_bytes_max,
            is_cancelled: limits.is_cancelled,
        };
        let text = run(&bounds.apply(&self.env), name, context, out)?;
        match continued {
            None => Ok(text),
            Some(last) => cut_at_tag(text, &last),
        }
    }

    fn context(
        &self,
        ending: ChatEnding,
        conversation: Vec<Value>,
        arguments: TemplateArguments,
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
        let add_prompt = ending == ChatEnding::GenerationPrompt;
        put("add_generation_prompt", Value::from(add_prompt));
        Value::from_pairs(members)
    }
}

/// Whether the error, or that of an included template in it, is one of too many instructions.
fn is_out_of_fuel(error: &minijinja::Error) -> bool {
    let first: Option<&(dyn std::error::Error + 'static)> = Some(error);
    std::iter::successors(first, |error| error.source()).any(|error| {
        let error = error.downcast_ref::<minijinja::Error>();
        error.is_some_and(|error| error.kind() == ErrorKind::OutOfFuel)
    })
}

fn run(
    env: &Environment<'_>,
    name: &str,
    context: Value,
    mut out: BoundedText,
) -> Result<String, RenderError> {
    let failed = |error: minijinja::Error| {
        if is_out_of_fuel(&error) {
            RenderError::TooLong
        } else {
            RenderError::Template(error.to_string())
        }
    };
    let template = env.get_template(name).map_err(failed)?;
    // The template is trusted, its input is not: no input may end the process.
    let render = || template.render_captured_to(context, &mut out).map(drop);
    catch_unwind(AssertUnwindSafe(render))
        .map_err(|_| RenderError::Template("the template engine panicked".to_owned()))?
        .map_err(failed)?;
    String::from_utf8(out.bytes).map_err(|error| RenderError::Template(error.to_string()))
}

/// Whether a template fails on a system message behind others. The engine decides it by this probe,
/// without special tokens and tools.
fn wants_system_first(env: &Environment<'_>) -> bool {
    let message = |role: &str| {
        Value::from_pairs([("role", Value::from(role)), ("content", Value::from("t"))])
    };
    let messages = ["system", "user", "system", "user"].map(message);
    let context = Value::from_pairs([
        ("messages", Value::from(messages.to_vec())),
        ("add_generation_prompt", Value::from(false)),
    ]);
    [DEFAULT, TOOL_USE].into_iter().any(|name| {
        let template = env.get_template(name).ok();
        let render = |template: minijinja::Template<'_, '_>| template.render(context.clone());
        template.is_some_and(|template| {
            let rendered = catch_unwind(AssertUnwindSafe(|| render(template)));
            !matches!(rendered, Ok(Ok(_)))
        })
    })
}

/// A writer that fails beyond its bound, or when the text is no longer wanted.
struct BoundedText {
    bytes: Vec<u8>,
    bytes_max: usize,
    is_cancelled: IsCancelled,
}

impl io::Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.bytes_max - self.bytes.len() {
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        if (self.is_cancelled)() {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The input of a template beside the conversation.
struct TemplateArguments {
    tools: Value,
    documents: Value,
    others: BTreeMap<String, Value>,
}

/// Names with a meaning in the engine's own call.
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
/// Names that the engine's own call consumes without an effect on the text.
const CONSUMED: &[&str] = &[
    "add_generation_prompt",
    "continue_final_message",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "tokenizer_kwargs",
];

impl TemplateArguments {
    /// The request's arguments take precedence over the engine's.
    fn read(chat: &ChatParts<'_>, rules: &TemplateRules) -> Result<Self, RenderError> {
        let mut read = Self {
            tools: Value::from(()),
            documents: Value::from(()),
            others: BTreeMap::new(),
        };
        let mut sets_thinking = false;
        if let Some(kwargs) = &rules.default_kwargs {
            read.template_kwargs(kwargs::read(kwargs)?)?;
        }
        let excludes_tools =
            chat.tool_choice == ToolChoice::None && rules.unused_tools == UnusedTools::Excluded;
        if let Some(tools) = chat.tools.as_deref().filter(|_| !excludes_tools) {
            read.tools = messages::tools(tools, chat.api)?;
        }
        if let Some(raw) = &chat.template_kwargs {
            let kwargs = kwargs::read(raw.get())?;
            sets_thinking = kwargs.contains_key(THINKING);
            read.template_kwargs(kwargs)?;
        }
        if let Some(documents) = &chat.documents {
            read.documents = messages::read_json("documents", documents)?;
        }
        if let Some(effort) = &chat.reasoning_effort {
            let others = &mut read.others;
            others.insert("reasoning_effort".to_owned(), Value::from(effort.as_ref()));
            if !sets_thinking {
                others.insert(THINKING.to_owned(), Value::from(effort != "none"));
            }
        }
        Ok(read)
    }

    /// The request's own arguments. vLLM drops null and "auto" as if they were absent.
    fn template_kwargs(&mut self, kwargs: TemplateKwargs) -> Result<(), RenderError> {
        for (name, value) in kwargs {
            if RESERVED.contains(&name.as_str()) {
                return Err(RenderError::Unsupported(KWARGS));
            }
            if value.is_none() || value.as_str() == Some("auto") {
                continue;
            }
            match name.as_str() {
                "tools" => self.tools = value,
                "documents" => self.documents = value,
                consumed if CONSUMED.contains(&consumed) => {}
                _ => {
                    self.others.insert(name, value);
                }
            }
        }
        Ok(())
    }
}

/// Appends the tag to the last message's text. Returns the text without it.
fn tag_last_message(conversation: &mut [Value]) -> Result<String, RenderError> {
    const INVALID: RenderError = RenderError::Invalid("continue_final_message");
    let last = conversation.last_mut().ok_or(INVALID)?;
    let content = last.get_attr("content").map_err(|_| INVALID)?;
    let (text, tagged) = match content.as_str() {
        Some(text) => (
            text.to_owned(),
            Value::from(format!("{text}{CONTINUE_TAG}")),
        ),
        None => tag_last_part(&content).ok_or(INVALID)?,
    };
    *last = with_member(last, "content", tagged);
    Ok(text)
}

fn tag_last_part(content: &Value) -> Option<(String, Value)> {
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

/// Ends the text after the last message's own text.
fn cut_at_tag(mut text: String, last: &str) -> Result<String, RenderError> {
    let at = text
        .rfind(CONTINUE_TAG.trim_end())
        .filter(|_| text.contains(last.trim_matches(python::is_space)))
        .ok_or(RenderError::Invalid("continue_final_message"))?;
    let kept_space = text[at..].starts_with(CONTINUE_TAG);
    text.truncate(at);
    if !kept_space {
        text.truncate(python::strip_end(&text).len());
    }
    Ok(text)
}
