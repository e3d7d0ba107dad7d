//! An engine profile as a file: what `trace fit` writes, and `simulate` and `tune` read.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::sim::TimingProfile;

/// Speed and cache of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineProfile {
    /// Prompt tokens per second of an engine that only prefills.
    pub prefill_tokens_per_sec: f64,
    /// Step time of decoding one sequence, beside the overhead.
    pub step_ms: f64,
    /// Step time of each further decoding sequence.
    pub step_ms_per_sequence: f64,
    /// Step time of each token of the decoding sequences' contexts.
    #[serde(default)]
    pub step_ms_per_context_token: f64,
    /// Step time of any step.
    pub step_overhead_ms: f64,
    /// Whether a step is scheduled while the one before runs, which vLLM does by default.
    #[serde(default)]
    pub async_scheduling: bool,
    /// Time of each answer outside the engine.
    #[serde(default)]
    pub request_ms: f64,
    /// Tokens of the KV cache; `None` if the recording does not show them.
    #[serde(default)]
    pub cache_tokens: Option<u32>,
}

#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("{key} {value} is not between {min} and {max}")]
    Range {
        key: &'static str,
        value: f64,
        min: f64,
        max: f64,
    },
}

/// A minute is long for a step.
const STEP_MS_MAX: f64 = 60_000.0;

impl EngineProfile {
    /// Parses and checks a file's text.
    pub fn parse(text: &str) -> Result<Self, ProfileError> {
        let profile: Self = serde_json::from_str(text)?;
        profile.check()?;
        Ok(profile)
    }

    pub(super) fn check(&self) -> Result<(), ProfileError> {
        let cache = self.cache_tokens.map_or(1.0, f64::from);
        for (key, value, min, max) in [
            (
                "prefill_tokens_per_sec",
                self.prefill_tokens_per_sec,
                1.0,
                1e9,
            ),
            ("step_ms", self.step_ms, 0.0, STEP_MS_MAX),
            (
                "step_ms_per_sequence",
                self.step_ms_per_sequence,
                0.0,
                STEP_MS_MAX,
            ),
            (
                "step_ms_per_context_token",
                self.step_ms_per_context_token,
                0.0,
                STEP_MS_MAX,
            ),
            ("step_overhead_ms", self.step_overhead_ms, 0.0, STEP_MS_MAX),
            ("request_ms", self.request_ms, 0.0, STEP_MS_MAX),
            ("cache_tokens", cache, 1.0, 1e9),
        ] {
            if !(min..=max).contains(&value) {
                return Err(ProfileError::Range {
                    key,
                    value,
                    min,
                    max,
                });
            }
        }
        Ok(())
    }

    /// The lines of a file.
    pub fn lines(&self) -> Result<Vec<String>, serde_json::Error> {
        let text = serde_json::to_string_pretty(self)?;
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// Without a lower tier of the cache.
    pub(crate) fn timing(&self) -> TimingProfile {
        let millis = |value: f64| Duration::from_secs_f64(value / 1000.0);
        TimingProfile {
            prefill_tokens_per_sec: self.prefill_tokens_per_sec,
            itl: millis(self.step_ms),
            itl_per_sequence: millis(self.step_ms_per_sequence),
            itl_per_context_token: millis(self.step_ms_per_context_token),
            step_overhead: millis(self.step_overhead_ms),
            load_tokens_per_sec: 0.0,
            async_scheduling: self.async_scheduling,
            request_latency: millis(self.request_ms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"prefill_tokens_per_sec": 20000, "step_ms": 7,
        "step_ms_per_sequence": 0.015, "step_ms_per_context_token": 0.000045,
        "step_overhead_ms": 1}"#;

    #[test]
    fn a_profile_is_read_as_it_is_written() {
        let profile = EngineProfile::parse(TEXT).unwrap();
        let again = profile.lines().unwrap().join("\n");
        assert_eq!(EngineProfile::parse(&again).unwrap(), profile);
        let timing = profile.timing();
        let known = TimingProfile {
            load_tokens_per_sec: 0.0,
            ..TimingProfile::GPU_8B
        };
        assert_eq!(timing, known);
    }

    /// A profile without the coefficient is one whose steps do not grow with contexts.
    #[test]
    fn a_profile_without_the_time_of_a_context_token_has_none() {
        let text = TEXT.replace("\"step_ms_per_context_token\": 0.000045,", "");
        let timing = EngineProfile::parse(&text).unwrap().timing();
        assert_eq!(timing.itl_per_context_token, Duration::ZERO);
    }

    #[test]
    fn an_impossible_profile_is_refused() {
        for (from, to, says) in [
            ("20000", "0", "prefill_tokens_per_sec 0 is not between 1"),
            ("0.015", "-1", "step_ms_per_sequence -1 is not between 0"),
            ("0.000045", "-1", "step_ms_per_context_token -1"),
            ("7,", "70000,", "step_ms 70000 is not"),
            ("7,", "7,\n\"speed\": 1,", "unknown field `speed`"),
            ("7,", "7,\n,", "line 2"),
            ("0.015", "\"x\"", "line 2 column"),
        ] {
            let error = EngineProfile::parse(&TEXT.replace(from, to)).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
