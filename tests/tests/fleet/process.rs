//! A real process of one test: its log in a file, shown when the test fails; gone with its handle.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

/// Lines of a log that a failed test shows.
const SHOWN_LINES: usize = 60;

/// A child process and what it said first: one JSON line with its addresses.
pub(crate) struct Process {
    program: &'static str,
    arguments: Vec<String>,
    log: PathBuf,
    running: Option<Running>,
    pub(crate) said: Value,
}

struct Running {
    child: Child,
    /// Kills the child if the test's process dies without a word: its standard input ends then.
    watchdog: Child,
}

impl Process {
    /// `arguments` name every port, so that the process comes back where it was.
    pub(crate) fn start(program: &'static str, log: &Path, arguments: Vec<String>) -> Self {
        let mut process = Self {
            program,
            arguments,
            log: log.to_owned(),
            running: None,
            said: Value::Null,
        };
        process.restart();
        process
    }

    /// Starts it again, after a kill if it still runs.
    pub(crate) fn restart(&mut self) {
        self.kill();
        let log = File::options().create(true).append(true).open(&self.log);
        let mut child = Command::new(self.program)
            .args(&self.arguments)
            .env("WARMROUTE_LOG", "info")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log.expect("a log"))
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", self.program));
        let kill = format!("read _; kill -9 {}", child.id());
        let watchdog = Command::new("sh")
            .args(["-c", &kill])
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh starts");
        let stdout = child.stdout.take().expect("piped");
        self.running = Some(Running { child, watchdog });
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        self.said = serde_json::from_str(&line).unwrap_or_else(|error| {
            panic!("{} said {line:?}: {error}; {}", self.program, self.tail())
        });
    }

    pub(crate) fn pid(&self) -> u32 {
        let running = self.running.as_ref();
        running.expect("it was not killed").child.id()
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        if let Some(mut running) = self.running.take() {
            // The watchdog first, so that it cannot meet another process of that number.
            for child in [&mut running.watchdog, &mut running.child] {
                child.kill().expect("it is our child");
                child.wait().expect("it was killed");
            }
        }
    }

    pub(crate) fn base(&self) -> String {
        format!("http://127.0.0.1:{}", self.said["port"])
    }

    fn tail(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let shown = &lines[lines.len().saturating_sub(SHOWN_LINES)..];
        format!("the end of {}:\n{}\n", self.log.display(), shown.join("\n"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.tail());
        }
        self.kill();
    }
}
