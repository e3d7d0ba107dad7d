//! Streams whose rest another engine generates, from the prompt's token ids and those generated so
//! far.
//!
//! [`ResumeTerms`] judges a request: a stream may be resumed only if an engine that gets all tokens
//! so far as a prompt continues it as the first one would have. [`ResumableStream`] reads the
//! stream, hides the token ids that the client did not ask for, and writes the request for the rest.
//! Absent: knowledge of the engines' parsers, which the operator has; see
//! `docs/adr/0023-resumed-streams.md`.

mod stream;
#[cfg(test)]
mod tests;

use serde::de::Deserializer as _;

use super::fields::BodyFields;
use super::request::{ParsedRequest, PromptRoute, PromptSource};
use super::rewrite::KeptMembers;
use super::{CompletionParts, PromptList};

pub use stream::{ResumableStream, StreamBytes};

/// Longest model: its prompts' ids fit into the buffer of one event.
const MODEL_LEN_MAX: u32 = 1 << 20;

/// Bytes of the fields that a request and its continuation share.
const MEMBERS_BYTES_MAX: usize = 16 << 10;

/// Tokens of a text completion that names no number.
const COMPLETION_TOKENS: u32 = 16;

/// Fields that mean the same for the rest of an answer. A repetition penalty counts the prompt's
/// tokens like the generated ones; the other penalties do not.
const SHARED: &[&str] = &[
    "model",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logit_bias",
    "repetition_penalty",
    "stop_token_ids",
    "allowed_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "user",
    "cache_salt",
    "priority",
    "session_id",
];

/// Fields that make the prompt, or whose value another takes the place of.
const REPLACED: &[&str] = &[
    "prompt",
    "messages",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "parallel_tool_calls",
    "max_tokens",
    "max_completion_tokens",
];

/// Fields that only these values leave without effect.
const IDLE: &[(&str, &[&str])] = &[
    ("n", &["1"]),
    ("best_of", &["1"]),
    ("echo", &["false"]),
    ("logprobs", &["false"]),
    ("top_logprobs", &["0"]),
    ("presence_penalty", &["0", "0.0"]),
    ("frequency_penalty", &["0", "0.0"]),
    ("min_tokens", &["0"]),
    ("stop", &["[]"]),
    ("seed", &[]),
    ("suffix", &[]),
    ("tools", &["[]"]),
    ("tool_choice", &["\"none\"", "\"auto\""]),
    (
        "response_format",
        &[r#"{"type":"text"}"#, r#"{"type": "text"}"#],
    ),
];

/// [`SHARED`], [`REPLACED`] and [`IDLE`].
const FIELDS: &[&str] = &{
    let mut names = [""; SHARED.len() + REPLACED.len() + IDLE.len()];
    let mut at = 0;
    while at < names.len() {
        let (replaced, idle) = (SHARED.len(), SHARED.len() + REPLACED.len());
        names[at] = if at < replaced {
            SHARED[at]
        } else if at < idle {
            REPLACED[at - replaced]
        } else {
            IDLE[at - idle].0
        };
        at += 1;
    }
    names
};

/// The form of the chunks that the client reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkForm {
    Text,
    Chat,
}

/// What the rest of a request's stream is requested with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResumeTerms {
    form: ChunkForm,
    /// Members of a JSON object.
    members: Vec<u8>,
    /// Tokens of the whole answer; `None`: as many as the model has room for.
    output_max: Option<u32>,
    /// Tokens of prompt and answer.
    model_len: u32,
}

impl ResumeTerms {
    /// `None` if the request's stream cannot be resumed. `model_len`: tokens of prompt and answer
    /// that the engines serve.
    pub fn of(parsed: &ParsedRequest<'_>, body: &[u8], model_len: Option<u32>) -> Option<Self> {
        let model_len = model_len.filter(|len| *len <= MODEL_LEN_MAX)?;
        let form = match (parsed.route, &parsed.prompt) {
            (PromptRoute::Completions, PromptSource::Completion(parts)) if is_single(parts) => {
                ChunkForm::Text
            }
            (PromptRoute::ChatCompletions, PromptSource::Chat(_)) => ChunkForm::Chat,
            _ => return None,
        };
        if !parsed.info.stream || parsed.info.opaque.is_some() {
            return None;
        }
        let fields = BodyFields::read(body, FIELDS).ok()?;
        let idle = IDLE.iter().all(|(name, values)| {
            let value = fields.raw(name).map(|raw| raw.get().trim());
            value.is_none_or(|value| values.contains(&value))
        });
        if fields.has_unknown() || !idle {
            return None;
        }
        let dropped: Vec<&str> = FIELDS[SHARED.len()..].to_vec();
        let mut json = serde_json::Deserializer::from_slice(body);
        let members = json.deserialize_map(KeptMembers::without(&dropped)).ok()?;
        Some(Self {
            form,
            members: members.text,
            output_max: output_max(form, &fields).ok()?,
            model_len,
        })
        .filter(|terms| terms.members.len() <= MEMBERS_BYTES_MAX)
    }

    /// The request for what follows these tokens of prompt and answer; `None` if nothing may follow.
    fn continuation(&self, prompt: &[u32], generated: &[u32]) -> Option<Vec<u8>> {
        let count = |ids: &[u32]| u32::try_from(ids.len()).ok();
        let room = self.model_len.checked_sub(count(prompt)?)?;
        let max = self.output_max.unwrap_or(room);
        let left = max
            .checked_sub(count(generated)?)
            .filter(|left| *left > 0)?;
        let ids = id_list(prompt.iter().chain(generated));
        let mut body = KeptMembers::without(&[]);
        body.text.clone_from(&self.members);
        body.push("prompt", &ids);
        body.push("max_tokens", &left.to_string());
        body.push("return_token_ids", "true");
        Some([b"{", body.text.as_slice(), b"}"].concat())
    }
}

/// JSON of token ids.
pub(super) fn id_list<'a>(ids: impl IntoIterator<Item = &'a u32>) -> String {
    let mut list = String::from("[");
    for id in ids {
        if list.len() > 1 {
            list.push(',');
        }
        list.push_str(&id.to_string());
    }
    list.push(']');
    list
}

/// The body of a request that [`ResumeTerms`] admits, which also asks for token ids.
pub fn with_token_ids(body: &[u8]) -> Vec<u8> {
    let start = memchr::memchr(b'{', body).map_or(0, |brace| brace + 1);
    let (brace, members) = body.split_at(start);
    [brace, br#""return_token_ids":true,"#, members].concat()
}

fn is_single(parts: &CompletionParts<'_>) -> bool {
    match &parts.prompts {
        PromptList::Texts(texts) => texts.len() == 1,
        PromptList::Tokens(lists) => lists.len() == 1,
    }
}

/// The number of tokens that a text completion asks for; `None` if an engine may read it otherwise.
pub(super) fn completion_tokens(fields: &BodyFields<'_>) -> Option<u32> {
    match fields.given("max_tokens") {
        // A null is not the default.
        Some(raw) => raw.get().parse().ok(),
        None => Some(COMPLETION_TOKENS),
    }
}

/// Fails for a number that an engine may read otherwise.
fn output_max(form: ChunkForm, fields: &BodyFields<'_>) -> Result<Option<u32>, ()> {
    let number = |name| match fields.raw(name) {
        Some(raw) => raw.get().parse::<u32>().map(Some).map_err(drop),
        None => Ok(None),
    };
    match form {
        ChunkForm::Text if fields.given("max_completion_tokens").is_some() => Err(()),
        ChunkForm::Text => completion_tokens(fields).map(Some).ok_or(()),
        ChunkForm::Chat => match number("max_completion_tokens")? {
            Some(max) => Ok(Some(max)),
            None => number("max_tokens"),
        },
    }
}
