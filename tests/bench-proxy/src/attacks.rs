//! Quiet clients, alone and beside each attack.
//!
//! The quiet clients send at a fixed rate: saturated clients would hide delays. An attack's clients
//! are a process of the lowest priority, since they stand for other machines. Each row of each
//! round has a proxy of its own, so that nothing of an earlier attack is left in it.

pub mod attacker;
mod http2;
mod quiet;
mod shapes;
mod table;

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::engines::Engines;
use crate::options::Options;
use crate::process::{Proxy, ProxyKind};
use crate::usage::Usage;
use quiet::Quiet;

/// Time of the quiet clients before the first measurement.
const WARM_UP: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    SlowBodies,
    SlowHeads,
    ManyKeys,
    Prose,
    OneLetter,
    Cjk,
    DeepJson,
    Connections,
    ResetStreams,
    HeaderBombs,
    UnreadStreams,
}

/// How often an attack's clients repeat their act.
pub struct Pace {
    pub clients: u64,
    /// Between two acts of one client.
    pub period: Duration,
}

impl Attack {
    pub const ALL: [Self; 11] = [
        Self::SlowBodies,
        Self::SlowHeads,
        Self::ManyKeys,
        Self::Prose,
        Self::OneLetter,
        Self::Cjk,
        Self::DeepJson,
        Self::Connections,
        Self::ResetStreams,
        Self::HeaderBombs,
        Self::UnreadStreams,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::SlowBodies => "slow bodies",
            Self::SlowHeads => "slow heads",
            Self::ManyKeys => "many keys, hang up",
            Self::Prose => "8 MiB of prose",
            Self::OneLetter => "8 MiB of one letter",
            Self::Cjk => "8 MiB of CJK",
            Self::DeepJson => "deep JSON",
            Self::Connections => "new connections",
            Self::ResetStreams => "reset streams",
            Self::HeaderBombs => "header bombs",
            Self::UnreadStreams => "unread streams",
        }
    }

    pub fn named(name: &str) -> anyhow::Result<Self> {
        let found = Self::ALL.into_iter().find(|attack| attack.name() == name);
        found.with_context(|| format!("no attack {name}"))
    }

    /// Time of the attack before the measurement.
    const fn lead(self) -> Duration {
        match self {
            // The send buffers of the proxy's sockets are full by then.
            Self::UnreadStreams => Duration::from_secs(12),
            Self::SlowBodies
            | Self::SlowHeads
            | Self::ManyKeys
            | Self::Prose
            | Self::OneLetter
            | Self::Cjk
            | Self::DeepJson
            | Self::Connections
            | Self::ResetStreams
            | Self::HeaderBombs => Duration::from_secs(1),
        }
    }

    pub const fn pace(self) -> Pace {
        let (clients, millis) = match self {
            Self::SlowBodies | Self::SlowHeads | Self::UnreadStreams => (64, 1000),
            Self::ManyKeys => (4, 500),
            Self::Prose | Self::OneLetter | Self::Cjk => (4, 1000),
            Self::DeepJson => (4, 40),
            Self::Connections => (20, 10),
            Self::ResetStreams => (8, 50),
            Self::HeaderBombs => (8, 20),
        };
        Pace {
            clients,
            period: Duration::from_millis(millis),
        }
    }
}

/// One attack on one proxy.
struct Row {
    attack: Attack,
    proxy: &'static str,
    rounds: Vec<Round>,
}

struct Round {
    alone: Quiet,
    beside: Quiet,
    acts_per_sec: f64,
    peak_mib: f64,
}

/// Prints a table of all attacks on all proxies whose name, or whose attack's name, has the text of
/// `--only`.
pub fn measure_all(engines: &Engines, options: &Options) -> anyhow::Result<()> {
    let mut rows = Vec::new();
    for attack in Attack::ALL {
        for kind in ProxyKind::ATTACKED {
            let is_wanted = options.only.as_ref().is_none_or(|only| {
                kind.name().contains(only.as_str()) || attack.name().contains(only.as_str())
            });
            if is_wanted {
                rows.push((attack, kind, Vec::new()));
            }
        }
    }
    for _ in 0..options.rounds {
        for (attack, kind, rounds) in &mut rows {
            let round = measure(*attack, *kind, engines, options)
                .with_context(|| format!("{} {}", kind.name(), attack.name()))?;
            rounds.push(round);
        }
    }
    let rows = rows.into_iter().map(|(attack, kind, rounds)| Row {
        attack,
        proxy: kind.name(),
        rounds,
    });
    print!("{}", table::render(&rows.collect::<Vec<_>>()));
    Ok(())
}

fn measure(
    attack: Attack,
    kind: ProxyKind,
    engines: &Engines,
    options: &Options,
) -> anyhow::Result<Round> {
    let proxy = Proxy::start(kind, &engines.engines, options)?;
    quiet::measure(proxy.address, WARM_UP)?;
    let alone = quiet::measure(proxy.address, options.measurement)?;
    let target = match attack {
        Attack::ResetStreams => proxy.http2_address,
        _ => proxy.address,
    };
    let attacker = Attacker::start(attack, target)?;
    std::thread::sleep(attack.lead());
    let before = proxy.usage()?;
    let beside = quiet::measure(proxy.address, options.measurement)?;
    let Usage { cpu_secs, peak_mib } = proxy.usage()?.since(before);
    let (acts, ended_early, acts_per_sec) = attacker.stop()?;
    eprintln!(
        "{}, {}: {acts} acts, {ended_early} refused or ended early; {cpu_secs:.2} s",
        attack.name(),
        kind.name()
    );
    Ok(Round {
        alone,
        beside,
        acts_per_sec,
        peak_mib,
    })
}

/// The process of an attack's clients, which ends when dropped.
struct Attacker {
    child: Child,
    output: BufReader<ChildStdout>,
    began: Instant,
}

impl Attacker {
    fn start(attack: Attack, target: SocketAddr) -> anyhow::Result<Self> {
        let mut child = Command::new("nice")
            .args(["-n", "19"])
            .arg(std::env::current_exe()?)
            .args(["--attacker", attack.name(), &target.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting an attack's clients")?;
        let output = child.stdout.take().context("no output")?;
        let mut started = Self {
            child,
            output: BufReader::new(output),
            began: Instant::now(),
        };
        started.output.read_line(&mut String::new())?;
        started.began = Instant::now();
        Ok(started)
    }

    /// Ends the attack. Returns its acts, those that were refused or ended early, and acts a second.
    fn stop(mut self) -> anyhow::Result<(u64, u64, f64)> {
        let secs = self.began.elapsed().as_secs_f64();
        drop(self.child.stdin.take());
        let mut counts = String::new();
        self.output.read_line(&mut counts)?;
        let numbers = counts.trim().split_once(' ').context("no counts")?;
        let acts: u64 = numbers.0.parse()?;
        Ok((acts, numbers.1.parse()?, acts as f64 / secs))
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
