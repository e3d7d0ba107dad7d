//! Compares the router's token ids with the engine's: a fixed list of probes is encoded here, and
//! the shell sends it to the engine's `POST /tokenize`. This module builds the probes and judges
//! the answers. A template is trusted only if they agree.

use std::fmt;

use serde::Deserialize;
use serde_json::{Map, Value};
use warmroute_proto::label_enum;

use super::{ChatEncodeError, CivilTime, RenderError, Tokenizer};
use crate::openai::{self, PromptList, PromptRoute, PromptSource};

/// One text or conversation, with the router's token ids.
#[derive(Debug)]
pub struct Probe {
    pub name: &'static str,
    pub kind: ProbeKind,
    /// Where the engine gives its token ids.
    pub path: ProbePath,
    pub body: Vec<u8>,
    pub ours: Result<Vec<u32>, ChatEncodeError>,
}

label_enum! {
    /// A route of engines that gives the token ids of a prompt.
    #[derive(PartialOrd, Ord)]
    pub enum ProbePath {
        Tokenize = "/tokenize",
        RenderChat = "/v1/chat/completions/render",
        RenderResponses = "/v1/responses/render",
        RenderMessages = "/v1/messages/render",
    }
}

/// The kind of prompts that a probe stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeKind {
    Completion,
    Chat,
    /// A chat whose last message goes on. SGLang's `/tokenize` refuses the fields that vLLM's needs.
    ContinuedChat,
    ChatWithTools,
    /// A chat by the engine's render route, which images need.
    RenderedChat,
    Responses,
    Messages,
    MessagesWithTools,
    /// Fields, tools and items that coding agents send. An engine may refuse them: then it refuses
    /// the agents' requests too.
    AgentResponses,
    AgentMessages,
}

/// The engine's answer to a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeAnswer {
    Tokens(Vec<u32>),
    /// A status of 4xx: its template raises an error.
    Refused,
    /// Another status, or other JSON than expected.
    Unusable,
}

/// The result of one probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeVerdict {
    Equal {
        tokens: usize,
    },
    /// Neither side renders this conversation.
    BothRefuse,
    /// The first position at which the ids differ; `None` is the end of a list.
    Differ {
        at: usize,
        ours: Option<u32>,
        theirs: Option<u32>,
    },
    OnlyEngineRefuses,
    /// The reason why the router has no ids.
    OnlyWeRefuse(String),
    Unanswered,
}

impl fmt::Display for ProbeVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Equal { tokens } => write!(f, "{tokens} equal tokens"),
            Self::BothRefuse => f.write_str("refused by both"),
            Self::Differ { at, ours, theirs } => {
                let shown = |id: &Option<u32>| id.map_or("none".to_owned(), |id| id.to_string());
                let (ours, theirs) = (shown(ours), shown(theirs));
                write!(f, "token {at} differs: router {ours}, engine {theirs}")
            }
            Self::OnlyEngineRefuses => f.write_str("the engine refuses it, the router does not"),
            Self::OnlyWeRefuse(reason) => {
                write!(f, "the engine renders it, the router does not: {reason}")
            }
            Self::Unanswered => f.write_str("the engine gave no usable answer"),
        }
    }
}

/// Compares the router's ids with the engine's answer.
pub fn compare(ours: &Result<Vec<u32>, ChatEncodeError>, theirs: &ProbeAnswer) -> ProbeVerdict {
    match (ours, theirs) {
        (_, ProbeAnswer::Unusable) => ProbeVerdict::Unanswered,
        (Err(_), ProbeAnswer::Refused) => ProbeVerdict::BothRefuse,
        (Ok(_), ProbeAnswer::Refused) => ProbeVerdict::OnlyEngineRefuses,
        (Err(error), ProbeAnswer::Tokens(_)) => ProbeVerdict::OnlyWeRefuse(error.to_string()),
        (Ok(ours), ProbeAnswer::Tokens(theirs)) if ours == theirs => {
            ProbeVerdict::Equal { tokens: ours.len() }
        }
        (Ok(ours), ProbeAnswer::Tokens(theirs)) => {
            let equal = ours.iter().zip(theirs).take_while(|(a, b)| a == b);
            let at = equal.count();
            let (ours, theirs) = (ours.get(at).copied(), theirs.get(at).copied());
            ProbeVerdict::Differ { at, ours, theirs }
        }
    }
}

/// The kinds of prompts that are trusted after all probes of one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenTrust {
    pub completions: bool,
    pub chat: bool,
    pub chat_with_tools: bool,
    pub rendered_chat: bool,
    pub responses: bool,
    pub messages: bool,
    pub messages_with_tools: bool,
    /// Probes that both sides refused.
    pub skipped: usize,
}

/// Trusts a kind if at least one of its probes is equal and none differs. Chats with tools need
/// both chat kinds. A continued chat must not differ, but may be refused.
pub fn trust<'v>(verdicts: impl IntoIterator<Item = (ProbeKind, &'v ProbeVerdict)>) -> TokenTrust {
    let verdicts: Vec<_> = verdicts.into_iter().collect();
    let refused = |verdict: &ProbeVerdict| matches!(verdict, ProbeVerdict::BothRefuse);
    let is_equal = |verdict: &ProbeVerdict| matches!(verdict, ProbeVerdict::Equal { .. });
    let of_kind = |kind: ProbeKind| verdicts.iter().filter(move |(of, _)| *of == kind);
    let none_against =
        |kind: ProbeKind| !of_kind(kind).any(|(kind, verdict)| is_against(*kind, verdict));
    let trusted =
        |kind: ProbeKind| none_against(kind) && of_kind(kind).any(|(_, verdict)| is_equal(verdict));
    let chat = trusted(ProbeKind::Chat) && none_against(ProbeKind::ContinuedChat);
    let messages = trusted(ProbeKind::Messages) && none_against(ProbeKind::AgentMessages);
    TokenTrust {
        completions: trusted(ProbeKind::Completion),
        chat,
        chat_with_tools: chat && trusted(ProbeKind::ChatWithTools),
        rendered_chat: trusted(ProbeKind::RenderedChat),
        responses: trusted(ProbeKind::Responses) && none_against(ProbeKind::AgentResponses),
        messages,
        messages_with_tools: messages && trusted(ProbeKind::MessagesWithTools),
        skipped: verdicts.iter().filter(|(_, v)| refused(v)).count(),
    }
}

/// Whether a verdict speaks against prompts of its kind.
pub fn is_against(kind: ProbeKind, verdict: &ProbeVerdict) -> bool {
    match verdict {
        ProbeVerdict::Equal { .. } | ProbeVerdict::BothRefuse => false,
        // An engine without a parser for calls refuses every message with tools.
        ProbeVerdict::OnlyEngineRefuses => !matches!(
            kind,
            ProbeKind::ContinuedChat
                | ProbeKind::MessagesWithTools
                | ProbeKind::AgentResponses
                | ProbeKind::AgentMessages
        ),
        ProbeVerdict::OnlyWeRefuse(_) => {
            !matches!(kind, ProbeKind::AgentResponses | ProbeKind::AgentMessages)
        }
        ProbeVerdict::Differ { .. } | ProbeVerdict::Unanswered => true,
    }
}

/// Reads the engine's response to a probe.
pub fn read_answer(status: u16, body: &[u8]) -> ProbeAnswer {
    #[derive(Deserialize)]
    struct Tokens {
        #[serde(alias = "token_ids")]
        tokens: Vec<u32>,
    }
    match status {
        200 => serde_json::from_slice::<Tokens>(body).map_or(ProbeAnswer::Unusable, |answer| {
            ProbeAnswer::Tokens(answer.tokens)
        }),
        400 | 422 => ProbeAnswer::Refused,
        _ => ProbeAnswer::Unusable,
    }
}

/// The probes of a model at this time. A template with a date may render them differently around
/// midnight, so a difference needs a second round.
pub fn probes(tokenizer: &Tokenizer, model: &str, now: CivilTime) -> Vec<Probe> {
    let definitions = serde_json::from_str::<Vec<ProbeDefinition>>(PROBES).unwrap_or_default();
    definitions
        .into_iter()
        .map(|definition| definition.probe(tokenizer, model, now))
        .collect()
}

/// Bodies without a model. Ids of calls have nine characters, since some templates require that.
const PROBES: &str = include_str!("probes.json");

#[derive(Deserialize)]
struct ProbeDefinition {
    name: &'static str,
    body: Map<String, Value>,
    /// It is sent to the chat's render route.
    #[serde(default)]
    rendered: bool,
    /// Its forms are those of agents.
    #[serde(default)]
    agent: bool,
}

impl ProbeDefinition {
    fn probe(mut self, tokenizer: &Tokenizer, model: &str, now: CivilTime) -> Probe {
        let has_tools = self.body.contains_key("tools");
        let (route, kind) = if self.body.contains_key("max_tokens") {
            let kind = match (self.agent, has_tools) {
                (true, _) => ProbeKind::AgentMessages,
                (false, true) => ProbeKind::MessagesWithTools,
                (false, false) => ProbeKind::Messages,
            };
            (PromptRoute::Messages, kind)
        } else if self.body.contains_key("input") {
            let kind = match self.agent {
                true => ProbeKind::AgentResponses,
                false => ProbeKind::Responses,
            };
            (PromptRoute::Responses, kind)
        } else if self.body.contains_key("prompt") {
            (PromptRoute::Completions, ProbeKind::Completion)
        } else if self.rendered {
            (PromptRoute::ChatCompletions, ProbeKind::RenderedChat)
        } else if has_tools {
            (PromptRoute::ChatCompletions, ProbeKind::ChatWithTools)
        } else if self.body.contains_key("continue_final_message") {
            (PromptRoute::ChatCompletions, ProbeKind::ContinuedChat)
        } else {
            (PromptRoute::ChatCompletions, ProbeKind::Chat)
        };
        self.body.insert("model".to_owned(), model.into());
        let body = Value::Object(self.body).to_string().into_bytes();
        Probe {
            name: self.name,
            kind,
            path: match route {
                PromptRoute::Responses => ProbePath::RenderResponses,
                PromptRoute::Messages => ProbePath::RenderMessages,
                PromptRoute::ChatCompletions if self.rendered => ProbePath::RenderChat,
                PromptRoute::ChatCompletions
                | PromptRoute::Completions
                | PromptRoute::Embeddings
                | PromptRoute::Pooling
                | PromptRoute::TokenIds
                | PromptRoute::Embed => ProbePath::Tokenize,
            },
            ours: encode(tokenizer, route, &body, now),
            body,
        }
    }
}

fn encode(
    tokenizer: &Tokenizer,
    route: PromptRoute,
    body: &[u8],
    now: CivilTime,
) -> Result<Vec<u32>, ChatEncodeError> {
    let invalid = ChatEncodeError::from(RenderError::Invalid("probe"));
    let read = openai::parse(route, body).ok();
    let read = read.filter(|request| request.info.opaque.is_none());
    match read.map(|request| request.prompt) {
        Some(PromptSource::Chat(chat)) => tokenizer.encode_chat(&chat, now),
        Some(PromptSource::Completion(parts)) => match parts.prompts {
            PromptList::Texts(texts) if texts.len() == 1 => {
                Ok(tokenizer.encode(&texts[0], parts.special_tokens)?)
            }
            PromptList::Texts(_) | PromptList::Tokens(_) => Err(invalid),
        },
        None => Err(invalid),
    }
}

#[cfg(test)]
mod tests;
