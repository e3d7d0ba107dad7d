//! The hostile requests that are sent whole.

use std::fmt::Write as _;

use super::{Attack, smuggling};
use crate::faults::Fault;
use crate::prompts::{Novelty, Prompts};

/// Below the router's largest prompt (8 MiB), with what its template adds.
const PROMPT_BYTES: usize = (8 << 20) - (64 << 10);

const KEYS: usize = 300_000;

const NESTING: usize = 100_000;

const HEADER_BYTES: usize = 60_000;

/// A request that is sent whole.
pub enum Shape {
    Chat(Chat),
    /// Head and body.
    Raw(String),
}

/// A chat of which each copy differs by a number.
pub struct Chat {
    headers: String,
    /// The body before the number.
    start: String,
    /// The body after the number.
    rest: String,
}

impl Shape {
    /// The requests of an attack, to be sent in turn. Empty: it sends none whole.
    pub fn all(attack: Attack) -> anyhow::Result<Vec<Self>> {
        let chats = match attack {
            Attack::Smuggling => return Ok(smuggling::requests().map(Self::Raw).into()),
            Attack::SlowBodies
            | Attack::SlowHeads
            | Attack::Connections
            | Attack::ResetStreams
            | Attack::UnreadStreams
            | Attack::IdleConnections => Vec::new(),
            Attack::ManyKeys => vec![many_keys()],
            Attack::Prose => {
                let text = Prompts::prose()?.prompt(Novelty::New, 0, PROMPT_BYTES);
                vec![chat(String::new(), &text)]
            }
            Attack::OneLetter => vec![chat(String::new(), &"a".repeat(PROMPT_BYTES))],
            Attack::Cjk => vec![chat(String::new(), &cjk())],
            Attack::DeepJson => ["metadata", "chat_template_kwargs", "tools"]
                .map(deep)
                .into(),
            Attack::HeaderBombs => [1, 60, 9_000]
                .map(|count| chat(headers(count), "Hi."))
                .into(),
            Attack::SilentEngines => vec![marked(Fault::Silence)],
            Attack::ResettingEngines => [
                Fault::ResetBeforeHead,
                Fault::ResetAfterHead,
                Fault::ResetWithinBody,
            ]
            .map(marked)
            .into(),
            Attack::ShortLengths => vec![marked(Fault::ShortLength)],
            Attack::LongLengths => [Fault::LongLengthAndEnd, Fault::LongLengthAndSilence]
                .map(marked)
                .into(),
            Attack::EndlessLines => vec![marked(Fault::EndlessLine)],
        };
        Ok(chats.into_iter().map(Self::Chat).collect())
    }

    /// The request's start with a number, and its rest.
    pub fn numbered(&self, number: u64) -> (String, &str) {
        match self {
            Self::Chat(chat) => (chat.numbered_start(number), &chat.rest),
            Self::Raw(request) => (String::new(), request),
        }
    }
}

impl Chat {
    /// The head and the body's start.
    fn numbered_start(&self, number: u64) -> String {
        let Self {
            headers,
            start,
            rest,
        } = self;
        let start = format!("{start}{number:010}");
        let length = start.len() + rest.len();
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\
             content-type: application/json\r\n{headers}content-length: {length}\r\n\r\n{start}"
        )
    }
}

fn chat(headers: String, text: &str) -> Chat {
    let start = r#"{"model":"m","max_tokens":16,"messages":[{"role":"user","content":"Question "#;
    Chat {
        headers,
        start: start.to_owned(),
        rest: format!(". {text}\"}}]}}"),
    }
}

/// A chat that an engine answers with the fault.
fn marked(fault: Fault) -> Chat {
    let text = format!("{}. Hi.", fault.mark());
    if fault.is_of_streams() {
        with_field(&text, "stream", "true")
    } else {
        chat(String::new(), &text)
    }
}

fn many_keys() -> Chat {
    let mut keys = String::new();
    for key in 0..KEYS {
        let comma = if key == 0 { "" } else { "," };
        // Writing into a string does not fail.
        let _ = write!(keys, "{comma}\"key{key:06}\":1");
    }
    with_field("Hi.", "chat_template_kwargs", &format!("{{{keys}}}"))
}

/// A chat with one more field.
fn with_field(text: &str, name: &str, value: &str) -> Chat {
    let chat = chat(String::new(), text);
    let open = chat.rest.strip_suffix('}').unwrap_or_default();
    let rest = format!("{open},\"{name}\":{value}}}");
    Chat { rest, ..chat }
}

fn deep(field: &str) -> Chat {
    let (open, close) = ("[".repeat(NESTING), "]".repeat(NESTING));
    with_field("Hi.", field, &format!("{{\"a\":{open}{close}}}"))
}

/// So many headers of 60 KB in all.
fn headers(count: usize) -> String {
    let mut headers = String::new();
    for number in 0..count {
        let line = format!("{number}:");
        let value = (HEADER_BYTES / count).saturating_sub(line.len() + 2).max(1);
        let _ = write!(headers, "{line}{}\r\n", "a".repeat(value));
    }
    headers
}

/// Sentences of 19 ideographs in no order.
fn cjk() -> String {
    let mut text = String::with_capacity(PROMPT_BYTES + 64);
    let mut state = 1_u32;
    while text.len() < PROMPT_BYTES {
        for _ in 0..19 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            text.extend(char::from_u32(0x4e00 + (state >> 16) % 8000));
        }
        text.push('。');
    }
    text
}
