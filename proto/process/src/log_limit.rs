//! A bound for log lines that clients or workers cause.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

const WINDOW: Duration = Duration::from_secs(1);

/// Lines of one kind in each second.
const LINES_MAX: u32 = 10;

/// Bounds the lines of one kind, in the whole process.
#[derive(Debug, Default)]
pub struct LogLimit(Mutex<LogWindow>);

#[derive(Debug)]
struct LogWindow {
    end: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl LogWindow {
    const EMPTY: Self = Self {
        end: None,
        lines: 0,
        left_out: 0,
    };
}

impl Default for LogWindow {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl LogLimit {
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(LogWindow::EMPTY))
    }

    /// Whether a line may be written: the number of those that were left out before it.
    pub fn admit(&self) -> Option<u64> {
        let now = Instant::now();
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if window.end.is_none_or(|end| now >= end) {
            window.end = Some(now + WINDOW);
            window.lines = 0;
        }
        if window.lines == LINES_MAX {
            window.left_out += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_line_says_how_many_were_left_out_before_it() {
        let limit = LogLimit::new();
        let admitted = |lines: u32| (0..lines).map(|_| limit.admit()).collect::<Vec<_>>();
        assert_eq!(admitted(LINES_MAX), [Some(0); LINES_MAX as usize]);
        assert_eq!(admitted(3), [None; 3]);
        tokio::time::advance(WINDOW).await;
        assert_eq!(admitted(2), [Some(3), Some(0)]);
    }
}
