//! The table `[tracing]`: where spans of requests are sent.

use serde::Deserialize;

use super::file::ValueError;
use crate::spans::SampleRatio;

/// Path of traces at a collector that receives OTLP over HTTP.
const TRACES_PATH: &str = "/v1/traces";

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct TracingSettings {
    otlp_endpoint: OtlpEndpoint,
    sample_ratio: SampleRatio,
}

/// `http://HOST:PORT`, maybe with a path; empty: none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
struct OtlpEndpoint(String);

impl Default for TracingSettings {
    fn default() -> Self {
        Self {
            otlp_endpoint: OtlpEndpoint::default(),
            sample_ratio: SampleRatio::ALL,
        }
    }
}

impl TracingSettings {
    /// The address that takes traces; `None`: no tracing.
    pub(crate) fn url(&self) -> Option<String> {
        let OtlpEndpoint(base) = &self.otlp_endpoint;
        (!base.is_empty()).then(|| format!("{}{TRACES_PATH}", base.trim_end_matches('/')))
    }

    pub(crate) const fn sample_ratio(&self) -> SampleRatio {
        self.sample_ratio
    }
}

impl TryFrom<String> for OtlpEndpoint {
    type Error = ValueError;

    fn try_from(text: String) -> Result<Self, ValueError> {
        let host = text.strip_prefix("http://");
        let is_base = host.is_some_and(|host| {
            !host.is_empty() && !host.starts_with('/') && !host.contains(['?', '#', '@', ' '])
        });
        if text.is_empty() || (is_base && reqwest::Url::parse(&text).is_ok()) {
            return Ok(Self(text));
        }
        Err(ValueError::OtlpEndpoint(text))
    }
}
