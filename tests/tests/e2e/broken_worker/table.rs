//! The table of `docs/RELIABILITY.md`: each fault before each router. `tests/fault-table.sh` runs
//! it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};

use super::fault::Fault;
use super::load::{LATE, Load, Shape};
use super::peers::{Peer, RunningPeer};
use super::stage::{self, ENGINES, Figures, TABLE};
use crate::fleet::{Flags, Fleet, Mode, Process};

/// Fleets at a time, unless `FAULT_TABLE_AT_ONCE` says otherwise. They mostly wait.
const AT_ONCE: usize = 4;

#[derive(Clone, Copy, Debug)]
struct Row {
    name: &'static str,
    fault: Option<Fault>,
    /// All engines have the fault, from the load's beginning on; no alarm is right.
    is_everywhere: bool,
    shape: Shape,
}

impl Row {
    const fn broken(name: &'static str, fault: Fault) -> Self {
        Self {
            name,
            fault: Some(fault),
            is_everywhere: false,
            shape: Shape::Usual,
        }
    }

    const fn well(name: &'static str, fault: Option<Fault>, shape: Shape) -> Self {
        Self {
            name,
            fault,
            is_everywhere: true,
            shape,
        }
    }
}

const ROWS: [Row; 15] = [
    Row::broken("hangs", Fault::Hang),
    Row::broken("frozen", Fault::Freeze),
    Row::broken("asleep", Fault::Sleep),
    Row::broken("status 500", Fault::Status(500)),
    Row::broken("status 503, `Retry-After`", Fault::Status(503)),
    Row::broken("status 429, `Retry-After`", Fault::Status(429)),
    Row::broken("status 401", Fault::Status(401)),
    Row::broken("status 404", Fault::Status(404)),
    Row::broken("error as a stream's first event", Fault::ErrorEvent(0)),
    Row::broken("error in mid-stream", Fault::ErrorEvent(3)),
    Row::broken("200 times slower", Fault::Slowdown(200)),
    Row::well("slow fleet", Some(Fault::Slowdown(10)), Shape::Usual),
    Row::well("prompts of 100,000 tokens", None, Shape::LongPrompts),
    Row::well(
        "silence of 60 s in streams",
        Some(Fault::Silence(60)),
        Shape::Marked,
    ),
    Row::well("poisoned requests", Some(Fault::Poison), Shape::Marked),
];

/// What is in front of the engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Front {
    OneRouter,
    TwoRouters,
    Peer(Peer),
}

impl Front {
    const OWN: [Self; 2] = [Self::OneRouter, Self::TwoRouters];

    const fn name(self) -> &'static str {
        match self {
            Self::OneRouter => "one router",
            Self::TwoRouters => "two routers",
            Self::Peer(peer) => peer.name(),
        }
    }

    const fn mode(self) -> Mode {
        match self {
            Self::TwoRouters => Mode::Nats {
                indexers: 1,
                routers: 2,
            },
            // A peer's fleet has an idle router too.
            Self::OneRouter | Self::Peer(_) => Mode::Embedded,
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "tests have no command line")]
fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Whether a list of names, separated by commas, has a part of this one. Without a list, it has.
fn is_chosen(list: &str, name: &str) -> bool {
    let list = setting(list);
    list.is_none_or(|list| list.split(',').any(|part| name.contains(part)))
}

async fn figures(row: Row, front: Front, programs: Option<&PathBuf>) -> String {
    let fleet = Fleet::start(front.mode(), ENGINES, Flags::default()).await;
    let peer = match (front, programs) {
        (Front::Peer(peer), Some(programs)) => Some(RunningPeer::start(peer, programs, &fleet)),
        (Front::Peer(_) | Front::OneRouter | Front::TwoRouters, _) => None,
    };
    let bases: Vec<String> = match &peer {
        Some(peer) => vec![peer.base.clone()],
        None => fleet.routers.iter().map(Process::base).collect(),
    };
    let hot = stage::prime(&fleet, &bases[0]).await;
    let mut load = Load::usual(TABLE.all);
    load.shape = row.shape;
    if let Some(Fault::Silence(secs)) = row.fault {
        load.silence = Duration::from_secs(secs);
    }
    let all: Vec<usize> = (0..ENGINES.count).collect();
    let (broken, times) = if row.is_everywhere {
        (all.as_slice(), stage::Times { begin: 0, ..TABLE })
    } else {
        load.hot_secs = TABLE.end;
        (&all[hot..=hot], TABLE)
    };
    let figures = stage::run(&fleet, &bases, load, (row.fault, broken), &times).await;
    show_failures(row, front, &figures);
    let (failed, late) = (figures.failed(row.fault), figures.late(load.silence));
    if row.is_everywhere {
        let alarms = match peer {
            Some(_) => String::new(),
            None => format!(", {} alarms", alarms(&fleet).await),
        };
        return format!("{failed} + {late}, {:.0} %{alarms}", 100.0 * figures.least);
    }
    let (share, back) = (100.0 * figures.broken_share, 100.0 * figures.back);
    format!("{failed} + {late}, {share:.1} %, {back:.0} %")
}

/// Workers that routers found stalled or broken.
async fn alarms(fleet: &Fleet) -> f64 {
    let opened = fleet.routers.iter().map(|router| {
        let log = router.logged();
        log.matches("circuit breaker opened").count()
    });
    fleet.metric("warmroute_router_source_stalls_total").await + opened.sum::<usize>() as f64
}

/// How requests failed, and how many.
fn show_failures(row: Row, front: Front, figures: &Figures) {
    let mut kinds: BTreeMap<String, (usize, f64)> = BTreeMap::new();
    for sent in &figures.sent {
        let late = (sent.waited > LATE).then(|| "late".to_owned());
        if let Some(why) = sent.failed.clone().or(late) {
            let kind = if sent.is_stream { "stream" } else { "plain" };
            let why: String = why.chars().take(400).collect();
            let seen = kinds.entry(format!("{kind}: {why}")).or_default();
            *seen = (seen.0 + 1, sent.at.as_secs_f64());
        }
    }
    for (why, (count, last)) in kinds {
        let (row, front) = (row.name, front.name());
        println!("{front}, {row}: {count} until {last:.1} s: {why}");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "minutes of load; tests/fault-table.sh prints it"]
async fn fault_table() {
    let programs = setting("PEERS").map(PathBuf::from);
    let peers = Peer::ALL.into_iter().filter(|peer| {
        let program = programs.as_ref().map(|programs| programs.join(peer.name()));
        program.is_some_and(|program| program.exists())
    });
    let fronts = Front::OWN.into_iter().chain(peers.map(Front::Peer));
    let fronts: Vec<Front> = fronts
        .filter(|front| is_chosen("FAULT_TABLE_FRONTS", front.name()))
        .collect();
    let rows = ROWS
        .iter()
        .filter(|row| is_chosen("FAULT_TABLE_ROWS", row.name));
    let rows: Vec<Row> = rows.copied().collect();
    let at_once = setting("FAULT_TABLE_AT_ONCE").map_or(AT_ONCE, |text| text.parse().unwrap());
    let cells = rows
        .iter()
        .flat_map(|row| fronts.iter().map(|front| (*row, *front)));
    let cells = stream::iter(cells).map(|(row, front)| figures(row, front, programs.as_ref()));
    let cells: Vec<String> = cells.buffered(at_once).collect().await;
    let cells: Vec<(Row, &[String])> = rows.into_iter().zip(cells.chunks(fronts.len())).collect();
    print("fault: lost, share, back", &fronts, &cells, |row| {
        !row.is_everywhere
    });
    print(
        "no fault: lost, least share, alarms",
        &fronts,
        &cells,
        |row| row.is_everywhere,
    );
}

/// Prints the rows of one kind.
fn print(title: &str, fronts: &[Front], cells: &[(Row, &[String])], is_of: fn(&Row) -> bool) {
    let names: Vec<&str> = fronts.iter().map(|front| front.name()).collect();
    println!("\n| {title} | {} |", names.join(" | "));
    println!("|---{}|", "|---".repeat(fronts.len()));
    for (row, cells) in cells.iter().filter(|(row, _)| is_of(row)) {
        println!("| {} | {} |", row.name, cells.join(" | "));
    }
}
