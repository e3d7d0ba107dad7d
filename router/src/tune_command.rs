//! The command `tune`: threads, progress and files around the search.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::Context as _;

use crate::trace_files;
use crate::tune::{TuneArgs, TuneError, TuneJob, TuneRun, Tuner};

/// Runs the search. Returns the report. `epoch` is the start of virtual time.
pub fn tune(args: &TuneArgs, epoch: Instant) -> anyhow::Result<String> {
    let mut args = args.clone();
    args.replay = trace_files::with_profile(&args.replay)?;
    let args = &args;
    let source = &args.replay.source;
    let trace = trace_files::load(&source.trace, &source.models)?;
    progress("measuring the capacity", LineEnd::Last);
    let mut tuner = Tuner::new(args, &trace, epoch)?;
    while let Some((name, jobs)) = tuner.next_round() {
        let runs = run_all(&tuner, name, &jobs)?;
        tuner.finish_round(&jobs, runs);
    }
    if let Some(path) = &args.html {
        trace_files::write_whole(path, [tuner.page()])?;
    }
    Ok(tuner.report())
}

/// Runs jobs on all processors. The order of the results is that of the jobs.
fn run_all(tuner: &Tuner<'_>, name: &str, jobs: &[TuneJob]) -> anyhow::Result<Vec<TuneRun>> {
    let threads = thread::available_parallelism()
        .map_or(1, Into::into)
        .min(jobs.len());
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || -> Result<Vec<(usize, TuneRun)>, TuneError> {
        let mut runs = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(number) else {
                return Ok(runs);
            };
            runs.push((number, tuner.run(job)?));
            let count = done.fetch_add(1, Ordering::Relaxed) + 1;
            let end = if count == jobs.len() {
                LineEnd::Last
            } else {
                LineEnd::Again
            };
            progress(
                &format!("round {name}: {count} of {} runs", jobs.len()),
                end,
            );
        }
    };
    let mut runs = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut all = Vec::new();
        for worker in workers {
            all.extend(worker.join().ok().context("a simulation failed")??);
        }
        anyhow::Ok(all)
    })?;
    runs.sort_by_key(|(number, _)| *number);
    Ok(runs.into_iter().map(|(_, run)| run).collect())
}

/// Whether the line is final, or the next one replaces it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LineEnd {
    Again,
    Last,
}

/// Shows the state on stderr; without a terminal, final lines only.
fn progress(line: &str, end: LineEnd) {
    let mut stderr = io::stderr().lock();
    // A closed stderr does not stop the command.
    match (stderr.is_terminal(), end) {
        (true, LineEnd::Again) => drop(write!(stderr, "\r\x1b[Ktune: {line}")),
        (true, LineEnd::Last) => drop(writeln!(stderr, "\r\x1b[Ktune: {line}")),
        (false, LineEnd::Last) => drop(writeln!(stderr, "tune: {line}")),
        (false, LineEnd::Again) => {}
    }
}
