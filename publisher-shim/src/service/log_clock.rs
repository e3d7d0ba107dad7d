//! Reads the log's clock: once for all ranks, after each reconnect and then periodically.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tracing::warn;
use warmroute_plane::Connection;

use super::ShimState;

/// Bounds how long messages are judged by another server's clock after a change of leaders.
const EVERY: Duration = Duration::from_secs(3);
const DEADLINE: Duration = Duration::from_secs(1);

/// The log's clock at some moment between `asked` and `answered`.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClockReading {
    pub(super) asked: std::time::Instant,
    pub(super) answered: std::time::Instant,
    pub(super) unix_ns: u64,
}

pub(super) async fn poll(shared: Arc<ShimState>) {
    let mut connection = shared.plane.connection();
    loop {
        if *connection.borrow_and_update() == Connection::Up {
            let asked = now();
            match timeout(DEADLINE, shared.plane.log_status()).await {
                Ok(Ok(status)) => {
                    shared.clock.send_replace(Some(ClockReading {
                        asked,
                        answered: now(),
                        unix_ns: status.now_unix_ns,
                    }));
                }
                Ok(Err(error)) => warn!(%error, "cannot read the log's clock"),
                Err(_) => warn!("the log's clock is late"),
            }
        }
        tokio::select! {
            biased;
            Ok(()) = connection.changed() => {}
            () = sleep(EVERY) => {}
        }
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}
