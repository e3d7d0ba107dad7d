//! Quiet clients, alone and beside each attack, by clients or through engines that misbehave.
//!
//! The quiet clients send at a fixed rate: saturated clients would hide delays. An attack's clients
//! are a process of the lowest priority, since they stand for other machines. Each row of each
//! round has a proxy of its own, so that nothing of an earlier attack is left in it.

pub mod attacker;
mod http2;
mod quiet;
mod shapes;
mod smuggling;
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
    IdleConnections,
    Smuggling,
    SilentEngines,
    ResettingEngines,
    ShortLengths,
    LongLengths,
    EndlessLines,
}

/// What its clients do is in `attacker` and `shapes`.
#[derive(Clone, Copy)]
struct Definition {
    name: &'static str,
    pace: Pace,
    /// Time of the attack before the measurement.
    lead: Duration,
    /// An answer that takes longer is given up.
    answer_max: Duration,
}

/// How often an attack's clients repeat their act.
#[derive(Clone, Copy)]
pub struct Pace {
    pub clients: u64,
    /// Between two acts of one client.
    pub period: Duration,
    /// The clients do not act together.
    pub is_spread: bool,
}

impl Definition {
    const fn new(name: &'static str, clients: u64, period_millis: u64) -> Self {
        Self {
            name,
            pace: Pace {
                clients,
                period: Duration::from_millis(period_millis),
                is_spread: false,
            },
            lead: Duration::from_secs(1),
            answer_max: Duration::from_secs(20),
        }
    }

    const fn spread(mut self) -> Self {
        self.pace.is_spread = true;
        self
    }

    const fn leading(self, secs: u64) -> Self {
        let lead = Duration::from_secs(secs);
        Self { lead, ..self }
    }

    const fn giving_up_after(self, secs: u64) -> Self {
        let answer_max = Duration::from_secs(secs);
        Self { answer_max, ..self }
    }
}

impl Attack {
    pub const ALL: [Self; 18] = [
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
        Self::IdleConnections,
        Self::Smuggling,
        Self::SilentEngines,
        Self::ResettingEngines,
        Self::ShortLengths,
        Self::LongLengths,
        Self::EndlessLines,
    ];

    const fn definition(self) -> Definition {
        match self {
            Self::SlowBodies => Definition::new("slow bodies", 64, 1000),
            Self::SlowHeads => Definition::new("slow heads", 64, 1000),
            Self::ManyKeys => Definition::new("many keys, hang up", 4, 500),
            Self::Prose => Definition::new("8 MiB of prose", 4, 1000),
            Self::OneLetter => Definition::new("8 MiB of one letter", 4, 1000),
            Self::Cjk => Definition::new("8 MiB of CJK", 4, 1000),
            Self::DeepJson => Definition::new("deep JSON", 4, 40),
            Self::Connections => Definition::new("new connections", 20, 10),
            Self::ResetStreams => Definition::new("reset streams", 8, 50),
            Self::HeaderBombs => Definition::new("header bombs", 8, 20),
            // The send buffers of the proxy's sockets are full by then.
            Self::UnreadStreams => Definition::new("unread streams", 64, 1000).leading(12),
            // All are open by then.
            Self::IdleConnections => Definition::new("idle connections", 4000, 20_000).leading(3),
            Self::Smuggling => Definition::new("smuggling", 20, 50).giving_up_after(1),
            Self::SilentEngines => Definition::new("silent engines", 200, 2000)
                .spread()
                .leading(3)
                .giving_up_after(2),
            Self::ResettingEngines => Definition::new("resetting engines", 8, 40),
            Self::ShortLengths => Definition::new("short lengths", 8, 40).giving_up_after(1),
            Self::LongLengths => Definition::new("long lengths", 200, 1000)
                .spread()
                .giving_up_after(1),
            Self::EndlessLines => Definition::new("endless lines", 8, 1000).leading(3),
        }
    }

    pub const fn name(self) -> &'static str {
        self.definition().name
    }

    pub fn named(name: &str) -> anyhow::Result<Self> {
        let found = Self::ALL.into_iter().find(|attack| attack.name() == name);
        found.with_context(|| format!("no attack {name}"))
    }

    pub const fn pace(self) -> Pace {
        self.definition().pace
    }

    pub const fn answer_max(self) -> Duration {
        self.definition().answer_max
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
    std::thread::sleep(attack.definition().lead);
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
