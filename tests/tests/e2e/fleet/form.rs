//! What differs between the engines of one fleet.

use super::{BLOCK, TOKENIZER, strings};

/// An engine's model and how it is cached and published.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    /// Served name.
    pub(crate) model: &'static str,
    /// Directory.
    pub(crate) tokenizer: &'static str,
    pub(crate) block_size: u64,
    pub(crate) events: Events,
    pub(crate) engine: EngineKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Events {
    Published,
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineKind {
    Vllm,
    Sglang,
}

impl Form {
    pub(crate) const USUAL: Self = Self {
        model: "mock",
        tokenizer: TOKENIZER,
        block_size: BLOCK,
        events: Events::Published,
        engine: EngineKind::Vllm,
    };

    pub(super) fn of(index: usize, forms: &[Self]) -> Self {
        forms.get(index).copied().unwrap_or(Self::USUAL)
    }

    pub(super) fn flags(self) -> Vec<String> {
        let mut flags = strings(&["--model", self.model, "--tokenizer", self.tokenizer]);
        if self.events == Events::None {
            flags.push("--no-events".to_owned());
        }
        if self.engine == EngineKind::Sglang {
            flags.push("--form=sglang".to_owned());
        }
        flags
    }
}
