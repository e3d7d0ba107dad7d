//! What is compared.

use warmroute_route::{Knobs, Policy};

/// A policy with its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TuneCandidate {
    policy: Policy,
    weight: f64,
    temperature: f64,
}

impl TuneCandidate {
    /// What a router does without flags.
    pub(super) const DEFAULT: Self = Self::plain(Policy::Time);

    /// Overlap score weights and temperatures of `kv`.
    pub(super) const WEIGHTS: [f64; 6] = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0];
    pub(super) const TEMPERATURES: [f64; 3] = [0.0, 0.05, 0.2];

    const fn plain(policy: Policy) -> Self {
        Self {
            policy,
            weight: 1.0,
            temperature: 0.0,
        }
    }

    pub(super) const fn kv(weight: f64, temperature: f64) -> Self {
        Self {
            policy: Policy::Kv,
            weight,
            temperature,
        }
    }

    /// Without sessions, `session` is `least-load`. `kv-once` is `kv` without moves, which is never better.
    pub(super) fn all() -> Vec<Self> {
        let policies = [
            Policy::Time,
            Policy::Approx,
            Policy::RoundRobin,
            Policy::LeastLoad,
            Policy::Random,
            Policy::PowerOfTwo,
            Policy::Session,
            Policy::PrefixHash,
        ];
        let mut all: Vec<Self> = policies.into_iter().map(Self::plain).collect();
        for temperature in Self::TEMPERATURES {
            all.extend(Self::WEIGHTS.map(|weight| Self::kv(weight, temperature)));
        }
        all
    }

    pub(super) fn knobs(self) -> Knobs {
        Knobs {
            policy: self.policy,
            overlap_score_weight: self.weight,
            temperature: self.temperature,
            ..Knobs::default()
        }
    }

    pub(super) fn label(self) -> String {
        let mut label = self.policy.label().to_owned();
        if self.policy == Policy::Kv {
            put!(label, ", weight {}", self.weight);
            if self.temperature > 0.0 {
                put!(label, ", temperature {}", self.temperature);
            }
        }
        label
    }

    /// The router's flags, each with its value.
    pub(super) fn flags(self) -> String {
        let mut flags = format!("--policy {}", self.policy.label());
        if self.policy == Policy::Kv {
            put!(flags, " --overlap-score-weight {}", self.weight);
            put!(flags, " --router-temperature {}", self.temperature);
        }
        flags
    }
}
