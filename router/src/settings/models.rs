//! The settings of single models: `[models."NAME"]`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::Deserialize;

use super::file::ValueError;
use crate::tokenize::{TemplateRules, UnusedTools};

/// What the file sets for models.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(crate) struct ModelTable(BTreeMap<String, ModelSettings>);

/// What the file sets for one model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ModelSettings {
    /// A path, or a Hugging Face id. Empty: from `models_dir`.
    tokenizer: String,
    chat_template: PathBuf,
    default_chat_template_kwargs: TemplateKwargs,
    exclude_tools_when_tool_choice_none: bool,
    /// Further names under which engines serve it.
    aliases: BTreeSet<String>,
}

/// A table of template arguments, as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "toml::Table")]
struct TemplateKwargs(Option<String>);

impl TryFrom<toml::Table> for TemplateKwargs {
    type Error = ValueError;

    fn try_from(table: toml::Table) -> Result<Self, ValueError> {
        let json = serde_json::to_string(&table).map_err(|_| ValueError::TemplateKwargs)?;
        // A date has no JSON value, and infinite numbers become null.
        let kept = serde_json::from_str::<toml::Table>(&json);
        if kept.ok().as_ref() != Some(&table) {
            return Err(ValueError::TemplateKwargs);
        }
        Ok(Self((!table.is_empty()).then_some(json)))
    }
}

impl ModelTable {
    /// Paths may differ between machines. Each router checks what they name against the engines.
    pub(super) fn without_paths(&self) -> Self {
        let mut table = self.clone();
        for model in table.0.values_mut() {
            model.tokenizer.clear();
            model.chat_template.clear();
        }
        table
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The settings of the model that engines serve under this name.
    pub(crate) fn of(&self, served: &str) -> Option<&ModelSettings> {
        let by_alias = || self.0.values().find(|model| model.aliases.contains(served));
        self.0.get(served).or_else(by_alias)
    }
}

impl ModelSettings {
    /// Path or id of its tokenizer.
    pub(crate) fn tokenizer(&self) -> Option<&str> {
        (!self.tokenizer.is_empty()).then_some(self.tokenizer.as_str())
    }

    pub(crate) fn chat_template(&self) -> Option<PathBuf> {
        let path = &self.chat_template;
        (!path.as_os_str().is_empty()).then(|| path.clone())
    }

    pub(crate) fn rules(&self) -> TemplateRules {
        TemplateRules {
            default_kwargs: self.default_chat_template_kwargs.0.clone(),
            unused_tools: if self.exclude_tools_when_tool_choice_none {
                UnusedTools::Excluded
            } else {
                UnusedTools::Rendered
            },
        }
    }
}
