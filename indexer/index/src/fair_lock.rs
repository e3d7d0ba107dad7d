//! A reader-writer lock for one busy writer and latency-critical readers, held for microseconds.
//!
//! It wraps the standard library's lock. A caller that finds it taken spins briefly before it
//! sleeps, because sleeping and waking take longer than the typical wait. The writer lets waiting
//! readers in before it takes the lock: a writer with a backlog would otherwise retake it before a
//! reader wakes.
//!
//! A reader that holds the lock for long (an image of the tree) blocks the writer, and a waiting
//! writer blocks new readers. So the value is read for long only while the writer does not ask for the
//! lock, and there is one writer: a [`FairWriter`] cannot be cloned, and a [`FairReader`] cannot write.
//!
//! The writer can query whether there were recent readers: work that only spares readers a wait is
//! skipped otherwise.

#[cfg(shuttle)]
use shuttle::hint::spin_loop;
#[cfg(shuttle)]
use shuttle::sync::atomic::{AtomicU32, Ordering};
#[cfg(shuttle)]
use shuttle::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(not(shuttle))]
use std::hint::spin_loop;
#[cfg(not(shuttle))]
use std::sync::atomic::{AtomicU32, Ordering};
#[cfg(not(shuttle))]
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::sync::{PoisonError, TryLockError};

/// Attempts before sleeping: about 20 µs, a few times as long as the lock is held. Under a
/// scheduler (`indexer/shuttle`) a few suffice.
const SPINS_MAX: u32 = if cfg!(shuttle) { 3 } else { 1000 };

/// Writer turns for which a reader counts as recent.
const RECENT_TURNS: u32 = 256;

/// The counters stand beside the lock's own, which readers and writer pass to each other anyway.
#[repr(C)]
struct FairLock<T> {
    readers_waiting: AtomicU32,
    /// Writer turns until the last reader is forgotten. A hint: it orders nothing and may miss one.
    recent_turns: AtomicU32,
    value: RwLock<T>,
}

/// The only one that writes a value.
pub struct FairWriter<T>(Arc<FairLock<T>>);

/// Reads a value that a [`FairWriter`] writes. Clones share it.
pub struct FairReader<T>(Arc<FairLock<T>>);

impl<T> Clone for FairReader<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// The guard, if the lock was free. Poisoning is ignored: users of the value compare digests.
fn acquired<Guard>(attempt: Result<Guard, TryLockError<Guard>>) -> Option<Guard> {
    match attempt {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Spins for a while until an attempt succeeds.
fn spin<T>(mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    (0..SPINS_MAX).find_map(|_| {
        let result = attempt();
        if result.is_none() {
            spin_loop();
        }
        result
    })
}

impl<T> FairLock<T> {
    fn read(&self) -> RwLockReadGuard<'_, T> {
        if let Some(guard) = acquired(self.value.try_read()) {
            return guard;
        }
        // Only a hint to the writer: it orders nothing.
        self.readers_waiting.fetch_add(1, Ordering::Relaxed);
        let guard = spin(|| acquired(self.value.try_read()))
            .unwrap_or_else(|| self.value.read().unwrap_or_else(PoisonError::into_inner));
        self.readers_waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }
}

impl<T> FairReader<T> {
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        let lock = &self.0;
        if lock.recent_turns.load(Ordering::Relaxed) < RECENT_TURNS / 2 {
            lock.recent_turns.store(RECENT_TURNS, Ordering::Relaxed);
        }
        lock.read()
    }
}

impl<T> FairWriter<T> {
    pub fn new(value: T) -> Self {
        Self(Arc::new(FairLock {
            readers_waiting: AtomicU32::new(0),
            recent_turns: AtomicU32::new(0),
            value: RwLock::new(value),
        }))
    }

    #[must_use]
    pub fn reader(&self) -> FairReader<T> {
        FairReader(Arc::clone(&self.0))
    }

    /// Returns true if there were recent readers. The writer calls it once a turn.
    pub fn has_recent_readers(&self) -> bool {
        let left = self.0.recent_turns.load(Ordering::Relaxed);
        if left > 0 {
            self.0.recent_turns.store(left - 1, Ordering::Relaxed);
        }
        left > 0
    }

    /// Does not count as a recent reader.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read()
    }

    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        let lock = &self.0;
        let no_reader_waits = || (lock.readers_waiting.load(Ordering::Relaxed) == 0).then_some(());
        // Readers that still wait afterwards come after this turn: neither side starves.
        spin(no_reader_waits);
        spin(|| acquired(lock.value.try_write()))
            .unwrap_or_else(|| lock.value.write().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn writer_and_readers_all_get_their_turns() {
        let writer = FairWriter::new((0_u64, 0_u64));
        let stop = AtomicBool::new(false);
        let (written, reads) = std::thread::scope(|scope| {
            let readers: Vec<_> = (0..3)
                .map(|_| {
                    let lock = writer.reader();
                    let stop = &stop;
                    scope.spawn(move || {
                        let mut reads = 0_u64;
                        while reads < 1000 || !stop.load(Ordering::Relaxed) {
                            let value = lock.read();
                            assert_eq!(value.0, value.1, "no half-done write is seen");
                            reads += 1;
                        }
                        reads
                    })
                })
                .collect();
            for _ in 0..1000 {
                let mut value = writer.write();
                value.0 += 1;
                value.1 += 1;
            }
            stop.store(true, Ordering::Relaxed);
            let reads: Vec<_> = readers
                .into_iter()
                .map(|reader| reader.join().unwrap())
                .collect();
            (writer.read().0, reads)
        });
        assert_eq!(written, 1000);
        assert!(reads.iter().all(|&reads| reads >= 1000));
    }

    #[test]
    fn readers_are_recent_for_a_while() {
        let writer = FairWriter::new(());
        drop(writer.read());
        assert!(!writer.has_recent_readers());
        drop(writer.reader().read());
        let recent = (0..).take_while(|_| writer.has_recent_readers()).count();
        assert_eq!(recent, RECENT_TURNS as usize);
    }

    #[test]
    fn lock_goes_on_after_a_panic() {
        let writer = FairWriter::new(1);
        let panicked = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    let _guard = writer.write();
                    panic!("on purpose");
                })
                .join()
        });
        assert!(panicked.is_err());
        *writer.write() += 1;
        assert_eq!(*writer.reader().read(), 2);
    }
}
