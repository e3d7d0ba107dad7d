//! `[engines]`: what engines get from this router besides requests, and what waits for them.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::http::HeaderValue;
use serde::Deserialize;
use warmroute_process::tls::Authorities;
use warmroute_shim::EngineKey;

use super::file::{Ranged, Seconds, Settings, SettingsError, read};
use crate::route::EngineBounds;

/// An engine may keep a few requests waiting for one step.
const FOREIGN_WAITING: NonZeroU32 = NonZeroU32::new(8).expect("it is not 0");

/// `[engines]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct EngineSettings {
    answer_timeout_secs: Seconds,
    authorization: AuthorizationRule,
    ca: PathBuf,
    key_file: PathBuf,
    load: bool,
    max_foreign_waiting: NonZeroU32,
    max_kv_usage_percent: Ranged<1, 100>,
    pub(super) queue_timeout_secs: Seconds,
    pub(super) max_queued_requests: usize,
    pub(super) max_queued_requests_per_model: usize,
    salted_messages: bool,
    token_timeout_secs: Seconds,
    wake: bool,
    /// The content of `ca`.
    #[serde(skip)]
    authorities: Authorities,
    /// The content of `key_file`.
    #[serde(skip)]
    key: Option<EngineKey>,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            answer_timeout_secs: Ranged(0),
            authorization: AuthorizationRule::Auto,
            ca: PathBuf::new(),
            key_file: PathBuf::new(),
            load: false,
            max_foreign_waiting: FOREIGN_WAITING,
            max_kv_usage_percent: Ranged(95),
            queue_timeout_secs: Ranged(30),
            max_queued_requests: 10_000,
            max_queued_requests_per_model: 10_000,
            salted_messages: false,
            token_timeout_secs: Ranged(0),
            wake: false,
            authorities: Authorities::default(),
            key: None,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum AuthorizationRule {
    #[default]
    Auto,
    Pass,
    Strip,
    Replace,
}

/// Whether tenants have caches of their own, on which routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SeparateCaches {
    None,
    /// The engines ignore the salt of `/v1/messages`, or may do so.
    WithoutMessages,
    WithMessages,
}

/// The clients' `Authorization` and `x-api-key` on the way to engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EngineAuthorization {
    /// Sent as they are, except for a tenant's key.
    Pass,
    Strip,
    /// The engines' own key is sent instead.
    Replace(HeaderValue),
}

impl EngineSettings {
    /// Without the key and the authorities.
    pub(super) fn without_files(&self) -> Self {
        Self {
            ca: PathBuf::new(),
            key_file: PathBuf::new(),
            authorities: Authorities::default(),
            key: None,
            ..self.clone()
        }
    }
}

impl Settings {
    pub(crate) fn separate_caches(&self) -> SeparateCaches {
        let mut tenants = self.tenants.iter();
        if tenants.all(|tenant| tenant.salt_group.is_none()) {
            SeparateCaches::None
        } else if self.engines.salted_messages {
            SeparateCaches::WithMessages
        } else {
            SeparateCaches::WithoutMessages
        }
    }

    pub(crate) fn engine_authorization(&self) -> EngineAuthorization {
        let engines = &self.engines;
        match (engines.authorization, &engines.key) {
            (AuthorizationRule::Pass, _) => EngineAuthorization::Pass,
            (AuthorizationRule::Replace, Some(key)) => {
                EngineAuthorization::Replace(key.header().clone())
            }
            // Where there are tenants, clients' keys are for this router.
            (AuthorizationRule::Auto, _) if self.tenants.is_empty() => EngineAuthorization::Pass,
            (
                AuthorizationRule::Auto | AuthorizationRule::Strip | AuthorizationRule::Replace,
                _,
            ) => EngineAuthorization::Strip,
        }
    }

    /// At which an engine takes no more; `None`: its metrics are not read.
    pub(crate) fn engine_bounds(&self) -> Option<EngineBounds> {
        let engines = &self.engines;
        engines.load.then(|| EngineBounds {
            foreign_waiting: engines.max_foreign_waiting.get(),
            kv_usage: f64::from(engines.max_kv_usage_percent.0) / 100.0,
        })
    }

    /// Longest time from sending a request that is no stream to its answer's head.
    pub(crate) fn answer_timeout(&self) -> Option<Duration> {
        let timeout = self.engines.answer_timeout_secs.duration();
        (!timeout.is_zero()).then_some(timeout)
    }

    /// Longest time between two pieces of a stream.
    pub(crate) fn token_timeout(&self) -> Option<Duration> {
        let timeout = self.engines.token_timeout_secs.duration();
        (!timeout.is_zero()).then_some(timeout)
    }

    /// Whether a sleeping engine is woken when requests wait for its model.
    pub(crate) const fn wakes_engines(&self) -> bool {
        self.engines.wake
    }

    /// The key of engines that have none of their own.
    pub(crate) const fn engine_key(&self) -> Option<&EngineKey> {
        self.engines.key.as_ref()
    }

    /// The authorities of engines.
    pub(crate) fn engine_authorities(&self) -> Authorities {
        self.engines.authorities.clone()
    }

    /// Reads `ca` and `key_file`, whose paths are relative to the settings file's directory.
    pub(super) fn read_engine_files(&mut self, settings: &Path) -> Result<(), SettingsError> {
        let dir = settings.parent().unwrap_or_else(|| Path::new(""));
        let engines = &mut self.engines;
        if !engines.ca.as_os_str().is_empty() {
            let loaded = Authorities::load(&dir.join(&engines.ca));
            engines.authorities =
                loaded.map_err(|error| SettingsError::EngineCa(Box::new(error)))?;
        }
        if engines.key_file.as_os_str().is_empty() {
            return match engines.authorization {
                AuthorizationRule::Replace => Err(SettingsError::NoEngineKey),
                AuthorizationRule::Auto | AuthorizationRule::Pass | AuthorizationRule::Strip => {
                    Ok(())
                }
            };
        }
        let path = dir.join(&engines.key_file);
        let text = read(&path).map_err(|error| SettingsError::EngineKey {
            path: path.clone(),
            error: Box::new(error),
        })?;
        let key = EngineKey::parse(text.lines().next().unwrap_or_default());
        engines.key = Some(key.map_err(|_| SettingsError::BadEngineKey(path))?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use uuid::Uuid;

    use super::super::WorkerRule;
    use super::*;

    #[test]
    fn a_key_comes_from_a_file_and_is_not_shown() {
        let dir = std::env::temp_dir().join(format!("wr-engines-{}", Uuid::new_v4()));
        fs::create_dir(&dir).unwrap();
        let path = dir.join("router.toml");
        let rule = WorkerRule::Registered;
        let load = |text: &str| {
            fs::write(&path, text).unwrap();
            Settings::load(&path, &rule).map_err(|error| error.to_string())
        };
        let replace = "[engines]\nauthorization = \"replace\"\n";
        let with_file = format!("{replace}key_file = \"key\"\n");
        assert!(load(replace).unwrap_err().contains("needs key_file"));
        assert!(load(&with_file).unwrap_err().contains("key"));
        for (key, valid) in [("", false), ("a\u{1}b", false), ("engine-secret\n", true)] {
            fs::write(dir.join("key"), key).unwrap();
            assert_eq!(load(&with_file).is_ok(), valid, "{key:?}");
        }
        let settings = load(&with_file).unwrap();
        let value = HeaderValue::from_static("Bearer engine-secret");
        assert_eq!(
            settings.engine_authorization(),
            EngineAuthorization::Replace(value)
        );
        assert!(!format!("{settings:?}").contains("secret"));
        assert!(!format!("{:?}", settings.engine_authorization()).contains("secret"));
        fs::remove_dir_all(dir).unwrap();
    }
}
