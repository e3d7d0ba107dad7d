//! What prompts have in common that a router renders and tokenizes in one way.

use std::fmt;
use std::sync::Arc;

/// The form of a prompt: by which code and files its tokens were made.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PromptForm {
    /// The requested name: a base model's or an adapter's.
    pub model: Arc<str>,
    /// The version of the router's tokenizer; 0 where the client or an engine sent token ids.
    pub tokenizer: u64,
    pub route: &'static str,
    pub features: PromptFeatures,
}

impl PromptForm {
    /// For reports that have no form in common.
    pub(super) fn any() -> Arc<Self> {
        Arc::new(Self {
            model: Arc::from(""),
            tokenizer: 0,
            route: "",
            features: PromptFeatures::default(),
        })
    }
}

impl fmt::Display for PromptForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of model {}", self.route, self.model)?;
        for (place, name) in self.features.names().enumerate() {
            let before = if place == 0 { " with" } else { "," };
            write!(f, "{before} {name}")?;
        }
        Ok(())
    }
}

/// What a template may branch on, and how the text reaches it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PromptFeatures(u8);

impl PromptFeatures {
    pub const TOKEN_IDS: Self = Self(1);
    pub const TOOLS: Self = Self(1 << 1);
    pub const TOOL_CALLS: Self = Self(1 << 2);
    pub const CONTENT_PARTS: Self = Self(1 << 3);
    pub const REASONING: Self = Self(1 << 4);
    pub const TEMPLATE_OPTIONS: Self = Self(1 << 5);
    pub const IMAGES: Self = Self(1 << 6);

    const NAMED: [(Self, &'static str); 7] = [
        (Self::TOKEN_IDS, "token ids"),
        (Self::TOOLS, "tools"),
        (Self::TOOL_CALLS, "tool calls"),
        (Self::CONTENT_PARTS, "content parts"),
        (Self::REASONING, "reasoning"),
        (Self::TEMPLATE_OPTIONS, "template options"),
        (Self::IMAGES, "images"),
    ];

    /// With `feature` if `has`.
    #[must_use]
    pub const fn with(self, feature: Self, has: bool) -> Self {
        if has { Self(self.0 | feature.0) } else { self }
    }

    fn names(self) -> impl Iterator<Item = &'static str> {
        let named = Self::NAMED.into_iter();
        named.filter_map(move |(feature, name)| (self.0 & feature.0 != 0).then_some(name))
    }
}
