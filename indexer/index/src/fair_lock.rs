//! A lock for one busy writer and readers in a hurry: both hold it for microseconds only.
//!
//! It is the standard library's reader-writer lock with two habits on top. Whoever finds it taken
//! looks again for a moment before going to sleep, because sleeping and waking cost more than what is
//! waited for. And the writer, before it takes the lock, lets those readers in that were waiting: a
//! writer that works through a backlog would otherwise take it again before a reader has woken up.
//!
//! A reader that holds the lock for long (an image of the tree) makes the writer wait, and a waiting
//! writer keeps new readers out. So only the writer itself may read for long.
//!
//! The writer can ask whether anybody read lately: work that only spares readers a wait is not worth doing
//! otherwise.

#[cfg(shuttle)]
use shuttle::hint::spin_loop;
#[cfg(shuttle)]
use shuttle::sync::atomic::{AtomicU32, Ordering};
#[cfg(shuttle)]
use shuttle::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(not(shuttle))]
use std::hint::spin_loop;
#[cfg(not(shuttle))]
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, TryLockError};
#[cfg(not(shuttle))]
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Looks before going to sleep: about 20 µs, a few times what a holder takes. Where every step is
/// scheduled (`indexer/shuttle`) a few show as much.
const LOOKS_MAX: u32 = if cfg!(shuttle) { 3 } else { 1000 };

/// How many of the writer's turns a reader is remembered for.
const REMEMBERED: u32 = 256;

/// The counters stand beside the lock's own, which readers and writer pass to each other anyway.
#[repr(C)]
pub struct FairRwLock<T> {
    readers_waiting: AtomicU32,
    /// FairRwLock until the last reader is forgotten. A hint: it orders nothing, and may miss one.
    remembered: AtomicU32,
    value: RwLock<T>,
}

/// A panic while the lock was held says nothing about the value here: its users compare digests.
fn taken<Guard>(attempt: Result<Guard, TryLockError<Guard>>) -> Option<Guard> {
    match attempt {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Looks a while, until there is something.
fn look<Found>(mut attempt: impl FnMut() -> Option<Found>) -> Option<Found> {
    (0..LOOKS_MAX).find_map(|_| {
        let found = attempt();
        if found.is_none() {
            spin_loop();
        }
        found
    })
}

impl<T> FairRwLock<T> {
    pub const fn new(value: T) -> Self {
        Self {
            readers_waiting: AtomicU32::new(0),
            remembered: AtomicU32::new(0),
            value: RwLock::new(value),
        }
    }

    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        if self.remembered.load(Ordering::Relaxed) < REMEMBERED / 2 {
            self.remembered.store(REMEMBERED, Ordering::Relaxed);
        }
        self.read_as_writer()
    }

    /// Did anybody read lately? For the one that writes, once a turn.
    pub fn has_recent_readers(&self) -> bool {
        let left = self.remembered.load(Ordering::Relaxed);
        if left > 0 {
            self.remembered.store(left - 1, Ordering::Relaxed);
        }
        left > 0
    }

    /// Reads for the one that writes: it is not remembered.
    pub fn read_as_writer(&self) -> RwLockReadGuard<'_, T> {
        if let Some(guard) = taken(self.value.try_read()) {
            return guard;
        }
        // Only a hint to the writer: it orders nothing.
        self.readers_waiting.fetch_add(1, Ordering::Relaxed);
        let guard = look(|| taken(self.value.try_read()))
            .unwrap_or_else(|| self.value.read().unwrap_or_else(PoisonError::into_inner));
        self.readers_waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        let none_waits = || (self.readers_waiting.load(Ordering::Relaxed) == 0).then_some(());
        // If readers still wait after that, they come after this turn: neither side starves.
        look(none_waits);
        look(|| taken(self.value.try_write()))
            .unwrap_or_else(|| self.value.write().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn writer_and_readers_all_get_their_turns() {
        let turns = FairRwLock::new((0_u64, 0_u64));
        let stop = AtomicBool::new(false);
        let (written, reads) = std::thread::scope(|scope| {
            let readers: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        let mut reads = 0_u64;
                        while reads < 1000 || !stop.load(Ordering::Relaxed) {
                            let value = turns.read();
                            assert_eq!(value.0, value.1, "no half-done write is seen");
                            reads += 1;
                        }
                        reads
                    })
                })
                .collect();
            for _ in 0..1000 {
                let mut value = turns.write();
                value.0 += 1;
                value.1 += 1;
            }
            stop.store(true, Ordering::Relaxed);
            let reads: Vec<_> = readers
                .into_iter()
                .map(|reader| reader.join().unwrap())
                .collect();
            (turns.read().0, reads)
        });
        assert_eq!(written, 1000);
        assert!(reads.iter().all(|&reads| reads >= 1000));
    }

    #[test]
    fn readers_are_remembered_for_a_while() {
        let turns = FairRwLock::new(());
        drop(turns.read_as_writer());
        assert!(!turns.has_recent_readers());
        drop(turns.read());
        let remembered = (0..).take_while(|_| turns.has_recent_readers()).count();
        assert_eq!(remembered, REMEMBERED as usize);
    }

    #[test]
    fn lock_goes_on_after_a_panic() {
        let turns = FairRwLock::new(1);
        let panicked = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    let _guard = turns.write();
                    panic!("on purpose");
                })
                .join()
        });
        assert!(panicked.is_err());
        *turns.write() += 1;
        assert_eq!(*turns.read(), 2);
    }
}
