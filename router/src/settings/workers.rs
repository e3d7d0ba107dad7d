//! Workers that files declare: `[[workers]]` in the settings file, or a file of its own.

use std::path::Path;

use serde::Deserialize;

use super::file::{Settings, SettingsError, read};
use super::keys::InvalidSettings;
use crate::config::{WorkerSpec, check_workers};

/// Where workers may be declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerRule {
    /// In files and by the API, besides these ones of `--worker`.
    Embedded(Vec<WorkerSpec>),
    /// With NATS: each worker's shim registers it.
    Registered,
}

impl WorkerRule {
    /// Refuses workers that cannot be served beside those of `--worker`.
    pub(super) fn check(&self, workers: &[WorkerSpec]) -> Result<(), SettingsError> {
        match self {
            Self::Embedded(fixed) => Ok(check_workers(fixed.iter().chain(workers))?),
            Self::Registered if workers.is_empty() => Ok(()),
            Self::Registered => Err(SettingsError::WorkersRegistered),
        }
    }
}

/// A file that declares workers only.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(Default)]
struct WorkersFile {
    workers: Vec<WorkerSpec>,
}

impl Settings {
    /// Adds the workers of `workers_file`, whose path is relative to the settings file's directory.
    pub(super) fn add_workers_file(&mut self, settings: &Path) -> Result<(), SettingsError> {
        if self.workers_file.as_os_str().is_empty() {
            return Ok(());
        }
        let dir = settings.parent().unwrap_or_else(|| Path::new(""));
        let path = dir.join(&self.workers_file);
        let parse = |text: &str| toml::from_str::<WorkersFile>(text).map_err(InvalidSettings::from);
        let file = read(&path).and_then(|text| Ok(parse(&text)?));
        let file = file.map_err(|error| SettingsError::WorkersFile {
            path,
            error: Box::new(error),
        })?;
        self.workers.extend(file.workers);
        Ok(())
    }

    /// Reads the files of the workers' keys.
    pub(super) fn read_worker_keys(&mut self, settings: &Path) -> Result<(), SettingsError> {
        let dir = settings.parent().unwrap_or_else(|| Path::new(""));
        for worker in &mut self.workers {
            // An error that quotes the file would show the key.
            if worker.key.is_some() {
                return Err(SettingsError::WorkerKey(worker.id.clone()));
            }
            worker.read_key(dir)?;
        }
        Ok(())
    }
}
