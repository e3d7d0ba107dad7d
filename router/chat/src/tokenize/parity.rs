//! Does the engine make the same tokens of the same conversations? A fixed list of probes is
//! encoded here and sent to the engine's `POST /tokenize` by the shell; this module says what to send and
//! what the answers mean. A template is trusted only after that.

use std::fmt;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::{ChatError, CivilTime, Tokenizer};
use crate::openai::{ChatParts, Generation, SpecialTokens};

/// One question to the engine, with our answer.
#[derive(Debug)]
pub struct Probe {
    pub name: &'static str,
    pub kind: Kind,
    /// Body for `POST /tokenize`.
    pub body: Vec<u8>,
    pub ours: Result<Vec<u32>, ChatError>,
}

/// What a probe speaks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Completion,
    Chat,
    ChatWithTools,
}

/// What the engine said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Tokens(Vec<u32>),
    /// It refuses this conversation (4xx): its template raises an error.
    Refused,
    /// No answer to the question: another status, or not the JSON that was expected.
    Unusable,
}

/// What one probe showed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Equal {
        tokens: usize,
    },
    /// Neither side renders this conversation; says nothing about others.
    BothRefuse,
    /// The first position at which the ids differ, with the ids there (none: the list has ended).
    Differ {
        at: usize,
        ours: Option<u32>,
        theirs: Option<u32>,
    },
    OnlyEngineRefuses,
    /// Why there are no ids here.
    OnlyWeRefuse(String),
    Unanswered,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Equal { tokens } => write!(f, "{tokens} equal tokens"),
            Self::BothRefuse => f.write_str("refused by both"),
            Self::Differ { at, ours, theirs } => {
                write!(
                    f,
                    "token {at} differs: ours {ours:?}, the engine's {theirs:?}"
                )
            }
            Self::OnlyEngineRefuses => f.write_str("the engine refuses it, we do not"),
            Self::OnlyWeRefuse(reason) => write!(f, "the engine renders it, we do not: {reason}"),
            Self::Unanswered => f.write_str("the engine gave no usable answer"),
        }
    }
}

/// Compares our ids with the engine's answer.
pub fn compare(ours: &Result<Vec<u32>, ChatError>, theirs: &Answer) -> Verdict {
    match (ours, theirs) {
        (_, Answer::Unusable) => Verdict::Unanswered,
        (Err(_), Answer::Refused) => Verdict::BothRefuse,
        (Ok(_), Answer::Refused) => Verdict::OnlyEngineRefuses,
        (Err(error), Answer::Tokens(_)) => Verdict::OnlyWeRefuse(error.to_string()),
        (Ok(ours), Answer::Tokens(theirs)) => {
            let shorter = ours.len().min(theirs.len());
            let differing = (0..shorter).find(|&at| ours.get(at) != theirs.get(at));
            match differing {
                None if ours.len() == theirs.len() => Verdict::Equal { tokens: ours.len() },
                at => {
                    let at = at.unwrap_or(shorter);
                    let (ours, theirs) = (ours.get(at).copied(), theirs.get(at).copied());
                    Verdict::Differ { at, ours, theirs }
                }
            }
        }
    }
}

/// What may be trusted after all probes of one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trust {
    pub completions: bool,
    pub chat: bool,
    pub chat_with_tools: bool,
    /// Probes that both sides refused.
    pub skipped: usize,
}

/// A kind is trusted if at least one of its probes compared equal and none spoke against it. Chats
/// without tools are not held against for what happens with tools.
pub fn trust<'v>(verdicts: impl IntoIterator<Item = (Kind, &'v Verdict)>) -> Trust {
    let mut equal = [0_usize; 3];
    let mut against = [0_usize; 3];
    let mut skipped = 0;
    for (kind, verdict) in verdicts {
        let at = match kind {
            Kind::Completion => 0,
            Kind::Chat => 1,
            Kind::ChatWithTools => 2,
        };
        match verdict {
            Verdict::Equal { .. } => equal[at] += 1,
            Verdict::BothRefuse => skipped += 1,
            Verdict::Differ { .. }
            | Verdict::OnlyEngineRefuses
            | Verdict::OnlyWeRefuse(_)
            | Verdict::Unanswered => against[at] += 1,
        }
    }
    let trusted = |at: usize| equal[at] > 0 && against[at] == 0;
    Trust {
        completions: trusted(0),
        chat: trusted(1),
        chat_with_tools: trusted(1) && trusted(2),
        skipped,
    }
}

/// Reads the engine's answer to a probe.
pub fn read_answer(status: u16, body: &[u8]) -> Answer {
    #[derive(Deserialize)]
    struct Tokens {
        tokens: Vec<u32>,
    }
    match status {
        200 => serde_json::from_slice::<Tokens>(body)
            .map_or(Answer::Unusable, |answer| Answer::Tokens(answer.tokens)),
        400 | 422 => Answer::Refused,
        _ => Answer::Unusable,
    }
}

/// The questions for a model, with our answers at this time. Probes that a template with a date
/// answers near midnight may differ once; ask again before believing it.
pub fn probes(tokenizer: &Tokenizer, model: &str, now: CivilTime) -> Vec<Probe> {
    let mut probes: Vec<Probe> = COMPLETIONS
        .iter()
        .map(|(name, text)| Probe {
            name,
            kind: Kind::Completion,
            body: json!({"model": model, "prompt": text})
                .to_string()
                .into_bytes(),
            ours: tokenizer
                .encode(text, SpecialTokens::Add)
                .map_err(ChatError::from),
        })
        .collect();
    probes.extend(
        chats()
            .into_iter()
            .map(|chat| chat.probe(tokenizer, model, now)),
    );
    probes
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

struct Chat {
    name: &'static str,
    messages: Value,
    tools: Option<Value>,
    generation: Generation,
}

impl Chat {
    fn probe(self, tokenizer: &Tokenizer, model: &str, now: CivilTime) -> Probe {
        let mut body = json!({"model": model, "messages": self.messages});
        if let Some(tools) = &self.tools {
            body["tools"] = tools.clone();
        }
        match self.generation {
            Generation::Prompt | Generation::Contradiction => {}
            Generation::Nothing => body["add_generation_prompt"] = json!(false),
            Generation::ContinueFinal => {
                body["add_generation_prompt"] = json!(false);
                body["continue_final_message"] = json!(true);
            }
        }
        let kind = if self.tools.is_some() {
            Kind::ChatWithTools
        } else {
            Kind::Chat
        };
        let ours = self.encode(tokenizer, now);
        Probe {
            name: self.name,
            kind,
            body: body.to_string().into_bytes(),
            ours,
        }
    }

    fn encode(&self, tokenizer: &Tokenizer, now: CivilTime) -> Result<Vec<u32>, ChatError> {
        let invalid = |_| ChatError::from(super::RenderError::Invalid("messages"));
        let raw = |value: &Value| RawValue::from_string(value.to_string()).map_err(invalid);
        let messages = raw(&self.messages)?;
        let tools = self.tools.as_ref().map(raw).transpose()?;
        let mut parts = ChatParts::new(&messages, tools.as_deref());
        parts.generation = self.generation;
        tokenizer.encode_chat(&parts, now)
    }
}

fn chats() -> Vec<Chat> {
    let user = |text: &str| json!({"role": "user", "content": text});
    let assistant = |text: &str| json!({"role": "assistant", "content": text});
    let system = json!({"role": "system", "content": "You are careful.\nAnswer briefly. "});
    let tool = json!({"type": "function", "function": {
        "name": "get_weather", "description": "Weather of a <city> & \"more\"",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "Größe egal"},
            "days": {"type": "integer", "enum": [1, 2]}},
            "required": ["city"]}}});
    // Nine characters: some templates insist on that.
    let call = json!({"role": "assistant", "content": "", "tool_calls": [{
        "id": "call00001", "type": "function",
        "function": {"name": "get_weather", "arguments": "{\"city\": \"Köln\", \"days\": 2}"}}]});
    let result = json!({"role": "tool", "tool_call_id": "call00001", "content": "{\"t\": 21.5}"});
    let plain = |name, messages| Chat {
        name,
        messages,
        tools: None,
        generation: Generation::Prompt,
    };
    let tooled = |name, messages| Chat {
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
        Chat {
            generation: Generation::Nothing,
            ..plain("no prompt", json!([turns[0], turns[1]]))
        },
        Chat {
            generation: Generation::ContinueFinal,
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
        let answer = |ids: &[u32]| compare(&ours, &Answer::Tokens(ids.to_vec()));
        assert_eq!(answer(&[1, 2, 3]), Verdict::Equal { tokens: 3 });
        assert_eq!(
            answer(&[1, 5, 3]),
            Verdict::Differ {
                at: 1,
                ours: Some(2),
                theirs: Some(5)
            }
        );
        assert_eq!(
            answer(&[1, 2]),
            Verdict::Differ {
                at: 2,
                ours: Some(3),
                theirs: None
            }
        );
        assert_eq!(
            answer(&[1, 2, 3, 4]),
            Verdict::Differ {
                at: 3,
                ours: None,
                theirs: Some(4)
            }
        );
        assert_eq!(compare(&ours, &Answer::Refused), Verdict::OnlyEngineRefuses);
        let failed = Err(ChatError::from(RenderError::NoTemplate));
        assert_eq!(compare(&failed, &Answer::Refused), Verdict::BothRefuse);
        assert!(matches!(
            compare(&failed, &Answer::Tokens(vec![])),
            Verdict::OnlyWeRefuse(_)
        ));
        assert_eq!(compare(&failed, &Answer::Unusable), Verdict::Unanswered);
    }

    #[test]
    fn trust_needs_one_equal_probe_and_none_against() {
        let equal = Verdict::Equal { tokens: 1 };
        let refused = Verdict::BothRefuse;
        let differ = Verdict::Differ {
            at: 0,
            ours: None,
            theirs: Some(1),
        };
        let of = |verdicts: &[(Kind, &Verdict)]| trust(verdicts.iter().copied());
        let all = of(&[
            (Kind::Completion, &equal),
            (Kind::Chat, &equal),
            (Kind::ChatWithTools, &equal),
        ]);
        assert!(all.completions && all.chat && all.chat_with_tools);
        let skipped = of(&[
            (Kind::Chat, &equal),
            (Kind::Chat, &refused),
            (Kind::ChatWithTools, &refused),
        ]);
        assert!(skipped.chat && !skipped.chat_with_tools && !skipped.completions);
        assert_eq!(skipped.skipped, 2);
        assert!(!of(&[(Kind::Chat, &refused)]).chat);
        let tools = of(&[(Kind::Chat, &equal), (Kind::ChatWithTools, &differ)]);
        assert!(tools.chat && !tools.chat_with_tools);
        let chat = of(&[(Kind::Chat, &differ), (Kind::ChatWithTools, &equal)]);
        assert!(!chat.chat && !chat.chat_with_tools);
    }

    #[test]
    fn answers_are_read() {
        let tokens = br#"{"count":2,"max_model_len":9,"tokens":[4,5],"token_strs":null}"#;
        assert_eq!(read_answer(200, tokens), Answer::Tokens(vec![4, 5]));
        assert_eq!(read_answer(200, b"{}"), Answer::Unusable);
        assert_eq!(read_answer(400, b"{\"error\":{}}"), Answer::Refused);
        assert_eq!(read_answer(404, b""), Answer::Unusable);
    }
}
