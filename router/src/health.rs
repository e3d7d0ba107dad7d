//! Is an engine usable? Pure: what the checks and the proxy saw comes in, a verdict comes out.
//!
//! Slow to condemn for a failed check (an engine's event loop stalls under load), quick for a
//! refused connection (nobody listens), quick to forgive.

/// Failed checks in a row that make a worker unusable.
const FAILURES_MAX: u32 = 2;

/// What somebody saw of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// `GET /health` was answered with success.
    CheckPassed,
    /// It was not, or not in time.
    CheckFailed,
    /// Somebody else answers there: not what the worker served.
    Stranger,
    /// A request could not be handed over, since nobody took the connection.
    ConnectFailed,
}

/// A worker's standing with the router.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// Not looked at yet: not used before the first check.
    #[default]
    Unchecked,
    Healthy {
        failures: u32,
    },
    Unhealthy,
}

/// What a sight changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Usable now, and was not.
    Up,
    /// Was usable or not looked at yet, and is not usable.
    Down,
    None,
}

impl Health {
    #[must_use]
    pub const fn usable(self) -> bool {
        match self {
            Self::Healthy { .. } => true,
            Self::Unchecked | Self::Unhealthy => false,
        }
    }

    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Unchecked => "unchecked",
            Self::Healthy { .. } => "healthy",
            Self::Unhealthy => "unhealthy",
        }
    }

    pub const fn see(&mut self, sight: Sight) -> Turn {
        let before = self.usable();
        let is_first = matches!(*self, Self::Unchecked);
        *self = match (*self, sight) {
            (_, Sight::CheckPassed) => Self::Healthy { failures: 0 },
            (Self::Healthy { failures }, Sight::CheckFailed) if failures + 1 < FAILURES_MAX => {
                Self::Healthy {
                    failures: failures + 1,
                }
            }
            (_, Sight::CheckFailed | Sight::ConnectFailed | Sight::Stranger) => Self::Unhealthy,
        };
        match (before, self.usable()) {
            (false, true) => Turn::Up,
            (true, false) => Turn::Down,
            (false, false) if is_first => Turn::Down,
            (true, true) | (false, false) => Turn::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Sight::{CheckFailed, CheckPassed, ConnectFailed, Stranger};
    use super::*;

    fn check(sights: &[Sight], turns: &[Turn]) {
        let mut health = Health::default();
        let seen: Vec<Turn> = sights.iter().map(|&sight| health.see(sight)).collect();
        assert_eq!(seen, turns, "{sights:?}");
    }

    #[test]
    fn one_failed_check_is_forgiven_two_are_not() {
        check(
            &[
                CheckPassed,
                CheckFailed,
                CheckPassed,
                CheckFailed,
                CheckFailed,
            ],
            &[Turn::Up, Turn::None, Turn::None, Turn::None, Turn::Down],
        );
    }

    #[test]
    fn a_refused_connection_counts_at_once_and_one_success_returns() {
        check(
            &[CheckPassed, ConnectFailed, ConnectFailed, CheckPassed],
            &[Turn::Up, Turn::Down, Turn::None, Turn::Up],
        );
    }

    #[test]
    fn a_stranger_gets_nothing_more() {
        check(
            &[CheckPassed, Stranger, Stranger, CheckPassed],
            &[Turn::Up, Turn::Down, Turn::None, Turn::Up],
        );
    }

    #[test]
    fn a_worker_is_not_used_before_its_first_check() {
        check(&[CheckPassed], &[Turn::Up]);
    }

    /// Whoever uses unchecked workers for want of others has to be told.
    #[test]
    fn a_first_check_that_fails_is_news() {
        check(
            &[CheckFailed, CheckFailed, CheckPassed],
            &[Turn::Down, Turn::None, Turn::Up],
        );
    }
}
