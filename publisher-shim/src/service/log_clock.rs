//! Reads the log's clock: once for all ranks, after each reconnect and then periodically.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};
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
    let mut late = 0;
    loop {
        if *connection.borrow_and_update() == Connection::Up {
            let asked = now();
            match timeout(DEADLINE, shared.plane.log_status()).await {
                Ok(Ok(status)) => {
                    late = 0;
                    report(&shared, Ok(()));
                    shared.clock.send_replace(Some(ClockReading {
                        asked,
                        answered: now(),
                        unix_ns: status.now_unix_ns,
                    }));
                }
                Ok(Err(error)) => report(&shared, Err(error.to_string())),
                // A busy server answers late now and then.
                Err(_) if late == 0 => late += 1,
                Err(_) => report(&shared, Err("it does not answer".to_owned())),
            }
        }
        tokio::select! {
            biased;
            Ok(()) = connection.changed() => {}
            () = sleep(EVERY) => {}
        }
    }
}

/// Logs a change.
fn report(shared: &ShimState, read: Result<(), String>) {
    let why = read.as_ref().err().cloned();
    match (shared.log.read(read), why) {
        (false, _) => {}
        (true, Some(why)) => warn!(
            why,
            "the log cannot be read: not ready, and this worker's credit ends; if its stream is \
             gone, create it by `warmroute-indexer init`"
        ),
        (true, None) => info!("the log can be read again"),
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}
