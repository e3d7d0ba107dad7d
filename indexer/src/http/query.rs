//! `/query` and `/query_by_hash`: what each worker holds of a prompt.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use axum::extract::{Json, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde::de::{DeserializeOwned, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use tokio::time::timeout;
use warmroute_index::view::WorkerView;
use warmroute_process::blocking;
use warmroute_proto::hash::local_hashes;
use warmroute_proto::query::{IndexAnswer, SourceAnswer, SourceState};
use warmroute_proto::{
    BlockCut, BlockSize, DpRank, EngineSeq, LocalHash, LogPosition, Seed, Source, WorkerId,
};

use super::{BODY_DEADLINE, HttpError, Limited, body_of, check_content_type};
use crate::query::PreparedQuery;
use crate::service::Handle;

/// Elements of a body that are parsed in one step, and blocks that are hashed in one: some 50 µs.
const STEP_ELEMENTS: usize = 1024;

/// Maximum blocks of a prompt: a million, of 16 tokens each mostly.
const BLOCKS_MAX: usize = 1 << 20;

/// Common fields are repeated, because `serde(flatten)` buffers unknown fields.
#[derive(Deserialize)]
struct TokensQuery {
    #[serde(alias = "model_name")]
    model: Option<String>,
    block_size: Option<u32>,
    instance_id: Option<WorkerId>,
    #[serde(deserialize_with = "in_steps")]
    token_ids: Vec<u32>,
    lora_name: Option<String>,
    cache_salt: Option<String>,
}

#[derive(Deserialize)]
struct HashQuery {
    #[serde(alias = "model_name")]
    model: Option<String>,
    block_size: Option<u32>,
    instance_id: Option<WorkerId>,
    /// Local block hashes, already seeded.
    #[serde(deserialize_with = "in_steps")]
    block_hashes: Vec<LocalHash>,
    cache_salt: Option<String>,
}

/// A long array, parsed in short steps.
fn in_steps<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Elements<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Elements<T> {
        type Value = Vec<T>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a sequence")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Vec<T>, A::Error> {
            let mut parsed = Vec::new();
            while let Some(element) = elements.next_element()? {
                parsed.push(element);
                if parsed.len().is_multiple_of(STEP_ELEMENTS) {
                    blocking::give_way();
                }
            }
            Ok(parsed)
        }
    }

    deserializer.deserialize_seq(Elements(PhantomData))
}

/// Selects workers. The RFC has `model`, its widest-used implementation `model_name`.
struct Scope {
    model: Option<String>,
    block_size: Option<u32>,
    instance_id: Option<WorkerId>,
}

impl Scope {
    /// A worker that the registry never named is meant only if no model is.
    fn means(&self, view: &WorkerView) -> bool {
        let id = &self.instance_id;
        id.as_ref().is_none_or(|id| *id == view.instance_id)
            && self.model.as_ref().is_none_or(|model| {
                view.entry.as_ref().is_some_and(|entry| {
                    entry.models.contains(model)
                        || entry.loras.iter().any(|lora| lora.name == *model)
                })
            })
    }

    const fn is_narrow(&self) -> bool {
        self.model.is_some() || self.instance_id.is_some()
    }

    fn block_cut(&self, meant: &[&WorkerView]) -> Result<BlockCut, HttpError> {
        let mut cuts = meant.iter().filter_map(|view| reported_cut(view));
        if let Some(tokens) = self.block_size {
            let size = BlockSize::new(tokens);
            let size = size.ok_or_else(|| HttpError::bad("block_size is 0"))?;
            return Ok(cuts
                .find(|cut| cut.size == size)
                .unwrap_or_else(|| size.into()));
        }
        let first = cuts
            .next()
            .ok_or_else(|| HttpError::bad("no worker reported its block size: give block_size"))?;
        if cuts.any(|cut| cut.size != first.size) {
            return Err(HttpError::bad(
                "block sizes differ: name model or block_size",
            ));
        }
        Ok(first)
    }
}

fn reported_cut(view: &WorkerView) -> Option<BlockCut> {
    view.entry.as_ref()?.block_cut()
}

#[derive(Serialize)]
struct QueryResponse {
    position: LogPosition,
    /// Tokens on the GPU by instance and rank.
    scores: BTreeMap<WorkerId, BTreeMap<DpRank, u64>>,
    instances: BTreeMap<WorkerId, Instance>,
}

/// The best of an instance's ranks, and each of them.
#[derive(Default, Serialize)]
struct Instance {
    longest_matched: u64,
    gpu: u64,
    cpu: u64,
    disk: u64,
    dp: BTreeMap<DpRank, u64>,
    rank_matches: BTreeMap<DpRank, RankMatch>,
    states: BTreeMap<DpRank, SourceState>,
    /// The engine batch that each rank's tokens are of; null before the first.
    engine_seqs: BTreeMap<DpRank, Option<EngineSeq>>,
}

/// One rank's tokens, cumulative: a rank's tiers go together, those of different ranks do not.
#[derive(Clone, Copy, Serialize)]
struct RankMatch {
    gpu: u64,
    cpu: u64,
    disk: u64,
}

/// The body of a query.
trait QueryBody: DeserializeOwned + Send + 'static {
    fn scope(&self) -> Scope;

    /// The blocks that are looked up.
    fn blocks(self, chosen: &Chosen) -> Result<Vec<LocalHash>, HttpError>;

    fn prepared(self, chosen: &Chosen) -> Result<PreparedQuery, HttpError> {
        let blocks = self.blocks(chosen)?;
        if blocks.len() > BLOCKS_MAX {
            return Err(HttpError::bad(format!(
                "the prompt has more than {BLOCKS_MAX} blocks"
            )));
        }
        Ok(PreparedQuery::in_steps(blocks, blocking::give_way))
    }
}

impl QueryBody for TokensQuery {
    fn scope(&self) -> Scope {
        Scope {
            model: self.model.clone(),
            block_size: self.block_size,
            instance_id: self.instance_id.clone(),
        }
    }

    fn blocks(self, chosen: &Chosen) -> Result<Vec<LocalHash>, HttpError> {
        let lora = self.lora_name.as_deref().or(chosen.lora.as_deref());
        let seed = Seed::new(lora, self.cache_salt.as_deref());
        let (cut, tokens) = (chosen.cut, &self.token_ids);
        let step = cut.size.tokens() * STEP_ELEMENTS;
        let steps = (0..tokens.len()).step_by(step).flat_map(|start| {
            blocking::give_way();
            let end = start + step + cut.lookahead as usize;
            local_hashes(&tokens[start..end.min(tokens.len())], cut, seed)
        });
        Ok(steps.collect())
    }
}

impl QueryBody for HashQuery {
    fn scope(&self) -> Scope {
        Scope {
            model: self.model.clone(),
            block_size: self.block_size,
            instance_id: self.instance_id.clone(),
        }
    }

    fn blocks(self, _: &Chosen) -> Result<Vec<LocalHash>, HttpError> {
        if self.cache_salt.is_some() {
            return Err(HttpError::bad(
                "cache_salt cannot be applied to hashes: compute them with it, or use /query",
            ));
        }
        Ok(self.block_hashes)
    }
}

pub(super) async fn by_tokens(
    State(index): State<Limited>,
    request: Request,
) -> Result<Response, HttpError> {
    answer::<TokensQuery>(&index, request).await
}

pub(super) async fn by_hashes(
    State(index): State<Limited>,
    request: Request,
) -> Result<Response, HttpError> {
    answer::<HashQuery>(&index, request).await
}

/// Parsing, hashing and encoding take long; reading the index does not.
async fn answer<T: QueryBody>(index: &Limited, request: Request) -> Result<Response, HttpError> {
    check_content_type(request.headers())?;
    let slot = index.slot().await?;
    let late = |_| HttpError {
        status: StatusCode::REQUEST_TIMEOUT,
        message: format!("the body takes longer than {BODY_DEADLINE:?}"),
    };
    let body = timeout(BODY_DEADLINE, body_of(request));
    let body = body.await.map_err(late)??;
    let parse = move || Json::<T>::from_bytes(&body);
    let Json(query) = index.compute(&slot, parse).await??;
    let scope = query.scope();
    let choose = move |handle: &Handle| Chosen::of(&handle.workers(), &scope);
    let chosen = index.read(&slot, choose).await??;
    let hash = move || query.prepared(&chosen).map(|prepared| (chosen, prepared));
    let (chosen, prepared) = index.compute(&slot, hash).await??;
    let look_up = move |handle: &Handle| chosen.answer(handle, &prepared);
    let found = index.read(&slot, look_up).await??;
    index.compute(&slot, || Json(found).into_response()).await
}

/// The workers that a query is about, which share one cut.
struct Chosen {
    cut: BlockCut,
    /// In order.
    workers: Vec<WorkerId>,
    /// The model is this adapter.
    lora: Option<String>,
}

impl Chosen {
    fn of(workers: &[WorkerView], scope: &Scope) -> Result<Self, HttpError> {
        let mut meant: Vec<_> = workers.iter().filter(|view| scope.means(view)).collect();
        if meant.is_empty() && scope.is_narrow() {
            return Err(HttpError {
                status: StatusCode::NOT_FOUND,
                message: "no such worker, or none that serves this model".to_owned(),
            });
        }
        let cut = scope.block_cut(&meant)?;
        // Blocks of another cut match nothing, and would be counted in the wrong unit.
        meant.retain(|view| reported_cut(view).is_none_or(|reported| reported == cut));
        let lora = scope.model.as_ref().filter(|model| {
            let entries = meant.iter().filter_map(|view| view.entry.as_ref());
            let mut loras = entries.flat_map(|entry| &entry.loras);
            loras.any(|lora| lora.name == **model)
        });
        Ok(Self {
            cut,
            workers: meant.iter().map(|view| view.instance_id.clone()).collect(),
            lora: lora.cloned(),
        })
    }

    fn answer(&self, handle: &Handle, query: &PreparedQuery) -> Result<QueryResponse, HttpError> {
        match handle.answer(query) {
            IndexAnswer::Runs {
                position, sources, ..
            } => Ok(self.response(position, &sources)),
            IndexAnswer::Behind { .. } => Err(HttpError {
                status: StatusCode::SERVICE_UNAVAILABLE,
                message: "the log is not known yet".to_owned(),
            }),
        }
    }

    fn response(&self, position: LogPosition, sources: &[SourceAnswer]) -> QueryResponse {
        let size = self.cut.size.tokens() as u64;
        let mut response = QueryResponse {
            position,
            scores: BTreeMap::new(),
            instances: BTreeMap::new(),
        };
        let meant =
            |answer: &&SourceAnswer| self.workers.binary_search(&answer.source.worker).is_ok();
        for answer in sources.iter().filter(meant) {
            let Source { worker, dp_rank } = &answer.source;
            let gpu = u64::from(answer.run.gpu) * size;
            let cpu = gpu + u64::from(answer.run.cpu) * size;
            let disk = cpu + u64::from(answer.run.disk) * size;
            let instance = response.instances.entry(worker.clone()).or_default();
            instance.gpu = instance.gpu.max(gpu);
            instance.cpu = instance.cpu.max(cpu);
            instance.disk = instance.disk.max(disk);
            instance.longest_matched = instance.longest_matched.max(disk);
            instance.dp.insert(*dp_rank, gpu);
            let rank = RankMatch { gpu, cpu, disk };
            instance.rank_matches.insert(*dp_rank, rank);
            instance.states.insert(*dp_rank, answer.states.gpu);
            instance.engine_seqs.insert(*dp_rank, answer.engine_seq);
            let scores = response.scores.entry(worker.clone()).or_default();
            scores.insert(*dp_rank, gpu);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A body may name more blocks than any prompt has.
    #[test]
    fn the_blocks_of_a_query_are_bounded() {
        let chosen = Chosen {
            cut: BlockSize::new(1).unwrap().into(),
            workers: Vec::new(),
            lora: None,
        };
        let of = |blocks: usize| HashQuery {
            model: None,
            block_size: None,
            instance_id: None,
            block_hashes: vec![LocalHash(0); blocks],
            cache_salt: None,
        };
        assert!(of(BLOCKS_MAX).prepared(&chosen).is_ok());
        let refused = of(BLOCKS_MAX + 1).prepared(&chosen);
        assert_eq!(refused.err().unwrap().status, StatusCode::BAD_REQUEST);
    }
}
