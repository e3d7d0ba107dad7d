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
    pub(crate) role: &'static str,
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
    Trtllm,
    /// vLLM with LMCache behind it.
    Lmcache,
}

impl Form {
    pub(crate) const USUAL: Self = Self {
        model: "mock",
        tokenizer: TOKENIZER,
        block_size: BLOCK,
        events: Events::Published,
        engine: EngineKind::Vllm,
        role: "both",
    };

    /// The best state of its sources.
    pub(crate) const fn best_state(self) -> &'static str {
        match self.engine {
            EngineKind::Vllm | EngineKind::Sglang | EngineKind::Lmcache => "exact",
            EngineKind::Trtllm => "unverified",
        }
    }

    pub(super) fn of(index: usize, forms: &[Self]) -> Self {
        forms.get(index).copied().unwrap_or(Self::USUAL)
    }

    pub(super) fn flags(self) -> Vec<String> {
        let mut flags = strings(&["--model", self.model, "--tokenizer", self.tokenizer]);
        flags.extend(strings(&["--role", self.role]));
        if self.events == Events::None {
            flags.push("--no-events".to_owned());
        }
        let of_engine: &[&str] = match self.engine {
            EngineKind::Vllm => &[],
            EngineKind::Sglang => &["--form=sglang"],
            EngineKind::Trtllm => &["--form=trtllm"],
            EngineKind::Lmcache => &["--lmcache", "--cpu-blocks=2000"],
        };
        flags.extend(strings(of_engine));
        flags
    }

    /// Facts that the engine's events do not show.
    pub(super) const fn assumed(self) -> &'static [&'static str] {
        match self.engine {
            EngineKind::Vllm | EngineKind::Sglang => &[],
            EngineKind::Trtllm => &["no-extra-keys"],
            EngineKind::Lmcache => &["no-extra-keys", "no-lora"],
        }
    }
}
