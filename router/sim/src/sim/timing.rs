//! Duration of a step: a linear model of prefill and decode.
//!
//! A decoding sequence reads the keys and values of its whole context in each step, so that steps
//! grow with the tokens of all contexts. Prefill has one rate: a profile stands for typical prompts.

use std::time::Duration;

/// Parameters of the duration of a scheduler step. All zero: steps take no time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimingProfile {
    /// Prompt tokens per second when nothing else runs; 0 means instantly.
    pub prefill_tokens_per_sec: f64,
    /// Step time of decoding one sequence.
    pub itl: Duration,
    /// Additional step time per further decoding sequence.
    pub itl_per_sequence: Duration,
    /// Additional step time per token of all decoding sequences' contexts.
    pub itl_per_context_token: Duration,
    /// Step time of any step.
    pub step_overhead: Duration,
    /// Tokens per second copied from a lower tier; 0 means instantly.
    pub load_tokens_per_sec: f64,
    /// Whether a step is scheduled when the one before begins, as vLLM's `--async-scheduling` does:
    /// a request then waits for one step more. The model's driver implements it.
    pub async_scheduling: bool,
    /// Time that each answer takes outside the engine: network, HTTP server, tokenizer. The model's
    /// driver adds it.
    pub request_latency: Duration,
}

/// Work of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    pub prefill_tokens: usize,
    pub decode_sequences: usize,
    /// Computed tokens of the decoding sequences, prompts included.
    pub context_tokens: usize,
    pub loaded_tokens: usize,
}

impl StepWork {
    pub(super) const fn is_empty(&self) -> bool {
        self.prefill_tokens == 0 && self.decode_sequences == 0
    }
}

impl TimingProfile {
    /// Takes no time: for tests.
    pub const INSTANT: Self = Self {
        prefill_tokens_per_sec: 0.0,
        itl: Duration::ZERO,
        itl_per_sequence: Duration::ZERO,
        itl_per_context_token: Duration::ZERO,
        step_overhead: Duration::ZERO,
        load_tokens_per_sec: 0.0,
        async_scheduling: false,
        request_latency: Duration::ZERO,
    };

    /// An 8-billion-parameter model on one large accelerator.
    pub const GPU_8B: Self = Self {
        prefill_tokens_per_sec: 20_000.0,
        itl: Duration::from_micros(7_000),
        itl_per_sequence: Duration::from_micros(15),
        itl_per_context_token: Duration::from_nanos(45),
        step_overhead: Duration::from_micros(1_000),
        load_tokens_per_sec: 150_000.0,
        async_scheduling: false,
        request_latency: Duration::ZERO,
    };

    /// A 70-billion-parameter model on four large accelerators.
    pub const GPU_70B: Self = Self {
        prefill_tokens_per_sec: 7_000.0,
        itl: Duration::from_micros(18_000),
        itl_per_sequence: Duration::from_micros(120),
        itl_per_context_token: Duration::from_nanos(30),
        step_overhead: Duration::from_micros(1_500),
        load_tokens_per_sec: 80_000.0,
        async_scheduling: false,
        request_latency: Duration::ZERO,
    };

    /// Ten times `GPU_8B`'s speed, for demonstrations and tests in real time.
    pub const FAST: Self = Self {
        prefill_tokens_per_sec: 200_000.0,
        itl: Duration::from_micros(1_000),
        itl_per_sequence: Duration::from_micros(2),
        itl_per_context_token: Duration::from_nanos(5),
        step_overhead: Duration::from_micros(100),
        load_tokens_per_sec: 1_500_000.0,
        async_scheduling: false,
        request_latency: Duration::ZERO,
    };

    /// Names for `by_name`.
    pub const NAMES: [&str; 4] = ["instant", "fast", "gpu-8b", "gpu-70b"];

    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        match name {
            "instant" => Some(Self::INSTANT),
            "fast" => Some(Self::FAST),
            "gpu-8b" => Some(Self::GPU_8B),
            "gpu-70b" => Some(Self::GPU_70B),
            _ => None,
        }
    }

    #[must_use]
    pub fn step_time(&self, work: StepWork) -> Duration {
        if work.is_empty() {
            return Duration::ZERO;
        }
        let decode = match u32::try_from(work.decode_sequences) {
            Ok(0) => Duration::ZERO,
            Ok(sequences) => self.itl + self.itl_per_sequence * (sequences - 1),
            Err(_) => Duration::MAX,
        };
        let contexts = u32::try_from(work.context_tokens).unwrap_or(u32::MAX);
        let contexts = self.itl_per_context_token.saturating_mul(contexts);
        self.step_overhead
            .saturating_add(at_rate(work.prefill_tokens, self.prefill_tokens_per_sec))
            .saturating_add(at_rate(work.loaded_tokens, self.load_tokens_per_sec))
            .saturating_add(decode)
            .saturating_add(contexts)
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "token counts are far below 2^52"
)]
fn at_rate(tokens: usize, per_sec: f64) -> Duration {
    if per_sec > 0.0 {
        Duration::try_from_secs_f64(tokens as f64 / per_sec).unwrap_or(Duration::MAX)
    } else {
        Duration::ZERO
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_a_profile() {
        assert!(
            TimingProfile::NAMES
                .iter()
                .all(|name| TimingProfile::by_name(name).is_some())
        );
        assert_eq!(TimingProfile::by_name("abacus"), None);
    }

    #[test]
    fn a_step_is_the_sum_of_its_parts() {
        let profile = TimingProfile {
            prefill_tokens_per_sec: 1_000.0,
            itl: Duration::from_millis(10),
            itl_per_sequence: Duration::from_millis(1),
            itl_per_context_token: Duration::from_micros(10),
            step_overhead: Duration::from_millis(2),
            load_tokens_per_sec: 10_000.0,
            async_scheduling: false,
            request_latency: Duration::ZERO,
        };
        let check = |prefill_tokens, decode_sequences, context_tokens, loaded_tokens, millis| {
            let work = StepWork {
                prefill_tokens,
                decode_sequences,
                context_tokens,
                loaded_tokens,
            };
            assert_eq!(profile.step_time(work), Duration::from_millis(millis));
        };
        check(0, 0, 0, 0, 0);
        check(500, 0, 0, 0, 502);
        check(0, 1, 0, 0, 12);
        check(0, 4, 0, 0, 15);
        check(0, 4, 1_000, 0, 25);
        check(500, 4, 0, 100, 525);
    }
}
