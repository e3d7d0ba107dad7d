//! The command `completions` of every binary, for installations without packages' files.

use clap::{Arg, ArgMatches, Command, value_parser};
use clap_complete::{Shell, generate};

use crate::print;

const NAME: &str = "completions";
const SHELL: &str = "shell";

/// The command, for the flags of a binary.
#[must_use]
pub fn command() -> Command {
    let shell = Arg::new(SHELL)
        .required(true)
        .value_name("SHELL")
        .value_parser(value_parser!(Shell));
    Command::new(NAME)
        .about("Prints completions for a shell: `source <(… completions bash)`")
        .arg(shell)
}

/// Prints the completions of `command` if they are what `matches` ask for. Returns whether they are.
pub fn printed(matches: &ArgMatches, mut command: Command) -> anyhow::Result<bool> {
    let asked = matches.subcommand_matches(NAME);
    let Some(shell) = asked.and_then(|asked| asked.get_one::<Shell>(SHELL)) else {
        return Ok(false);
    };
    // A writer that fails would be a panic of the generator.
    let mut script = Vec::new();
    let name = command.get_name().to_owned();
    generate(*shell, &mut command, name, &mut script);
    print(format_args!("{}", String::from_utf8_lossy(&script)))?;
    Ok(true)
}
