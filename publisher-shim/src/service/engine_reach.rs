//! Since when and why the engine does not serve, for the log and for operators' pages.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

/// A fault that lasts so long is reported, once.
const REPORT_AFTER: Duration = Duration::from_millis(900);

/// Why a worker is not registered, or its engine does not serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineFault {
    pub url: String,
    pub why: String,
    pub since: Instant,
}

#[derive(Debug)]
pub(super) struct EngineReach {
    url: String,
    fault: Mutex<Option<LastingFault>>,
}

#[derive(Debug)]
struct LastingFault {
    why: String,
    since: Instant,
    is_reported: bool,
}

impl EngineReach {
    /// Before the first answer there is a fault.
    pub(super) fn new(url: &str, now: Instant) -> Self {
        let fault = LastingFault {
            why: "not asked yet".to_owned(),
            since: now,
            is_reported: false,
        };
        Self {
            url: url.to_owned(),
            fault: Mutex::new(Some(fault)),
        }
    }

    pub(super) fn served(&self) {
        let before = self.lock().take();
        if before.is_some_and(|fault| fault.is_reported) {
            info!(url = self.url, "the engine serves");
        }
    }

    /// Its facts cannot be read, which the caller reports.
    pub(super) fn not_read(&self, why: String, now: Instant) {
        let mut fault = self.lock();
        let since = fault.as_ref().map_or(now, |fault| fault.since);
        *fault = Some(LastingFault {
            why,
            since,
            is_reported: true,
        });
    }

    /// Its health check failed.
    pub(super) fn failed(&self, why: Option<String>, now: Instant) {
        let why = why.unwrap_or_else(|| "its health check fails".to_owned());
        let mut fault = self.lock();
        let (since, was_reported) = fault
            .as_ref()
            .map_or((now, false), |fault| (fault.since, fault.is_reported));
        let is_reported = was_reported || now - since >= REPORT_AFTER;
        if is_reported && !was_reported {
            warn!(
                url = self.url,
                why, "the engine does not serve: its worker gets no requests"
            );
        }
        *fault = Some(LastingFault {
            why,
            since,
            is_reported,
        });
    }

    pub(super) fn fault(&self) -> Option<EngineFault> {
        let fault = self.lock();
        fault.as_ref().map(|fault| EngineFault {
            url: self.url.clone(),
            why: fault.why.clone(),
            since: fault.since,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<LastingFault>> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_has_its_first_time_and_its_last_reason() {
        let start = Instant::now();
        let reach = EngineReach::new("http://h:1", start);
        let at = |ms| start + Duration::from_millis(ms);
        let is_reported = || reach.lock().as_ref().map(|fault| fault.is_reported);
        reach.failed(Some("refused".to_owned()), at(10));
        assert_eq!(is_reported(), Some(false));
        reach.failed(Some("status 503".to_owned()), at(1000));
        assert_eq!(is_reported(), Some(true));
        let fault = EngineFault {
            url: "http://h:1".to_owned(),
            why: "status 503".to_owned(),
            since: start,
        };
        assert_eq!(reach.fault(), Some(fault));
        reach.served();
        assert_eq!(reach.fault(), None);
        reach.failed(None, at(2000));
        assert_eq!(reach.fault().unwrap().since, at(2000));
        assert_eq!(is_reported(), Some(false));
    }
}
