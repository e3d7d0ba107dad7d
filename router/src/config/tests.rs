use std::path::Path;

use clap::{CommandFactory as _, Parser as _};

use super::*;

fn config(flags: &[&str]) -> Result<Config, ConfigError> {
    let flags = std::iter::once("warmroute-router").chain(flags.iter().copied());
    Config::try_from(Args::try_parse_from(flags).unwrap())
}

fn refused(flags: &[&str]) -> String {
    config(flags).unwrap_err().to_string()
}

#[test]
fn the_defaults_are_valid() {
    let config = config(&[]).unwrap();
    assert_eq!(config.public.to_string(), "0.0.0.0:8080");
    assert_eq!(config.admin.to_string(), "127.0.0.1:29000");
    assert_eq!(config.knobs, Knobs::default());
    assert!(config.workers.is_empty());
}

#[test]
fn workers_come_repeated_or_in_one_list() {
    let config = config(&[
        "--worker",
        "http://a:1,kv=tcp://a:2",
        "--worker",
        "http://b:1;http://c:1 http://d:1",
    ])
    .unwrap();
    let names: Vec<&str> = config.workers.iter().map(|spec| spec.id.as_str()).collect();
    assert_eq!(names, ["a:1", "b:1", "c:1", "d:1"]);
}

#[test]
fn what_cannot_work_refuses_to_start_and_names_the_flag() {
    for (flags, names) in [
        (&["--nats-url", "nats://h:4222"][..], "not built in yet"),
        (
            &["--overlap-score-weight", "-1"],
            "--overlap-score-weight -1",
        ),
        (
            &["--overlap-score-weight", "inf"],
            "--overlap-score-weight inf",
        ),
        (&["--router-temperature", "NaN"], "--router-temperature NaN"),
        (&["--cpu-overlap-credit", "1.5"], "--cpu-overlap-credit 1.5"),
        (&["--disk-overlap-credit", "nan"], "--disk-overlap-credit"),
        (&["--port", "9", "--admin-port", "9"], "are both 9"),
        (&["--host", "no.such"], "--host"),
        (&["--namespace", ""], "--namespace"),
        (&["--block-size", "0"], "--block-size 0"),
        (&["--max-body-bytes", "0"], "--max-body-bytes 0"),
        (
            &["--max-buffered-bytes", "2048"],
            "less than --max-body-bytes",
        ),
        (&["--max-connections", "0"], "--max-connections 0"),
        (&["--max-active-requests", "0"], "--max-active-requests 0"),
        (&["--connect-timeout-ms", "0"], "--connect-timeout-ms 0"),
        (&["--health-interval-ms", "0"], "--health-interval-ms 0"),
        (&["--tokenizer", "/no/such/file"], "does not exist"),
        (&["--log", "a=b=c"], "no log filter"),
        (
            &["--worker", "http://a:1,id=x", "--worker", "http://b:1,id=x"],
            "two workers are named x",
        ),
        (
            &[
                "--worker",
                "http://a:1,id=x",
                "--worker",
                "http://a:1/,id=y",
            ],
            "two workers have the URL",
        ),
        (
            &[
                "--worker",
                "http://a:1,kv=tcp://h:5",
                "--worker",
                "http://b:1,kv=tcp://h:5",
            ],
            "two workers have the endpoint",
        ),
    ] {
        let message = refused(flags);
        assert!(message.contains(names), "{flags:?}: {message}");
    }
}

#[test]
fn malformed_workers_and_numbers_are_refused_by_the_parser() {
    for flags in [
        ["--worker", "h:1"],
        ["--worker", "http://h:1,replay=tcp://h:2"],
        ["--worker", "http://h:1,ranks=0"],
        ["--port", "70000"],
        ["--policy", "magic"],
    ] {
        let all = std::iter::once("warmroute-router").chain(flags);
        assert!(Args::try_parse_from(all).is_err(), "{flags:?}");
    }
}

#[test]
fn a_service_link_in_place_of_a_port_leaves_the_default() {
    let config = config(&[
        "--port",
        "tcp://10.0.0.1:80",
        "--admin-port",
        "tcp://10.0.0.1:81",
    ]);
    let config = config.unwrap();
    assert_eq!(config.public.port(), 8080);
    assert_eq!(config.admin.port(), 29000);
}

#[test]
fn port_0_twice_is_no_clash() {
    assert!(config(&["--port", "0", "--admin-port", "0"]).is_ok());
}

#[test]
fn unknown_names_of_the_environment_are_found() {
    let link = "tcp://10.0.0.1:8080";
    let present = [
        ("PATH", "/bin"),
        ("WARMROUTE_PORT", link),
        ("WARMROUTE_ROUTER_TEMPERATUR", "1"),
        ("WARMROUTE_WORKER_ID", "w"),
        ("WARMROUTE_ROUTER_SERVICE_HOST", "10.0.0.1"),
        ("WARMROUTE_ROUTER_SERVICE_PORT_HTTP", "8080"),
        ("WARMROUTE_ROUTER_PORT", link),
        ("WARMROUTE_ROUTER_PORT_8080_TCP", link),
        ("WARMROUTE_ROUTER_PORT_8080_TCP_ADDR", "10.0.0.1"),
        ("WARMROUTE_BLOCKSIZE", "16"),
        ("WARMROUTE_ADMN_PORT", "29001"),
    ];
    assert_eq!(
        unknown_names(present.map(|(name, value)| (name.to_owned(), value.to_owned()))),
        [
            "WARMROUTE_ADMN_PORT",
            "WARMROUTE_BLOCKSIZE",
            "WARMROUTE_ROUTER_TEMPERATUR"
        ]
    );
}

#[test]
fn every_flag_has_its_environment_name_and_a_reason() {
    let command = Args::command();
    let mut flags = 0;
    for flag in command.get_arguments() {
        let Some(long) = flag.get_long() else {
            continue;
        };
        flags += 1;
        let expected = format!("WARMROUTE_{}", long.replace('-', "_").to_uppercase());
        let env = flag.get_env().and_then(|name| name.to_str());
        assert_eq!(env, Some(expected.as_str()), "--{long}");
        assert!(flag.get_help().is_some(), "--{long} has no help");
    }
    assert!(flags <= 25, "{flags} flags");
}

/// `docs/CONFIGURATION.md` has exactly one row a flag, with its environment name and default.
#[test]
fn the_documented_table_is_the_real_one() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/CONFIGURATION.md");
    let text = std::fs::read_to_string(path).unwrap();
    let section = text
        .split("\n## ")
        .find(|section| section.starts_with("warmroute-router"))
        .unwrap();
    let mut documented: Vec<String> = section
        .lines()
        .filter(|line| line.starts_with("| `--"))
        .map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            format!("{} {} {}", cells[1], cells[2], cells[3])
        })
        .collect();
    let command = Args::command();
    let mut real: Vec<String> = command
        .get_arguments()
        .filter_map(|flag| {
            let long = flag.get_long()?;
            let env = flag.get_env()?.to_str()?;
            let default = flag.get_default_values().first();
            let default = default.map_or_else(
                || "–".to_owned(),
                |value| format!("`{}`", value.to_string_lossy()),
            );
            Some(format!("`--{long}` `{env}` {default}"))
        })
        .collect();
    documented.sort();
    real.sort();
    assert_eq!(documented, real);
}
