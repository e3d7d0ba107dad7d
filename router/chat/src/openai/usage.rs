//! The token counts that an engine reports.

use serde::Deserialize;
use serde::de::IgnoredAny;

/// `usage` of a response or of a stream's last chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenUsage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    /// Prompt tokens read from the prefix cache. vLLM reports them only with
    /// `--enable-prompt-tokens-details`.
    pub cached_tokens: Option<u64>,
}

/// The places of `usage`: at the top, or in the response or message that an event brings.
#[derive(Deserialize)]
struct ResponseBody {
    usage: Option<UsageFields>,
    response: Option<InnerBody>,
    message: Option<InnerBody>,
}

#[derive(Deserialize)]
struct InnerBody {
    usage: Option<UsageFields>,
}

/// The counts of chat and text completions, of `/v1/responses` and of `/v1/messages`.
#[derive(Deserialize)]
struct UsageFields {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptDetails>,
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    input_tokens_details: Option<PromptDetails>,
    /// In `/v1/messages` not part of `input_tokens`, like the next.
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

/// The choices of a stream's chunk.
#[derive(Deserialize)]
struct ChunkChoices {
    choices: Vec<IgnoredAny>,
}

/// Whether a stream's chunk has an empty list of choices, as the last one, which reports the usage.
pub(super) fn has_no_choices(json: &[u8]) -> bool {
    serde_json::from_slice(json).is_ok_and(|chunk: ChunkChoices| chunk.choices.is_empty())
}

impl TokenUsage {
    /// Reads a whole JSON response or one stream chunk; `None` if it reports no usage.
    pub fn from_json(json: &[u8]) -> Option<Self> {
        let body: ResponseBody = serde_json::from_slice(json).ok()?;
        let inner = || body.response.or(body.message)?.usage;
        let usage = body.usage.or_else(inner)?;
        let (read, created) = (
            usage.cache_read_input_tokens,
            usage.cache_creation_input_tokens,
        );
        let input = || {
            let cached = read.unwrap_or(0).saturating_add(created.unwrap_or(0));
            Some(usage.input_tokens?.saturating_add(cached))
        };
        let details = usage.prompt_tokens_details.or(usage.input_tokens_details);
        Some(Self {
            prompt_tokens: usage.prompt_tokens.or_else(input)?,
            completion_tokens: usage.completion_tokens.or(usage.output_tokens).unwrap_or(0),
            cached_tokens: details.and_then(|details| details.cached_tokens).or(read),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_are_optional() {
        let with = br#"{"id":"x","choices":[{"text":"a"}],"usage":{"prompt_tokens":33,
            "total_tokens":35,"completion_tokens":2,
            "prompt_tokens_details":{"cached_tokens":32}}}"#;
        let expected = TokenUsage {
            prompt_tokens: 33,
            completion_tokens: 2,
            cached_tokens: Some(32),
        };
        assert_eq!(TokenUsage::from_json(with), Some(expected));
        let without = br#"{"usage":{"prompt_tokens":3,"completion_tokens":null,
            "prompt_tokens_details":null}}"#;
        let expected = TokenUsage {
            prompt_tokens: 3,
            completion_tokens: 0,
            cached_tokens: None,
        };
        assert_eq!(TokenUsage::from_json(without), Some(expected));
    }

    #[test]
    fn usage_of_responses_and_messages_is_read() {
        let expected = TokenUsage {
            prompt_tokens: 33,
            completion_tokens: 2,
            cached_tokens: Some(32),
        };
        for json in [
            r#"{"usage":{"input_tokens":33,"output_tokens":2,"input_tokens_details":
                {"cached_tokens":32,"cache_write_tokens":0}}}"#,
            r#"{"type":"response.completed","response":{"usage":{"input_tokens":33,
                "output_tokens":2,"input_tokens_details":{"cached_tokens":32}}}}"#,
            r#"{"usage":{"input_tokens":1,"output_tokens":2,"cache_read_input_tokens":32}}"#,
            r#"{"type":"message_start","message":{"usage":{"input_tokens":0,"output_tokens":2,
                "cache_read_input_tokens":32,"cache_creation_input_tokens":1}}}"#,
        ] {
            assert_eq!(
                TokenUsage::from_json(json.as_bytes()),
                Some(expected),
                "{json}"
            );
        }
    }

    /// An engine's bytes are not trusted.
    #[test]
    fn counts_of_a_hostile_engine_saturate() {
        let json = format!(
            r#"{{"usage":{{"input_tokens":1,"cache_read_input_tokens":{max},
                "cache_creation_input_tokens":{max}}}}}"#,
            max = u64::MAX
        );
        let usage = TokenUsage::from_json(json.as_bytes()).unwrap();
        assert_eq!(usage.prompt_tokens, u64::MAX);
    }

    #[test]
    fn other_json_has_no_usage() {
        for json in [
            &b""[..],
            b"{}",
            b"{\"usage\":null}",
            b"[DONE]",
            b"{\"usage\":{}}",
            b"\xff",
        ] {
            assert_eq!(TokenUsage::from_json(json), None);
        }
    }
}
