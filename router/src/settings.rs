//! The settings of the file that `--config` names, and its reload.
//!
//! The file is TOML. An unknown key or an impossible value is an error that names the line. At the
//! start such an error ends the process; later the router keeps its settings and logs the error
//! once. The file is read again on SIGHUP and when its content changes, which the router checks
//! every `CHECK_PERIOD`.

mod differences;
mod engines;
mod file;
mod keys;
mod models;
mod pairs;
mod picker;
mod queue;
mod tenants;
mod tls;
mod traces;
mod workers;

#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::metrics::{Metrics, ReloadResult};

pub(crate) use engines::{EngineAuthorization, SeparateCaches};
pub(crate) use file::is_plain_path;
pub(crate) use file::{
    CompletionPrompts, MultimodalRule, RecordingRule, ResumeRule, TenantHint, WorkerHint,
};
pub use file::{Settings, SettingsError};
pub(crate) use keys::ExplainRule;
pub(crate) use queue::QueueLengths;
pub(crate) use tenants::{TenantLimits, TenantRules};
pub use workers::WorkerRule;

/// Time between two looks at the file. Needs no notification by the file system, which network and
/// overlay file systems do not have.
const CHECK_PERIOD: Duration = Duration::from_secs(2);

/// The settings in force. What a request may do is decided when it begins; its later steps take the
/// times and bounds in force then.
#[derive(Debug, Default)]
pub struct LiveSettings(watch::Sender<Arc<Settings>>);

impl LiveSettings {
    pub(crate) fn new(settings: Settings) -> Arc<Self> {
        Arc::new(Self(watch::Sender::new(Arc::new(settings))))
    }

    pub(crate) fn current(&self) -> Arc<Settings> {
        Arc::clone(&self.0.borrow())
    }

    pub(crate) fn replace(&self, settings: Settings) {
        self.0.send_replace(Arc::new(settings));
    }

    /// Notified of each later replacement.
    pub(crate) fn changes(&self) -> watch::Receiver<Arc<Settings>> {
        self.0.subscribe()
    }
}

/// A file of settings as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsFile {
    pub path: PathBuf,
    pub settings: Settings,
    pub rule: WorkerRule,
}

impl SettingsFile {
    /// Reads and parses the file.
    pub fn load(path: &Path, rule: &WorkerRule) -> Result<Self, SettingsError> {
        Ok(Self {
            path: path.to_owned(),
            settings: Settings::load(path, rule)?,
            rule: rule.clone(),
        })
    }
}

/// Reads the file again when it changes.
pub(crate) struct SettingsWatcher {
    /// `None`: SIGHUP reads only the other files again.
    file: Option<(PathBuf, WorkerRule)>,
    live: Arc<LiveSettings>,
    metrics: Arc<Metrics>,
    /// The file's last content, or why there was none.
    judged: Result<Settings, String>,
    /// The content in force, to show what changes.
    table: toml::Table,
    hangup: Signal,
}

/// Why the file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReloadCause {
    Period,
    Signal,
}

impl SettingsWatcher {
    pub(crate) fn new(
        file: Option<SettingsFile>,
        live: Arc<LiveSettings>,
        metrics: Arc<Metrics>,
    ) -> io::Result<Self> {
        Ok(Self {
            judged: Ok(Settings::clone(&live.current())),
            table: file
                .as_ref()
                .map(|file| table(&file.path))
                .unwrap_or_default(),
            file: file.map(|file| (file.path, file.rule)),
            live,
            metrics,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    pub(crate) async fn run(mut self, stop: CancellationToken) {
        self.live.current().warn_of_what_serves_no_client();
        let mut ticks = interval(CHECK_PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let cause = tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => ReloadCause::Period,
                received = self.hangup.recv() => match received {
                    Some(()) => ReloadCause::Signal,
                    None => continue,
                },
            };
            self.reload(cause).await;
        }
    }

    /// Applies the file if its content changed or an operator asks.
    async fn reload(&mut self, cause: ReloadCause) {
        let Some((path, rule)) = self.file.clone() else {
            if cause == ReloadCause::Signal {
                tracing::info!("no settings file, other files are read again");
                self.live.replace(Settings::clone(&self.live.current()));
            }
            return;
        };
        let shown = path.clone();
        let read = spawn_blocking(move || (Settings::load(&path, &rule), table(&path))).await;
        let Ok((read, table)) = read else {
            return;
        };
        let judged = read.map_err(|error| error.to_string());
        let judged = judged.and_then(|settings| match cause {
            ReloadCause::Period => self.without_opened_ports(settings),
            ReloadCause::Signal => Ok(settings),
        });
        if judged == self.judged && cause == ReloadCause::Period {
            return;
        }
        match &judged {
            Ok(settings) => {
                let changed = differences::differences(&self.table, &table).join(", ");
                tracing::info!(path = %shown.display(), "settings loaded: {changed}");
                self.table = table;
                settings.warn_of_what_serves_no_client();
                if settings.is_admin_port_locked() {
                    tracing::warn!("no admin keys are left: the admin port admits no client");
                }
                self.live.replace(settings.clone());
                self.metrics.reloaded(ReloadResult::Loaded);
            }
            Err(error) => {
                let path = shown.display();
                tracing::error!(error, %path, "settings not loaded, old ones kept");
                self.metrics.reloaded(ReloadResult::Refused);
            }
        }
        self.judged = judged;
    }

    /// A file may be half written, so a change of it opens no port. The removal of the last admin
    /// key applies and locks the port; a file that would open another port is refused.
    fn without_opened_ports(&self, mut settings: Settings) -> Result<Settings, String> {
        let before = self.live.current();
        if settings.opens_a_port_of(&before) {
            return Err(SettingsError::OpensPort.to_string());
        }
        settings.lock_admin_port_of(&before);
        Ok(settings)
    }
}

/// The file's content as it is written; empty if it is no TOML, which loading it reports.
fn table(path: &Path) -> toml::Table {
    let text = file::read(path).unwrap_or_default();
    text.parse().unwrap_or_default()
}
