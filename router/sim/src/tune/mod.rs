//! `warmroute-router tune`: which policy and parameters suit a trace.
//!
//! Successive halving: all candidates replay short slices of the trace, the better ones longer
//! slices with more seeds. All candidates of a round replay the same slices with the same arrivals,
//! so that differences are paired by seed. What wins is confirmed against the default by seeds that
//! had no part in the choice.
//!
//! Pure: [`Tuner`] names the runs, and its caller runs them on any threads. Equal flags and traces
//! give equal bytes.

/// Adds formatted text to a string.
macro_rules! put {
    ($to:expr, $($format:tt)+) => {
        $to.push_str(&format!($($format)+))
    };
}

mod candidate;
mod chart;
mod page;
mod report;
mod statistics;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use warmroute_route::Knobs;

pub use candidate::TuneCandidate;

use crate::simulate::ReplayArgs;
use crate::simulate::args::SimulationPlan;
use crate::simulate::arrivals::Arrivals;
use crate::simulate::outcome::{Figures, TimeSlot};
use crate::simulate::{capacity, world};
use crate::trace::Trace;

/// Find the policy and the parameters that suit a trace, by simulation: what wins, by how much, and
/// which differences are noise.
#[derive(Clone, Debug, Args)]
pub struct TuneArgs {
    #[command(flatten)]
    pub replay: ReplayArgs,
    /// What is to be low: mean time to first token, its 99th percentile, or mean time to the end of
    /// the answer.
    #[arg(long, value_enum, default_value_t = TuneGoal::Ttft)]
    pub goal: TuneGoal,
    /// Seeds of the last two rounds; more make intervals narrower.
    #[arg(long, default_value_t = 8)]
    pub seeds: u64,
    /// Write a page with charts to this file.
    #[arg(long, value_name = "FILE")]
    pub html: Option<std::path::PathBuf>,
}

/// The figure that is minimised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TuneGoal {
    Ttft,
    P99,
    E2e,
}

impl TuneGoal {
    fn of(self, figures: &Figures) -> f64 {
        match self {
            Self::Ttft => figures.ttft_mean_ms,
            Self::P99 => figures.ttft_p99_ms,
            Self::E2e => figures.e2e_mean_ms,
        }
    }

    const fn label(self) -> &'static str {
        match self {
            Self::Ttft => "mean time to first token",
            Self::P99 => "99th percentile of the time to first token",
            Self::E2e => "mean time to the end of the answer",
        }
    }
}

/// Rounds with their candidates, part of the trace and seeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum RoundKind {
    Screen,
    Narrow,
    Final,
    /// The winner against the default.
    Confirm,
}

impl RoundKind {
    const ALL: [Self; 4] = [Self::Screen, Self::Narrow, Self::Final, Self::Confirm];

    const fn label(self) -> &'static str {
        match self {
            Self::Screen => "screen",
            Self::Narrow => "narrow",
            Self::Final => "final",
            Self::Confirm => "confirm",
        }
    }

    /// Candidates that go on from it, the default besides.
    const fn keeps(self) -> usize {
        match self {
            Self::Screen => 8,
            Self::Narrow => 4,
            Self::Final | Self::Confirm => 1,
        }
    }

    /// The trace's requests over those of a run.
    const fn part(self) -> usize {
        match self {
            Self::Screen => 4,
            Self::Narrow => 3,
            Self::Final | Self::Confirm => 2,
        }
    }
}

/// One run.
#[derive(Clone, Copy, Debug)]
pub struct TuneJob {
    candidate: TuneCandidate,
    requests: usize,
    seed: u64,
}

/// What came of a run.
#[derive(Clone, Debug)]
pub struct TuneRun {
    figures: Figures,
    slots: Vec<TimeSlot>,
    /// Computed tokens of each worker.
    worker_tokens: Vec<u64>,
}

/// The runs of one candidate in one round, in the order of seeds.
#[derive(Clone, Debug)]
struct CandidateRuns {
    candidate: TuneCandidate,
    runs: Vec<TuneRun>,
}

/// A finished round. Candidates are in the order of their goal's geometric mean.
#[derive(Clone, Debug)]
struct TuneRound {
    kind: RoundKind,
    ranking: Vec<CandidateRuns>,
}

#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    #[error("--seeds {0} is not between 2 and 1000")]
    Seeds(u64),
    #[error(transparent)]
    Args(anyhow::Error),
    #[error(transparent)]
    Simulation(anyhow::Error),
}

/// A search over candidates.
pub struct Tuner<'t> {
    trace: &'t Trace,
    plan: SimulationPlan,
    goal: TuneGoal,
    seeds: u64,
    capacity: f64,
    epoch: Instant,
    rounds: Vec<TuneRound>,
}

impl<'t> Tuner<'t> {
    /// Measures the fleet's capacity, unless it is given. `epoch` is the start of virtual time; only
    /// differences to it are used.
    pub fn new(args: &TuneArgs, trace: &'t Trace, epoch: Instant) -> Result<Self, TuneError> {
        if !(2..=1000).contains(&args.seeds) {
            return Err(TuneError::Seeds(args.seeds));
        }
        let plan = args.replay.plan(Knobs::default());
        let plan = plan.map_err(|error| TuneError::Args(error.into()))?;
        let capacity = match plan.capacity {
            Some(capacity) => capacity,
            None => capacity::measure(trace, &plan, epoch)
                .map_err(|error| TuneError::Simulation(error.into()))?,
        };
        Ok(Self {
            trace,
            plan,
            goal: args.goal,
            seeds: args.seeds,
            capacity,
            epoch,
            rounds: Vec::new(),
        })
    }

    /// Name and runs of the next round; `None` at the end.
    #[must_use]
    pub fn next_round(&self) -> Option<(&'static str, Vec<TuneJob>)> {
        let kind = *RoundKind::ALL.get(self.rounds.len())?;
        let candidates = self.candidates(kind);
        // Nothing is to be confirmed if the default wins.
        if kind == RoundKind::Confirm && candidates.len() < 2 {
            return None;
        }
        let whole = self.plan.stretch.requests.unwrap_or(usize::MAX);
        let requests = whole.min(self.trace.len()).div_ceil(kind.part());
        let jobs = candidates.into_iter().flat_map(|candidate| {
            self.seeds(kind).map(move |seed| TuneJob {
                candidate,
                requests,
                seed,
            })
        });
        Some((kind.label(), jobs.collect()))
    }

    /// Runs a job.
    pub fn run(&self, job: &TuneJob) -> Result<TuneRun, TuneError> {
        let mut plan = self.plan.clone();
        plan.setup.seed = job.seed;
        plan.setup.replicas.knobs = job.candidate.knobs();
        plan.stretch.seed = job.seed;
        plan.stretch.requests = Some(job.requests);
        let pace = capacity::pace(self.trace, &plan.setup, self.rate());
        let arrivals = Arrivals::new(self.trace, plan.stretch, pace);
        let outcome = world::run(self.trace, arrivals, &plan.setup, self.epoch)
            .map_err(|error| TuneError::Simulation(error.into()))?;
        Ok(TuneRun {
            figures: outcome.figures(plan.bounds),
            slots: outcome.slots(SLOTS),
            worker_tokens: outcome.worker_tokens(),
        })
    }

    /// Takes the results of a round's jobs, in the jobs' order.
    pub fn finish_round(&mut self, jobs: &[TuneJob], runs: Vec<TuneRun>) {
        let Some(&kind) = RoundKind::ALL.get(self.rounds.len()) else {
            return;
        };
        let mut ranking: Vec<CandidateRuns> = Vec::new();
        for (job, run) in jobs.iter().zip(runs) {
            match ranking
                .last_mut()
                .filter(|last| last.candidate == job.candidate)
            {
                Some(last) => last.runs.push(run),
                None => ranking.push(CandidateRuns {
                    candidate: job.candidate,
                    runs: vec![run],
                }),
            }
        }
        let goal = self.goal;
        ranking.sort_by(|one, other| one.mean_log(goal).total_cmp(&other.mean_log(goal)));
        self.rounds.push(TuneRound { kind, ranking });
    }

    fn candidates(&self, kind: RoundKind) -> Vec<TuneCandidate> {
        let Some(last) = self.rounds.last() else {
            return TuneCandidate::all();
        };
        debug_assert!(last.kind < kind);
        let best = last.ranking.iter().take(last.kind.keeps());
        let mut candidates: Vec<TuneCandidate> = best.map(|runs| runs.candidate).collect();
        if !candidates.contains(&TuneCandidate::DEFAULT) {
            candidates.push(TuneCandidate::DEFAULT);
        }
        candidates
    }

    /// No two rounds have a seed in common.
    fn seeds(&self, kind: RoundKind) -> std::ops::Range<u64> {
        let count = match kind {
            RoundKind::Screen => 2,
            RoundKind::Narrow => self.seeds.min(4),
            RoundKind::Final | RoundKind::Confirm => self.seeds,
        };
        let first = kind as u64 * 10_000;
        first..first + count
    }

    /// Requests a second, or open sessions.
    fn rate(&self) -> f64 {
        self.capacity * self.plan.load
    }
}

/// Points of a chart over time.
const SLOTS: u32 = 24;

impl CandidateRuns {
    fn logs(&self, goal: TuneGoal) -> impl Iterator<Item = f64> {
        let runs = self.runs.iter();
        // A figure of 0 is one without requests.
        runs.map(move |run| goal.of(&run.figures).max(1e-9).ln())
    }

    fn mean_log(&self, goal: TuneGoal) -> f64 {
        self.logs(goal).sum::<f64>() / self.runs.len() as f64
    }

    /// Mean of a figure over the runs.
    fn mean(&self, figure: impl Fn(&Figures) -> f64) -> f64 {
        let sum: f64 = self.runs.iter().map(|run| figure(&run.figures)).sum();
        sum / self.runs.len() as f64
    }
}

impl TuneRound {
    fn of(&self, candidate: TuneCandidate) -> Option<&CandidateRuns> {
        self.ranking.iter().find(|runs| runs.candidate == candidate)
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
