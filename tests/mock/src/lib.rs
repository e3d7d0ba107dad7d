//! A vLLM, SGLang or TensorRT-LLM server without a model: HTTP and ZMQ around the engine model of
//! `warmroute_sim::sim`.
//!
//! [`Mock::start`] binds the sockets and runs until [`Mock::stop`]. Each rank is one engine that
//! steps in real time ([`EngineArgs::profile`]), with its own publisher thread. The `/debug` routes
//! report what no real engine reports: held blocks and aborted requests.
//!
//! A tool is called where the client demands it. Deliberately absent: authentication, TLS, stop
//! strings, sampling parameters, and all other options that change the text but neither the cache
//! nor the load.
#![forbid(unsafe_code)]

mod answer;
mod args;
mod debug;
mod error;
mod fault;
mod generate;
mod history;
mod images;
mod lmcache;
mod load;
mod loras;
mod metrics;
mod publisher;
mod rank;
mod server;
mod sglang;
mod stored;
mod text;
mod transfer;
mod trtllm;
mod wire;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use axum::serve::ListenerExt as _;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::warn;
use warmroute_sim::sim::EngineConfig;

pub use args::{Args, EngineArgs, EngineForm, EventArgs, HashMode};
use history::History;
pub use history::{BlockName, HistoryBatch, PairChange};
use lmcache::Chunks;
use load::LoadRate;
pub use loras::Loras;
pub use publisher::{Delivery, Publisher, PublisherOptions};
use rank::{Rank, RankForm};
use server::{CallCounts, Server, routes};
use stored::StoredAnswers;
use text::Text;
use transfer::Transfers;
use trtllm::EventQueue;
pub use wire::Encoder;

/// A running mock engine.
pub struct Mock {
    host: IpAddr,
    ports: Ports,
    stop: CancellationToken,
    tasks: TaskTracker,
}

/// Bound ports; `kv` and `replay` by rank.
#[derive(Clone, Debug, Serialize)]
pub struct Ports {
    pub port: u16,
    pub kv: Vec<u16>,
    /// Empty without a replay.
    pub replay: Vec<u16>,
}

impl Mock {
    pub async fn start(args: Args) -> anyhow::Result<Self> {
        ensure!(args.ranks >= 1, "--ranks must be at least 1");
        let host = args.host;
        let text = Text::load(args.tokenizer.as_deref())?;
        let config = args.engine.config(&text.vocabulary())?;
        let max_model_len = config.longest_request();
        let loras = Loras::from(args.loras.clone());
        let ranks = ranks(&args, &loras, &config)?;
        let listener = TcpListener::bind(SocketAddr::new(host, args.port))
            .await
            .with_context(|| format!("binding {host}:{}", args.port))?;
        let ports = Ports {
            port: listener.local_addr()?.port(),
            kv: ranks.iter().map(|rank| rank.publisher.kv_port).collect(),
            replay: ranks
                .iter()
                .filter_map(|rank| rank.publisher.replay_port)
                .collect(),
        };
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        for rank in &ranks {
            tasks.spawn(Arc::clone(rank).run(stop.clone()));
        }
        let lease = Duration::from_millis(args.transfer_lease_ms);
        let bound = Transfers::bind(args.role, host, lease).await;
        let (transfers, transfer_listener) = bound.context("binding a port for transfers")?;
        let rate = LoadRate::default();
        for rank in &ranks {
            let block = config.block_size.tokens();
            tasks.spawn(load::run(
                Arc::clone(rank),
                rate.clone(),
                block,
                stop.clone(),
            ));
        }
        let server = Arc::new(Server {
            model: args.model.clone(),
            loras,
            args,
            ranks,
            text,
            max_model_len,
            #[expect(clippy::cast_possible_truncation, reason = "whole seconds are wanted")]
            #[expect(clippy::cast_sign_loss, reason = "later than 1970")]
            started_unix: rank::unix_seconds() as u64,
            health: AtomicU16::new(200),
            has_metrics: AtomicBool::new(true),
            answer_fault: Mutex::default(),
            requests: AtomicU64::new(0),
            received: AtomicU64::new(0),
            id_prompts: AtomicU64::new(0),
            image_renders: AtomicU64::new(0),
            rate,
            calls: CallCounts::default(),
            stored: StoredAnswers::default(),
            transfers: Arc::clone(&transfers),
            tasks: tasks.clone(),
        });
        tasks.spawn(transfers.run(transfer_listener, stop.clone()));
        tasks.spawn(serve(listener, server, stop.clone()));
        tasks.close();
        Ok(Self {
            host,
            ports,
            stop,
            tasks,
        })
    }

    #[must_use]
    pub const fn ports(&self) -> &Ports {
        &self.ports
    }

    /// The HTTP address.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", SocketAddr::new(self.host, self.ports.port))
    }

    /// Ends every request and frees the ports. Idle HTTP connections stay open until their clients
    /// close them.
    pub async fn stop(self) {
        self.stop.cancel();
        self.tasks.wait().await;
    }
}

fn ranks(args: &Args, loras: &Loras, config: &EngineConfig) -> anyhow::Result<Vec<Arc<Rank>>> {
    let rank = |number| {
        let publisher = Publisher::start(publisher_options(args, number)?)?;
        let encoder = Encoder {
            rank: number,
            hash_mode: args.events.hash_mode,
            loras: loras.clone(),
            lmcache: args.engine.lmcache,
        };
        let history = args.events.history.then(History::default);
        let form = match args.form {
            EngineForm::Vllm if args.engine.lmcache => {
                RankForm::Lmcache(Chunks::new(config.cpu_chunk_blocks))
            }
            EngineForm::Vllm => RankForm::Vllm,
            EngineForm::Sglang => RankForm::Sglang,
            EngineForm::Trtllm => {
                RankForm::Trtllm(EventQueue::new(number, config, args.events.event_buffer))
            }
        };
        let rank = Rank::new(config.clone(), form, publisher, encoder, history);
        Ok(Arc::new(rank))
    };
    (0..args.ranks).map(rank).collect()
}

/// Accepts connections until cancelled.
async fn serve(listener: TcpListener, server: Arc<Server>, stop: CancellationToken) {
    // Sends each token without delay.
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            warn!(%error, "tokens may arrive in clusters");
        }
    });
    tokio::select! {
        () = stop.cancelled() => {}
        result = async { axum::serve(listener, routes(server)).await } => {
            if let Err(error) = result {
                warn!(%error, "the HTTP server ended");
            }
        }
    }
}

fn publisher_options(args: &Args, rank: u32) -> anyhow::Result<PublisherOptions> {
    let offset = u16::try_from(rank).context("too many ranks")?;
    let port = |first: u16| match first {
        0 => Ok(0),
        first => first
            .checked_add(offset)
            .context("a rank's port is above 65535"),
    };
    Ok(PublisherOptions {
        bind: args.host,
        kv_port: port(args.events.kv_port)?,
        replay_port: args.events.replay_port.map(port).transpose()?,
        topic: args.events.topic.clone(),
        buffer_steps: args.events.buffer_steps,
    })
}
