//! The engine's side of `verify`.
//!
//! The mock engine lists its blocks (`/debug/blocks`); engines without that, as vLLM, answer 404
//! and are skipped. Every engine reports how much of a prompt was cached: a *probe* sends a unique
//! prompt, waits until the index credits it, sends it again, and compares.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::{BlockSize, Digest, DpRank, EngineSeq, PrefixHash, Tier};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const DEADLINE: Duration = Duration::from_secs(10);

/// Deadline of an engine's block list.
const LIST_DEADLINE: Duration = Duration::from_secs(2);

/// Whole blocks of a probe's prompt.
pub const PROBE_BLOCKS: usize = 4;

/// Token ids that every vocabulary has, and that mean nothing to any template.
const TOKEN_FIRST: u64 = 300;
const TOKENS: u64 = 700;

/// What one rank of an engine holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineRankList {
    pub dp_rank: DpRank,
    /// The last batch that changed a pair, and the last batch; `None` without one.
    pub changed: Option<EngineSeq>,
    pub last: Option<EngineSeq>,
    pub digest: Digest,
}

#[derive(Deserialize)]
struct BlockListPage {
    ranks: Vec<RankBlocks>,
}

#[derive(Deserialize)]
struct RankBlocks {
    dp_rank: DpRank,
    last_seq: Option<EngineSeq>,
    published_seq_that_changed: Option<EngineSeq>,
    blocks: Vec<ListedBlock>,
}

#[derive(Deserialize)]
struct ListedBlock {
    prefix_hash: String,
    tier: Tier,
}

/// None if it is no list of blocks.
#[must_use]
pub fn read_list(body: &[u8]) -> Option<Vec<EngineRankList>> {
    let page: BlockListPage = serde_json::from_slice(body).ok()?;
    let ranks = page.ranks.into_iter().map(|rank| {
        let mut digest = Digest::default();
        for block in rank.blocks {
            digest.insert(PrefixHash(block.prefix_hash.parse().ok()?), block.tier);
        }
        Some(EngineRankList {
            dp_rank: rank.dp_rank,
            changed: rank.published_seq_that_changed,
            last: rank.last_seq,
            digest,
        })
    });
    ranks.collect()
}

/// A prompt of four blocks and one token more, so that all four can be read from the cache.
#[must_use]
pub fn probe_tokens(block_size: BlockSize, seed: u64) -> Vec<u32> {
    let count = PROBE_BLOCKS * block_size.tokens() + 1;
    let token = |at: u64| TOKEN_FIRST + xxh3_64_with_seed(&at.to_le_bytes(), seed) % TOKENS;
    (0..count as u64)
        .filter_map(|at| u32::try_from(token(at)).ok())
        .collect()
}

/// An engine's HTTP.
#[derive(Clone)]
pub struct EngineClient {
    http: reqwest::Client,
    url: String,
}

/// Why a probe says nothing.
#[derive(Debug, thiserror::Error)]
pub enum NoProbe {
    #[error("the engine does not answer: {0}")]
    Http(#[from] reqwest::Error),
    #[error("the engine does not report cached tokens: --enable-prompt-tokens-details")]
    Untold,
    #[error("it serves no model")]
    NoModel,
}

impl EngineClient {
    pub fn new(entry: &WorkerEntry) -> reqwest::Result<Self> {
        let http = reqwest::Client::builder()
            .timeout(DEADLINE)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .build()?;
        let url = entry.url.clone();
        Ok(Self { http, url })
    }

    /// None if it does not list its blocks.
    pub async fn list(&self) -> Option<Vec<EngineRankList>> {
        let url = format!("{}/debug/blocks", self.url);
        let ask = self.http.get(url).timeout(LIST_DEADLINE);
        let answer = ask.send().await.ok()?;
        let body = answer.error_for_status().ok()?.bytes().await.ok()?;
        read_list(&body)
    }

    /// Sends the prompt, and returns how many of its tokens were cached before.
    pub async fn cached(
        &self,
        entry: &WorkerEntry,
        rank: DpRank,
        tokens: &[u32],
    ) -> Result<u64, NoProbe> {
        let model = entry.models.first().ok_or(NoProbe::NoModel)?;
        let body = json!({"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0});
        let url = format!("{}/v1/completions", self.url);
        let sent = self.http.post(url).json(&body);
        let sent = sent.header("X-data-parallel-rank", rank.to_string());
        let answer: Value = sent.send().await?.error_for_status()?.json().await?;
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .ok_or(NoProbe::Untold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_blocks_is_read_and_nothing_else() {
        let body = br#"{"ranks": [{"dp_rank": 1, "last_seq": 9, "published_seq_that_changed": 7,
            "blocks": [{"prefix_hash": "42", "tier": "gpu", "references": 2}]},
            {"dp_rank": 2, "last_seq": null, "published_seq_that_changed": null, "blocks": []}]}"#;
        let mut digest = Digest::default();
        digest.insert(PrefixHash(42), Tier::Gpu);
        let listed = read_list(body).unwrap();
        assert_eq!(listed[0].digest, digest);
        assert_eq!(listed[0].changed, Some(EngineSeq(7)));
        assert_eq!(listed[0].last, Some(EngineSeq(9)));
        assert_eq!(listed[1].last, None);
        assert_eq!(read_list(br#"{"detail":"Not Found"}"#), None);
    }

    #[test]
    fn a_probe_is_four_blocks_and_a_token_and_unique() {
        let size = BlockSize::new(16).unwrap();
        let tokens = probe_tokens(size, 1);
        assert_eq!(tokens.len(), 65);
        assert!(tokens.iter().all(|&token| (300..1000).contains(&token)));
        assert_ne!(tokens, probe_tokens(size, 2));
    }
}
