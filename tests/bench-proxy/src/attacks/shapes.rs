//! The hostile requests that are sent whole.

use std::fmt::Write as _;

use super::Attack;
use crate::prompts::{Novelty, Prompts};

/// Below the router's largest prompt (8 MiB), with what its template adds.
const PROMPT_BYTES: usize = (8 << 20) - (64 << 10);

const KEYS: usize = 300_000;

const NESTING: usize = 100_000;

const HEADER_BYTES: usize = 60_000;

/// A request of which each copy differs by a number.
pub struct Shape {
    headers: String,
    /// The body before the number.
    start: String,
    /// The body after the number.
    rest: String,
}

impl Shape {
    /// The requests of an attack, to be sent in turn. Empty: it sends none whole.
    pub fn all(attack: Attack) -> anyhow::Result<Vec<Self>> {
        Ok(match attack {
            Attack::SlowBodies
            | Attack::SlowHeads
            | Attack::Connections
            | Attack::ResetStreams
            | Attack::UnreadStreams => Vec::new(),
            Attack::ManyKeys => vec![many_keys()],
            Attack::Prose => {
                let text = Prompts::load()?.prompt(Novelty::New, 0, PROMPT_BYTES);
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
        })
    }

    /// The request's head and the body's start, and the rest.
    pub fn numbered(&self, number: u64) -> (String, &str) {
        let Self {
            headers,
            start,
            rest,
        } = self;
        let start = format!("{start}{number:010}");
        let length = start.len() + rest.len();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\
             content-type: application/json\r\n{headers}content-length: {length}\r\n\r\n{start}"
        );
        (head, rest)
    }
}

fn chat(headers: String, text: &str) -> Shape {
    let start = r#"{"model":"m","max_tokens":16,"messages":[{"role":"user","content":"Question "#;
    Shape {
        headers,
        start: start.to_owned(),
        rest: format!(". {text}\"}}]}}"),
    }
}

fn many_keys() -> Shape {
    let mut keys = String::new();
    for key in 0..KEYS {
        let comma = if key == 0 { "" } else { "," };
        // Writing into a string does not fail.
        let _ = write!(keys, "{comma}\"key{key:06}\":1");
    }
    with_field("chat_template_kwargs", &format!("{{{keys}}}"))
}

/// A short chat with one more field.
fn with_field(name: &str, value: &str) -> Shape {
    let shape = chat(String::new(), "Hi.");
    let open = shape.rest.strip_suffix('}').unwrap_or_default();
    let rest = format!("{open},\"{name}\":{value}}}");
    Shape { rest, ..shape }
}

fn deep(field: &str) -> Shape {
    let (open, close) = ("[".repeat(NESTING), "]".repeat(NESTING));
    with_field(field, &format!("{{\"a\":{open}{close}}}"))
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
