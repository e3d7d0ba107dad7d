//! Durations that `./test.sh` shows.

use std::io::{Write as _, stderr};

use tokio::time::Instant;

/// Prints how long something took. Not captured when the test passes, unlike the print macros.
pub(crate) fn report(what: &str, since: Instant) {
    let line = format!("{what}: {:.1} s\n", since.elapsed().as_secs_f64());
    drop(stderr().write_all(line.as_bytes()));
}
