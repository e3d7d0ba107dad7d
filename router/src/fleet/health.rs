//! Health of one worker. Pure: observations in, transitions out.
//!
//! Two failed probes in a row make a worker unusable (an engine's event loop stalls under load),
//! one refused connection does (no process listens), one passed probe makes it usable. A worker whose
//! engine says that it sleeps is not usable either. Requests that fail are `breaker`'s.

/// Failed probes in a row that make a worker unusable.
const FAILURES_MAX: u32 = 2;

/// One observation of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observation {
    /// `GET /health` was answered with success.
    ProbePassed,
    /// That, and the engine says that its model sleeps.
    Asleep,
    /// Passed, by an engine that does not report whether it sleeps. It is not asked again until
    /// it comes back.
    PassedWithoutSleep,
    /// It was not, or not in time.
    ProbeFailed,
    /// Another engine answers at the address: it does not list the worker's models.
    OtherEngine,
    /// The connection was refused.
    ConnectRefused,
}

impl Observation {
    /// What was seen, for operators.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::ProbePassed | Self::PassedWithoutSleep => "it answers",
            Self::Asleep => "its model sleeps",
            Self::ProbeFailed => "GET /health gives no success within 5 s",
            Self::OtherEngine => "an engine with other models answers there",
            Self::ConnectRefused => "nothing listens there",
        }
    }
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
    /// The engine answers, and its model's memory is released.
    Asleep,
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
            Self::Asleep => "asleep",
        }
    }

    /// Requests that wait there should leave.
    #[must_use]
    pub const fn is_lost(self) -> bool {
        matches!(self, Self::Unhealthy | Self::Asleep)
    }

    pub const fn observe(&mut self, observation: Observation) -> HealthChange {
        let before = *self;
        *self = match (before, observation) {
            (_, Observation::ProbePassed | Observation::PassedWithoutSleep) => {
                Self::Healthy { failures: 0 }
            }
            (_, Observation::Asleep) => Self::Asleep,
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
            (Self::Unchecked | Self::Unhealthy | Self::Asleep, true) => HealthChange::Up,
            (Self::Unchecked | Self::Healthy { .. }, false) => HealthChange::Down,
            // Another reason.
            (Self::Unhealthy, false) if matches!(self, Self::Asleep) => HealthChange::Down,
            (Self::Asleep, false) if matches!(self, Self::Unhealthy) => HealthChange::Down,
            (Self::Healthy { .. }, true) | (Self::Unhealthy | Self::Asleep, false) => {
                HealthChange::None
            }
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

    #[test]
    fn a_sleeping_engine_is_not_usable_until_it_is_awake() {
        let mut health = WorkerHealth::default();
        for (observation, change, label) in [
            (Observation::PassedWithoutSleep, HealthChange::Up, "healthy"),
            (Observation::Asleep, HealthChange::Down, "asleep"),
            (Observation::Asleep, HealthChange::None, "asleep"),
            (ProbeFailed, HealthChange::Down, "unhealthy"),
            (Observation::Asleep, HealthChange::Down, "asleep"),
            (ProbePassed, HealthChange::Up, "healthy"),
        ] {
            assert_eq!(health.observe(observation), change, "{observation:?}");
            assert_eq!(health.label(), label);
            assert_eq!(health.usable(), label == "healthy");
        }
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
