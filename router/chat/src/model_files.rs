//! Reads the files of a model's tokenizer: a directory in Hugging Face's layout, or a bare
//! `tokenizer.json`. Files of other forms are converted.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::convert::{Configurations, ConversionError, ForeignForm};

mod legacy;
mod renderer;

/// A file is unreadable or malformed.
#[derive(Debug, thiserror::Error)]
pub enum ModelFileError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} is malformed: {reason}")]
    Json { path: PathBuf, reason: String },
    #[error("{path} has more than {max} bytes")]
    TooLarge { path: PathBuf, max: u64 },
    #[error("there is no tokenizer.json beside {path}: {source}")]
    Conversion {
        path: PathBuf,
        source: ConversionError,
    },
    #[error(
        "there is no tokenizer.json beside {path}, whose form is not supported: \
         convert it with transformers' AutoTokenizer and save_pretrained"
    )]
    OtherForm { path: PathBuf },
}

/// How an engine uses its templates.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct TemplateRules {
    /// JSON of `--default-chat-template-kwargs`.
    pub default_kwargs: Option<String>,
    pub unused_tools: UnusedTools,
}

/// The tools of a request whose `tool_choice` is `none`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnusedTools {
    #[default]
    Rendered,
    /// `--exclude-tools-when-tool-choice-none`.
    Excluded,
}

/// Where a model's tokenizer and templates are, and how they are used.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ModelSource {
    /// A directory, or a bare `tokenizer.json`.
    pub path: PathBuf,
    /// A template in a file of its own, which replaces the directory's.
    pub chat_template: Option<PathBuf>,
    pub rules: TemplateRules,
}

/// The content of a model's files.
#[derive(Debug, Default)]
pub struct ModelFiles {
    /// `tokenizer.json`, as it is or converted.
    pub(crate) tokenizer: Vec<u8>,
    /// `tokenizer_config.json` without its template.
    pub(crate) config: Map<String, Value>,
    pub(crate) templates: TemplateSources,
    pub(crate) rules: TemplateRules,
    /// The class or type by which transformers may choose other rules than those of
    /// `tokenizer.json`.
    pub(crate) rules_of: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum TemplateSources {
    #[default]
    None,
    Single(String),
    Named(BTreeMap<String, String>),
    /// The engine's own code of this name.
    OwnRenderer(&'static str),
}

impl ModelSource {
    pub fn read(&self) -> Result<ModelFiles, ModelFileError> {
        let mut files = read(&self.path)?;
        // A template in the settings replaces every renderer but one.
        let is_harmony = files.templates == TemplateSources::OwnRenderer(renderer::HARMONY);
        if let Some(path) = self.chat_template.as_ref().filter(|_| !is_harmony) {
            let template = fs::read_to_string(path).map_err(unreadable(path))?;
            files.templates = TemplateSources::Single(template);
        }
        files.rules = self.rules.clone();
        Ok(files)
    }
}

impl ModelFiles {
    /// Bytes of `tokenizer.json`, as it is or converted.
    pub fn tokenizer_bytes(&self) -> usize {
        self.tokenizer.len()
    }

    /// A hash of all that a tokenizer is made from.
    pub fn digest(&self) -> u64 {
        let rest = format!("{:?}{:?}{:?}", self.config, self.templates, self.rules);
        xxh3_64_with_seed(&self.tokenizer, xxh3_64(rest.as_bytes()))
    }
}

pub(crate) fn read(path: &Path) -> Result<ModelFiles, ModelFileError> {
    if !path.is_dir() {
        return Ok(ModelFiles {
            tokenizer: fs::read(path).map_err(unreadable(path))?,
            ..ModelFiles::default()
        });
    }
    let mut configurations = Configurations {
        tokenizer: json_object(&path.join("tokenizer_config.json"))?.unwrap_or_default(),
        model: json_object(&path.join("config.json"))?.unwrap_or_default(),
    };
    let config = &mut configurations.tokenizer;
    // A legacy file, read only where the configuration does not list its tokens by id.
    if !config.contains_key("added_tokens_decoder") {
        config.extend(json_object(&path.join("special_tokens_map.json"))?.unwrap_or_default());
    }
    let mut templates = template_sources(path, config.remove("chat_template"))?;
    let file = path.join("tokenizer.json");
    let tokenizer = match foreign_file(path).filter(|_| !file.exists()) {
        None => {
            let added = json_object(&path.join("added_tokens.json"))?;
            let tokenizer = fs::read(&file).map_err(unreadable(&file))?;
            legacy::add_tokens(added, &tokenizer, &mut configurations.tokenizer);
            legacy::with_mistral_rules(tokenizer, &configurations)
        }
        Some((path, None)) => return Err(ModelFileError::OtherForm { path }),
        Some((file, Some(form))) => {
            if !form.has_templates() {
                templates = TemplateSources::None;
            }
            let added = path.join("added_tokens.json");
            // Tokens that only this file lists are in no part that is converted.
            if added.exists()
                && !configurations
                    .tokenizer
                    .contains_key("added_tokens_decoder")
            {
                return Err(ModelFileError::OtherForm { path: added });
            }
            let content = bounded(&file, form.bytes_max())?;
            let converted = form.convert(&content, &mut configurations);
            converted.map_err(|source| ModelFileError::Conversion { path: file, source })?
        }
    };
    if let Some(name) = renderer::of_model(&configurations.model, &file_names(path)) {
        templates = TemplateSources::OwnRenderer(name);
    }
    Ok(ModelFiles {
        tokenizer,
        rules_of: legacy::rules_of(&configurations),
        config: configurations.tokenizer,
        templates,
        rules: TemplateRules::default(),
    })
}

/// The file that the engine reads where there is no `tokenizer.json`, and its form if the router
/// knows that.
fn foreign_file(directory: &Path) -> Option<(PathBuf, Option<ForeignForm>)> {
    let candidate = |name: String| {
        let form = ForeignForm::of_name(&name);
        let is_other = name == "vocab.json" || name.ends_with(".model");
        (form.is_some() || is_other).then(|| (directory.join(name), form))
    };
    let entries = file_names(directory).into_iter().filter_map(candidate);
    // The forms are in the order in which engines look for them.
    entries.min_by(|(path, form), (other_path, other_form)| {
        let key = (form.is_none(), *form, path);
        key.cmp(&(other_form.is_none(), *other_form, other_path))
    })
}

fn file_names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let name = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
    entries.filter_map(name).collect()
}

fn bounded(path: &Path, max: u64) -> Result<Vec<u8>, ModelFileError> {
    let mut content = Vec::new();
    let file = fs::File::open(path).map_err(unreadable(path))?;
    let read = file.take(max + 1).read_to_end(&mut content);
    if read.map_err(unreadable(path))? as u64 > max {
        let path = path.to_owned();
        return Err(ModelFileError::TooLarge { path, max });
    }
    Ok(content)
}

/// Template files take precedence over the configuration, and over a processor's legacy file.
fn template_sources(
    directory: &Path,
    configured: Option<Value>,
) -> Result<TemplateSources, ModelFileError> {
    let single = text(&directory.join("chat_template.jinja"))?;
    let mut named = additional_templates(&directory.join("additional_chat_templates"))?;
    if !named.is_empty() {
        named.extend(single.map(|source| ("default".to_owned(), source)));
        return Ok(TemplateSources::Named(named));
    }
    if let Some(source) = single {
        return Ok(TemplateSources::Single(source));
    }
    if let Some(mut legacy) = json_object(&directory.join("chat_template.json"))?
        && let Some(Value::String(source)) = legacy.remove("chat_template")
    {
        return Ok(TemplateSources::Single(source));
    }
    let malformed = || ModelFileError::Json {
        path: directory.join("tokenizer_config.json"),
        reason: "chat_template is neither text nor a list of names and templates".to_owned(),
    };
    match configured {
        None | Some(Value::Null) => Ok(TemplateSources::None),
        Some(Value::String(source)) => Ok(TemplateSources::Single(source)),
        Some(Value::Array(list)) => named_list(&list)
            .map(TemplateSources::Named)
            .ok_or_else(malformed),
        Some(_) => Err(malformed()),
    }
}

fn named_list(list: &[Value]) -> Option<BTreeMap<String, String>> {
    let text = |entry: &Value, name: &str| entry.get(name)?.as_str().map(str::to_owned);
    list.iter()
        .map(|entry| Some((text(entry, "name")?, text(entry, "template")?)))
        .collect()
}

/// The `*.jinja` files of a directory, by name; empty if it does not exist.
fn additional_templates(directory: &Path) -> Result<BTreeMap<String, String>, ModelFileError> {
    let mut named = BTreeMap::new();
    if !directory.is_dir() {
        return Ok(named);
    }
    for entry in fs::read_dir(directory).map_err(unreadable(directory))? {
        let path = entry.map_err(unreadable(directory))?.path();
        let is_template = path.extension().is_some_and(|end| end == "jinja");
        let name = path.file_stem().and_then(|stem| stem.to_str());
        if let (true, Some(name)) = (is_template, name)
            && let Some(source) = text(&path)?
        {
            named.insert(name.to_owned(), source);
        }
    }
    Ok(named)
}

fn unreadable(path: &Path) -> impl Fn(io::Error) -> ModelFileError + use<'_> {
    |source| ModelFileError::Read {
        path: path.to_owned(),
        source,
    }
}

/// A file's text; `None` if the file does not exist.
fn text(path: &Path) -> Result<Option<String>, ModelFileError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unreadable(path)(error)),
    }
}

fn json_object(path: &Path) -> Result<Option<Map<String, Value>>, ModelFileError> {
    let Some(text) = text(path)? else {
        return Ok(None);
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|error| ModelFileError::Json {
            path: path.to_owned(),
            reason: error.to_string(),
        })
}

#[cfg(test)]
mod tests;
