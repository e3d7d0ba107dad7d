//! The libzmq contexts of a process. Each has two threads and a bounded number of sockets, so that the
//! ranks of many engines share a few.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// A rank has four sockets at most, and one that is closed may count a moment longer; a context has
/// 1,023.
const RANKS_MAX: usize = 128;

/// The contexts of a process. Clones share them.
#[derive(Clone, Default)]
pub struct ZmqContexts(Arc<Mutex<ContextPool>>);

#[derive(Default)]
struct ContextPool {
    contexts: Vec<Arc<zmq::Context>>,
    ranks: u64,
}

/// One rank's share of a context.
pub(super) struct RankContext {
    context: Arc<zmq::Context>,
    /// Unique within the process.
    number: u64,
}

impl ZmqContexts {
    /// Room for one more rank's sockets, until it is dropped.
    pub(super) fn rank(&self) -> RankContext {
        let mut pool = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pool.ranks += 1;
        let number = pool.ranks;
        // One is the pool's own.
        let has_room = |context: &&Arc<zmq::Context>| Arc::strong_count(context) <= RANKS_MAX;
        let context = match pool.contexts.iter().find(has_room) {
            Some(context) => Arc::clone(context),
            None => {
                let context = Arc::new(zmq::Context::new());
                pool.contexts.push(Arc::clone(&context));
                context
            }
        };
        RankContext { context, number }
    }
}

impl fmt::Debug for ZmqContexts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZmqContexts").finish_non_exhaustive()
    }
}

impl RankContext {
    pub(super) fn socket(&self, kind: zmq::SocketType) -> zmq::Result<zmq::Socket> {
        self.context.socket(kind)
    }

    /// An endpoint within the process that no other rank has, by the rank's own number of it.
    pub(super) fn inner_endpoint(&self, of_rank: u64) -> String {
        format!("inproc://{}-{of_rank}", self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contexts(pool: &ZmqContexts) -> usize {
        pool.0.lock().unwrap().contexts.len()
    }

    #[test]
    fn many_ranks_share_a_context_and_have_room_for_their_sockets() {
        let pool = ZmqContexts::default();
        let mut ranks: Vec<_> = (0..2 * RANKS_MAX).map(|_| pool.clone().rank()).collect();
        assert_eq!(contexts(&pool), 2);
        let sockets = ranks.iter().map(|rank| {
            let pair = |_| rank.socket(zmq::PAIR).unwrap();
            (0..4).map(pair).collect::<Vec<_>>()
        });
        let sockets: Vec<_> = sockets.collect();
        ranks.push(pool.rank());
        assert_eq!(contexts(&pool), 3);
        drop(sockets);
        // Others take the place of those that are gone.
        ranks.truncate(RANKS_MAX);
        ranks.extend((0..RANKS_MAX).map(|_| pool.rank()));
        assert_eq!(contexts(&pool), 3);
    }

    #[test]
    fn ranks_of_one_context_have_endpoints_of_their_own() {
        let pool = ZmqContexts::default();
        let (one, other) = (pool.rank(), pool.rank());
        let names = [&one, &other, &one].map(|rank| rank.inner_endpoint(1));
        assert_ne!(names[0], names[1]);
        assert_eq!(names[0], names[2]);
        assert_ne!(one.inner_endpoint(1), one.inner_endpoint(2));
    }
}
