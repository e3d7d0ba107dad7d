//! The files of a model's tokenizer: a directory as Hugging Face lays it out, or a bare
//! `tokenizer.json`. Reading is all that happens here.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

/// A file could not be read or does not say what it should.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} is not the JSON that is expected: {reason}")]
    Json { path: PathBuf, reason: String },
}

/// What `tokenizer_config.json` and its neighbours say.
#[derive(Debug, Default)]
pub(crate) struct Files {
    pub(crate) tokenizer: Vec<u8>,
    pub(crate) config: Map<String, Value>,
    pub(crate) templates: Templates,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) enum Templates {
    #[default]
    None,
    Single(String),
    Named(BTreeMap<String, String>),
}

pub(crate) fn read(path: &Path) -> Result<Files, FileError> {
    if !path.is_dir() {
        return Ok(Files {
            tokenizer: bytes(path)?,
            ..Files::default()
        });
    }
    let mut config = object(&path.join("tokenizer_config.json"))?.unwrap_or_default();
    // A file of earlier times, read only where the configuration does not list its tokens by id.
    if !config.contains_key("added_tokens_decoder") {
        config.extend(object(&path.join("special_tokens_map.json"))?.unwrap_or_default());
    }
    let templates = templates(path, config.remove("chat_template"))?;
    Ok(Files {
        tokenizer: bytes(&path.join("tokenizer.json"))?,
        config,
        templates,
    })
}

/// Template files come before the configuration's own; a processor's legacy file before that one.
fn templates(directory: &Path, configured: Option<Value>) -> Result<Templates, FileError> {
    let single = text(&directory.join("chat_template.jinja"))?;
    let mut named = additional(&directory.join("additional_chat_templates"))?;
    if !named.is_empty() {
        named.extend(single.map(|source| ("default".to_owned(), source)));
        return Ok(Templates::Named(named));
    }
    if let Some(source) = single {
        return Ok(Templates::Single(source));
    }
    if let Some(legacy) = object(&directory.join("chat_template.json"))?
        && let Some(Value::String(source)) = legacy.get("chat_template")
    {
        return Ok(Templates::Single(source.clone()));
    }
    let path = || directory.join("tokenizer_config.json");
    match configured {
        None | Some(Value::Null) => Ok(Templates::None),
        Some(Value::String(source)) => Ok(Templates::Single(source)),
        Some(Value::Array(list)) => named_list(&list).map(Templates::Named).ok_or_else(|| {
            let reason = "chat_template is a list without names and templates".to_owned();
            FileError::Json {
                path: path(),
                reason,
            }
        }),
        Some(_) => {
            let reason = "chat_template is neither a text nor a list".to_owned();
            Err(FileError::Json {
                path: path(),
                reason,
            })
        }
    }
}

fn named_list(list: &[Value]) -> Option<BTreeMap<String, String>> {
    let text = |entry: &Value, name: &str| entry.get(name)?.as_str().map(str::to_owned);
    list.iter()
        .map(|entry| Some((text(entry, "name")?, text(entry, "template")?)))
        .collect()
}

fn additional(directory: &Path) -> Result<BTreeMap<String, String>, FileError> {
    let mut named = BTreeMap::new();
    if !directory.is_dir() {
        return Ok(named);
    }
    let failed = |source| FileError::Read {
        path: directory.to_owned(),
        source,
    };
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_template = path
            .extension()
            .is_some_and(|extension| extension == "jinja");
        let name = path
            .file_stem()
            .and_then(|stem| stem.to_str())
            .map(str::to_owned);
        if let (true, Some(name), Some(source)) = (is_template, name, text(&path)?) {
            named.insert(name, source);
        }
    }
    Ok(named)
}

fn bytes(path: &Path) -> Result<Vec<u8>, FileError> {
    fs::read(path).map_err(|source| FileError::Read {
        path: path.to_owned(),
        source,
    })
}

/// A file's text, or nothing if there is no such file.
fn text(path: &Path) -> Result<Option<String>, FileError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(FileError::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

fn object(path: &Path) -> Result<Option<Map<String, Value>>, FileError> {
    let Some(text) = text(path)? else {
        return Ok(None);
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|error| FileError::Json {
            path: path.to_owned(),
            reason: error.to_string(),
        })
}

#[cfg(test)]
mod tests;
