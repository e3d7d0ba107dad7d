//! The files of a proxy's connections, to its clients and to its engines together.
//!
//! An idle client needs one file, a request in flight two. So clients may hold most of the files
//! while engines need few. A connection beyond all of them closes the client that is idle longest.
//! It opens without waiting for that: what is kept for other purposes holds it until then.

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

    /// Counts a file that is open now or soon. A client calls it before it is listed as idle: it
    /// would close itself otherwise.
    #[must_use]
    pub fn take(&self) -> ConnectionFile {
        let files = &*self.0;
        let open = files.open.fetch_add(1, Ordering::Relaxed) + 1;
        if open > files.max && files.idle.evict() {
            files.evicted.iter().for_each(IntCounter::inc);
        }
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
