//! The files of a proxy's connections, to its clients and to its engines together.
//!
//! An idle client needs one file, a request in flight two. So clients may hold most of the files
//! while engines need few. A connection beyond all files closes the client that is idle longest; where
//! none is idle, it is refused, so that the files kept for probes are left. It opens without waiting
//! for the closed one's file.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use prometheus::IntCounter;

use super::idle::IdleConnections;

/// Counts open files against a bound. Clones count together.
#[derive(Clone)]
pub struct ConnectionFiles(Arc<FilesInUse>);

struct FilesInUse {
    max: usize,
    open: AtomicUsize,
    /// The clients that may be closed.
    idle: Arc<IdleConnections>,
    evicted: Option<IntCounter>,
}

/// One open file, until it is dropped.
pub struct ConnectionFile(ConnectionFiles);

impl ConnectionFiles {
    /// `evicted` counts the clients that are closed for others.
    #[must_use]
    pub fn new(max: usize, evicted: IntCounter) -> Self {
        Self::of(max, Some(evicted))
    }

    fn of(max: usize, evicted: Option<IntCounter>) -> Self {
        Self(Arc::new(FilesInUse {
            max,
            open: AtomicUsize::new(0),
            idle: Arc::default(),
            evicted,
        }))
    }

    /// A file for a connection to an engine; `None` if all are in use and no client is idle.
    #[must_use]
    pub fn take(&self) -> Option<ConnectionFile> {
        self.make_room().then(|| self.count())
    }

    /// Whether there is room for a file, or for that of a client that is closed for it.
    pub(super) fn make_room(&self) -> bool {
        let files = &*self.0;
        if files.open.load(Ordering::Relaxed) < files.max {
            return true;
        }
        let is_evicted = files.idle.evict();
        if is_evicted {
            files.evicted.iter().for_each(IntCounter::inc);
        }
        is_evicted
    }

    /// Counts a file that is open.
    pub(super) fn count(&self) -> ConnectionFile {
        self.0.open.fetch_add(1, Ordering::Relaxed);
        ConnectionFile(self.clone())
    }

    pub(super) fn idle(&self) -> &Arc<IdleConnections> {
        &self.0.idle
    }
}

/// Without a bound.
impl Default for ConnectionFiles {
    fn default() -> Self {
        Self::of(usize::MAX, None)
    }
}

impl Drop for ConnectionFile {
    fn drop(&mut self) {
        self.0.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}
