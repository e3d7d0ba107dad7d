//! The token counts that an engine reports.

use serde::Deserialize;

/// `usage` of a response or of a stream's last chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenUsage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    /// Prompt tokens read from the prefix cache. vLLM reports them only with
    /// `--enable-prompt-tokens-details`.
    pub cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct ResponseBody {
    usage: Option<UsageFields>,
}

#[derive(Deserialize)]
struct UsageFields {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

impl TokenUsage {
    /// Reads a whole JSON response or one stream chunk; `None` if it reports no usage.
    pub fn from_json(json: &[u8]) -> Option<Self> {
        let usage = serde_json::from_slice::<ResponseBody>(json).ok()?.usage?;
        let details = usage.prompt_tokens_details;
        Some(Self {
            prompt_tokens: usage.prompt_tokens?,
            completion_tokens: usage.completion_tokens.unwrap_or(0),
            cached_tokens: details.and_then(|details| details.cached_tokens),
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
