//! The indexer's lock under a scheduler that picks every next step: no interleaving of writer and
//! readers shows half a write, loses one, or blocks a thread forever (which the scheduler
//! reports as a deadlock, and endless spinning as too many steps).
#![forbid(unsafe_code)]

#[path = "../../index/src/fair_lock.rs"]
pub mod fair_lock;

#[cfg(test)]
mod tests {
    use shuttle::{Config, Runner, check_pct, thread};

    use super::fair_lock::FairWriter;

    const SCHEDULES: usize = 2000;

    /// One writer, three readers, a few rounds each.
    fn write_and_read() {
        const WRITES: u64 = 3;
        let writer = FairWriter::new((0_u64, 0_u64));
        let readers: Vec<_> = (0..3)
            .map(|_| {
                let lock = writer.reader();
                thread::spawn(move || {
                    let mut last = 0;
                    for _ in 0..2 {
                        let value = lock.read();
                        assert_eq!(value.0, value.1, "half a write is seen");
                        assert!(value.0 >= last, "a write is lost");
                        last = value.0;
                    }
                })
            })
            .collect();
        for written in 0..WRITES {
            // What it does ahead, it does for readers that it knows of.
            if writer.has_recent_readers() {
                assert_eq!(*writer.read(), (written, written), "only it writes");
            }
            let mut value = writer.write();
            value.0 += 1;
            thread::yield_now();
            value.1 += 1;
        }
        for reader in readers {
            reader.join().unwrap();
        }
        assert_eq!(*writer.read(), (WRITES, WRITES));
    }

    #[test]
    fn at_random() {
        let scheduler = shuttle::scheduler::RandomScheduler::new(SCHEDULES);
        Runner::new(scheduler, Config::new()).run(write_and_read);
    }

    #[test]
    fn with_priorities_that_change_a_few_times() {
        check_pct(write_and_read, SCHEDULES, 3);
    }
}
