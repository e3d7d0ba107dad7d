//! Threads that serve connections, each with a runtime of its own. A connection stays on one thread:
//! no step of its requests wakes another thread, which costs more than most steps.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

/// Threads of each thread's blocking work: large bodies, names of engines. More wait.
const BLOCKING_THREADS_MAX: usize = 16;

/// Files of each thread's runtime.
pub const FILES: u64 = 4;

/// Time for blocking calls of a thread's tasks to end after it.
const BLOCKING_END: Duration = Duration::from_secs(1);

thread_local! {
    static NUMBER: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The number of the current thread; `None` on other threads.
pub fn current_number() -> Option<usize> {
    NUMBER.get()
}

/// Clones are the same threads. They end with the last clone. Without any, connections stay on the
/// runtime that accepts them.
#[derive(Clone, Default)]
pub struct ConnectionThreads {
    threads: Arc<[ConnectionThread]>,
    _end: Option<Arc<DropGuard>>,
}

struct ConnectionThread {
    runtime: Handle,
    /// Its open connections.
    open: Arc<AtomicUsize>,
}

/// Counts a connection as open until dropped.
struct OpenCount(Arc<AtomicUsize>);

impl Drop for OpenCount {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ConnectionThreads {
    pub fn start(count: usize) -> io::Result<Self> {
        let end = CancellationToken::new();
        let guard = end.clone().drop_guard();
        let threads = (0..count).map(|number| ConnectionThread::start(number, end.clone()));
        Ok(Self {
            threads: threads.collect::<io::Result<_>>()?,
            _end: Some(Arc::new(guard)),
        })
    }

    /// Serves an accepted connection on the thread that has the fewest.
    pub(crate) fn spawn<F>(
        &self,
        tasks: &TaskTracker,
        stream: TcpStream,
        serve: impl FnOnce(TcpStream) -> F + Send + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let open = |thread: &&ConnectionThread| thread.open.load(Ordering::Relaxed);
        let Some(thread) = self.threads.iter().min_by_key(open) else {
            tasks.spawn(serve(stream));
            return;
        };
        thread.open.fetch_add(1, Ordering::Relaxed);
        let count = OpenCount(Arc::clone(&thread.open));
        // A socket belongs to the runtime in which it was opened.
        let stream = stream.into_std();
        let served = async move {
            let _count = count;
            match stream.and_then(TcpStream::from_std) {
                Ok(stream) => serve(stream).await,
                Err(error) => tracing::warn!(%error, "connection closed before its first request"),
            }
        };
        tasks.spawn_on(served, &thread.runtime);
    }
}

impl ConnectionThread {
    fn start(number: usize, end: CancellationToken) -> io::Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS_MAX)
            .build()?;
        let handle = runtime.handle().clone();
        let run = move || {
            NUMBER.set(Some(number));
            runtime.block_on(end.cancelled());
            runtime.shutdown_timeout(BLOCKING_END);
        };
        thread::Builder::new()
            .name(format!("connections-{number}"))
            .spawn(run)?;
        Ok(Self {
            runtime: handle,
            open: Arc::default(),
        })
    }
}
