//! Engines that reset connections: while one client's requests make them do so, and whenever a
//! connection is used again.

use tokio::time::{Duration, interval};

use super::engine::{Act, Reuse};
use super::{CHAT, HostileEngines, chat};

/// Requests of the client whose requests make engines reset connections.
const HOSTILE_REQUESTS: usize = 24;

/// Between two of them.
const PERIOD: Duration = Duration::from_millis(333);

const ANSWERS_MIN: usize = 20;

/// Each hostile request breaks at both workers, so both have the same share of broken requests.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_makes_engines_reset_connections_harms_no_other() {
    let engines = HostileEngines::start(2, Reuse::Served).await;
    let target = engines.router("").await;
    let others = [target.other_client(3), target.other_client(4)];
    let url = format!("{}{CHAT}", target.process.base());
    let hostile = chat(Act::Reset.mark(), "Reset.");
    let mut ticks = interval(PERIOD);
    let mut statuses = std::collections::BTreeMap::<u16, usize>::new();
    for _ in 0..HOSTILE_REQUESTS {
        ticks.tick().await;
        let sent = target.http.post(&url).body(hostile.clone()).send().await;
        *statuses.entry(sent.unwrap().status().as_u16()).or_default() += 1;
        assert_eq!(target.health().await, ["healthy", "healthy"]);
    }
    for other in &others {
        other.until_answered(1).await;
    }
    let mut answered = 0;
    for other in others {
        answered += other.stop().await;
    }
    println!(
        "{HOSTILE_REQUESTS} hostile requests, answered {statuses:?}: {} connections reset, \
         {answered} answers to others",
        engines.resets()
    );
    assert_eq!(statuses.into_keys().collect::<Vec<_>>(), [502]);
    assert!(engines.resets() >= 2 * HOSTILE_REQUESTS, "at both workers");
    assert!(answered >= ANSWERS_MIN, "{answered}");
    assert_eq!(target.health().await, ["healthy", "healthy"]);
    target.until_by_tokens().await;
}

/// An engine may close a kept connection when the next request is on its way.
#[tokio::test(flavor = "multi_thread")]
async fn connections_that_are_reset_when_they_are_used_again_fail_no_request() {
    const REQUESTS: usize = 60;
    let engines = HostileEngines::start(2, Reuse::Reset).await;
    let target = engines.router("").await;
    for number in 0..REQUESTS {
        target.ask(chat("", &format!("Question {number}."))).await;
    }
    let retries = "retries_total{reason=\"stale_connection\"}";
    let retries = target.metric(retries).await;
    println!(
        "{REQUESTS} requests answered: {} connections reset, {retries} requests sent once more",
        engines.resets()
    );
    assert!(retries > 0.0, "no connection was used again");
    assert_eq!(target.health().await, ["healthy", "healthy"]);
}
