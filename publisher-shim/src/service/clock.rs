//! Asks what the log's clock shows: one question for all ranks, at once when the plane is back, then
//! now and then.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tracing::warn;
use warmroute_plane::Connection;

use super::Shared;

/// As long may a message be judged by another server's clock, after a change of leaders.
const EVERY: Duration = Duration::from_secs(3);
const DEADLINE: Duration = Duration::from_secs(1);

/// What the log's clock showed between two moments.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    pub(super) asked: std::time::Instant,
    pub(super) answered: std::time::Instant,
    pub(super) unix_ns: u64,
}

pub(super) async fn ask(shared: Arc<Shared>) {
    let mut connection = shared.plane.connection();
    loop {
        if *connection.borrow_and_update() == Connection::Up {
            let asked = now();
            match timeout(DEADLINE, shared.plane.log_status()).await {
                Ok(Ok(status)) => {
                    shared.clock.send_replace(Some(Told {
                        asked,
                        answered: now(),
                        unix_ns: status.now_unix_ns,
                    }));
                }
                Ok(Err(error)) => warn!(%error, "the log does not tell its time"),
                Err(_) => warn!("the log is slow to tell its time"),
            }
        }
        tokio::select! {
            () = sleep(EVERY) => {}
            Ok(()) = connection.changed() => {}
        }
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}
