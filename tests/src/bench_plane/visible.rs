//! Delay from the engine's socket to an indexer's view, and the cost of a query.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::time::{Instant, timeout};
use warmroute_plane::Plane as _;
use warmroute_proto::hash::local_hashes;
use warmroute_proto::query::{IndexAnswer, IndexQuery};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{BlockSize, Seed, codec};

use crate::engine::{BLOCK, Engine};
use crate::measure::Figure;
use crate::stage::Stage;
use crate::transport::{EXCHANGES, QUERY_BLOCKS, pace};

/// Blocks of an event at a fixed rate: a short prompt, or a few steps of decoding.
const EVENT_BLOCKS: usize = 4;
/// Blocks of an event of the throughput measurement: a prompt of 2,048 tokens.
const LARGE_BLOCKS: usize = 128;
const END_MAX: Duration = Duration::from_secs(120);

/// Publishing times of the batches, by rank.
type Sent = Arc<Mutex<Vec<Vec<Instant>>>>;

/// Publishes batches at this rate, evenly over the ranks, and measures each delay until the
/// indexer's view has it.
pub(crate) async fn delays(stage: &Stage, rate: u64, secs: u64) -> anyhow::Result<Vec<Figure>> {
    let ranks = stage.engine.ranks();
    let total = rate * secs;
    let batches = batches(&stage.engine, total, EVENT_BLOCKS)?;
    let sent: Sent = Arc::new(Mutex::new(vec![Vec::new(); ranks]));
    let records = stage.records();
    let publisher = {
        let (engine, sent) = (Arc::clone(&stage.engine), Arc::clone(&sent));
        std::thread::spawn(move || {
            pace(rate, total, |number| {
                let (rank, seq) = place(number, engine.ranks());
                let mut sent = sent.lock().unwrap_or_else(PoisonError::into_inner);
                sent[rank].push(Instant::now());
                drop(sent);
                if let Some(payload) = usize::try_from(number).ok().and_then(|at| batches.get(at)) {
                    // A batch that was not published shows up as missing.
                    drop(engine.publish(rank, seq, payload));
                }
            });
        })
    };
    let watched = timeout(END_MAX, watch(stage, &sent, total)).await;
    let mut samples = watched.context("some events never came")??;
    ensure!(publisher.join().is_ok(), "the publisher failed");
    let records = stage.records() - records;
    let what = "event → visible in the indexer";
    Ok(vec![Figure::of(what, Some(rate), records, &mut samples)])
}

/// Records the time at which a position of the indexer covers each batch.
async fn watch(stage: &Stage, sent: &Sent, total: u64) -> anyhow::Result<Vec<Duration>> {
    let mut positions = stage.index.positions();
    let mut seen = vec![0; stage.engine.ranks()];
    let mut samples = Vec::new();
    while u64::try_from(samples.len())? < total {
        positions.changed().await.context("the indexer ended")?;
        let digest = stage.index.digest();
        let now = Instant::now();
        let sent = sent.lock().unwrap_or_else(PoisonError::into_inner);
        for source in &digest.sources {
            let rank = usize::try_from(source.dp_rank.0)?;
            let Some(last) = source.engine_seq else {
                continue;
            };
            let known = usize::try_from(last.0)? + 1;
            let new = sent[rank].get(seen[rank]..known).unwrap_or_default();
            samples.extend(new.iter().map(|at| now.duration_since(*at)));
            seen[rank] = seen[rank].max(known);
        }
    }
    Ok(samples)
}

/// Publishes at full speed. Returns blocks a second until the indexer has the last one.
pub(crate) async fn throughput(stage: &Stage, million_blocks: u64) -> anyhow::Result<Figure> {
    let total = million_blocks * 1_000_000 / u64::try_from(LARGE_BLOCKS)?;
    let batches = batches(&stage.engine, total, LARGE_BLOCKS)?;
    let first = first_seqs(stage);
    let before: u64 = held(stage);
    let records = stage.records();
    let begun = Instant::now();
    let engine = Arc::clone(&stage.engine);
    let publisher = std::thread::spawn(move || {
        for (number, payload) in (0..).zip(&batches) {
            let (rank, seq) = place(number, engine.ranks());
            engine.publish(rank, first + seq, payload)?;
        }
        anyhow::Ok(())
    });
    let wanted = before + total * u64::try_from(LARGE_BLOCKS)?;
    let mut positions = stage.index.positions();
    let arrival = async {
        while held(stage) < wanted {
            positions.changed().await.context("the indexer ended")?;
        }
        anyhow::Ok(())
    };
    timeout(END_MAX, arrival)
        .await
        .context("some blocks never came")??;
    let took = begun.elapsed();
    let published = publisher.join();
    published.map_err(|_| anyhow::anyhow!("the publisher failed"))??;
    let blocks = wanted - before;
    let per_sec = u128::from(blocks) * 1_000_000 / took.as_micros().max(1);
    Ok(Figure {
        what: "blocks a second, shim → log → indexer".to_owned(),
        per_sec: Some(u64::try_from(per_sec)?),
        p50_us: None,
        p99_us: None,
        records: stage.records() - records,
    })
}

fn held(stage: &Stage) -> u64 {
    let sources = stage.index.digest().sources;
    sources.iter().filter_map(|source| source.blocks).sum()
}

/// Every rank's next sequence number.
fn first_seqs(stage: &Stage) -> u64 {
    let sources = stage.index.digest().sources;
    let next = sources.iter().filter_map(|source| source.engine_seq);
    next.map(|seq| seq.0 + 1).max().unwrap_or(0)
}

/// Sequential queries of an indexer over NATS. Every rank holds the prompt.
pub(crate) async fn query_delays(stage: &Stage) -> anyhow::Result<Vec<Figure>> {
    let size = BlockSize::new(u32::try_from(BLOCK)?).context("a block size")?;
    let subject = Subjects::new(&stage.namespace).query();
    let mut figures = Vec::new();
    for (seq, blocks) in (0..).zip(QUERY_BLOCKS) {
        let mut tokens = Vec::new();
        for rank in 0..stage.engine.ranks() {
            let (held, payload) = stage.engine.batch(rank, blocks)?;
            stage.engine.publish(rank, seq, &payload)?;
            tokens = held;
        }
        until_seq(stage, seq).await?;
        let query = IndexQuery {
            blocks: local_hashes(&tokens, size, Seed::new(None, None)),
            at_least: None,
        };
        let payload = bytes::Bytes::from(codec::encode(&query)?);
        let mut samples = Vec::new();
        for _ in 0..EXCHANGES {
            let begun = Instant::now();
            let answer = stage
                .plane
                .request(subject.clone(), payload.clone(), END_MAX)
                .await?;
            samples.push(begun.elapsed());
            let answer = codec::decode::<IndexAnswer>(&answer)?;
            ensure!(matches!(answer, IndexAnswer::Runs { .. }), "no answer");
        }
        let what = format!("query of {blocks} blocks over NATS");
        figures.push(Figure::of(&what, None, EXCHANGES, &mut samples));
    }
    Ok(figures)
}

async fn until_seq(stage: &Stage, seq: u64) -> anyhow::Result<()> {
    let mut positions = stage.index.positions();
    let arrival = async {
        loop {
            let sources = stage.index.digest().sources;
            let known = |seqs: Option<u64>| seqs.is_some_and(|known| known >= seq);
            if sources
                .iter()
                .all(|source| known(source.engine_seq.map(|seq| seq.0)))
            {
                return anyhow::Ok(());
            }
            positions.changed().await.context("the indexer ended")?;
        }
    };
    timeout(END_MAX, arrival)
        .await
        .context("a prompt never came")?
}

/// Rank and sequence number of batch `number`.
fn place(number: u64, ranks: usize) -> (usize, u64) {
    let ranks = ranks as u64;
    let rank = usize::try_from(number % ranks).unwrap_or(0);
    (rank, number / ranks)
}

fn batches(engine: &Engine, total: u64, blocks: usize) -> anyhow::Result<Vec<Vec<u8>>> {
    let batch = |number| {
        let (rank, _) = place(number, engine.ranks());
        anyhow::Ok(engine.batch(rank, blocks)?.1)
    };
    (0..total).map(batch).collect()
}
