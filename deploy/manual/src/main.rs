//! Writes the man pages and shell completions of all binaries: `warmroute-manual DIRECTORY`. A
//! binary of its own, so that the products do not contain what writes them.
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use clap::{Command, CommandFactory as _};
use clap_complete::Shell;

fn main() -> anyhow::Result<()> {
    let directory = std::env::args_os().nth(1);
    let directory = directory.context("usage: warmroute-manual DIRECTORY")?;
    write(Path::new(&directory))
}

/// Creates `man/` with one page for each command, and `completions/` with one file for each binary
/// and shell, named as the shells look for them.
fn write(directory: &Path) -> anyhow::Result<()> {
    let (pages, completions) = (directory.join("man"), directory.join("completions"));
    fs::create_dir_all(&pages).context("creating man")?;
    for mut command in commands() {
        let name = command.get_name().to_owned();
        clap_mangen::generate_to(command.clone().disable_help_subcommand(true), &pages)
            .with_context(|| format!("writing the pages of {name}"))?;
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let of_shell = completions.join(shell.to_string());
            fs::create_dir_all(&of_shell).context("creating completions")?;
            clap_complete::generate_to(shell, &mut command, &name, of_shell)
                .with_context(|| format!("writing the completions of {name}"))?;
        }
    }
    Ok(())
}

fn commands() -> [Command; 4] {
    [
        warmroute_router::config::RouterArgs::command(),
        warmroute_indexer::args::IndexerArgs::command(),
        warmroute_shim::args::Args::command(),
        warmroute_mock_engine::Args::command(),
    ]
}
