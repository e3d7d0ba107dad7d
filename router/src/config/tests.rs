use clap::Parser as _;
use warmroute_proto::Tiers;

use super::*;
use crate::route::Policy;
use crate::settings::Settings;

fn config(flags: &[&str]) -> Result<Config, RouterConfigError> {
    let flags = std::iter::once("warmroute-router").chain(flags.iter().copied());
    Config::try_from(RouterArgs::try_parse_from(flags).unwrap())
}

fn refused(flags: &[&str]) -> String {
    let flags = std::iter::once("warmroute-router").chain(flags.iter().copied());
    match RouterArgs::try_parse_from(flags) {
        Ok(args) => Config::try_from(args).unwrap_err().to_string(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn the_defaults_are_valid() {
    let config = config(&[]).unwrap();
    assert_eq!(config.public.to_string(), "0.0.0.0:8080");
    assert_eq!(config.admin.to_string(), "127.0.0.1:29000");
    assert_eq!(config.knobs, Knobs::default());
    assert!(config.workers.is_empty());
}

/// Each flag has a value that no other one has.
#[test]
fn each_flag_sets_its_field() {
    let config = config(&[
        "--host=127.0.0.3",
        "--port=1003",
        "--admin-host=127.0.0.4",
        "--admin-port=1004",
        "--worker=http://a:1,kv=tcp://a:2,replay=tcp://a:3,id=x,ranks=5",
        concat!("--tokenizer=", env!("CARGO_MANIFEST_DIR")),
        "--state-dir=/var/lib/x",
        "--block-size=48",
        "--health-interval-ms=1005",
        "--namespace=ns",
        "--policy=least-load",
        "--overlap-score-weight=2.5",
        "--router-temperature=0.25",
        "--tier-credits=cpu=0.6,disk=0.2",
        "--max-active-requests=1006",
        concat!(
            "--config=",
            env!("CARGO_MANIFEST_DIR"),
            "/../deploy/router.toml"
        ),
        "--log=warn",
        "--log-json",
    ]);
    // Destructured, so that a new field is not forgotten.
    let Config {
        public,
        admin,
        namespace,
        nats,
        workers,
        tokenizer,
        state_dir,
        block_size,
        knobs,
        limits: _,
        health_interval,
        threads: _,
        settings,
        logs,
    } = config.unwrap();
    assert_eq!(public.to_string(), "127.0.0.3:1003");
    assert_eq!(admin.to_string(), "127.0.0.4:1004");
    assert_eq!(namespace, Namespace::from("ns"));
    assert!(nats.is_none());
    let worker = "http://a:1,kv=tcp://a:2,replay=tcp://a:3,id=x,ranks=5";
    let worker: WorkerSpec = worker.parse().unwrap();
    assert_eq!(workers, [worker]);
    assert_eq!(tokenizer, Some(env!("CARGO_MANIFEST_DIR").into()));
    assert_eq!(state_dir, Some("/var/lib/x".into()));
    assert_eq!(block_size, BlockSize::new(48));
    let expected = Knobs {
        policy: Policy::LeastLoad,
        overlap_score_weight: 2.5,
        temperature: 0.25,
        tier_weights: Tiers {
            gpu: 1.0,
            cpu: 0.6,
            disk: 0.2,
        },
        active_max: Some(1006),
        ..Knobs::default()
    };
    assert_eq!(knobs, expected);
    assert_eq!(health_interval, Duration::from_millis(1005));
    // The example holds the defaults.
    assert_eq!(settings.unwrap().settings, Settings::default());
    assert_eq!((logs.log.as_str(), logs.log_json), ("warn", true));
}

#[test]
fn each_limit_sets_its_field() {
    let config = config(&[
        "--max-body-bytes=2007",
        "--max-buffered-bytes=2008",
        "--max-connections=1009",
    ]);
    let expected = Limits {
        body_bytes: 2007,
        buffered_bytes: 2008,
        connections: 1009,
    };
    assert_eq!(config.unwrap().limits, expected);
}

/// The flags that need a server.
#[test]
fn each_nats_flag_sets_its_field() {
    let config = config(&[
        "--nats-url=nats://h:1",
        "--namespace=ns",
        "--nats-creds=/creds",
        "--nats-tls=ca=/ca,cert=/cert,key=/key",
        "--init",
    ]);
    let config = config.unwrap();
    assert_eq!(config.namespace, Namespace::from("ns"));
    let NatsArgs {
        nats_url,
        namespace,
        nats_creds,
        nats_tls,
        init,
    } = config.nats.unwrap();
    assert_eq!(nats_url.as_deref(), Some("nats://h:1"));
    assert_eq!(namespace.as_str(), "ns");
    assert_eq!(nats_creds, Some("/creds".into()));
    let tls = nats_tls.unwrap();
    assert_eq!(tls.authority, Some("/ca".into()));
    assert_eq!(tls.identity, Some(("/cert".into(), "/key".into())));
    assert!(init);
}

#[test]
fn workers_are_given_repeatedly_or_in_one_list() {
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
fn an_impossible_configuration_refuses_to_start_and_names_the_flag() {
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
        (
            &["--block-size", "0"],
            "'--block-size <TOKENS>': not between 1 and",
        ),
        (&["--max-body-bytes", "0"], "'--max-body-bytes"),
        (
            &["--max-buffered-bytes", "2048"],
            "less than --max-body-bytes",
        ),
        (&["--max-connections", "0"], "'--max-connections"),
        (&["--max-active-requests", "0"], "--max-active-requests 0"),
        (&["--health-interval-ms", "0"], "'--health-interval-ms"),
        (&["--tokenizer", "/no/such/file"], "does not exist"),
        (
            &["--state-dir", "/x", "--nats-url", "nats://h:1"],
            "--state-dir has no effect",
        ),
        (&["--log", "a=b=c"], "'--log <FILTER>'"),
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
        ["--worker", "http://h"],
        ["--worker", "http://h/v1,id=a"],
        ["--worker", "http://[::1]"],
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
        assert!(RouterArgs::try_parse_from(all).is_err(), "{flags:?}");
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
fn an_unnamed_tier_keeps_its_credit() {
    let config = config(&["--tier-credits", "disk=0.1"]).unwrap();
    assert_eq!(config.knobs.tier_weights.cpu, 0.8);
    assert_eq!(config.knobs.tier_weights.disk, 0.1);
}

#[test]
fn port_0_twice_is_no_clash() {
    assert!(config(&["--port", "0", "--admin-port", "0"]).is_ok());
}

#[test]
fn what_is_applied_at_the_start_only_comes_from_the_settings() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("router.toml");
    std::fs::write(&path, "prefix_hash_load_percent = 150\nrequest_threads = 7").unwrap();
    let config = config(&["--config", path.to_str().unwrap()]).unwrap();
    assert_eq!(config.knobs.prefix_load_percent, 150);
    assert_eq!(config.threads.connections, 7);
}
