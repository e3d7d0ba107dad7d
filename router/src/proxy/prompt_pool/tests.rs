use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;

/// A job of numbered steps, each of which waits for a permission.
struct Steps {
    name: &'static str,
    left: usize,
    step_bytes: usize,
    done: Sender<&'static str>,
    may_go: Option<Receiver<()>>,
}

impl PromptJob for Steps {
    fn step(&mut self) -> TaskState {
        if let Some(may_go) = &self.may_go {
            may_go.recv().unwrap();
        }
        self.left = self.left.saturating_sub(self.step_bytes);
        self.done.send(self.name).unwrap();
        if self.left == 0 {
            TaskState::Done
        } else {
            TaskState::More
        }
    }

    fn bytes_left(&self) -> usize {
        self.left
    }
}

fn steps(name: &'static str, left: usize, done: &Sender<&'static str>) -> Box<Steps> {
    Box::new(Steps {
        name,
        left,
        step_bytes: 64 << 10,
        done: done.clone(),
        may_go: None,
    })
}

#[test]
fn short_jobs_pass_long_ones_and_long_ones_end() {
    let (done, _steps_done) = channel();
    let queues = JobQueues::default();
    queues.put(steps("long", 16 << 20, &done));
    queues.put(steps("medium", 1 << 20, &done));
    queues.put(steps("short", 20 << 10, &done));
    let left = |lane| queues.lock().take(lane).map(|job| job.job.bytes_left());
    assert_eq!(left(JobLane::Short), Some(20 << 10));
    assert_eq!(left(JobLane::Short), None);
    assert_eq!(left(JobLane::Any), Some(1 << 20));
    assert_eq!(left(JobLane::Any), Some(16 << 20));
    // A long job that has waited long is due before a new short one.
    queues.put(steps("long", 1 << 20, &done));
    thread::sleep(DELAY_OF_64_KIB * 20);
    queues.put(steps("short", 20 << 10, &done));
    assert_eq!(left(JobLane::Any), Some(1 << 20));
}

/// Three bodies of 10 MB once delayed the next short prompt by 81 seconds.
#[test]
fn long_steps_do_not_delay_short_jobs() {
    let pool = PromptPool::start().unwrap();
    let (done, finished) = channel();
    let mut blocked = Vec::new();
    for _ in 0..THREADS_MAX {
        let (go, may_go) = channel();
        blocked.push(go);
        let job = Steps {
            may_go: Some(may_go),
            ..*steps("long", 10 << 20, &done)
        };
        pool.submit(Box::new(job));
    }
    for _ in 0..10 {
        pool.submit(steps("short", 20 << 10, &done));
        assert_eq!(finished.recv_timeout(Duration::from_secs(20)), Ok("short"));
    }
    drop(pool);
    for go in blocked {
        go.send(()).ok();
    }
}

#[test]
fn a_job_that_panics_ends_alone() {
    struct Panics;
    impl PromptJob for Panics {
        fn step(&mut self) -> TaskState {
            panic!("a defect")
        }
        fn bytes_left(&self) -> usize {
            1
        }
    }
    let pool = PromptPool::start().unwrap();
    for _ in 0..2 * THREADS_MAX {
        pool.submit(Box::new(Panics));
    }
    let (done, finished) = channel();
    pool.submit(steps("short", 1, &done));
    assert_eq!(finished.recv_timeout(Duration::from_secs(20)), Ok("short"));
}
