//! The token counts that an engine reports.

use serde::Deserialize;

/// `usage` of a response or of a stream's last chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    /// Prompt tokens that came from the prefix cache; none if the engine does not tell (vLLM needs
    /// `--enable-prompt-tokens-details`).
    pub cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Response {
    #[serde(default)]
    usage: Option<Counts>,
}

#[derive(Deserialize)]
struct Counts {
    #[serde(default)]
    prompt_tokens: Option<u64>,
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

impl Usage {
    /// Reads a whole JSON response or one stream chunk. Nothing if there is no usage in it.
    pub fn from_json(json: &[u8]) -> Option<Self> {
        let counts = serde_json::from_slice::<Response>(json).ok()?.usage?;
        Some(Self {
            prompt_tokens: counts.prompt_tokens?,
            completion_tokens: counts.completion_tokens.unwrap_or(0),
            cached_tokens: counts.prompt_tokens_details.and_then(|d| d.cached_tokens),
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
        let expected = Usage {
            prompt_tokens: 33,
            completion_tokens: 2,
            cached_tokens: Some(32),
        };
        assert_eq!(Usage::from_json(with), Some(expected));
        let without = br#"{"usage":{"prompt_tokens":3,"completion_tokens":null,
            "prompt_tokens_details":null}}"#;
        let expected = Usage {
            prompt_tokens: 3,
            completion_tokens: 0,
            cached_tokens: None,
        };
        assert_eq!(Usage::from_json(without), Some(expected));
    }

    #[test]
    fn anything_else_has_no_usage() {
        for json in [
            &b""[..],
            b"{}",
            b"{\"usage\":null}",
            b"[DONE]",
            b"{\"usage\":{}}",
            b"\xff",
        ] {
            assert_eq!(Usage::from_json(json), None);
        }
    }
}
