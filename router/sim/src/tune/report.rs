//! What a search found, in words.

use super::statistics::PairedRatio;
use super::{CandidateRuns, RoundKind, TuneCandidate, TuneGoal, TuneRound, Tuner};

/// Widest label of a candidate.
const LABEL_WIDTH: usize = 32;

/// The result of a search.
pub(super) struct Verdict<'r> {
    pub(super) winner: &'r CandidateRuns,
    pub(super) default: &'r CandidateRuns,
    /// The winner over the default, by seeds that had no part in the choice; `None` if the default
    /// wins.
    pub(super) gain: Option<PairedRatio>,
}

impl Verdict<'_> {
    /// The candidate to use: the default, unless another one is surely better.
    pub(super) fn advice(&self) -> TuneCandidate {
        match &self.gain {
            Some(gain) if gain.high < 1.0 => self.winner.candidate,
            Some(_) | None => TuneCandidate::DEFAULT,
        }
    }

    pub(super) fn sentence(&self, goal: TuneGoal) -> String {
        let (name, what) = (self.winner.candidate.label(), goal.label());
        match &self.gain {
            None => format!("The default, time, has the lowest {what}."),
            Some(gain) if gain.is_noise() => format!(
                "{name} had the lowest {what}, but its difference from the default is noise: {}.",
                gain.percent()
            ),
            Some(gain) if gain.low > 1.0 => format!(
                "No candidate has a lower {what} than the default: the best other one, {name}, has {}.",
                gain.percent()
            ),
            Some(gain) => format!(
                "{name} has the lowest {what}: {} against the default.",
                gain.percent()
            ),
        }
    }
}

impl Tuner<'_> {
    /// The report for a terminal.
    #[must_use]
    pub fn report(&self) -> String {
        let mut text = String::new();
        let Some(verdict) = self.verdict() else {
            return text;
        };
        put!(text, "{}\n", self.setting());
        put!(text, "{}\n\n", verdict.sentence(self.goal));
        if let Some(last) = self.round(RoundKind::Final) {
            put!(text, "{}\n", self.table(last));
        }
        put!(text, "Use: {}", self.advised_flags(&verdict));
        text
    }

    pub(super) fn setting(&self) -> String {
        let unit = if self.trace.has_sessions() {
            "open sessions"
        } else {
            "requests/s"
        };
        format!(
            "{} requests, {} workers, load {} of a capacity of {:.2} {unit}; goal: {}",
            self.trace.len(),
            self.plan.setup.workers,
            self.plan.load,
            self.capacity,
            self.goal.label(),
        )
    }

    pub(super) fn advised_flags(&self, verdict: &Verdict<'_>) -> String {
        let advice = verdict.advice();
        if advice == TuneCandidate::DEFAULT {
            return format!("no flags, or {}", advice.flags());
        }
        advice.flags()
    }

    pub(super) fn round(&self, kind: RoundKind) -> Option<&TuneRound> {
        self.rounds.iter().find(|round| round.kind == kind)
    }

    pub(super) fn verdict(&self) -> Option<Verdict<'_>> {
        let last = self.round(RoundKind::Final)?;
        let first = last.ranking.first()?;
        let Some(confirmed) = self.round(RoundKind::Confirm) else {
            return Some(Verdict {
                winner: first,
                default: last.of(TuneCandidate::DEFAULT)?,
                gain: None,
            });
        };
        let winner = confirmed.of(first.candidate)?;
        let default = confirmed.of(TuneCandidate::DEFAULT)?;
        Some(Verdict {
            winner,
            default,
            gain: PairedRatio::of(winner.logs(self.goal), default.logs(self.goal)),
        })
    }

    /// A row for each finalist: its figures, and its difference from the best.
    fn table(&self, last: &TuneRound) -> String {
        let mut text = format!(
            "{:<LABEL_WIDTH$} {:>9} {:>9} {:>8} {:>9} {:>6}  against the best\n",
            "candidate", "TTFT ms", "p99 ms", "ITL ms", "e2e ms", "hits"
        );
        for (candidate, figures, against) in self.rows(last) {
            let [ttft, p99, itl, e2e, hits] = figures;
            put!(
                text,
                "{:<LABEL_WIDTH$} {ttft:>9.1} {p99:>9.0} {itl:>8.2} {e2e:>9.0} {hits:>6.3}  {against}\n",
                candidate.label(),
            );
        }
        text
    }

    /// Mean TTFT, p99 TTFT, ITL, end-to-end time and hit rate of each finalist, and its difference
    /// from the best.
    pub(super) fn rows(&self, last: &TuneRound) -> Vec<(TuneCandidate, [f64; 5], String)> {
        let Some(best) = last.ranking.first() else {
            return Vec::new();
        };
        let row = |runs: &CandidateRuns| {
            let ratio = PairedRatio::of(runs.logs(self.goal), best.logs(self.goal));
            let against = match ratio {
                _ if runs.candidate == best.candidate => "best".to_owned(),
                Some(ratio) if ratio.is_noise() => format!("{} (noise)", ratio.percent()),
                Some(ratio) => ratio.percent(),
                None => String::new(),
            };
            let figures = [
                runs.mean(|figures| figures.ttft_mean_ms),
                runs.mean(|figures| figures.ttft_p99_ms),
                runs.mean(|figures| figures.itl_mean_ms),
                runs.mean(|figures| figures.e2e_mean_ms),
                runs.mean(|figures| figures.hit_rate),
            ];
            (runs.candidate, figures, against)
        };
        last.ranking.iter().map(row).collect()
    }
}
