use clap::Parser as _;

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
        (
            &["--nats-url", "nats://h:4222", "--worker", "http://a:1"][..],
            "exclude each other",
        ),
        (&["--init"], "without --nats-url"),
        (
            &["--overlap-score-weight", "-1"],
            "--overlap-score-weight -1",
        ),
        (
            &["--overlap-score-weight", "inf"],
            "--overlap-score-weight inf",
        ),
        (&["--router-temperature", "NaN"], "--router-temperature NaN"),
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
        ["--tier-credits", "cpu=1.5"],
        ["--tier-credits", "cpu=0.5,cpu=0.5"],
        ["--tier-credits", "disk=nan"],
        ["--tier-credits", "gpu=1"],
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
fn a_tier_that_is_not_named_keeps_its_credit() {
    let config = config(&["--tier-credits", "disk=0.1"]).unwrap();
    assert_eq!(config.knobs.tier_weights.cpu, 0.8);
    assert_eq!(config.knobs.tier_weights.disk, 0.1);
}

#[test]
fn port_0_twice_is_no_clash() {
    assert!(config(&["--port", "0", "--admin-port", "0"]).is_ok());
}
