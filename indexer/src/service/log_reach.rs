//! Whether the log answers, while the server does: its stream may be gone. Pure but for the log.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::{info, warn};

/// A fault that lasts so long makes this replica not ready. Changes of a stream's leader are shorter.
const FAULT_AFTER: Duration = Duration::from_secs(3);

/// What the writer sees of the log.
#[derive(Debug, Default)]
pub(super) struct LogReach(Mutex<Option<LogFault>>);

#[derive(Debug)]
struct LogFault {
    since: Instant,
    why: String,
    is_reported: bool,
}

impl LogReach {
    /// The log answered.
    pub(super) fn answered(&self) {
        if self.lock().take().is_some_and(|fault| fault.is_reported) {
            info!("the log can be read again");
        }
    }

    /// The log did not answer. Returns whether it did before.
    pub(super) fn failed(&self, why: String, now: Instant) -> bool {
        let mut fault = self.lock();
        let is_first = fault.is_none();
        let since = fault.as_ref().map_or(now, |fault| fault.since);
        let was_reported = fault.as_ref().is_some_and(|fault| fault.is_reported);
        let is_reported = now.duration_since(since) >= FAULT_AFTER;
        if is_reported && !was_reported {
            warn!(
                why,
                "the log cannot be read: not ready, and routers give no credit; if its stream is \
                 gone, create it by `warmroute-indexer init`, after a full disk restart nats-server"
            );
        }
        *fault = Some(LogFault {
            since,
            why,
            is_reported,
        });
        is_first
    }

    /// Why the log has not answered for [`FAULT_AFTER`].
    pub(super) fn fault(&self, now: Instant) -> Option<String> {
        let fault = self.lock();
        let lasting = |fault: &&LogFault| now.duration_since(fault.since) >= FAULT_AFTER;
        fault
            .as_ref()
            .filter(lasting)
            .map(|fault| fault.why.clone())
    }

    /// The connection is gone, which explains everything.
    pub(super) fn cut_off(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<LogFault>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_fault_counts_until_the_log_answers() {
        let (reach, start) = (LogReach::default(), tokio::time::Instant::now().into_std());
        let failed = |at| reach.failed("stream not found".to_owned(), start + at);
        assert!(failed(Duration::ZERO));
        assert_eq!(reach.fault(start + FAULT_AFTER / 2), None);
        assert!(!failed(FAULT_AFTER));
        let fault = reach.fault(start + FAULT_AFTER);
        assert_eq!(fault.as_deref(), Some("stream not found"));
        reach.answered();
        assert_eq!(reach.fault(start + FAULT_AFTER), None);
        assert!(failed(FAULT_AFTER * 2));
        reach.cut_off();
        assert_eq!(reach.fault(start + FAULT_AFTER * 9), None);
    }
}
