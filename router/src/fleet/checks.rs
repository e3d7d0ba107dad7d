//! Results of the checks at a worker's registration: its tokens and blocks are the router's.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::openai::PromptRoute;
use crate::tokenize::parity::ProbePath;
use crate::tokenizers::TokenizerVersion;

/// The name of the check without which a worker's images have no credit.
pub(crate) const RENDERED_CHAT: &str = "rendered_chat";

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
    /// The weakest result of its models.
    #[serde(flatten)]
    pub tokens: TokenChecks,
    /// Blocks have as many tokens as the operator says.
    pub block_size: CheckResult,
    /// By base model.
    #[serde(skip)]
    pub models: BTreeMap<String, ModelChecks>,
}

/// The checks of one model of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ModelChecks {
    /// The tokenizer that was compared.
    pub tokenizer: Option<TokenizerVersion>,
    pub tokens: TokenChecks,
}

/// Whether the router has the engine's token ids, for each kind of prompts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct TokenChecks {
    /// A rendered and tokenized chat.
    pub chat: CheckResult,
    pub chat_with_tools: CheckResult,
    pub text: CheckResult,
    /// A chat by the engine's own render route, which images need; skipped where it has none.
    pub rendered_chat: CheckResult,
    /// `/v1/responses`. Compared by the engine's render routes, like the next two; skipped, and not
    /// credited, where it has none.
    pub responses: CheckResult,
    /// `/v1/messages`.
    pub messages: CheckResult,
    pub messages_with_tools: CheckResult,
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

    /// A failure, else a check that is not done, else a skipped one.
    fn weakest(self, other: &Self) -> Self {
        let rank = |result: &Self| match result {
            Self::Failed { .. } => 0,
            Self::Pending => 1,
            Self::Skipped { .. } => 2,
            Self::Passed => 3,
        };
        if rank(other) < rank(&self) {
            other.clone()
        } else {
            self
        }
    }

    pub(crate) const fn is_failure(&self) -> bool {
        matches!(self, Self::Failed { .. })
    }
}

impl TokenChecks {
    /// One result for all checks.
    pub(crate) fn all(result: &CheckResult) -> Self {
        Self {
            chat: result.clone(),
            chat_with_tools: result.clone(),
            text: result.clone(),
            rendered_chat: result.clone(),
            responses: result.clone(),
            messages: result.clone(),
            messages_with_tools: result.clone(),
        }
    }

    /// Each check by its name.
    pub(crate) const fn named(&self) -> [(&'static str, &CheckResult); 7] {
        let Self {
            chat,
            chat_with_tools,
            text,
            rendered_chat,
            responses,
            messages,
            messages_with_tools,
        } = self;
        [
            ("chat", chat),
            ("chat_with_tools", chat_with_tools),
            ("text", text),
            (RENDERED_CHAT, rendered_chat),
            ("responses", responses),
            ("messages", messages),
            ("messages_with_tools", messages_with_tools),
        ]
    }

    /// The checks that one route of an engine is asked for.
    pub(crate) fn of_path(&mut self, path: ProbePath) -> Vec<&mut CheckResult> {
        match path {
            ProbePath::Tokenize => {
                vec![&mut self.chat, &mut self.chat_with_tools, &mut self.text]
            }
            ProbePath::RenderChat => vec![&mut self.rendered_chat],
            ProbePath::RenderResponses => vec![&mut self.responses],
            ProbePath::RenderMessages => {
                vec![&mut self.messages, &mut self.messages_with_tools]
            }
        }
    }

    /// The routes with a check that is not done.
    pub(crate) fn open_paths(mut self) -> BTreeSet<ProbePath> {
        let is_open = |path: &ProbePath| {
            let mut checks = self.of_path(*path).into_iter();
            checks.any(|check| *check == CheckResult::Pending)
        };
        ProbePath::ALL.into_iter().filter(is_open).collect()
    }

    /// The check by which an engine is known to render prompts of this route; `None`: it renders no
    /// images there.
    pub(crate) const fn rendering(&self, route: PromptRoute) -> Option<&CheckResult> {
        match route {
            PromptRoute::ChatCompletions => Some(&self.rendered_chat),
            PromptRoute::Responses => Some(&self.responses),
            PromptRoute::Messages => Some(&self.messages),
            PromptRoute::Completions
            | PromptRoute::Embeddings
            | PromptRoute::Pooling
            | PromptRoute::TokenIds
            | PromptRoute::Embed => None,
        }
    }

    fn weakest(self, other: &Self) -> Self {
        Self {
            chat: self.chat.weakest(&other.chat),
            chat_with_tools: self.chat_with_tools.weakest(&other.chat_with_tools),
            text: self.text.weakest(&other.text),
            rendered_chat: self.rendered_chat.weakest(&other.rendered_chat),
            responses: self.responses.weakest(&other.responses),
            messages: self.messages.weakest(&other.messages),
            messages_with_tools: self.messages_with_tools.weakest(&other.messages_with_tools),
        }
    }
}

impl RegistrationChecks {
    pub(crate) fn new(block_size: CheckResult, models: BTreeMap<String, ModelChecks>) -> Self {
        let none = CheckResult::skipped("it serves no base model");
        let mut each = models.values().map(|checks| checks.tokens.clone());
        let first = each.next().unwrap_or_else(|| TokenChecks::all(&none));
        Self {
            tokens: each.fold(first, |all, tokens| all.weakest(&tokens)),
            block_size,
            models,
        }
    }

    pub(crate) fn complete(&self) -> bool {
        let mut checks = self.named();
        checks.all(|(_, check)| *check != CheckResult::Pending)
    }

    /// Each check by its name.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, &CheckResult)> {
        let block_size = ("block_size", &self.block_size);
        self.tokens.named().into_iter().chain([block_size])
    }
}
