//! Probes of engines (`--probe`): an engine's cached tokens against the index's credit.
//!
//! A probe sends a unique prompt to a rank, waits until a replica credits it, sends it again, and
//! compares. Each exact source is probed once per replica.

use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use uuid::Uuid;
use warmroute_process::tls::EngineTls;
use warmroute_proto::hash::local_hashes;
use warmroute_proto::query::{IndexAnswer, SourceState};
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::view::SourceView;
use warmroute_proto::{BlockCut, DpRank, Seed, Source};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::collect::PlaneReader;
use super::{Code, Findings, PlaneState, StatusLine};

/// Deadline of a request to an engine.
const ENGINE_DEADLINE: Duration = Duration::from_secs(10);

/// Deadline for an index to credit what its engine just cached.
const CREDIT_DEADLINE: Duration = Duration::from_secs(10);
const CREDIT_PAUSE: Duration = Duration::from_millis(50);

/// Whole blocks of a probe's prompt.
const PROBE_BLOCKS: usize = 4;

/// Token ids that every vocabulary has, and that mean nothing to any template.
const TOKEN_FIRST: u64 = 300;
const TOKENS: u64 = 700;

/// A probe of a source by a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineProbe {
    pub source: Source,
    pub indexer: String,
    pub outcome: ProbeOutcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// The engine had cached at least the credited tokens.
    Equal,
    /// The index credits only this number of the prompt's blocks.
    Uncredited { blocks: usize },
    /// The engine had cached fewer tokens than credited.
    Short { credited: u64, cached: u64 },
    /// The engine could not be probed.
    Failed { reason: String },
}

pub(super) fn judge(state: &PlaneState, findings: &mut Findings, rest: &mut Vec<StatusLine>) {
    let Some(probes) = &state.probes else {
        return;
    };
    for probe in probes {
        let at = format!("{} by indexer {}", probe.source, probe.indexer);
        match &probe.outcome {
            ProbeOutcome::Equal => {}
            ProbeOutcome::Uncredited { blocks } => {
                let about = format!("{at}: {blocks} of {PROBE_BLOCKS} blocks are credited");
                findings.add(Code::ProbeUncredited, about);
            }
            ProbeOutcome::Short { credited, cached } => {
                let about = format!("{at}: {credited} tokens are credited, {cached} were cached");
                findings.add(Code::ProbeShort, about);
            }
            ProbeOutcome::Failed { reason } => {
                findings.add(Code::ProbeSilent, format!("{}: {reason}", probe.source));
            }
        }
    }
    rest.push(("probes", format!("{} of exact sources", probes.len())));
}

impl PlaneReader {
    /// Probes each exact source of each replica's view.
    pub async fn probe(
        &self,
        state: &PlaneState,
        tls: &EngineTls,
    ) -> reqwest::Result<Vec<EngineProbe>> {
        let http = tls.client().timeout(ENGINE_DEADLINE).build()?;
        let mut probes = Vec::new();
        for (id, view) in state.answers() {
            let exact = |one: &&SourceView| one.states.gpu == SourceState::Exact;
            for source in view.sources.iter().filter(exact).map(|one| &one.source) {
                let Some(entry) = state.registry.workers.get(&source.worker) else {
                    continue;
                };
                let outcome = self.probe_one(&http, id, entry, source).await;
                let failed = |error: anyhow::Error| ProbeOutcome::Failed {
                    reason: format!("{error:#}"),
                };
                probes.push(EngineProbe {
                    source: source.clone(),
                    indexer: id.to_owned(),
                    outcome: outcome.unwrap_or_else(failed),
                });
            }
        }
        Ok(probes)
    }

    async fn probe_one(
        &self,
        http: &reqwest::Client,
        id: &str,
        entry: &WorkerEntry,
        source: &Source,
    ) -> anyhow::Result<ProbeOutcome> {
        let cut = entry.block_cut().context("its block size is not known")?;
        let tokens = probe_tokens(cut, Uuid::new_v4().as_u64_pair().0);
        cached_tokens(http, entry, source.dp_rank, &tokens).await?;
        let blocks = local_hashes(&tokens, cut, Seed::new(None, None));
        let end = Instant::now() + CREDIT_DEADLINE;
        let mut credited = 0;
        while credited < PROBE_BLOCKS && Instant::now() < end {
            credited = match self.query(id, blocks.clone()).await? {
                IndexAnswer::Runs { sources, .. } => {
                    let mut answers = sources.into_iter();
                    let answer = answers.find(|answer| answer.source == *source);
                    answer.map_or(0, |answer| answer.run.gpu as usize)
                }
                IndexAnswer::Behind { .. } => 0,
            };
            sleep(CREDIT_PAUSE).await;
        }
        if credited < PROBE_BLOCKS {
            return Ok(ProbeOutcome::Uncredited { blocks: credited });
        }
        let credited = (credited * cut.size.tokens()) as u64;
        let cached = cached_tokens(http, entry, source.dp_rank, &tokens).await?;
        Ok(match cached < credited {
            true => ProbeOutcome::Short { credited, cached },
            false => ProbeOutcome::Equal,
        })
    }
}

/// A prompt of four blocks and as few tokens more as let all four be read from the cache.
fn probe_tokens(cut: BlockCut, seed: u64) -> Vec<u32> {
    let behind = cut.lookahead.max(1) as usize;
    let count = PROBE_BLOCKS * cut.size.tokens() + behind;
    let token = |at: u64| TOKEN_FIRST + xxh3_64_with_seed(&at.to_le_bytes(), seed) % TOKENS;
    (0..count as u64)
        .filter_map(|at| u32::try_from(token(at)).ok())
        .collect()
}

/// Sends the prompt. Returns how many of its tokens were cached before.
async fn cached_tokens(
    http: &reqwest::Client,
    entry: &WorkerEntry,
    rank: DpRank,
    tokens: &[u32],
) -> anyhow::Result<u64> {
    let model = entry.models.first().context("it serves no model")?;
    let body = json!({"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0});
    let request = http
        .post(format!("{}/v1/completions", entry.url))
        .header("X-data-parallel-rank", rank.to_string())
        .json(&body);
    let failed = "the engine does not answer";
    let answer = request.send().await.context(failed)?;
    let answer = answer.error_for_status().context(failed)?;
    let answer: Value = answer.json().await.context(failed)?;
    answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .context("the engine does not report cached tokens: --enable-prompt-tokens-details")
}

#[cfg(test)]
mod tests {
    use warmroute_proto::BlockSize;

    use super::*;

    #[test]
    fn a_probe_is_four_blocks_and_a_token_and_unique() {
        let cut = |lookahead| BlockCut {
            size: BlockSize::new(16).unwrap(),
            lookahead,
        };
        let tokens = probe_tokens(cut(0), 1);
        assert_eq!(tokens.len(), 65);
        // All four blocks have a name.
        assert_eq!(probe_tokens(cut(1), 1).len(), 65);
        assert_eq!(probe_tokens(cut(3), 1).len(), 67);
        assert!(tokens.iter().all(|&token| (300..1000).contains(&token)));
        assert_ne!(tokens, probe_tokens(cut(0), 2));
    }
}
