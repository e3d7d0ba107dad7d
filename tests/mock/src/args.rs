//! The mock engine's command line.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr as _;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::{Parser, ValueEnum};
use warmroute_proto::BlockSize;
use warmroute_proto::registry::WorkerRole;
use warmroute_sim::sim::{EngineConfig, GroupKind, TimingProfile};

use crate::lmcache;

/// A vLLM server without a model: its HTTP and ZMQ sides around an exact model of its block cache.
///
/// `POST /debug/fault` sets faults while it runs, as `{"hang": true}`, `{"slowdown": 20}`,
/// `{"health": 503}`, and in the field `answer` `{"status": 500}`, `{"error_event": 3}` (a stream
/// fails after so many events), `{"silence_ms": 60000}` (after a stream's first event) or `"none"`.
/// With `marker` an `answer` is for requests that contain this text.
#[derive(Clone, Debug, Parser)]
#[command(name = "warmroute-mock-engine", version)]
pub struct Args {
    /// Address that every socket binds to.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// HTTP port; 0 lets the system choose, here and below.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Data-parallel ranks, each with a cache and a publisher of its own.
    #[arg(long, default_value_t = 1)]
    pub ranks: u32,
    /// The server that is imitated.
    #[arg(long, value_enum, default_value_t = EngineForm::Vllm)]
    pub form: EngineForm,
    /// Served model name.
    #[arg(long, default_value = "mock-model")]
    pub model: String,
    /// Served adapter name; may be given several times.
    #[arg(long = "lora")]
    pub loras: Vec<String>,
    /// Directory with a Hugging Face tokenizer and chat template. Without, a token is a byte of
    /// UTF-8 and a chat is rendered as `ChatML`.
    #[arg(long)]
    pub tokenizer: Option<PathBuf>,
    /// Have no render routes, as vLLM without --enable-scale-out.
    #[arg(long)]
    pub no_render: bool,
    /// Report no cached tokens, as vLLM without --enable-prompt-tokens-details.
    #[arg(long)]
    pub no_prompt_tokens_details: bool,
    /// Which part of a request it serves: both, prefill or decode. Others are refused.
    #[arg(long, default_value = "both", value_parser = WorkerRole::from_str)]
    pub role: WorkerRole,
    /// Time for which a prefill engine holds a prompt's blocks, in milliseconds.
    #[arg(long, default_value_t = 30_000)]
    pub transfer_lease_ms: u64,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub events: EventArgs,
}

/// The cache and the speed of each rank.
#[derive(Clone, Debug, clap::Args)]
pub struct EngineArgs {
    /// Tokens in a block.
    #[arg(long, default_value_t = 16)]
    pub block_size: u32,
    /// Blocks of each rank's cache; one of them is the null block.
    #[arg(long, default_value_t = 4096)]
    pub num_blocks: u32,
    /// Blocks of the CPU tier; 0 for none.
    #[arg(long, default_value_t = 0)]
    pub cpu_blocks: u32,
    /// Keep the CPU tier in chunks of 256 tokens and publish it as LMCache does.
    #[arg(long)]
    pub lmcache: bool,
    /// Publish as a hybrid model does, with so many sliding-window groups before the main one.
    #[arg(long, default_value_t = 0)]
    pub sliding_groups: usize,
    /// Longest prompt and output together; by default what the blocks can hold.
    #[arg(long)]
    pub max_model_len: Option<usize>,
    /// Tokens behind a block that its hash covers, as of vLLM with EAGLE or MTP.
    #[arg(long, default_value_t = 0)]
    pub lookahead: u32,
    /// Tokens that one step may compute.
    #[arg(long, default_value_t = 8192)]
    pub max_num_batched_tokens: usize,
    /// Requests that run at the same time on a rank.
    #[arg(long, default_value_t = 256)]
    pub max_num_seqs: usize,
    /// Step timing: instant, fast, gpu-8b or gpu-70b.
    #[arg(long, default_value = "fast", value_parser = profile)]
    pub profile: TimingProfile,
    /// Prefill speed, instead of the profile's.
    #[arg(long)]
    pub prefill_tokens_per_sec: Option<f64>,
    /// Time between the tokens of one sequence in milliseconds, instead of the profile's.
    #[arg(long)]
    pub itl_ms: Option<f64>,
}

/// How each rank publishes.
#[derive(Clone, Debug, clap::Args)]
pub struct EventArgs {
    /// ZMQ port of the cache events; rank r binds this + r.
    #[arg(long, default_value_t = 5557)]
    pub kv_port: u16,
    /// ZMQ port of the replay; rank r binds this + r. Without, there is no replay, as with vLLM.
    #[arg(long)]
    pub replay_port: Option<u16>,
    /// Batches that the replay keeps.
    #[arg(long, default_value_t = 10_000)]
    pub buffer_steps: usize,
    /// Topic of the live events.
    #[arg(long, default_value = "")]
    pub topic: String,
    /// Events that a TensorRT-LLM server keeps for its reader.
    #[arg(long, default_value_t = 4096)]
    pub event_buffer: usize,
    /// Show in the metrics whether there is a CPU tier, as vLLM from 0.11 on shows a KV connector.
    #[arg(long)]
    pub connector_metrics: bool,
    /// Report to clients that events are disabled.
    #[arg(long)]
    pub no_events: bool,
    /// Keep what every batch changed, for /debug/history.
    #[arg(long)]
    pub history: bool,
    /// How hashes are encoded in events.
    #[arg(long, value_enum, default_value_t = HashMode::Int)]
    pub hash_mode: HashMode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineForm {
    Vllm,
    Sglang,
    Trtllm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HashMode {
    /// 64-bit integers, vLLM's default.
    Int,
    /// 32 bytes, of which the last 8 are the integer.
    Bytes,
}

/// The window of the sliding groups, in blocks.
const SLIDING_WINDOW_BLOCKS: u32 = 2;

impl Args {
    /// The defaults with every port chosen by the system and a replay: for tests.
    #[must_use]
    pub fn on_free_ports() -> Self {
        Self::parse_from([
            "warmroute-mock-engine",
            "--port=0",
            "--kv-port=0",
            "--replay-port=0",
        ])
    }
}

impl EngineArgs {
    /// The engine of one rank.
    pub(crate) fn config(&self, vocabulary: &[u32]) -> anyhow::Result<EngineConfig> {
        let block_size = BlockSize::new(self.block_size).context("--block-size must not be 0")?;
        ensure!(self.num_blocks >= 2, "--num-blocks must be at least 2");
        ensure!(
            self.max_num_batched_tokens >= 1 && self.max_num_seqs >= 1,
            "--max-num-batched-tokens and --max-num-seqs must not be 0"
        );
        ensure!(
            self.lookahead == 0 || self.cpu_blocks == 0,
            "--lookahead needs --cpu-blocks 0, as vLLM has none with a connector"
        );
        let window = SLIDING_WINDOW_BLOCKS.saturating_mul(self.block_size);
        let mut groups = vec![GroupKind::SlidingWindow(window); self.sliding_groups];
        groups.push(GroupKind::FullAttention);
        Ok(EngineConfig {
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_num_seqs: self.max_num_seqs,
            lookahead: self.lookahead,
            max_model_len: self.max_model_len.unwrap_or(usize::MAX),
            cpu_blocks: self.cpu_blocks,
            cpu_chunk_blocks: if self.lmcache {
                (lmcache::CHUNK_TOKENS / block_size.tokens()).max(1)
            } else {
                1
            },
            groups,
            life: fastrand::u64(..),
            profile: self.timing()?,
            vocabulary: vocabulary.into(),
            ..EngineConfig::new(block_size, self.num_blocks)
        })
    }

    fn timing(&self) -> anyhow::Result<TimingProfile> {
        let mut profile = self.profile;
        if let Some(rate) = self.prefill_tokens_per_sec {
            ensure!(rate >= 0.0, "--prefill-tokens-per-sec must not be negative");
            profile.prefill_tokens_per_sec = rate;
        }
        if let Some(millis) = self.itl_ms {
            let itl = Duration::try_from_secs_f64(millis / 1000.0);
            profile.itl = itl.context("--itl-ms must be a time")?;
            profile.itl_per_sequence = Duration::ZERO;
            profile.itl_per_context_token = Duration::ZERO;
        }
        Ok(profile)
    }
}

fn profile(name: &str) -> Result<TimingProfile, String> {
    let unknown = || format!("known profiles: {}", TimingProfile::NAMES.join(", "));
    TimingProfile::by_name(name).ok_or_else(unknown)
}
