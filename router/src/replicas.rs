//! Which indexer replica is asked: any that answers, and soon another one if it does not.
//!
//! Pure. Replicas come and go by the registry; a replica that was late is asked last for a while, so
//! that one that hangs costs a few requests some milliseconds, and nobody an answer. Order beyond
//! that is chance, which spreads the load.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;

/// A replica that was late is asked last for this long; each time it is late again, for twice as
/// long, up to [`SUSPECT_MAX`].
const SUSPECT: Duration = Duration::from_millis(500);
const SUSPECT_MAX: Duration = Duration::from_secs(8);

/// More are not remembered: queries reach them all the same, as one of the many.
const REPLICAS_MAX: usize = 256;

#[derive(Debug, Default)]
pub struct Replicas {
    known: BTreeMap<Arc<str>, Replica>,
}

#[derive(Debug, Default)]
struct Replica {
    ready: bool,
    late: u32,
    suspect_until: Option<Instant>,
}

impl Replicas {
    /// The registry has this replica, new or changed.
    pub fn put(&mut self, id: &str, ready: bool) {
        if let Some(known) = self.known.get_mut(id) {
            known.ready = ready;
        } else if self.known.len() < REPLICAS_MAX {
            let replica = Replica {
                ready,
                ..Replica::default()
            };
            self.known.insert(id.into(), replica);
        }
    }

    pub fn gone(&mut self, id: &str) {
        self.known.remove(id);
    }

    /// Forgets all but these: the registry was read anew.
    pub fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        self.known.retain(|id, _| is_there(id));
    }

    pub fn answered(&mut self, id: &str) {
        if let Some(replica) = self.known.get_mut(id) {
            replica.late = 0;
            replica.suspect_until = None;
        }
    }

    /// It did not answer in time, or is not there.
    pub fn late(&mut self, id: &str, now: Instant) {
        if let Some(replica) = self.known.get_mut(id) {
            let doubled = SUSPECT * 2_u32.pow(replica.late.min(10));
            replica.late = replica.late.saturating_add(1);
            replica.suspect_until = Some(now + doubled.min(SUSPECT_MAX));
        }
    }

    /// The two to ask, in this order: ready before others, trusted before suspects, ties at random.
    pub fn two(&self, now: Instant, rng: &mut Rng) -> [Option<Arc<str>>; 2] {
        let mut best: [Option<(Rank, &Arc<str>)>; 2] = [None, None];
        for (id, replica) in &self.known {
            let suspect = replica.suspect_until.is_some_and(|until| now < until);
            let rank = (!replica.ready, suspect, rng.u32(..));
            match best {
                [Some((first, _)), second] if first < rank => {
                    if second.is_none_or(|(second, _)| rank < second) {
                        best[1] = Some((rank, id));
                    }
                }
                [first, _] => best = [Some((rank, id)), first],
            }
        }
        best.map(|one| one.map(|(_, id)| Arc::clone(id)))
    }
}

/// Not ready, suspect, chance: the lowest is asked first.
type Rank = (bool, bool, u32);

#[cfg(test)]
mod tests {
    use super::*;

    fn replicas(ids: &[(&str, bool)]) -> Replicas {
        let mut replicas = Replicas::default();
        for (id, ready) in ids {
            replicas.put(id, *ready);
        }
        replicas
    }

    fn now() -> Instant {
        tokio::time::Instant::now().into_std()
    }

    fn two(replicas: &Replicas, now: Instant, seed: u64) -> [Option<String>; 2] {
        let two = replicas.two(now, &mut Rng::with_seed(seed));
        two.map(|id| id.map(|id| id.to_string()))
    }

    #[test]
    fn nobody_known_nobody_named() {
        let now = now();
        assert_eq!(two(&Replicas::default(), now, 0), [None, None]);
        let one = two(&replicas(&[("a", false)]), now, 0);
        assert_eq!(one, [Some("a".to_owned()), None]);
    }

    #[test]
    fn load_is_spread_and_the_second_is_another() {
        let replicas = replicas(&[("a", true), ("b", true), ("c", true)]);
        let mut firsts = BTreeMap::<String, u32>::new();
        for seed in 0..300 {
            let [Some(first), Some(second)] = two(&replicas, now(), seed) else {
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
        let mut replicas = replicas(&[("late", true), ("starting", false), ("well", true)]);
        replicas.late("late", now);
        for seed in 0..50 {
            let order = two(&replicas, now, seed);
            assert_eq!(order, [Some("well".to_owned()), Some("late".to_owned())]);
        }
        let later = now + SUSPECT;
        let firsts = (0..50).map(|seed| two(&replicas, later, seed)[0].clone());
        assert!(
            firsts
                .into_iter()
                .any(|first| first.as_deref() == Some("late"))
        );
        replicas.late("late", later);
        assert!((0..50).all(|seed| {
            let first = two(&replicas, later + SUSPECT, seed)[0].clone();
            first.as_deref() == Some("well")
        }));
        replicas.answered("late");
        replicas.gone("well");
        assert_eq!(two(&replicas, later, 0)[0].as_deref(), Some("late"));
    }
}
