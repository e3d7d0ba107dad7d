//! Results of the checks at a worker's registration: its tokens and blocks are the router's.

use serde::Serialize;

/// The result of one check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub(crate) enum CheckResult {
    /// Not done yet: not trusted yet.
    #[default]
    Pending,
    Passed,
    Failed {
        why: String,
    },
    /// There is nothing to compare with. Not trusted, and not a fault.
    Skipped {
        why: String,
    },
}

/// The checks of one worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct RegistrationChecks {
    /// A rendered and tokenized chat has the engine's token ids.
    pub chat: CheckResult,
    pub chat_with_tools: CheckResult,
    pub text: CheckResult,
    /// Blocks have as many tokens as the router assumes.
    pub block_size: CheckResult,
}

impl CheckResult {
    pub(crate) fn failed(why: impl Into<String>) -> Self {
        Self::Failed { why: why.into() }
    }

    pub(crate) fn skipped(why: impl Into<String>) -> Self {
        Self::Skipped { why: why.into() }
    }

    pub(crate) const fn passed(&self) -> bool {
        matches!(self, Self::Passed)
    }

    pub(crate) const fn is_failure(&self) -> bool {
        matches!(self, Self::Failed { .. })
    }
}

impl RegistrationChecks {
    pub(crate) fn complete(&self) -> bool {
        let checks = self.named();
        checks
            .iter()
            .all(|(_, check)| **check != CheckResult::Pending)
    }

    /// Each check by its name.
    pub(crate) const fn named(&self) -> [(&'static str, &CheckResult); 4] {
        let Self {
            chat,
            chat_with_tools,
            text,
            block_size,
        } = self;
        [
            ("chat", chat),
            ("chat_with_tools", chat_with_tools),
            ("text", text),
            ("block_size", block_size),
        ]
    }
}
