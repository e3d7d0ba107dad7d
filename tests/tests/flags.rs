//! The flags of the three binaries: each has an environment name, a reason and a row in the docs.

use std::collections::BTreeSet;
use std::path::Path;

use clap::{Command, CommandFactory as _};
use warmroute_process::env::{OURS, PREFIX, is_ours};

fn commands() -> [Command; 3] {
    [
        warmroute_router::config::RouterArgs::command(),
        warmroute_indexer::args::IndexerArgs::command(),
        warmroute_shim::args::Args::command(),
    ]
}

#[test]
fn every_flag_has_its_environment_name_and_a_reason() {
    for command in commands() {
        let mut flags = 0;
        for flag in command.get_arguments() {
            let Some(long) = flag.get_long() else {
                continue;
            };
            // An action, as --help is one: in the environment it would keep a process from serving.
            if long == "check" {
                continue;
            }
            flags += 1;
            let expected = format!("WARMROUTE_{}", long.replace('-', "_").to_uppercase());
            let env = flag.get_env().and_then(|name| name.to_str());
            assert_eq!(env, Some(expected.as_str()), "--{long}");
            assert!(is_ours(&expected), "{expected} is unknown to the others");
            assert!(flag.get_help().is_some(), "--{long} has no help");
        }
        // The router's further settings are in the file of `--config`.
        assert!(flags <= 25, "{}: {flags} flags", command.get_name());
    }
}

/// A listed name that no binary reads would be ignored silently.
#[test]
fn every_name_of_the_environments_list_is_read_by_a_binary() {
    let mut read = BTreeSet::new();
    for command in commands() {
        let all = std::iter::once(&command).chain(command.get_subcommands());
        for flag in all.flat_map(Command::get_arguments) {
            read.extend(
                flag.get_env()
                    .and_then(|name| name.to_str())
                    .map(str::to_owned),
            );
        }
    }
    let listed: BTreeSet<String> = OURS.iter().map(|name| format!("{PREFIX}{name}")).collect();
    assert_eq!(listed, read);
}

/// `docs/REFERENCE.md` has exactly one row for each flag, with its default.
#[test]
fn the_documented_tables_are_the_real_ones() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/REFERENCE.md");
    let text = std::fs::read_to_string(path).unwrap();
    for command in commands() {
        let name = command.get_name();
        let section = text
            .split("\n## ")
            .find(|section| section.starts_with(name));
        let section = section.unwrap_or_else(|| panic!("no section {name}"));
        assert_eq!(documented(section), real(&command), "{name}");
    }
}

/// `docs/OPERATIONS.md` names every finding of `doctor` with its severity.
#[test]
fn the_documented_findings_are_the_real_ones() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/OPERATIONS.md");
    let text = std::fs::read_to_string(path).unwrap();
    for code in warmroute_indexer::doctor::Code::ALL {
        let cells = format!("| `{}` | {} |", code.label(), code.severity().label());
        assert!(text.contains(&cells), "{cells}");
    }
}

fn documented(section: &str) -> Vec<String> {
    let mut rows: Vec<String> = section
        .lines()
        .filter(|line| line.starts_with("| `--"))
        .map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            format!("{} {}", cells[1], cells[2])
        })
        .collect();
    rows.sort();
    rows
}

fn real(command: &Command) -> Vec<String> {
    let mut rows: Vec<String> = command
        .get_arguments()
        .filter_map(|flag| {
            let long = flag.get_long()?;
            flag.get_env()?;
            let default = flag.get_default_values().first();
            let default = default.map_or_else(
                || "–".to_owned(),
                |value| format!("`{}`", value.to_string_lossy()),
            );
            Some(format!("`--{long}` {default}"))
        })
        .collect();
    rows.sort();
    rows
}
