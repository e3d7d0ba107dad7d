//! Whether the log can be read and takes records, while the server answers: its stream may be gone or
//! full.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::NotReady;

/// What the last attempts found. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct LogHealth(Arc<Mutex<Faults>>);

#[derive(Debug, Default)]
struct Faults {
    read: Option<String>,
    append: Option<String>,
}

impl LogHealth {
    /// The result of a read. Returns whether the log is newly at fault or newly well.
    pub(super) fn read(&self, result: Result<(), String>) -> bool {
        let mut faults = self.lock();
        let before = std::mem::replace(&mut faults.read, result.err());
        before.is_some() != faults.read.is_some()
    }

    /// The result of an append of any rank.
    pub(super) fn appended(&self, result: Result<(), String>) {
        self.lock().append = result.err();
    }

    pub(super) fn check(&self) -> Result<(), NotReady> {
        let faults = self.lock();
        let refused = faults.append.clone().map(NotReady::LogRefuses);
        let unread = faults.read.clone().map(NotReady::LogUnreadable);
        unread.or(refused).map_or(Ok(()), Err)
    }

    fn lock(&self) -> MutexGuard<'_, Faults> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_lasts_until_the_same_attempt_succeeds() {
        let health = LogHealth::default();
        let why = || "no responders".to_owned();
        assert_eq!(health.check(), Ok(()));
        assert!(health.read(Err(why())));
        assert!(!health.read(Err(why())));
        health.appended(Ok(()));
        assert_eq!(health.check(), Err(NotReady::LogUnreadable(why())));
        assert!(health.read(Ok(())));
        health.appended(Err(why()));
        assert_eq!(health.check(), Err(NotReady::LogRefuses(why())));
        health.appended(Ok(()));
        assert_eq!(health.check(), Ok(()));
    }
}
