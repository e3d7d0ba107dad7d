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

/// Such seconds in the gate.
const GATE_SECS: u64 = 4;

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
        Some(Fault::ErrorEvent(3)),
        Some(Fault::Status(500)),
        Some(Fault::Sleep),
    ] {
        costs_few(&fleet, &bases, (fault, hot), SECS).await;
        serves_again(&fleet, &bases, hot).await;
    }
}

/// The two kinds of loss that nothing can retry, or only late, in the seconds that the gate has.
#[tokio::test(flavor = "multi_thread")]
async fn a_hang_and_broken_streams_cost_few_requests() {
    let fleet = Fleet::start(Mode::Embedded, ENGINES, Flags::default()).await;
    let bases = [fleet.routers[0].base()];
    let hot = stage::prime(&fleet, &bases[0]).await;
    costs_few(&fleet, &bases, (None, hot), GATE_SECS).await;
    costs_few(&fleet, &bases, (Some(Fault::Hang), hot), GATE_SECS).await;
    serves_again(&fleet, &bases, hot).await;
    costs_few(&fleet, &bases, (Some(Fault::ErrorEvent(3)), hot), GATE_SECS).await;
}

/// At most [`LOST_MAX`] requests of a load fail while the worker has the fault.
async fn costs_few(
    fleet: &Fleet,
    bases: &[String],
    (fault, broken): (Option<Fault>, usize),
    secs: u64,
) {
    if let Some(fault) = fault {
        fault.begin(fleet, broken).await;
    }
    let sent = load::run(bases, Load::usual(secs)).await;
    let failed: Vec<&Sent> = sent.iter().filter(|sent| sent.failed.is_some()).collect();
    println!(
        "{fault:?}: {} of {} requests failed",
        failed.len(),
        sent.len()
    );
    assert!(failed.len() <= LOST_MAX, "{fault:?}: {failed:?}");
    if let Some(fault) = fault {
        fault.end(fleet, broken).await;
    }
}

/// Waits until the worker gets requests and answers them.
async fn serves_again(fleet: &Fleet, bases: &[String], engine: usize) {
    let before = stage::finished(fleet, engine).await;
    fleet
        .until("the worker serves again", async |fleet| {
            load::run(bases, Load::usual(1)).await;
            stage::finished(fleet, engine).await > before
        })
        .await;
}

on_both_planes!(a_broken_worker_costs_few_requests);
