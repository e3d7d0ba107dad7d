//! Token ids in place of a text completion's prompt, where the answer stays the same.

use super::fields::BodyFields;
use super::request::{ParsedRequest, PromptRoute, PromptSource};
use super::rewrite::part_of;
use super::{PromptList, resume};

/// Fields of which the answer shows nothing of the prompt's text. With any other field, and with
/// `echo`, the engine gets the text.
const FIELDS: &[&str] = &[
    "model",
    "prompt",
    "add_special_tokens",
    "max_tokens",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "allowed_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logprobs",
    "n",
    "seed",
    "user",
    "cache_salt",
    "priority",
    "session_id",
    "response_format",
    "structured_outputs",
    "return_token_ids",
    "echo",
];

/// A body around its prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptSlot {
    before: Vec<u8>,
    after: Vec<u8>,
    /// Most tokens of a prompt that the engine surely accepts: its errors differ by form.
    tokens_max: u32,
}

impl PromptSlot {
    /// `None` if the answer could differ. `model_len`: tokens of prompt and answer.
    pub fn of(parsed: &ParsedRequest<'_>, body: &[u8], model_len: Option<u32>) -> Option<Self> {
        let single = match (parsed.route, &parsed.prompt) {
            (PromptRoute::Completions, PromptSource::Completion(parts)) => {
                matches!(&parts.prompts, PromptList::Texts(texts) if texts.len() == 1)
            }
            _ => false,
        };
        let fields = BodyFields::read(body, FIELDS).ok().filter(|_| single)?;
        let prompt = fields.raw("prompt")?.get();
        let echo = fields.flag("echo").ok()?.unwrap_or(false);
        if fields.has_unknown() || echo || !prompt.starts_with('"') {
            return None;
        }
        let range = part_of(body, prompt.as_bytes())?;
        let output = resume::completion_tokens(&fields)?;
        Some(Self {
            before: body[..range.start].to_vec(),
            after: body[range.end..].to_vec(),
            tokens_max: model_len?.checked_sub(output)?,
        })
    }

    /// The body with these ids as its prompt.
    pub fn filled(&self, ids: &[u32]) -> Option<Vec<u8>> {
        let tokens = u32::try_from(ids.len()).ok()?;
        let fits = (1..=self.tokens_max).contains(&tokens);
        let list = fits.then(|| resume::id_list(ids))?;
        Some([self.before.as_slice(), list.as_bytes(), &self.after].concat())
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::parse;
    use super::*;

    fn filled(body: &str, ids: &[u32]) -> Option<String> {
        let parsed = parse(PromptRoute::Completions, body.as_bytes()).unwrap();
        let slot = PromptSlot::of(&parsed, body.as_bytes(), Some(20))?;
        Some(String::from_utf8(slot.filled(ids)?).unwrap())
    }

    #[test]
    fn ids_take_the_place_of_a_text_and_nothing_else() {
        let body = r#"{ "prompt": "a\"b", "max_tokens":  9, "logprobs": 1, "stop": "x" }"#;
        let expected = body.replace(r#""a\"b""#, "[1,22]");
        assert_eq!(filled(body, &[1, 22]), Some(expected));
        // The last of repeated keys wins.
        let body = r#"{"prompt":"a","prompt":"b"}"#;
        let expected = r#"{"prompt":"a","prompt":[7]}"#;
        assert_eq!(filled(body, &[7]).as_deref(), Some(expected));
    }

    /// In these the engine's answer shows the text, or an error whose words depend on the form.
    #[test]
    fn other_requests_keep_their_text() {
        for body in [
            r#"{"prompt":"a","echo":true}"#,
            r#"{"prompt":"a","prompt_logprobs":1}"#,
            r#"{"prompt":"a","truncate_prompt_tokens":1}"#,
            r#"{"prompt":"a","kv_transfer_params":{}}"#,
            r#"{"prompt":"a","a_field_of_tomorrow":1}"#,
            r#"{"prompt":["a"]}"#,
            r#"{"prompt":["a","b"]}"#,
            r#"{"prompt":[1,2]}"#,
            r#"{"prompt":"a","max_tokens":19}"#,
            r#"{"prompt":"a","max_tokens":null}"#,
        ] {
            assert_eq!(filled(body, &[1, 2]), None, "{body}");
        }
        assert_eq!(filled(r#"{"prompt":""}"#, &[]), None);
        assert!(filled(r#"{"prompt":"a","max_tokens":18}"#, &[1, 2]).is_some());
    }
}
