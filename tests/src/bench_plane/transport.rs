//! The bare server without Warmroute's parts: the transport's own cost.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;
use warmroute_plane::{NatsPlane, Plane as _};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{DpRank, LogPosition, Source, WorkerId};

use crate::measure::Figure;
use crate::server::NatsServer;
use crate::stage::{config, namespace};

/// Approximate size of a small event's record.
const RECORD_BYTES: usize = 200;
const END_MAX: Duration = Duration::from_secs(120);
/// Number of sequential requests.
pub(crate) const EXCHANGES: u64 = 5_000;
/// A prompt of 1,024 tokens, and one of 32,768.
pub(crate) const QUERY_BLOCKS: [usize; 2] = [64, 2048];

/// Calls `call` `total` times at `rate`. Calls that fell behind follow without pause.
pub(crate) fn pace(rate: u64, total: u64, mut call: impl FnMut(u64)) {
    let begun = Instant::now();
    for number in 0..total {
        let due = Duration::from_nanos(number * 1_000_000_000 / rate);
        let early = due.saturating_sub(begun.elapsed());
        if !early.is_zero() {
            std::thread::sleep(early);
        }
        call(number);
    }
}

/// Append → tail, on one subject, pipelined.
pub(crate) async fn log_delay(
    server: &NatsServer,
    rate: u64,
    secs: u64,
) -> anyhow::Result<Vec<Figure>> {
    let (namespace, writer) = namespace(server).await?;
    let reader = NatsPlane::connect(config(server, &namespace, "reader")).await?;
    let mut tail = reader.tail(LogPosition(0), 256).await?;
    let source = Source {
        worker: WorkerId::from("none"),
        dp_rank: DpRank(0),
    };
    let subject = Subjects::new(&namespace).records(&source);
    let total = rate * secs;
    let (send, mut due) = mpsc::channel::<Instant>(1 << 16);
    let pacer = std::thread::spawn(move || {
        // The receiver is gone only if the measurement failed.
        pace(rate, total, |_| {
            send.blocking_send(Instant::now()).unwrap_or(())
        });
    });
    let payload = Bytes::from(vec![7; RECORD_BYTES]);
    let tasks = TaskTracker::new();
    let (sent, mut begun) = mpsc::channel(1 << 16);
    // A record without acknowledgement may never arrive.
    let failed = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&failed);
    tasks.spawn(async move {
        let count = |stored: bool| _ = counted.fetch_add(u64::from(!stored), Ordering::Relaxed);
        let mut acknowledgements = FuturesUnordered::new();
        loop {
            tokio::select! {
                at = due.recv() => {
                    let Some(at) = at else { break };
                    sent.send(at).await.unwrap_or(());
                    match writer.append(subject.clone(), payload.clone()).await {
                        Ok(acknowledged) => acknowledgements.push(acknowledged),
                        Err(_) => count(false),
                    }
                }
                Some(acknowledged) = acknowledgements.next() => count(acknowledged.is_ok()),
            }
        }
        while let Some(acknowledged) = acknowledgements.next().await {
            count(acknowledged.is_ok());
        }
    });
    let mut samples = Vec::new();
    let read = async {
        while u64::try_from(samples.len())? < total {
            let batch = tail.next().await.context("the log ended")?;
            let now = Instant::now();
            for _ in batch {
                let at = begun.recv().await.context("nobody sent this")?;
                samples.push(now.duration_since(at));
            }
        }
        anyhow::Ok(())
    };
    let read = timeout(END_MAX, read).await;
    let (failed, came) = (failed.load(Ordering::Relaxed), samples.len());
    let missing = || {
        let stats = reader.stats();
        format!("{came} of {total} records came, {failed} appends failed; the reader: {stats:?}")
    };
    read.with_context(missing)??;
    ensure!(failed == 0, "{failed} of {total} appends failed");
    tasks.close();
    tasks.wait().await;
    drop(pacer.join());
    let what = "the transport alone: append → tail";
    Ok(vec![Figure::of(what, Some(rate), total, &mut samples)])
}

/// Request and reply of equal length, as long as the queries are.
pub(crate) async fn echo_delay(server: &NatsServer) -> anyhow::Result<Vec<Figure>> {
    let (namespace, asker) = namespace(server).await?;
    let echo = NatsPlane::connect(config(server, &namespace, "echo")).await?;
    let subject = Subjects::new(&namespace).query();
    let mut requests = echo.serve(subject.clone()).await?;
    let tasks = TaskTracker::new();
    let answering = tasks.spawn(async move {
        while let Some(request) = requests.next().await {
            request.reply.send(request.payload);
        }
    });
    let mut figures = Vec::new();
    for blocks in QUERY_BLOCKS {
        let payload = Bytes::from(vec![7; blocks * 8]);
        let mut samples = Vec::new();
        for _ in 0..EXCHANGES {
            let begun = Instant::now();
            asker
                .request(subject.clone(), payload.clone(), END_MAX)
                .await?;
            samples.push(begun.elapsed());
        }
        let what = format!("the transport alone: echo of {} bytes", blocks * 8);
        figures.push(Figure::of(&what, None, EXCHANGES, &mut samples));
    }
    answering.abort();
    Ok(figures)
}
