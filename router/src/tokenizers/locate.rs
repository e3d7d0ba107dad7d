//! Finds the files of a model's tokenizer. Model names come from engines and settings: none of them
//! leaves the directory that it is looked up in.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::settings::Settings;
use crate::tokenize::ModelSource;

/// Longest name that is looked up, in bytes.
const NAME_BYTES_MAX: usize = 256;

/// The files that a tokenizer is named by, in a model's directory.
const TOKENIZER_FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "config.json"];

/// Where a served model's files may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModelNames<'a> {
    /// As engines list it.
    pub served: &'a str,
    /// The path or id that its engine reports as the model's root.
    pub root: Option<&'a str>,
}

/// A named tokenizer that is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocateError {
    #[error("{0} does not exist")]
    NoPath(String),
    #[error(
        "{id} is neither a path nor in the hub cache {cache:?}: run `hf download {id} \
         --include '*.jinja' '*token*' 'config.json' 'tekken.json'` there, or name a directory"
    )]
    NotCached { id: String, cache: PathBuf },
}

/// The local cache of the Hugging Face hub, which is read only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HubCache(PathBuf);

impl HubCache {
    /// The directory that Hugging Face's own tools use.
    pub(crate) fn from_env() -> Self {
        let dir = |name| env::var_os(name).filter(|value| !value.is_empty());
        let dir = |name| dir(name).map(PathBuf::from);
        let of_user = || Some(dir("HOME")?.join(".cache"));
        let cache = || dir("XDG_CACHE_HOME").or_else(of_user);
        let home = || dir("HF_HOME").or_else(|| Some(cache()?.join("huggingface")));
        let hub = dir("HF_HUB_CACHE").or_else(|| Some(home()?.join("hub")));
        Self(hub.unwrap_or_default())
    }

    #[cfg(test)]
    pub(super) const fn at(path: PathBuf) -> Self {
        Self(path)
    }

    /// The snapshot of an id's main branch.
    fn snapshot(&self, id: &str) -> Option<PathBuf> {
        let repository = self.0.join(format!("models--{}", id.replace('/', "--")));
        let commit = fs::read_to_string(repository.join("refs/main")).ok()?;
        let commit = commit.trim();
        let is_commit = !commit.is_empty() && commit.bytes().all(|b| b.is_ascii_alphanumeric());
        let snapshot = repository.join("snapshots").join(commit);
        (is_commit && snapshot.is_dir()).then_some(snapshot)
    }

    /// A path, or a Hugging Face id that is in the cache.
    pub(crate) fn find(&self, named: &str) -> Result<PathBuf, LocateError> {
        let path = PathBuf::from(named);
        if path.exists() {
            return Ok(path);
        }
        let is_id = named.split('/').count() <= 2 && is_plain_name(named);
        if !is_id {
            return Err(LocateError::NoPath(named.to_owned()));
        }
        self.snapshot(named).ok_or_else(|| LocateError::NotCached {
            id: named.to_owned(),
            cache: self.0.clone(),
        })
    }
}

/// Finds a model's files: by its settings, else in `models_dir`, else `default`. `None`: there are
/// none.
pub(super) fn locate(
    names: ModelNames<'_>,
    settings: &Settings,
    default: Option<&Path>,
    cache: &HubCache,
) -> Result<Option<ModelSource>, LocateError> {
    let of_model = settings.models.of(names.served);
    let configured = of_model.and_then(|model| model.tokenizer());
    let path = match configured {
        Some(named) => Some(cache.find(named)?),
        None => settings
            .models_dir()
            .and_then(|dir| in_directory(dir, names))
            .or_else(|| default.map(Path::to_owned)),
    };
    Ok(path.map(|path| ModelSource {
        path,
        chat_template: of_model.and_then(|model| model.chat_template()),
        rules: of_model.map(|model| model.rules()).unwrap_or_default(),
    }))
}

/// The directory of a model below `dir`: its served name, its root, or the root's last part.
fn in_directory(dir: &Path, names: ModelNames<'_>) -> Option<PathBuf> {
    let root = names.root.map(|root| root.trim_end_matches('/'));
    let last = root.and_then(|root| root.rsplit('/').next());
    let names = [Some(names.served), root, last];
    let plain = names
        .into_iter()
        .flatten()
        .filter(|name| is_plain_name(name));
    let mut paths = plain.map(|name| dir.join(name));
    paths.find(|path| TOKENIZER_FILES.iter().any(|file| path.join(file).exists()))
}

/// Whether a name is a relative path of plain parts: `..`, absolute paths and backslashes would leave
/// a directory.
fn is_plain_name(name: &str) -> bool {
    let is_plain = |part: &str| {
        let mut bytes = part.bytes();
        !part.is_empty()
            && !part.bytes().all(|byte| byte == b'.')
            && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-_.:@+".contains(&byte))
    };
    name.len() <= NAME_BYTES_MAX && name.split('/').all(is_plain)
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn scratch(files: &[&str]) -> TempDir {
        let dir = TempDir::new().unwrap();
        for file in files {
            let file = dir.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "abc123\n").unwrap();
        }
        dir
    }

    fn found(scratch: &TempDir, served: &str, root: Option<&str>) -> Option<String> {
        let dir = scratch.path().join("models");
        let settings = Settings::parse(&format!("models_dir = {dir:?}")).unwrap();
        let names = ModelNames { served, root };
        let source = locate(names, &settings, None, &HubCache::default()).unwrap()?;
        let relative = source.path.strip_prefix(scratch.path()).unwrap();
        Some(relative.to_str().unwrap().to_owned())
    }

    #[test]
    fn a_model_is_found_by_name_then_by_root() {
        let scratch = scratch(&[
            "models/chat/tokenizer.json",
            "models/org/base/tokenizer_config.json",
            "models/base/tokenizer.json",
        ]);
        for (served, root, path) in [
            ("chat", Some("org/base"), Some("models/chat")),
            ("x", Some("org/base"), Some("models/org/base")),
            ("x", Some("/data/weights/base/"), Some("models/base")),
            ("org/base", None, Some("models/org/base")),
            ("x", Some("/data/weights/none"), None),
            ("x", None, None),
        ] {
            let path = path.map(str::to_owned);
            assert_eq!(found(&scratch, served, root), path, "{served} {root:?}");
        }
    }

    /// Names come from the network.
    #[test]
    fn a_name_never_leaves_the_directory() {
        let scratch = scratch(&["secret/tokenizer.json", "models/m/tokenizer.json"]);
        let absolute = scratch.path().join("secret");
        for name in [
            "../secret",
            "m/../../secret",
            "./../secret",
            absolute.to_str().unwrap(),
            "..",
            ".",
            "",
            "m//../../secret",
            "..\\secret",
            "m\0",
            "...",
        ] {
            assert_eq!(found(&scratch, name, None), None, "{name:?}");
            let by_root = found(&scratch, "none", Some(name));
            assert_eq!(by_root, None, "{name:?}");
        }
        assert!(found(&scratch, "m", None).is_some());
    }

    #[test]
    fn an_id_is_found_in_the_hub_cache() {
        let scratch = scratch(&[
            "hub/models--org--m/refs/main",
            "hub/models--org--m/snapshots/abc123/tokenizer.json",
            "hub/models--org--half/refs/main",
        ]);
        let cache = HubCache::at(scratch.path().join("hub"));
        let path = cache.find("org/m").unwrap();
        assert!(path.ends_with("models--org--m/snapshots/abc123"));
        for id in ["org/half", "org/none", "none"] {
            let error = cache.find(id).unwrap_err();
            assert!(matches!(error, LocateError::NotCached { .. }), "{error}");
            assert!(error.to_string().contains(&format!("hf download {id}")));
        }
        for path in ["/no/such/dir", "../x", "a/b/c"] {
            assert_eq!(cache.find(path), Err(LocateError::NoPath(path.into())));
        }
        assert_eq!(cache.find(path.to_str().unwrap()), Ok(path));
    }

    #[test]
    fn settings_come_before_the_directory_and_the_default_is_last() {
        let scratch = scratch(&["models/m/tokenizer.json", "own/tokenizer.json"]);
        let text = format!(
            "models_dir = {:?}\n[models.llama]\ntokenizer = {:?}\naliases = [\"m\"]\n\
             chat_template = \"/t.jinja\"\nexclude_tools_when_tool_choice_none = true\n\
             default_chat_template_kwargs = {{ enable_thinking = false }}\n[models.bad]\n\
             tokenizer = \"/no/such\"\n",
            scratch.path().join("models"),
            scratch.path().join("own"),
        );
        let settings = Settings::parse(&text).unwrap();
        let default = Path::new("/default");
        let find = |served| {
            let names = ModelNames { served, root: None };
            locate(names, &settings, Some(default), &HubCache::default())
        };
        let own = find("llama").unwrap().unwrap();
        assert_eq!(own.path, scratch.path().join("own"));
        assert_eq!(own.chat_template.as_deref(), Some(Path::new("/t.jinja")));
        let kwargs = own.rules.default_kwargs.as_deref();
        assert_eq!(kwargs, Some("{\"enable_thinking\":false}"));
        assert_eq!(find("m").unwrap().unwrap(), own, "by its alias");
        assert_eq!(find("other").unwrap().unwrap().path, default);
        assert!(find("bad").is_err());
    }
}
