//! Scripts against expected output: `testdata/*.txt`. Each command stands on a line; the lines
//! between `----` and the next empty line are what it prints. `REWRITE_GOLDEN=1` rewrites them.
//! `testdata/README.md` lists the commands.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use warmroute_proto::{Change, LocalHash, PrefixHash, Record, Tier, TierState, Tiers};

use crate::tests_support::{World, locals, prefix, removed, source, stored};
use crate::tree::SourceNodes;

#[derive(Default)]
struct Names(std::collections::BTreeMap<PrefixHash, String>);

impl Names {
    fn learn(&mut self, chain: &str) {
        let words: Vec<_> = chain.split_whitespace().collect();
        for length in 1..=words.len() {
            let name = words[..length].join(" ");
            if let Some(prefix) = prefix(&name) {
                self.0.insert(prefix, name);
            }
        }
    }

    fn of(&self, prefix: Option<PrefixHash>) -> &str {
        prefix.map_or("", |prefix| &self.0[&prefix])
    }

    fn local(&self, local: LocalHash) -> &str {
        let words = self.0.values().flat_map(|name| name.split_whitespace());
        let mut found = words.filter(|word| locals(word) == [local]);
        found.next().unwrap_or("?")
    }
}

struct Script {
    world: World,
    names: Names,
    last: Option<Record>,
}

/// `stored w1/0 gpu [a] [b c]` as words and bracketed lists.
struct Line<'a> {
    words: Vec<&'a str>,
    lists: Vec<&'a str>,
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Self {
        let (words, rest) = line.split_once('[').unwrap_or((line, ""));
        let lists = rest.split('[').map(|list| {
            let list = list.trim();
            list.strip_suffix(']').unwrap_or(list)
        });
        Self {
            words: words.split_whitespace().collect(),
            lists: lists.collect(),
        }
    }
}

fn tier(word: &str) -> Tier {
    let mut tiers = Tier::ALL.into_iter();
    tiers.find(|tier| tier.label() == word).expect("a tier")
}

fn state(word: &str) -> TierState {
    match word {
        "complete" => TierState::Complete,
        "partial" => TierState::Partial,
        "unverified" => TierState::Unverified,
        "stale" => TierState::Stale,
        "catching_up" => TierState::CatchingUp,
        "absent" => TierState::Absent,
        other => panic!("{other} is no state"),
    }
}

impl Script {
    fn new() -> Self {
        Self {
            world: World::new(),
            names: Names::default(),
            last: None,
        }
    }

    fn run(&mut self, line: &str) -> String {
        let (lost, line) = match line.strip_prefix("lost ") {
            Some(rest) => (true, rest),
            None => (false, line),
        };
        let Line { words, lists } = Line::parse(line);
        match words[..] {
            ["stored", name, on] => {
                self.names.learn(&lists.join(" "));
                self.change(name, stored(lists[0], lists[1], tier(on)), lost)
            }
            ["removed", name, on] => self.change(name, removed(lists[0], tier(on)), lost),
            ["cleared", name, on] => {
                let change = Change::Cleared { tier: tier(on) };
                self.change(name, change, lost)
            }
            ["again"] => {
                let record = self.last.clone().expect("a record");
                format!("{}\n", self.world.deliver_record(&record).label())
            }
            ["junk", name] => {
                let verdict = self.world.deliver(&source(name), vec![0]);
                format!("{}\n", verdict.label())
            }
            ["generation", name] => {
                self.world.shim(name).next_generation();
                String::new()
            }
            ["states", name, gpu, cpu, disk] => {
                let (gpu, cpu, disk) = (state(gpu), state(cpu), state(disk));
                self.world.shim(name).states = Tiers { gpu, cpu, disk };
                String::new()
            }
            ["heartbeat", name] => format!("{}\n", self.world.heartbeat(name).label()),
            ["register", worker] => {
                self.world.register(worker);
                String::new()
            }
            ["deregister", worker] => {
                self.world.deregister(worker);
                String::new()
            }
            ["wait", seconds] => {
                let seconds = seconds.strip_suffix('s').expect("seconds");
                self.world
                    .wait(Duration::from_secs(seconds.parse().unwrap()));
                String::new()
            }
            ["match"] => self.matched(lists[0]),
            ["dump", name] => self.dump(name),
            ["resyncs"] => self.resyncs(),
            ref other => panic!("{other:?} is no command"),
        }
    }

    fn change(&mut self, name: &str, change: Change, lost: bool) -> String {
        let record = self.world.shim(name).record(vec![change]);
        self.last = Some(record.clone());
        if lost {
            return String::new();
        }
        format!("{}\n", self.world.deliver_record(&record).label())
    }

    fn matched(&self, names: &str) -> String {
        let mut out = String::new();
        for answer in self.world.ask(names) {
            let (run, states) = (answer.run, answer.states);
            write!(out, "{}", answer.source).unwrap();
            for tier in Tier::ALL {
                let (run, state) = (run.get(tier), states.get(tier).label());
                write!(out, " {tier} {run} {state}").unwrap();
            }
            let reason = answer.reason.map(|reason| format!(" ({reason:?})"));
            writeln!(out, "{}", reason.unwrap_or_default()).unwrap();
        }
        out
    }

    fn dump(&self, name: &str) -> String {
        let mut out = String::new();
        for change in self
            .world
            .fold
            .nodes_of(&source(name))
            .map(SourceNodes::into_changes)
            .unwrap_or_default()
        {
            match change {
                Change::Stored {
                    parent,
                    blocks,
                    tier,
                } => {
                    let blocks: Vec<_> = blocks.iter().map(|&b| self.names.local(b)).collect();
                    let (parent, blocks) = (self.names.of(parent), blocks.join(" "));
                    writeln!(out, "stored {tier} [{parent}] [{blocks}]").unwrap();
                }
                Change::Removed { blocks, tier } => {
                    for block in blocks {
                        writeln!(out, "removed {tier} [{}]", self.names.of(Some(block))).unwrap();
                    }
                }
                Change::Cleared { tier } => writeln!(out, "cleared {tier}").unwrap(),
            }
        }
        out
    }

    fn resyncs(&mut self) -> String {
        let now = self.world.now;
        let mut out = String::new();
        for request in self.world.fold.poll_resyncs(now) {
            let (source, above, reason) = (request.source, request.above, request.reason.label());
            writeln!(out, "{source} above {above} {reason}").unwrap();
        }
        out
    }
}

/// The script with its output as it is.
fn replay(script: &str) -> String {
    let mut state = Script::new();
    let mut out = String::new();
    let mut expected = false;
    for line in script.lines() {
        if expected {
            expected = !line.is_empty();
            continue;
        }
        if line == "----" {
            expected = true;
            continue;
        }
        if line.is_empty() && out.ends_with("\n\n") {
            continue;
        }
        writeln!(out, "{line}").unwrap();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let printed = state.run(line);
        if !printed.is_empty() {
            writeln!(out, "----\n{printed}").unwrap();
        }
    }
    format!("{}\n", out.trim_end())
}

#[test]
fn scripts_print_what_they_say() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata");
    let mut scripts: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "txt"))
        .collect();
    scripts.sort();
    assert!(!scripts.is_empty());
    for path in scripts {
        let script = std::fs::read_to_string(&path).unwrap();
        let replayed = replay(&script);
        if std::env::var_os("REWRITE_GOLDEN").is_some() {
            std::fs::write(&path, replayed).unwrap();
        } else {
            assert_eq!(replayed, script, "{}", path.display());
        }
    }
}
