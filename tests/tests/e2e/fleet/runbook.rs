//! Runbooks of `docs/OPERATIONS.md`: their commands, as they stand there.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitStatus};

use tokio::task::spawn_blocking;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/OPERATIONS.md");

/// Beginnings of commands for processes that a test starts and restarts itself.
const OF_TESTS: [&str; 2] = ["warmroute-shim ", "systemctl "];

/// Runs the commands of a runbook, with this fleet's names in place of the page's.
pub(crate) async fn runbook(title: &str, names: &[(&str, &str)], directory: &Path) -> ExitStatus {
    let mut script = commands(title);
    for (from, to) in names {
        assert!(script.contains(from), "{title}: no {from} in {script}");
        script = script.replace(from, to);
    }
    let mut command = Command::new("sh");
    command.args(["-euc", &script]).current_dir(directory);
    let run = move || command.status().expect("sh starts");
    spawn_blocking(run).await.expect("it ended")
}

fn commands(title: &str) -> String {
    let page = fs::read_to_string(PAGE).expect("the page");
    let (_, rest) = page.split_once(&format!("\n**{title}.** ")).expect(title);
    let (runbook, _) = rest.split_once("\n**").unwrap_or((rest, ""));
    let (_, block) = runbook.split_once("```sh\n").expect("commands");
    let (block, _) = block.split_once("```").expect("their end");
    let lines = block.lines();
    let own = lines.filter(|line| !OF_TESTS.iter().any(|command| line.starts_with(command)));
    own.collect::<Vec<_>>().join("\n")
}
