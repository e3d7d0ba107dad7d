//! What a recording shows of its engines' speed.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::cache::{self, CachedPrompt};
use super::concurrency::{Concurrency, OpenInterval};
use super::regression::fit;
use super::{EngineProfile, FitError, ROWS_MIN};
use crate::recording::{RecordedOutcome, Recording, RequestFacts};

/// Tokens that an engine computes in a step.
const STEP_TOKENS: f64 = 8192.0;

/// Alternations of the two regressions; the third changes little.
const ROUNDS: usize = 4;

/// Answered requests with a measured first token.
#[derive(Debug, Default)]
pub(super) struct Samples {
    requests: Vec<ServedRequest>,
    /// Recorded requests, also those without a first token.
    recorded: usize,
    prompts: Vec<CachedPrompt>,
    /// Prompts whose cached tokens an engine reported.
    reported: usize,
    sources: usize,
    engines: Vec<SourceActivity>,
}

/// Times in seconds since the recording began.
#[derive(Clone, Copy, Debug)]
struct ServedRequest {
    source: usize,
    arrived: f64,
    first: f64,
    end: f64,
    ttft: Duration,
    prompt: f64,
    cached: Option<f64>,
    uncached: f64,
    gaps: f64,
}

/// What runs at one source, over time.
#[derive(Debug, Default)]
struct SourceActivity {
    prefill: Concurrency,
    decode: Concurrency,
    /// Tokens of the decoding sequences' contexts.
    contexts: Concurrency,
    /// Uncached tokens of all prompts whose first token came until then.
    computed: Vec<(f64, f64)>,
}

/// Means over a time.
#[derive(Clone, Copy, Debug)]
struct RunningMean {
    sequences: f64,
    /// Tokens of all their contexts.
    tokens: f64,
}

/// Steps that a prompt waits beyond the rest of the current one, from which on the engine schedules
/// ahead. Below 1, because the network and the router's own time count too.
const STEPS_AHEAD_MIN: f64 = 0.75;

/// Coefficients in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct StepCosts {
    /// The part of a decode step that does not depend on its sequences, with `overhead`.
    base: f64,
    each: f64,
    per_context_token: f64,
    per_token: f64,
    overhead: f64,
    /// Beyond the step of an idle engine's first token.
    request: f64,
    /// Steps that a prompt waits beside running sequences, beyond the rest of the current one.
    ahead: f64,
}

impl Samples {
    pub(super) fn of(recording: &Recording, models: &[String]) -> Self {
        let is_chosen = |facts: &RequestFacts| {
            let named = models.is_empty() || models.iter().any(|model| **model == *facts.model);
            named && facts.outcome == RecordedOutcome::Completed
        };
        let mut numbers = BTreeMap::new();
        let mut found = Self::default();
        let mut rows: Vec<_> = recording
            .requests
            .iter()
            .filter(|row| is_chosen(&row.0))
            .collect();
        rows.sort_by_key(|(facts, _)| facts.arrived);
        for (facts, last) in rows {
            found.recorded += 1;
            let Some(placement) = &facts.placement else {
                continue;
            };
            let next = numbers.len();
            let key = (&placement.worker, placement.dp_rank);
            let source = *numbers.entry(key).or_insert(next);
            found.requests.extend(served(facts, source));
            let path = recording.path(*last);
            let blocks = facts.prompt_tokens.saturating_add(facts.output_tokens);
            let blocks = blocks.div_ceil(facts.block_tokens.max(1)) as usize;
            found.reported += usize::from(facts.cached_tokens.is_some());
            found.prompts.push(CachedPrompt {
                source,
                own_blocks: blocks.saturating_sub(path.len()),
                path,
                cached_blocks: (facts.cached_tokens.unwrap_or(0) / facts.block_tokens.max(1))
                    as usize,
            });
        }
        found.sources = numbers.len();
        found.engines = (0..found.sources)
            .map(|source| found.activity(source))
            .collect();
        found
    }

    pub(super) const fn sources(&self) -> usize {
        self.sources
    }

    /// Tokens of all prompts and answers.
    pub(super) fn tokens(&self) -> usize {
        let tokens = |served: &ServedRequest| (served.prompt + served.gaps + 1.0) as usize;
        self.requests.iter().map(tokens).sum::<usize>().max(1 << 16)
    }

    /// Ascending.
    pub(super) fn ttfts(&self) -> Vec<Duration> {
        let mut ttfts: Vec<Duration> = self.requests.iter().map(|served| served.ttft).collect();
        ttfts.sort_unstable();
        ttfts
    }

    /// Cached tokens of the prompts whose engine reports them, over all tokens of these.
    pub(super) fn hit_rate(&self) -> Option<f64> {
        let reported = self
            .requests
            .iter()
            .filter_map(|one| Some((one.cached?, one.prompt)));
        let (cached, prompts) =
            reported.fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        (prompts > 0.0).then(|| cached / prompts)
    }

    /// The profile that explains the samples.
    pub(super) fn profile(&self, block_tokens: u32) -> Result<EngineProfile, FitError> {
        let times = self.times()?;
        let step = (times.base + times.each - times.overhead).max(0.0);
        let is_reported = self.reported == self.prompts.len();
        let blocks = cache::blocks(&self.prompts, self.sources).filter(|_| is_reported);
        let cache_tokens = blocks.and_then(|blocks| {
            let blocks = u32::try_from(blocks).ok()?;
            blocks.checked_mul(block_tokens)
        });
        let profile = EngineProfile {
            prefill_tokens_per_sec: 1.0 / times.per_token,
            step_ms: step * 1000.0,
            step_ms_per_sequence: times.each * 1000.0,
            step_ms_per_context_token: times.per_context_token * 1000.0,
            step_overhead_ms: times.overhead * 1000.0,
            request_ms: times.request * 1000.0,
            async_scheduling: times.ahead > STEPS_AHEAD_MIN,
            cache_tokens,
        };
        profile.check()?;
        Ok(profile)
    }

    fn times(&self) -> Result<StepCosts, FitError> {
        let (decode, alone) = (self.decode_rows(), self.alone());
        enough("answers of several tokens", decode.len())?;
        enough("prompts that no other prompt waited beside", alone.len())?;
        let [base, each, per_context_token, per_token] = fit(&decode);
        let mut times = StepCosts {
            base,
            each,
            per_context_token,
            per_token,
            ..StepCosts::default()
        };
        for _ in 0..ROUNDS {
            let rows = alone
                .iter()
                .map(|&(served, running)| first_token_row(served, running, times));
            [times.per_token, times.overhead, times.ahead] = fit(&rows.collect::<Vec<_>>());
            let idle = times.overhead;
            times.overhead = idle.min(times.base + times.each);
            times.request = idle - times.overhead;
            let rows = decode
                .iter()
                .map(|&([gaps, running, contexts, prefill], secs)| {
                    ([gaps, running, contexts], secs - times.per_token * prefill)
                });
            let rows: Vec<_> = rows.collect();
            [times.base, times.each, times.per_context_token] = fit(&rows);
        }
        Ok(times)
    }

    /// Decode times over gaps, gaps × sequences, gaps × tokens of their contexts, and tokens
    /// prefilled in that time. The scatter of a sum of steps grows with the root of their number,
    /// and is divided by it.
    fn decode_rows(&self) -> Vec<([f64; 4], f64)> {
        let answers = self.requests.iter().filter(|served| served.gaps > 0.0);
        let row = |served: &ServedRequest| {
            let engine = &self.engines[served.source];
            let running = engine.running(served.first, served.end);
            let prefill = engine.computed_until(served.end) - engine.computed_until(served.first);
            let root = served.gaps.sqrt();
            let RunningMean { sequences, tokens } = running;
            let row = [root, root * sequences, root * tokens, prefill / root];
            (row, (served.end - served.first) / root)
        };
        answers.map(row).collect()
    }

    /// Requests in whose prefill no other took part, with the sequences that ran then: none, or at
    /// least one in the mean.
    fn alone(&self) -> Vec<(ServedRequest, RunningMean)> {
        let each = self.requests.iter().map(|served| {
            let engine = &self.engines[served.source];
            let (start, end) = (served.arrived, served.first);
            let running = engine.running(start, end);
            (*served, engine.prefill.mean(start, end), running)
        });
        let alone = each.filter(|&(_, waiting, running)| {
            waiting < 1.001 && !(0.001..0.999).contains(&running.sequences)
        });
        alone
            .map(|(served, _, running)| (served, running))
            .collect()
    }

    fn activity(&self, source: usize) -> SourceActivity {
        let mine = || {
            self.requests
                .iter()
                .filter(move |served| served.source == source)
        };
        let mut computed: Vec<(f64, f64)> = mine()
            .map(|served| (served.first, served.uncached))
            .collect();
        computed.sort_by(|one, other| one.0.total_cmp(&other.0));
        let mut sum = 0.0;
        for (_, tokens) in &mut computed {
            sum += *tokens;
            *tokens = sum;
        }
        let prefill = mine().map(|served| OpenInterval {
            start: served.arrived,
            end: served.first,
            value: 1.0,
        });
        let decode = |value: fn(&ServedRequest) -> f64| {
            Concurrency::new(mine().map(move |served| OpenInterval {
                start: served.first,
                end: served.end,
                value: value(served),
            }))
        };
        SourceActivity {
            prefill: Concurrency::new(prefill),
            decode: decode(|_| 1.0),
            contexts: decode(ServedRequest::context),
            computed,
        }
    }
}

impl ServedRequest {
    /// Tokens of the context, in the mean over the answer.
    fn context(&self) -> f64 {
        self.prompt + self.gaps / 2.0
    }
}

impl SourceActivity {
    fn running(&self, start: f64, end: f64) -> RunningMean {
        RunningMean {
            sequences: self.decode.mean(start, end),
            tokens: self.contexts.mean(start, end),
        }
    }

    fn computed_until(&self, at: f64) -> f64 {
        let later = self.computed.partition_point(|(first, _)| *first <= at);
        later
            .checked_sub(1)
            .map_or(0.0, |place| self.computed[place].1)
    }
}

/// Time to the first token over uncached tokens, steps of an idle engine, and the time of a step
/// that is waited for. Where sequences run, the steps' time is known, and half a step passes until
/// the next one begins.
fn first_token_row(
    served: ServedRequest,
    running: RunningMean,
    times: StepCosts,
) -> ([f64; 3], f64) {
    let steps = (served.uncached / STEP_TOKENS).ceil();
    let secs = served.first - served.arrived;
    if running.sequences > 0.0 {
        let contexts = times.per_context_token * running.tokens;
        let step = times.base + times.each * running.sequences + contexts;
        let row = [served.uncached, 0.0, step];
        (row, secs - times.request - (steps + 0.5) * step)
    } else {
        ([served.uncached, steps, 0.0], secs)
    }
}

/// `None` without a first token.
fn served(facts: &RequestFacts, source: usize) -> Option<ServedRequest> {
    let (ttft, placement) = (facts.ttft?, facts.placement.as_ref()?);
    let arrived = facts.arrived.as_secs_f64();
    let prompt = f64::from(facts.prompt_tokens);
    let credited = f64::from(placement.credited_blocks) * f64::from(facts.block_tokens);
    let cached = facts.cached_tokens.map(f64::from);
    Some(ServedRequest {
        source,
        arrived,
        first: arrived + ttft.as_secs_f64(),
        end: arrived + facts.duration.max(ttft).as_secs_f64(),
        ttft,
        prompt,
        cached,
        uncached: (prompt - cached.unwrap_or(credited)).max(1.0),
        gaps: f64::from(facts.output_tokens.saturating_sub(1)),
    })
}

fn enough(what: &'static str, found: usize) -> Result<(), FitError> {
    if found < ROWS_MIN {
        return Err(FitError::TooFew { what, found });
    }
    Ok(())
}

impl fmt::Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} answered requests on {} engines, {} with a measured first token",
            self.recorded,
            self.sources,
            self.requests.len()
        )
    }
}
