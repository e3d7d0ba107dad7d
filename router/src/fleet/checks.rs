//! What a worker has to show at its registration: that its tokens and blocks are the router's.

use serde::Serialize;

/// The result of one check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub(crate) enum Check {
    /// Not done yet: not trusted yet.
    #[default]
    Pending,
    Passed,
    Failed {
        why: String,
    },
    /// There is nothing to compare with. Not trusted, and nobody's fault.
    Skipped {
        why: String,
    },
}

impl Check {
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

    const fn pending(&self) -> bool {
        matches!(self, Self::Pending)
    }
}

/// The checks of one worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Checks {
    /// A rendered and tokenized chat has the engine's token ids.
    pub chat: Check,
    /// So has one with tools.
    pub chat_with_tools: Check,
    /// So has a text.
    pub text: Check,
    /// A block has as many tokens here as there.
    pub block_size: Check,
}

impl Checks {
    pub(crate) const fn complete(&self) -> bool {
        let Self {
            chat,
            chat_with_tools,
            text,
            block_size,
        } = self;
        !(chat.pending() || chat_with_tools.pending() || text.pending() || block_size.pending())
    }

    /// Each check by its name.
    pub(crate) const fn named(&self) -> [(&'static str, &Check); 4] {
        [
            ("chat", &self.chat),
            ("chat_with_tools", &self.chat_with_tools),
            ("text", &self.text),
            ("block_size", &self.block_size),
        ]
    }
}
