//! Compares the router's token ids with the engine's: a fixed list of probes is encoded here, and
//! the shell sends it to the engine's `POST /tokenize`. This module builds the probes and judges the
//! answers. A template is trusted only if they agree.

use std::fmt;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::{ChatEncodeError, CivilTime, Tokenizer};
use crate::openai::{ChatEnding, ChatParts, SpecialTokens};

/// One text or conversation, with the router's token ids.
#[derive(Debug)]
pub struct Probe {
    pub name: &'static str,
    pub kind: ProbeKind,
    /// Body for `POST /tokenize`.
    pub body: Vec<u8>,
    pub ours: Result<Vec<u32>, ChatEncodeError>,
}

/// The kind of prompts that a probe stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeKind {
    Completion,
    Chat,
    ChatWithTools,
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
                write!(f, "token {at} differs: router {ours:?}, engine {theirs:?}")
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
        (Ok(ours), ProbeAnswer::Tokens(theirs)) => {
            let shorter = ours.len().min(theirs.len());
            let differing = (0..shorter).find(|&at| ours.get(at) != theirs.get(at));
            match differing {
                None if ours.len() == theirs.len() => ProbeVerdict::Equal { tokens: ours.len() },
                at => {
                    let at = at.unwrap_or(shorter);
                    let (ours, theirs) = (ours.get(at).copied(), theirs.get(at).copied());
                    ProbeVerdict::Differ { at, ours, theirs }
                }
            }
        }
    }
}

/// The kinds of prompts that are trusted after all probes of one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenTrust {
    pub completions: bool,
    pub chat: bool,
    pub chat_with_tools: bool,
    /// Probes that both sides refused.
    pub skipped: usize,
}

/// Trusts a kind if at least one of its probes is equal and none differs. Chats with tools need both
/// chat kinds.
pub fn trust<'v>(verdicts: impl IntoIterator<Item = (ProbeKind, &'v ProbeVerdict)>) -> TokenTrust {
    let verdicts: Vec<_> = verdicts.into_iter().collect();
    let refused = |verdict: &ProbeVerdict| matches!(verdict, ProbeVerdict::BothRefuse);
    let trusted = |kind: ProbeKind| {
        let mut judged = verdicts
            .iter()
            .filter(|(of, verdict)| *of == kind && !refused(verdict))
            .peekable();
        judged.peek().is_some()
            && judged.all(|(_, verdict)| matches!(verdict, ProbeVerdict::Equal { .. }))
    };
    TokenTrust {
        completions: trusted(ProbeKind::Completion),
        chat: trusted(ProbeKind::Chat),
        chat_with_tools: trusted(ProbeKind::Chat) && trusted(ProbeKind::ChatWithTools),
        skipped: verdicts
            .iter()
            .filter(|(_, verdict)| refused(verdict))
            .count(),
    }
}

/// Reads the engine's response to a probe.
pub fn read_answer(status: u16, body: &[u8]) -> ProbeAnswer {
    #[derive(Deserialize)]
    struct Tokens {
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
    let completions = COMPLETIONS.iter().map(|(name, text)| Probe {
        name,
        kind: ProbeKind::Completion,
        body: json!({"model": model, "prompt": text})
            .to_string()
            .into_bytes(),
        ours: tokenizer
            .encode(text, SpecialTokens::Add)
            .map_err(ChatEncodeError::from),
    });
    let chats = chats().into_iter();
    completions
        .chain(chats.map(|chat| chat.probe(tokenizer, model, now)))
        .collect()
}

const COMPLETIONS: &[(&str, &str)] = &[
    (
        "text",
        "The quick brown fox jumps over the lazy dog, 12345 times.\n\n  It's   done.\t",
    ),
    (
        "unicode text",
        "Grüße, e\u{301}té, 你好，世界！ Привет 👩‍👩‍👧 \u{a0}ﬁn\u{200b}",
    ),
];

struct ChatProbe {
    name: &'static str,
    messages: Value,
    tools: Option<Value>,
    ending: ChatEnding,
}

impl ChatProbe {
    fn probe(&self, tokenizer: &Tokenizer, model: &str, now: CivilTime) -> Probe {
        let mut body = json!({"model": model, "messages": self.messages});
        if let Some(tools) = &self.tools {
            body["tools"] = tools.clone();
        }
        match self.ending {
            ChatEnding::GenerationPrompt | ChatEnding::Contradiction => {}
            ChatEnding::LastMessage => body["add_generation_prompt"] = json!(false),
            ChatEnding::InsideLastMessage => {
                body["add_generation_prompt"] = json!(false);
                body["continue_final_message"] = json!(true);
            }
        }
        Probe {
            name: self.name,
            kind: match self.tools {
                Some(_) => ProbeKind::ChatWithTools,
                None => ProbeKind::Chat,
            },
            body: body.to_string().into_bytes(),
            ours: self.encode(tokenizer, now),
        }
    }

    fn encode(&self, tokenizer: &Tokenizer, now: CivilTime) -> Result<Vec<u32>, ChatEncodeError> {
        let invalid = |_| ChatEncodeError::from(super::RenderError::Invalid("messages"));
        let raw = |value: &Value| RawValue::from_string(value.to_string()).map_err(invalid);
        let messages = raw(&self.messages)?;
        let tools = self.tools.as_ref().map(raw).transpose()?;
        let mut parts = ChatParts::new(&messages, tools.as_deref());
        parts.ending = self.ending;
        tokenizer.encode_chat(&parts, now)
    }
}

fn chats() -> Vec<ChatProbe> {
    let user = |text: &str| json!({"role": "user", "content": text});
    let assistant = |text: &str| json!({"role": "assistant", "content": text});
    let system = json!({"role": "system", "content": "You are careful.\nAnswer briefly. "});
    let tool = json!({"type": "function", "function": {
        "name": "get_weather", "description": "Weather of a <city> & \"more\"",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "Größe egal"},
            "days": {"type": "integer", "enum": [1, 2]}},
            "required": ["city"]}}});
    // Nine characters: some templates require that.
    let call = json!({"role": "assistant", "content": "", "tool_calls": [{
        "id": "call00001", "type": "function",
        "function": {"name": "get_weather", "arguments": "{\"city\": \"Köln\", \"days\": 2}"}}]});
    let result = json!({"role": "tool", "tool_call_id": "call00001", "content": "{\"t\": 21.5}"});
    let plain = |name, messages| ChatProbe {
        name,
        messages,
        tools: None,
        ending: ChatEnding::GenerationPrompt,
    };
    let tooled = |name, messages| ChatProbe {
        tools: Some(json!([tool])),
        ..plain(name, messages)
    };
    let turns = json!([
        user("  Hello there! "),
        assistant(" Hi.\n"),
        user("What's 2+2?\n\n")
    ]);
    let parts = json!([{"role": "user", "content": [
        {"type": "text", "text": "one"}, {"type": "text", "text": " two"}]}]);
    let unicode = json!([user(
        "Grüße 你好 👩‍👩‍👧 e\u{301} \u{a0}<|im_end|></s>[INST] {{ x }} {% y %}"
    )]);
    vec![
        plain("user", json!([user("Hello, who are you?")])),
        plain("system", json!([system, user("Hello, who are you?")])),
        plain("turns", turns.clone()),
        plain(
            "system and turns",
            json!([system, turns[0], turns[1], turns[2]]),
        ),
        plain("unicode", unicode),
        plain("parts", parts),
        ChatProbe {
            ending: ChatEnding::LastMessage,
            ..plain("no prompt", json!([turns[0], turns[1]]))
        },
        ChatProbe {
            ending: ChatEnding::InsideLastMessage,
            ..plain("continued", json!([turns[0], assistant("The answer is")]))
        },
        tooled("tools", json!([user("Weather in Köln?")])),
        tooled(
            "tools and system",
            json!([system, user("Weather in Köln?")]),
        ),
        tooled(
            "tool result",
            json!([user("Weather in Köln?"), call, result]),
        ),
        tooled(
            "tool history",
            json!([user("Weather?"), call, result, assistant("21."), user("OK")]),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenize::RenderError;

    #[test]
    fn a_difference_is_located() {
        let ours = Ok(vec![1, 2, 3]);
        let answer = |ids: &[u32]| compare(&ours, &ProbeAnswer::Tokens(ids.to_vec()));
        assert_eq!(answer(&[1, 2, 3]), ProbeVerdict::Equal { tokens: 3 });
        assert_eq!(
            answer(&[1, 5, 3]),
            ProbeVerdict::Differ {
                at: 1,
                ours: Some(2),
                theirs: Some(5)
            }
        );
        assert_eq!(
            answer(&[1, 2]),
            ProbeVerdict::Differ {
                at: 2,
                ours: Some(3),
                theirs: None
            }
        );
        assert_eq!(
            answer(&[1, 2, 3, 4]),
            ProbeVerdict::Differ {
                at: 3,
                ours: None,
                theirs: Some(4)
            }
        );
        assert_eq!(
            compare(&ours, &ProbeAnswer::Refused),
            ProbeVerdict::OnlyEngineRefuses
        );
        let failed = Err(ChatEncodeError::from(RenderError::NoTemplate));
        assert_eq!(
            compare(&failed, &ProbeAnswer::Refused),
            ProbeVerdict::BothRefuse
        );
        assert!(matches!(
            compare(&failed, &ProbeAnswer::Tokens(vec![])),
            ProbeVerdict::OnlyWeRefuse(_)
        ));
        assert_eq!(
            compare(&failed, &ProbeAnswer::Unusable),
            ProbeVerdict::Unanswered
        );
    }

    #[test]
    fn trust_needs_one_equal_probe_and_none_against() {
        let equal = ProbeVerdict::Equal { tokens: 1 };
        let refused = ProbeVerdict::BothRefuse;
        let differ = ProbeVerdict::Differ {
            at: 0,
            ours: None,
            theirs: Some(1),
        };
        let of = |verdicts: &[(ProbeKind, &ProbeVerdict)]| trust(verdicts.iter().copied());
        let all = of(&[
            (ProbeKind::Completion, &equal),
            (ProbeKind::Chat, &equal),
            (ProbeKind::ChatWithTools, &equal),
        ]);
        assert!(all.completions && all.chat && all.chat_with_tools);
        let skipped = of(&[
            (ProbeKind::Chat, &equal),
            (ProbeKind::Chat, &refused),
            (ProbeKind::ChatWithTools, &refused),
        ]);
        assert!(skipped.chat && !skipped.chat_with_tools && !skipped.completions);
        assert_eq!(skipped.skipped, 2);
        assert!(!of(&[(ProbeKind::Chat, &refused)]).chat);
        let tools = of(&[
            (ProbeKind::Chat, &equal),
            (ProbeKind::ChatWithTools, &differ),
        ]);
        assert!(tools.chat && !tools.chat_with_tools);
        let chat = of(&[
            (ProbeKind::Chat, &differ),
            (ProbeKind::ChatWithTools, &equal),
        ]);
        assert!(!chat.chat && !chat.chat_with_tools);
    }

    #[test]
    fn answers_are_read() {
        let tokens = br#"{"count":2,"max_model_len":9,"tokens":[4,5],"token_strs":null}"#;
        assert_eq!(read_answer(200, tokens), ProbeAnswer::Tokens(vec![4, 5]));
        assert_eq!(read_answer(200, b"{}"), ProbeAnswer::Unusable);
        assert_eq!(read_answer(400, b"{\"error\":{}}"), ProbeAnswer::Refused);
        assert_eq!(read_answer(404, b""), ProbeAnswer::Unusable);
    }
}
