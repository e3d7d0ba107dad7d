//! The indexer's tree against dynamo-kv-router's, on a workload file, one JSON line a variant.
//!
//! `--workload FILE [--peer] [--only NAME] [--runs N]`. Every run of a variant is a process of its
//! own, and its memory is measured in another one. Prints the medians of several runs.
//! `--workload FILE --derive holes:PERCENT|tiers|grow:TIMES --out FILE` makes another file instead;
//! `--child lengths` prints medians by prompt length, for `plot.py`.

mod derive;
mod index;
mod measure;
mod mirror_and_tree;
mod naive;
mod ours;
#[cfg(feature = "peer")]
mod peer;
mod workload;

use std::process::Command;

use measure::Figures;
use serde_json::{Map, Value, json};
use workload::Workload;

struct Variant {
    name: &'static str,
    run: fn(&Workload) -> Figures,
    memory: fn(&Workload) -> Figures,
    lengths: fn(&Workload) -> Vec<(u32, u32)>,
}

fn variants(peer: bool) -> Vec<Variant> {
    macro_rules! variant {
        ($index:ty, $run:ident) => {
            Variant {
                name: <$index as index::Index>::NAME,
                run: measure::$run::<$index>,
                memory: measure::memory::<$index>,
                lengths: measure::lengths::<$index>,
            }
        };
    }
    let mut variants = vec![
        variant!(ours::Ours, concurrent),
        variant!(mirror_and_tree::MirrorAndTree, single),
        variant!(naive::HashMapWalk, single),
    ];
    #[cfg(feature = "peer")]
    if peer {
        variants.extend([
            variant!(peer::Concurrent, concurrent),
            variant!(peer::Positional, concurrent),
            variant!(peer::SingleThread, single),
        ]);
    }
    assert!(!peer || cfg!(feature = "peer"), "built without the peer");
    variants
}

#[derive(Default)]
struct Args {
    workload: String,
    peer: bool,
    only: Option<String>,
    runs: usize,
    /// The measurement of a child process.
    child: Option<String>,
    derive: Option<String>,
    out: String,
}

fn args() -> Args {
    let mut args = Args {
        runs: 1,
        ..Args::default()
    };
    let mut given = std::env::args().skip(1);
    while let Some(flag) = given.next() {
        let mut value = || given.next().expect("the flag's value");
        match flag.as_str() {
            "--workload" => args.workload = value(),
            "--peer" => args.peer = true,
            "--only" => args.only = Some(value()),
            "--runs" => args.runs = value().parse().expect("a number of runs"),
            "--derive" => args.derive = Some(value()),
            "--out" => args.out = value(),
            "--child" => args.child = Some(value()),
            other => panic!("unknown flag {other}"),
        }
    }
    assert!(!args.workload.is_empty(), "--workload FILE is needed");
    args
}

fn child(args: &Args, variant: &Variant, what: &str) -> Map<String, Value> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([
        "--workload",
        &args.workload,
        "--only",
        variant.name,
        "--child",
        what,
    ]);
    if args.peer {
        command.arg("--peer");
    }
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

fn median(values: &[Value]) -> Value {
    let mut numbers: Vec<f64> = values.iter().filter_map(Value::as_f64).collect();
    numbers.sort_by(f64::total_cmp);
    numbers
        .get(numbers.len() / 2)
        .map_or(Value::Null, |&number| rounded(number))
}

fn rounded(number: f64) -> Value {
    let rounded = if number.abs() < 1000.0 {
        (number * 100.0).round() / 100.0
    } else {
        number.round()
    };
    Value::from(rounded)
}

fn line(figures: Figures) -> Map<String, Value> {
    let value = |value: Option<f64>| value.map_or(Value::Null, Value::from);
    figures
        .0
        .into_iter()
        .map(|(key, figure)| (key.to_owned(), value(figure)))
        .collect()
}

fn main() {
    let args = args();
    if let Some(kind) = &args.derive {
        let base = Workload::load(&args.workload).unwrap();
        let number = |number: &str| number.parse::<f64>().expect("a number");
        let derived = match kind.split_once(':') {
            Some(("holes", percent)) => {
                derive::derive(&base, derive::Kind::Holes(number(percent) / 100.0), 4)
            }
            Some(("grow", copies)) => derive::grow(&base, number(copies) as u64),
            Some(_) => panic!("unknown kind {kind}"),
            None => derive::derive(&base, derive::Kind::Tiers, 4),
        };
        std::fs::write(&args.out, derived).unwrap();
        return;
    }
    let wanted = |variant: &Variant| args.only.as_ref().is_none_or(|only| only == variant.name);
    for variant in variants(args.peer).iter().filter(|variant| wanted(variant)) {
        if let Some(what) = &args.child {
            let workload = Workload::load(&args.workload).unwrap();
            if what == "lengths" {
                let lengths = (variant.lengths)(&workload);
                let entries = workload.trailer.resident_entries;
                let name = variant.name;
                println!(
                    "{}",
                    json!({"variant": name, "entries": entries, "lengths": lengths})
                );
                continue;
            }
            let measure = if what == "memory" {
                variant.memory
            } else {
                variant.run
            };
            println!("{}", Value::Object(line(measure(&workload))));
            continue;
        }
        let runs: Vec<_> = (0..args.runs)
            .map(|_| {
                let mut run = child(&args, variant, "run");
                run.extend(child(&args, variant, "memory"));
                run
            })
            .collect();
        let mut shown = Map::new();
        shown.insert("variant".into(), variant.name.into());
        for key in runs[0].keys() {
            let values: Vec<_> = runs.iter().map(|run| run[key].clone()).collect();
            let value = if key.ends_with("exact") {
                Value::Bool(values.iter().all(|value| value.as_f64() == Some(1.0)))
            } else {
                median(&values)
            };
            shown.insert(key.clone(), value);
        }
        println!("{}", Value::Object(shown));
    }
}
