//! A bound of each fleet's life: a test that waits without end fails, and shows its logs.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use super::process::tail;

/// The longest scenario takes two minutes. Only a defect takes this long.
const LIFE_MAX: Duration = Duration::from_secs(15 * 60);

/// Ends the test process if it is not dropped in time. The processes that the tests started end
/// with it.
pub(super) struct LifeLimit {
    _dropped: Sender<()>,
}

impl LifeLimit {
    /// For the fleet in this directory, from now on.
    #[expect(
        clippy::disallowed_methods,
        reason = "a thread that hangs cannot be ended otherwise"
    )]
    pub(super) fn start(place: PathBuf) -> Self {
        let (dropped, waiting) = mpsc::channel();
        thread::spawn(move || {
            if waiting.recv_timeout(LIFE_MAX) == Err(RecvTimeoutError::Timeout) {
                show_logs(&place);
                eprintln!("a fleet was not dropped within {LIFE_MAX:?}");
                std::process::exit(1);
            }
        });
        Self { _dropped: dropped }
    }
}

fn show_logs(place: &Path) {
    let files = fs::read_dir(place).into_iter().flatten().flatten();
    let paths = files.map(|file| file.path());
    for log in paths.filter(|path| path.extension().is_some_and(|kind| kind == "log")) {
        eprintln!("{}", tail(&log));
    }
}
