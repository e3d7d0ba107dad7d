//! A real nats-server of one test: its own port and directory, killed with SIGKILL, gone with the
//! test.

pub(crate) mod child;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use std::{env, fs};

use child::Watchdog;
use tokio::time::{Instant, sleep};

const START_MAX: Duration = Duration::from_secs(20);

pub(crate) struct NatsServer {
    dir: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(String, String)>,
    port: u16,
    running: Option<Running>,
}

struct Running {
    server: Child,
    watchdog: Watchdog,
}

/// `NATS_SERVER`, else the repository's `.venv`, else the search path.
fn binary() -> PathBuf {
    if let Some(path) = env::var_os("NATS_SERVER") {
        return path.into();
    }
    let folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let mut binaries = folders.map(|folder| folder.join(".venv/bin/nats-server"));
    if let Some(binary) = binaries.find(|binary| binary.exists()) {
        return binary;
    }
    let on_path = Command::new("nats-server").arg("--version").output();
    assert!(
        on_path.is_ok(),
        "no nats-server: ./test.sh installs one, or set NATS_SERVER to its path"
    );
    "nats-server".into()
}

impl NatsServer {
    pub(crate) async fn start() -> Self {
        Self::start_with(&["-js".into()], &[]).await
    }

    /// With arguments beside address, port and directory, and variables for its configuration.
    pub(crate) async fn start_with(arguments: &[OsString], environment: &[(&str, &str)]) -> Self {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let name = format!("nats-{}-{number}", std::process::id());
        // A benchmark has no directory from cargo.
        let tmp = option_env!("CARGO_TARGET_TMPDIR");
        let dir = tmp.map_or_else(env::temp_dir, PathBuf::from).join(name);
        fs::create_dir_all(&dir).unwrap();
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let mut server = Self {
            dir,
            arguments: arguments.to_vec(),
            environment: environment.iter().map(owned).collect(),
            port: 0,
            running: None,
        };
        server.restart().await;
        server
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Where it keeps its streams.
    pub(crate) fn store(&self) -> PathBuf {
        self.dir.join("store")
    }

    /// Process id of the running server.
    pub(crate) fn pid(&self) -> u32 {
        self.running
            .as_ref()
            .expect("it was not killed")
            .server
            .id()
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        if let Some(mut running) = self.running.take() {
            running.watchdog.end();
            running.server.kill().unwrap();
            running.server.wait().unwrap();
        }
    }

    /// Starts it again, on the same port and directory.
    pub(crate) async fn restart(&mut self) {
        self.kill();
        let deadline = Instant::now() + START_MAX;
        loop {
            self.running = Some(self.spawn());
            if self.came_up(deadline).await {
                return;
            }
            self.kill();
            let log = fs::read_to_string(self.dir.join("log")).unwrap_or_default();
            assert!(
                Instant::now() < deadline,
                "nats-server does not start: {log}"
            );
        }
    }

    fn spawn(&self) -> Running {
        let port = match self.port {
            0 => "-1".to_owned(),
            port => port.to_string(),
        };
        let server = Command::new(binary())
            .args(&self.arguments)
            .args(["-a", "127.0.0.1", "-p", &port, "-sd"])
            .arg(self.store())
            .arg("--ports_file_dir")
            .arg(&self.dir)
            .arg("-l")
            .arg(self.dir.join("log"))
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("nats-server starts");
        let watchdog = Watchdog::over(&server);
        Running { server, watchdog }
    }

    /// False if it ended or the time is over.
    async fn came_up(&mut self, deadline: Instant) -> bool {
        let ports = self.dir.join(format!("nats-server_{}.ports", self.pid()));
        let server = &mut self.running.as_mut().unwrap().server;
        while Instant::now() < deadline && server.try_wait().unwrap().is_none() {
            let text = fs::read_to_string(&ports).unwrap_or_default();
            if let Some((_, rest)) = text.split_once("nats://127.0.0.1:") {
                let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
                self.port = digits.parse().unwrap();
                return true;
            }
            sleep(Duration::from_millis(10)).await;
        }
        false
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
        // A file that stays behind is harmless.
        drop(fs::remove_dir_all(&self.dir));
    }
}
