//! A router records its requests; the recording is converted, simulated and tuned to.

use std::fs;
use std::path::Path;
use std::process::Command;

use fastrand::Rng;

use crate::fleet::traffic::{request, serve};
use crate::fleet::{Engines, Flags, Fleet, Mode, Place, ROUTER};

const REQUESTS: usize = 40;
const WRITTEN: &str = "warmroute_router_recorded_requests_total{outcome=\"written\"}";

#[tokio::test(flavor = "multi_thread")]
async fn a_recording_is_converted_simulated_and_tuned_to() {
    let place = Place::new();
    let (recording, settings) = (place.path("recording"), place.path("settings.toml"));
    let text = format!("recording_dir = \"{}\"\n", recording.display());
    fs::write(&settings, text).unwrap();
    let config = format!("--config={}", settings.display());
    let engines = Engines {
        count: 2,
        ranks: 1,
        blocks: 400,
        flags: &["--profile", "instant"],
    };
    let flags = Flags {
        router: Box::leak(Box::new([&*config.leak()])),
        ..Flags::default()
    };
    let fleet = Fleet::start(Mode::Embedded, engines, flags).await;
    let mut rng = Rng::with_seed(3);
    let mut prompt_tokens = 0;
    for _ in 0..REQUESTS {
        let (path, body) = request(&mut rng);
        prompt_tokens += serve(&fleet, path, &body).await.prompt_tokens;
    }
    let written = async |fleet: &Fleet| fleet.metric(WRITTEN).await == REQUESTS as f64;
    fleet.until("all requests are recorded", written).await;
    // Killed, not stopped: a recording is readable up to its last written record.
    fleet.routers[0].kill();

    let converted = place.path("converted.jsonl");
    run(&["trace", "convert", text_of(&recording), text_of(&converted)]);
    let lines = fs::read_to_string(&converted).unwrap();
    let lengths = lines.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        line["input_length"].as_u64().unwrap()
    });
    let lengths: Vec<u64> = lengths.collect();
    assert_eq!(lengths.len(), REQUESTS);
    assert_eq!(lengths.iter().sum::<u64>(), prompt_tokens);

    for trace in [&recording, &converted] {
        let report = run(&[
            "simulate",
            "--trace",
            text_of(trace),
            "--workers",
            "2",
            "--json",
        ]);
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["requests"], REQUESTS, "{report}");
    }
    let page = place.path("tune.html");
    let report = run(&[
        "tune",
        "--trace",
        text_of(&recording),
        "--workers",
        "2",
        "--seeds",
        "2",
        "--html",
        text_of(&page),
    ]);
    assert!(report.contains("time"), "{report}");
    assert!(fs::read_to_string(&page).unwrap().contains("</svg>"));
}

#[test]
fn a_profile_file_is_used_and_a_broken_one_refused_with_its_line() {
    let place = Place::new();
    let [trace, profile, fitted] = ["trace", "profile", "fitted"].map(|name| place.path(name));
    let row = r#"{"timestamp":0,"input_length":1000,"output_length":1,"hash_ids":[1,2]}"#;
    fs::write(&trace, row).unwrap();
    let rest = "\"step_ms\": 1, \"step_ms_per_sequence\": 0, \"step_overhead_ms\": 0}";
    let (trace, profile) = (text_of(&trace), text_of(&profile));
    let mut simulate = vec!["simulate", "--json", "--capacity=1", "--trace", trace];
    simulate.extend(["--profile-file", profile]);
    fs::write(
        profile,
        format!("{{\"prefill_tokens_per_sec\": 1000,\n{rest}"),
    )
    .unwrap();
    let report: serde_json::Value = serde_json::from_str(&run(&simulate)).unwrap();
    assert_eq!(report["ttft_mean_ms"], 1000.0, "{report}");
    for (wrong, says) in [
        ("{\n\"speed\": 1}", "unknown field `speed`"),
        ("{\n\"speed\": 1}", "line 2"),
        (
            &format!("{{\"prefill_tokens_per_sec\": 0,\n{rest}"),
            "prefill_tokens_per_sec 0 is not between",
        ),
    ] {
        fs::write(profile, wrong).unwrap();
        let complaint = complaint(&simulate);
        assert!(complaint.contains(says), "{complaint}");
    }
    let complaint = complaint(&["trace", "fit", trace, text_of(&fitted)]);
    assert!(complaint.contains("not a recording"), "{complaint}");
    assert!(!fitted.exists());
}

/// Runs a command of the router that must fail. Returns its complaint.
fn complaint(arguments: &[&str]) -> String {
    let ended = Command::new(ROUTER).args(arguments).output();
    let ended = ended.expect("the router starts");
    assert!(!ended.status.success(), "{arguments:?}");
    String::from_utf8(ended.stderr).expect("text")
}

/// Runs a command of the router that must succeed. Returns what it prints.
fn run(arguments: &[&str]) -> String {
    let ended = Command::new(ROUTER).args(arguments).output();
    let ended = ended.expect("the router starts");
    let complaint = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{arguments:?}: {complaint}");
    String::from_utf8(ended.stdout).expect("text")
}

fn text_of(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}
