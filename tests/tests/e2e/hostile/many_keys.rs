//! Bodies of very many keys, whose clients hang up while the router works on them.

use tokio::time::{Duration, Instant, sleep, timeout};

use super::attack::many_keys;
use super::engine::{Act, Reuse};
use super::{HostileEngines, Target, post};
use crate::fleet::PATIENCE;

/// Pairs of such bodies, one pair after the other.
const ROUNDS: usize = 15;

/// Time after which a client hangs up: the router works on its request by then.
const HANG_UP_AFTER: Duration = Duration::from_millis(20);

/// Answers to the other client after each pair: the first request may have been sent before.
const ANSWERS_AFTER: usize = 2;

/// Two such bodies once occupied all prompt threads for minutes, also when their clients had left.
#[tokio::test(flavor = "multi_thread")]
async fn two_bodies_of_many_keys_leave_the_prompt_threads_to_others() {
    let engines = HostileEngines::start(2, Reuse::Served).await;
    // A request without its prompt's tokens has waited for a minute.
    let target = engines.router("prompt_timeout_ms = 60000\n").await;
    let body = many_keys(Act::Hang.mark());
    assert!(body.len() > 4_000_000, "{}", body.len());
    let request = post("", &body);
    let other = target.other_client(2);
    let attack = async {
        for _ in 0..ROUNDS {
            let clients = [target.send(&request).await, target.send(&request).await];
            let are_held = async |target: &Target| {
                target.metric("buffered_bytes").await >= 2.0 * body.len() as f64
            };
            target.until("both bodies are held", are_held).await;
            sleep(HANG_UP_AFTER).await;
            drop(clients);
            other.until_answered(ANSWERS_AFTER).await;
        }
    };
    let ended = timeout(PATIENCE, attack).await;
    assert!(ended.is_ok(), "others wait for the work on such bodies");
    let answered = other.stop().await;
    let ended = Instant::now();
    target.until_by_tokens().await;
    let reason = "unhashed_requests_total{reason=\"prompt_timeout\"}";
    let late = target.metric(reason).await;
    println!(
        "{} bodies of 300,000 keys: {answered} answers to others, {late} of them without tokens; \
         by tokens again after {} ms",
        2 * ROUNDS,
        ended.elapsed().as_millis()
    );
    assert_eq!(late, 0.0);
    let is_empty = async |target: &Target| target.metric("buffered_bytes").await == 0.0;
    target.until("no body is held", is_empty).await;
}
