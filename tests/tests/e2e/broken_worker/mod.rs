//! A worker that swallows requests: hung, frozen, asleep, failing or slow, with a hot prefix.

mod fault;
mod load;
mod peers;
mod stage;
mod table;

use fault::Fault;
use load::{Load, Sent};
use stage::ENGINES;

use crate::fleet::{Flags, Fleet, Mode, Process};

/// Seconds of load during each fault, at ten requests a second.
const SECS: u64 = 10;

/// Requests that may fail during one fault.
const LOST_MAX: usize = 3;

async fn a_broken_worker_costs_few_requests(mode: Mode) {
    let fleet = Fleet::start(mode, ENGINES, Flags::default()).await;
    let bases: Vec<String> = fleet.routers.iter().map(Process::base).collect();
    let hot = stage::prime(&fleet, &bases[0]).await;
    for fault in [
        None,
        Some(Fault::Hang),
        Some(Fault::ErrorEvent(0)),
        Some(Fault::Status(500)),
        Some(Fault::Sleep),
    ] {
        if let Some(fault) = fault {
            fault.begin(&fleet, hot).await;
        }
        let sent = load::run(&fleet.http, &bases, Load::usual(SECS)).await;
        let failed: Vec<&Sent> = sent.iter().filter(|sent| sent.failed.is_some()).collect();
        println!(
            "{fault:?}: {} of {} requests failed",
            failed.len(),
            sent.len()
        );
        assert!(failed.len() <= LOST_MAX, "{fault:?}: {failed:?}");
        if let Some(fault) = fault {
            fault.end(&fleet, hot).await;
        }
        serves_again(&fleet, &bases, hot).await;
    }
}

/// Waits until the worker gets requests and answers them.
async fn serves_again(fleet: &Fleet, bases: &[String], engine: usize) {
    let before = stage::finished(fleet, engine).await;
    fleet
        .until("the worker serves again", async |fleet| {
            load::run(&fleet.http, bases, Load::usual(1)).await;
            stage::finished(fleet, engine).await > before
        })
        .await;
}

on_both_planes!(a_broken_worker_costs_few_requests);
