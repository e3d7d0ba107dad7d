//! Queries every indexer continuously, and compares each answer with the engine's history.
//!
//! Prompts are drawn from what the engines hold or held. An indexer that is down, stopped or not
//! ready is counted as such. An answer that claims more than it can prove ends the test with a full
//! report.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_mock_engine::HistoryBatch;
use warmroute_proto::query::SourceState;
use warmroute_simulation::checker::{Claim, Truth};

use crate::fleet::{BLOCK, Fleet, worker_name};

/// Pause between two queries to one indexer.
const PAUSE: Duration = Duration::from_millis(10);
/// A stopped indexer answers late or never.
const DEADLINE: Duration = Duration::from_secs(2);

pub(crate) struct Watch {
    shared: Arc<Shared>,
    stop: CancellationToken,
    asking: Vec<JoinHandle<()>>,
}

struct Shared {
    http: reqwest::Client,
    ranks: Vec<Rank>,
    tally: Mutex<Tally>,
    wrong: Mutex<Vec<String>>,
}

struct Rank {
    worker: String,
    number: u64,
    history: String,
    truth: tokio::sync::Mutex<Truth>,
}

/// Answers of each indexer by state, and the number of `exact` ones with credit.
#[derive(Clone, Debug, Default)]
struct Tally {
    states: BTreeMap<&'static str, u64>,
    silent: u64,
    /// By indexer and source.
    credited: BTreeMap<(usize, usize), u64>,
}

impl Watch {
    /// Watches all current indexers and engines.
    pub(crate) fn start(fleet: &Fleet, ranks: u64) -> Self {
        let engines = 0..fleet.engines.len();
        let ranks = engines.flat_map(|engine| (0..ranks).map(move |number| (engine, number)));
        let rank = |(engine, number)| Rank {
            worker: worker_name(engine),
            number,
            history: fleet.engine(engine, &format!("/debug/history?rank={number}")),
            truth: tokio::sync::Mutex::default(),
        };
        let shared = Arc::new(Shared {
            http: fleet.http.clone(),
            ranks: ranks.map(rank).collect(),
            tally: Mutex::default(),
            wrong: Mutex::default(),
        });
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let ask = |(number, base)| {
            let (shared, stop) = (Arc::clone(&shared), stop.clone());
            tasks.spawn(async move {
                stop.run_until_cancelled(shared.ask_on(number, base)).await;
            })
        };
        let asking = fleet.indexes().into_iter().enumerate().map(ask).collect();
        Self {
            shared,
            stop,
            asking,
        }
    }

    /// Fails the test after a wrong answer or the end of a querying task.
    pub(crate) fn check(&self) {
        let asked = self.asking.iter().all(|task| !task.is_finished());
        assert!(asked, "a task of the checker failed");
        let wrong = lock(&self.shared.wrong);
        assert!(wrong.is_empty(), "wrong answers:\n{}", wrong.join("\n"));
    }

    /// Waits until every indexer has reported every source `exact`, with credit, `more` further
    /// times.
    pub(crate) async fn until_exact(&self, fleet: &Fleet, times: u64) {
        let credited = || lock(&self.shared.tally).credited.clone();
        let before = credited();
        let wanted = fleet.indexes().len() * self.shared.ranks.len();
        fleet
            .until("exact answers are given and true", async |_| {
                self.check();
                let now = credited();
                let grown = now.iter().filter(|(key, count)| {
                    **count >= before.get(key).copied().unwrap_or(0) + times
                });
                grown.count() == wanted
            })
            .await;
    }

    /// Answers by state since the start.
    pub(crate) fn counts(&self) -> String {
        let Tally { states, silent, .. } = &*lock(&self.shared.tally);
        format!("{states:?}, {silent} questions without an answer")
    }

    /// Stops, and fails the test after a wrong answer.
    pub(crate) async fn end(self) -> String {
        self.check();
        self.stop.cancel();
        let counts = self.counts();
        for task in self.asking {
            task.await.expect("a task of the checker");
        }
        let wrong = lock(&self.shared.wrong);
        assert!(wrong.is_empty(), "wrong answers:\n{}", wrong.join("\n"));
        counts
    }
}

impl Shared {
    async fn ask_on(&self, indexer: usize, base: String) {
        let mut rng = Rng::new();
        loop {
            sleep(PAUSE).await;
            let rank = &self.ranks[rng.usize(..self.ranks.len())];
            let mut truth = rank.truth.lock().await;
            let Some(prompt) = truth.prompt(&mut rng) else {
                self.learn(rank, &mut truth).await;
                continue;
            };
            drop(truth);
            let body = json!({"block_hashes": prompt, "block_size": BLOCK});
            let Some(answer) = self.ask(&base, &body).await else {
                lock(&self.tally).silent += 1;
                continue;
            };
            for (source, rank) in self.ranks.iter().enumerate() {
                let Some(claim) = claim(&answer["instances"][&rank.worker], rank.number) else {
                    continue;
                };
                let mut truth = rank.truth.lock().await;
                if claim.seq.is_some_and(|seq| seq >= truth.next()) {
                    self.learn(rank, &mut truth).await;
                }
                let named = claim.seq.is_none_or(|seq| seq < truth.next());
                let judged = match truth.judge(&prompt, claim) {
                    Ok(()) if named => Ok(()),
                    Ok(()) => Err(format!("{claim:?}: no such batch")),
                    Err(wrong) => Err(wrong.to_string()),
                };
                drop(truth);
                if let Err(wrong) = judged {
                    let (worker, number) = (&rank.worker, rank.number);
                    let wrong = format!("{base} of {worker}/{number}: {wrong}; it said {answer}");
                    lock(&self.wrong).push(wrong);
                }
                self.count((indexer, source), claim);
            }
        }
    }

    fn count(&self, key: (usize, usize), claim: Claim) {
        let mut tally = lock(&self.tally);
        *tally.states.entry(claim.state.label()).or_default() += 1;
        let is_credited = claim.state == SourceState::Exact && claim.blocks > 0;
        *tally.credited.entry(key).or_default() += u64::from(is_credited);
    }

    async fn ask(&self, base: &str, body: &Value) -> Option<Value> {
        let question = self.http.post(format!("{base}/query_by_hash")).json(body);
        let answer = question.timeout(DEADLINE).send().await.ok()?;
        if !answer.status().is_success() {
            return None;
        }
        answer.json().await.ok()
    }

    /// Fetches everything that the engine has published.
    async fn learn(&self, rank: &Rank, truth: &mut Truth) {
        loop {
            let url = format!("{}&from={}", rank.history, truth.next());
            let answer = self.http.get(url).send().await.expect("a history");
            let status = answer.status();
            let bytes = answer.bytes().await.expect("a history");
            assert!(status.is_success(), "{}", String::from_utf8_lossy(&bytes));
            let batches: Vec<HistoryBatch> = rmp_serde::from_slice(&bytes).expect("batches");
            if batches.is_empty() {
                return;
            }
            for batch in &batches {
                truth.learn(batch);
            }
        }
    }
}

/// An answer's claim about one rank; `None` if it does not name the rank.
fn claim(instance: &Value, rank: u64) -> Option<Claim> {
    let of_rank = |key: &str| &instance[key][rank.to_string()];
    let state = serde_json::from_value(of_rank("states").clone()).ok()?;
    Some(Claim {
        state,
        seq: of_rank("engine_seqs").as_u64(),
        blocks: of_rank("dp").as_u64().expect("tokens") / BLOCK,
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
