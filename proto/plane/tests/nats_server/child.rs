//! Child processes of a test: gone when it is, however it ends, and listened to for a bounded time.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// For what takes a moment; only a defect takes so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Kills a child if the test's process dies without a word: its standard input ends then. To be
/// ended before the child is waited for, so that it cannot meet another process of that number.
pub(crate) struct Watchdog(Child);

impl Watchdog {
    pub(crate) fn over(child: &Child) -> Self {
        let kill = format!("read _; kill -9 {}", child.id());
        let mut watchdog = Command::new("sh");
        watchdog.args(["-c", &kill]).stdin(Stdio::piped());
        Self(watchdog.stderr(Stdio::null()).spawn().expect("sh starts"))
    }

    /// Once or more often.
    pub(crate) fn end(&mut self) {
        self.0.kill().expect("it is our child");
        self.0.wait().expect("it was killed");
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.end();
    }
}

/// First line of a child's piped standard output; nothing if it ends before.
pub(crate) fn first_line(child: &mut Child) -> String {
    let stdout = child.stdout.take().expect("a pipe");
    let (said, heard) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        drop(said.send(read.map(|_| line)));
    });
    let line = heard
        .recv_timeout(PATIENCE)
        .expect("the child writes a line");
    line.expect("text")
}

/// Waits until it has ended by itself.
pub(crate) fn ended(child: &mut Child) -> ExitStatus {
    const LOOK: Duration = Duration::from_millis(5);
    let looks = PATIENCE.as_millis() / LOOK.as_millis();
    for _ in 0..looks {
        if let Some(status) = child.try_wait().expect("our child") {
            return status;
        }
        std::thread::sleep(LOOK);
    }
    panic!("it does not end");
}
