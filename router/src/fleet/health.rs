//! Health of one worker. Pure: observations in, transitions out.
//!
//! Two failed probes in a row make a worker unusable (an engine's event loop stalls under load),
//! one refused connection does (no process listens), one passed probe makes it usable. Requests
//! that break after they were sent are `breaker`'s.

/// Failed probes in a row that make a worker unusable.
const FAILURES_MAX: u32 = 2;

/// One observation of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observation {
    /// `GET /health` was answered with success.
    ProbePassed,
    /// It was not, or not in time.
    ProbeFailed,
    /// Another engine answers at the address: it does not list the worker's models.
    OtherEngine,
    /// The connection was refused.
    ConnectRefused,
}

/// A worker's health.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorkerHealth {
    /// Not probed yet: used only where no worker is known to be healthy.
    #[default]
    Unchecked,
    Healthy {
        failures: u32,
    },
    Unhealthy,
}

/// What an observation changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthChange {
    /// Usable, and was not.
    Up,
    /// Not usable, and was usable or unchecked.
    Down,
    None,
}

impl WorkerHealth {
    #[must_use]
    pub const fn usable(self) -> bool {
        matches!(self, Self::Healthy { .. })
    }

    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Unchecked => "unchecked",
            Self::Healthy { .. } => "healthy",
            Self::Unhealthy => "unhealthy",
        }
    }

    pub const fn observe(&mut self, observation: Observation) -> HealthChange {
        let before = *self;
        *self = match (before, observation) {
            (_, Observation::ProbePassed) => Self::Healthy { failures: 0 },
            (Self::Healthy { failures }, Observation::ProbeFailed)
                if failures + 1 < FAILURES_MAX =>
            {
                Self::Healthy {
                    failures: failures + 1,
                }
            }
            (
                _,
                Observation::ProbeFailed | Observation::ConnectRefused | Observation::OtherEngine,
            ) => Self::Unhealthy,
        };
        match (before, self.usable()) {
            (Self::Unchecked | Self::Unhealthy, true) => HealthChange::Up,
            (Self::Unchecked | Self::Healthy { .. }, false) => HealthChange::Down,
            (Self::Healthy { .. }, true) | (Self::Unhealthy, false) => HealthChange::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Observation::{ConnectRefused, OtherEngine, ProbeFailed, ProbePassed};
    use super::*;

    fn check(steps: &[(Observation, HealthChange)]) {
        let mut health = WorkerHealth::default();
        for (number, (observation, expected)) in steps.iter().enumerate() {
            assert_eq!(
                health.observe(*observation),
                *expected,
                "{number} of {steps:?}"
            );
        }
    }

    #[test]
    fn one_failed_probe_is_forgiven_two_are_not() {
        check(&[
            (ProbePassed, HealthChange::Up),
            (ProbeFailed, HealthChange::None),
            (ProbePassed, HealthChange::None),
            (ProbeFailed, HealthChange::None),
            (ProbeFailed, HealthChange::Down),
        ]);
    }

    #[test]
    fn a_refused_connection_or_another_engine_counts_at_the_first_time_and_one_success_returns() {
        for observation in [ConnectRefused, OtherEngine] {
            check(&[
                (ProbePassed, HealthChange::Up),
                (observation, HealthChange::Down),
                (observation, HealthChange::None),
                (ProbePassed, HealthChange::Up),
            ]);
        }
    }

    #[test]
    fn a_worker_is_not_usable_before_its_first_probe() {
        assert!(!WorkerHealth::default().usable());
        check(&[(ProbePassed, HealthChange::Up)]);
    }

    /// Unchecked workers are used where no healthy one is, so the transition must be published.
    #[test]
    fn a_first_probe_that_fails_is_a_change() {
        check(&[
            (ProbeFailed, HealthChange::Down),
            (ProbeFailed, HealthChange::None),
            (ProbePassed, HealthChange::Up),
        ]);
    }
}
