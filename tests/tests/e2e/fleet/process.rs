//! A real process of one test, with a log file that is printed when the test fails. Dropping it
//! kills it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::PATIENCE;
use crate::nats_server::child::Watchdog;

/// Settings of a router whose test gives no others: its answers show decisions.
const SETTINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/explain.toml");

/// Log lines that a failed test prints.
const SHOWN_LINES: usize = 60;

/// A child process and its first line: JSON with its addresses.
pub(crate) struct Process {
    binary: &'static str,
    arguments: Vec<String>,
    log: PathBuf,
    running: Mutex<Option<Running>>,
    pub(crate) said: Value,
}

struct Running {
    child: Child,
    watchdog: Watchdog,
}

impl Running {
    /// Its exit status, if it has ended: the pid may be reused then.
    fn status(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().expect("our child");
        if status.is_some() {
            self.watchdog.end();
        }
        status
    }
}

impl Process {
    /// `arguments` name every port, so that a restarted process is at the same addresses.
    pub(crate) async fn start(binary: &'static str, log: &Path, arguments: Vec<String>) -> Self {
        let mut process = Self {
            binary,
            arguments,
            log: log.to_owned(),
            running: Mutex::default(),
            said: Value::Null,
        };
        process.said = process.restart().await;
        process
    }

    /// Starts it again, after SIGKILL if it still runs. The addresses are unchanged.
    pub(crate) async fn restart(&self) -> Value {
        self.kill();
        let said = self.log.with_extension("said");
        let log = File::options().create(true).append(true).open(&self.log);
        let name = self.binary;
        let child = Command::new(name)
            .args(&self.arguments)
            .env("WARMROUTE_CONFIG", SETTINGS)
            .env("WARMROUTE_LOG", "info")
            .stdin(Stdio::null())
            .stdout(File::create(&said).expect("a file"))
            .stderr(log.expect("a log"))
            .spawn()
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let watchdog = Watchdog::over(&child);
        *self.running() = Some(Running { child, watchdog });
        let deadline = Instant::now() + PATIENCE;
        loop {
            let text = fs::read_to_string(&said).expect("a file");
            if let Some((line, _)) = text.split_once('\n') {
                return serde_json::from_str(line).expect("a line of JSON");
            }
            assert!(
                self.is_running(),
                "{name} ended after its start; {}",
                self.tail()
            );
            assert!(
                Instant::now() < deadline,
                "{name} says nothing; {}",
                self.tail()
            );
            sleep(Duration::from_millis(5)).await;
        }
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_running(&self) -> bool {
        let mut running = self.running();
        running
            .as_mut()
            .is_some_and(|running| running.status().is_none())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.running()
            .as_ref()
            .expect("it was not killed")
            .child
            .id()
    }

    /// Sends SIGKILL.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let status = status.expect("a running process");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.expect("memory").trim().trim_end_matches(" kB");
        kib.parse::<u64>().expect("a number") << 10
    }

    /// Open files, sockets among them.
    pub(crate) fn open_files(&self) -> usize {
        let files = fs::read_dir(format!("/proc/{}/fd", self.pid()));
        files.expect("a running process").count()
    }

    pub(crate) fn kill(&self) {
        if let Some(mut running) = self.running().take() {
            running.watchdog.end();
            running.child.kill().expect("it is our child");
            running.child.wait().expect("it was killed");
        }
    }

    /// Sends a signal by its name without SIG: `TERM`, `STOP`, `CONT`.
    pub(crate) fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// Waits until it has ended.
    pub(crate) async fn ended(&self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(running) = self.running().as_mut()
                && let Some(status) = running.status()
            {
                return status;
            }
            let name = self.binary;
            assert!(
                Instant::now() < deadline,
                "{name} does not end; {}",
                self.tail()
            );
            sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) fn base(&self) -> String {
        format!("http://127.0.0.1:{}", self.said["port"])
    }

    /// Everything that it logged, in all its lives.
    pub(crate) fn logged(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn tail(&self) -> String {
        tail(&self.log)
    }
}

/// The last lines of a log.
pub(super) fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let shown = lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n");
    format!("the end of {}:\n{shown}\n", log.display())
}

/// Sends a signal, by its name without SIG, to a process that a test started.
pub(crate) fn signal(pid: u32, name: &str) {
    let pid = pid.to_string();
    let sent = Command::new("kill").args(["-s", name, &pid]).status();
    assert!(sent.expect("kill starts").success(), "SIG{name} to {pid}");
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.tail());
        }
        self.kill();
    }
}
