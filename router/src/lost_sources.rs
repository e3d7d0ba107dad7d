//! Sources that requests should leave: of unhealthy and sleeping workers, and stalled ones.
//!
//! The loss of a source concerns the requests that were sent there before. A request that is sent to
//! a lost source, because there is no other one or as a probe, leaves it only at its next loss: each
//! loss has a number, and a request knows the last one before it was sent.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use tokio::sync::watch;
use warmroute_proto::{Source, WorkerId};

/// The sources that are lost now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct LostSources {
    /// The number of the last loss.
    last: u64,
    /// With the number of the loss.
    workers: BTreeMap<WorkerId, u64>,
    /// With the number of the loss, and the core's number of the stall.
    stalled: BTreeMap<Source, (u64, u64)>,
}

/// Publishes the losses.
#[derive(Debug, Default)]
pub struct LossBoard(watch::Sender<Arc<LostSources>>);

/// Notified of the losses after its making.
#[derive(Debug)]
pub struct LossWatch {
    lost: watch::Receiver<Arc<LostSources>>,
    since: u64,
}

/// Why a request should leave its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The worker is unhealthy or asleep.
    Worker,
    Stall,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Worker => "the worker is unhealthy or asleep",
            Self::Stall => "the worker makes no progress",
        })
    }
}

impl LossBoard {
    /// These workers can serve no requests. Wakes nothing if they are the same as before.
    pub(crate) fn set_workers(&self, workers: &BTreeSet<WorkerId>) {
        self.0.send_if_modified(|lost| {
            if lost.workers.keys().eq(workers) {
                return false;
            }
            let lost = Arc::make_mut(lost);
            lost.workers.retain(|worker, _| workers.contains(worker));
            for worker in workers {
                if !lost.workers.contains_key(worker) {
                    lost.last += 1;
                    lost.workers.insert(worker.clone(), lost.last);
                }
            }
            true
        });
    }

    /// These sources are stalled, each with the number of its stall.
    pub(crate) fn set_stalls(&self, stalls: &BTreeMap<Source, u64>) {
        self.0.send_if_modified(|lost| {
            let known = lost
                .stalled
                .iter()
                .map(|(source, (_, stall))| (source, stall));
            if known.eq(stalls) {
                return false;
            }
            let lost = Arc::make_mut(lost);
            lost.stalled
                .retain(|source, (_, stall)| stalls.get(source) == Some(&*stall));
            for (source, stall) in stalls {
                if !lost.stalled.contains_key(source) {
                    lost.last += 1;
                    lost.stalled.insert(source.clone(), (lost.last, *stall));
                }
            }
            true
        });
    }

    /// To be made before the choice of a source, so that no loss is missed.
    #[must_use]
    pub fn watch(&self) -> LossWatch {
        let lost = self.0.subscribe();
        let since = lost.borrow().last;
        LossWatch { lost, since }
    }
}

impl LossWatch {
    /// Waits for the next loss of a source. Cancel-safe. Pending for good once the board is gone.
    pub async fn lost(&mut self, source: &Source) -> Loss {
        loop {
            {
                let lost = self.lost.borrow_and_update();
                if let Some((number, loss)) = lost.loss_of(source)
                    && number > self.since
                {
                    self.since = lost.last;
                    return loss;
                }
            }
            if self.lost.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Whether the source's worker is unhealthy or asleep now.
    pub(crate) fn is_worker_lost(&self, worker: &WorkerId) -> bool {
        self.lost.borrow().workers.contains_key(worker)
    }
}

impl LostSources {
    fn loss_of(&self, source: &Source) -> Option<(u64, Loss)> {
        let worker = self.workers.get(&source.worker);
        let worker = worker.map(|number| (*number, Loss::Worker));
        let stall = self.stalled.get(source);
        let stall = stall.map(|(number, _)| (*number, Loss::Stall));
        worker
            .into_iter()
            .chain(stall)
            .max_by_key(|(number, _)| *number)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use warmroute_proto::DpRank;

    use super::*;

    fn source(worker: &str) -> Source {
        Source {
            worker: worker.into(),
            dp_rank: DpRank(0),
        }
    }

    fn workers(names: &[&str]) -> BTreeSet<WorkerId> {
        names.iter().map(|name| WorkerId::from(*name)).collect()
    }

    #[test]
    fn a_loss_concerns_the_requests_that_were_sent_before() {
        let board = LossBoard::default();
        let (mut before, mut other) = (board.watch(), board.watch());
        board.set_workers(&workers(&["w"]));
        let mut after = board.watch();
        assert_eq!(before.lost(&source("w")).now_or_never(), Some(Loss::Worker));
        assert_eq!(before.lost(&source("w")).now_or_never(), None, "once");
        assert_eq!(other.lost(&source("v")).now_or_never(), None);
        assert_eq!(after.lost(&source("w")).now_or_never(), None);
        board.set_workers(&workers(&[]));
        assert!(!after.is_worker_lost(&"w".into()));
        board.set_workers(&workers(&["w"]));
        assert_eq!(after.lost(&source("w")).now_or_never(), Some(Loss::Worker));
    }

    #[test]
    fn each_stall_of_a_source_is_a_loss() {
        let board = LossBoard::default();
        let mut first = board.watch();
        board.set_stalls(&[(source("w"), 1)].into());
        assert_eq!(first.lost(&source("w")).now_or_never(), Some(Loss::Stall));
        let mut probe = board.watch();
        board.set_stalls(&[(source("w"), 1)].into());
        assert_eq!(probe.lost(&source("w")).now_or_never(), None);
        board.set_stalls(&[(source("w"), 2)].into());
        assert_eq!(probe.lost(&source("w")).now_or_never(), Some(Loss::Stall));
    }
}
