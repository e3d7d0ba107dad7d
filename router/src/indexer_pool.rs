//! Which indexer replica is queried: any that answers, and soon another one if it does not.
//!
//! Pure. Replicas are added and removed by the registry. A replica that was late is queried last for
//! a while, so that one that hangs costs few requests some milliseconds, and no request its answer.
//! Ties are broken at random, which spreads the load.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use warmroute_proto::registry::IndexerEntry;

/// A late replica is queried last for this long. Doubles with every further late answer, up to
/// [`SUSPECT_MAX`].
const SUSPECT: Duration = Duration::from_millis(500);
const SUSPECT_MAX: Duration = Duration::from_secs(8);

/// Further replicas are not tracked. Queries to the shared subject still reach them.
const INDEXERS_MAX: usize = 256;

/// Why the index is out of reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub(crate) enum IndexFault {
    #[error("NATS is out of reach")]
    PlaneAway,
    #[error("no indexer is registered")]
    NoneRegistered,
    #[error("no indexer is ready")]
    NoneReady,
    #[error("no indexer answers in time")]
    NoneAnswers,
}

/// The indexer replicas that the registry lists, and how they answered.
#[derive(Debug, Default)]
pub struct IndexerPool {
    indexers: BTreeMap<Arc<str>, IndexerStatus>,
}

#[derive(Debug, Default)]
struct IndexerStatus {
    ready: bool,
    late_answers: u32,
    suspect_until: Option<Instant>,
}

impl IndexerPool {
    /// Adds or updates a replica.
    pub fn put(&mut self, entry: &IndexerEntry) {
        if let Some(known) = self.indexers.get_mut(entry.id.as_str()) {
            known.ready = entry.ready;
        } else if self.indexers.len() < INDEXERS_MAX {
            let status = IndexerStatus {
                ready: entry.ready,
                ..IndexerStatus::default()
            };
            self.indexers.insert(entry.id.as_str().into(), status);
        }
    }

    pub fn remove(&mut self, id: &str) {
        self.indexers.remove(id);
    }

    /// All known replicas.
    #[must_use]
    pub fn ids(&self) -> Vec<Arc<str>> {
        self.indexers.keys().cloned().collect()
    }

    /// All known replicas with whether they are suspect.
    pub fn suspects(&self, now: Instant) -> Vec<(Arc<str>, bool)> {
        let all = self.indexers.iter();
        all.map(|(id, indexer)| (Arc::clone(id), indexer.is_suspect(now)))
            .collect()
    }

    pub fn answered(&mut self, id: &str) {
        if let Some(indexer) = self.indexers.get_mut(id) {
            indexer.late_answers = 0;
            indexer.suspect_until = None;
        }
    }

    /// The replica did not answer in time, or is not reachable.
    pub fn late(&mut self, id: &str, now: Instant) {
        if let Some(indexer) = self.indexers.get_mut(id) {
            let doubled = SUSPECT * 2_u32.pow(indexer.late_answers.min(10));
            indexer.late_answers = indexer.late_answers.saturating_add(1);
            indexer.suspect_until = Some(now + doubled.min(SUSPECT_MAX));
        }
    }

    /// Why no replica answers, as far as is known.
    pub(crate) fn fault(&self, now: Instant) -> Option<IndexFault> {
        let mut all = self.indexers.values();
        if all.len() == 0 {
            Some(IndexFault::NoneRegistered)
        } else if all.clone().all(|indexer| !indexer.ready) {
            Some(IndexFault::NoneReady)
        } else if all.all(|indexer| indexer.is_suspect(now)) {
            Some(IndexFault::NoneAnswers)
        } else {
            None
        }
    }

    /// The two replicas to query, in this order: ready before others, trusted before suspects, ties
    /// at random.
    pub fn pick_two(&self, now: Instant, rng: &mut Rng) -> [Option<Arc<str>>; 2] {
        let mut best: [Option<(PickOrder, &Arc<str>)>; 2] = [None, None];
        for (id, indexer) in &self.indexers {
            let suspect = indexer.is_suspect(now);
            let order = (!indexer.ready, suspect, rng.u32(..));
            match best {
                [Some((first, _)), second] if first < order => {
                    if second.is_none_or(|(second, _)| order < second) {
                        best[1] = Some((order, id));
                    }
                }
                [first, _] => best = [Some((order, id)), first],
            }
        }
        best.map(|one| one.map(|(_, id)| Arc::clone(id)))
    }
}

impl IndexerStatus {
    fn is_suspect(&self, now: Instant) -> bool {
        self.suspect_until.is_some_and(|until| now < until)
    }
}

/// Not ready, suspect, random: the lowest is picked first.
type PickOrder = (bool, bool, u32);

#[cfg(test)]
mod tests {
    use warmroute_proto::LogPosition;

    use super::*;

    fn pool(indexers: &[(&str, bool)]) -> IndexerPool {
        let mut pool = IndexerPool::default();
        for &(id, ready) in indexers {
            pool.put(&IndexerEntry {
                id: id.to_owned(),
                url: None,
                version: String::new(),
                ready,
                log: None,
                position: LogPosition(0),
            });
        }
        pool
    }

    fn now() -> Instant {
        tokio::time::Instant::now().into_std()
    }

    fn two(pool: &IndexerPool, now: Instant, seed: u64) -> [Option<String>; 2] {
        let two = pool.pick_two(now, &mut Rng::with_seed(seed));
        two.map(|id| id.map(|id| id.to_string()))
    }

    #[test]
    fn an_empty_pool_picks_none() {
        let now = now();
        assert_eq!(two(&IndexerPool::default(), now, 0), [None, None]);
        let one = two(&pool(&[("a", false)]), now, 0);
        assert_eq!(one, [Some("a".to_owned()), None]);
    }

    #[test]
    fn a_fault_is_one_of_all_replicas() {
        let now = now();
        let fault = |pool: &IndexerPool| pool.fault(now);
        let none = IndexerPool::default();
        assert_eq!(fault(&none), Some(IndexFault::NoneRegistered));
        let unready = pool(&[("a", false), ("b", false)]);
        assert_eq!(fault(&unready), Some(IndexFault::NoneReady));
        let mut two = pool(&[("a", true), ("b", true)]);
        two.late("a", now);
        assert_eq!(fault(&two), None);
        two.late("b", now);
        assert_eq!(fault(&two), Some(IndexFault::NoneAnswers));
    }

    #[test]
    fn load_is_spread_and_the_second_is_another() {
        let pool = pool(&[("a", true), ("b", true), ("c", true)]);
        let mut firsts = BTreeMap::<String, u32>::new();
        for seed in 0..300 {
            let [Some(first), Some(second)] = two(&pool, now(), seed) else {
                panic!("two are known");
            };
            assert_ne!(first, second);
            *firsts.entry(first).or_default() += 1;
        }
        assert!(firsts.values().all(|&count| count > 50), "{firsts:?}");
    }

    #[test]
    fn ready_ones_first_and_late_ones_last_for_a_while() {
        let now = now();
        let mut pool = pool(&[("late", true), ("starting", false), ("well", true)]);
        pool.late("late", now);
        for seed in 0..50 {
            let order = two(&pool, now, seed);
            assert_eq!(order, [Some("well".to_owned()), Some("late".to_owned())]);
        }
        let later = now + SUSPECT;
        let firsts = (0..50).map(|seed| two(&pool, later, seed)[0].clone());
        assert!(
            firsts
                .into_iter()
                .any(|first| first.as_deref() == Some("late"))
        );
        pool.late("late", later);
        assert!((0..50).all(|seed| {
            let first = two(&pool, later + SUSPECT, seed)[0].clone();
            first.as_deref() == Some("well")
        }));
        pool.answered("late");
        pool.remove("well");
        assert_eq!(two(&pool, later, 0)[0].as_deref(), Some("late"));
    }
}
