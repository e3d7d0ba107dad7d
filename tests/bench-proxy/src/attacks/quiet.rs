//! Clients of short chats at a fixed rate.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::LocalSet;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::client::{self, Client, Load, Measured, PLAIN_CLIENTS};

/// Between two requests of one client: 200 requests a second in all.
const PERIOD: Duration = Duration::from_millis(40);

/// A request without an answer by then has failed.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// What the quiet clients saw.
#[derive(Default)]
pub struct Quiet {
    pub measured: Measured,
    pub failed: usize,
}

/// Sends for this time. Each latency counts from the moment at which the request was due if its
/// connection was still busy then.
pub fn measure(address: SocketAddr, time: Duration) -> anyhow::Result<Quiet> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let seen = Rc::new(RefCell::new(Quiet::default()));
    let tasks = LocalSet::new();
    tasks.block_on(&runtime, async {
        let began = Instant::now();
        let mut running = Vec::new();
        for number in 0..PLAIN_CLIENTS {
            let quiet = send_paced(address, began, time, number, Rc::clone(&seen));
            running.push(tokio::task::spawn_local(quiet));
        }
        for client in running {
            client.await?;
        }
        anyhow::Ok(())
    })?;
    let mut seen = seen.take();
    seen.measured.latencies.sort_unstable();
    seen.measured.requests = seen.measured.latencies.len();
    seen.measured.wall = time;
    Ok(seen)
}

async fn send_paced(
    address: SocketAddr,
    began: Instant,
    time: Duration,
    number: usize,
    seen: Rc<RefCell<Quiet>>,
) {
    let load = Load::Plain {
        prompt_bytes: 200,
        requests: 0,
    };
    let mut client = None;
    let mut due = began + PERIOD * number as u32 / PLAIN_CLIENTS as u32;
    let mut turn = 0;
    while due < began + time {
        // A timer's own lateness is no latency.
        let start = if Instant::now() > due {
            due
        } else {
            sleep_until(due).await;
            Instant::now()
        };
        let request = client::request(&load, number * 1_000_000 + turn);
        let answered = timeout_at(start + ANSWER_MAX, ask(&mut client, address, &request)).await;
        if matches!(answered, Ok(Ok(()))) {
            seen.borrow_mut().measured.latencies.push(start.elapsed());
        } else {
            client = None;
            seen.borrow_mut().failed += 1;
        }
        due += PERIOD;
        turn += 1;
    }
}

async fn ask(
    client: &mut Option<Client>,
    address: SocketAddr,
    request: &[u8],
) -> anyhow::Result<()> {
    let client = match client {
        Some(client) => client,
        None => client.insert(Client::connect(address).await?),
    };
    client.ask(request, false).await?;
    Ok(())
}
