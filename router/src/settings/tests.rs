use std::collections::BTreeSet;
use std::fs;

use axum::http::HeaderValue;
use tokio::time::sleep;
use uuid::Uuid;
use warmroute_process::server::HalfClosed;

use super::*;
use crate::route::PairThreshold;

fn refused(text: &str) -> String {
    Settings::parse(text).unwrap_err().to_string()
}

#[test]
fn each_key_sets_its_value() {
    let text = r#"
        cors_origins = ["https://chat.example.org", "http://localhost:3000"]
        extra_routes = ["/v1/voices", "/v1/batches/", "/invocations"]
        completion_prompts = "token-ids"
        multimodal = "render"
        connect_timeout_ms = 250
        drain_timeout_secs = 86400
        engine_wait_timeout_secs = 300
        first_token_timeout_secs = 60
        half_closed_clients = "serve"
        max_prompt_bytes = 7
        pd_uncached_threshold = 512
        prefix_hash_load_percent = 150
        prompt_timeout_ms = 100
        recording_dir = "/var/lib/recordings"
        recording_max_bytes = 1048576
        request_threads = 12
        resume_streams = "all"
        tenant_hint = "cache-salt"
        worker_hint = "follow"
        [[workers]]
        url = "http://h:1"
        kv = "tcp://h:2"
        id = "a"
        ranks = 2
    "#;
    let settings = Settings::parse(text).unwrap();
    assert_eq!(settings.connect_timeout(), Duration::from_millis(250));
    assert_eq!(settings.drain_timeout(), Duration::from_secs(86_400));
    assert_eq!(settings.engine_wait_timeout(), Duration::from_secs(300));
    assert_eq!(
        settings.first_token_timeout(),
        Some(Duration::from_secs(60))
    );
    assert_eq!(settings.half_closed_clients(), HalfClosed::Serve);
    assert_eq!(settings.max_prompt_bytes(), 7);
    assert_eq!(settings.pair_threshold(), PairThreshold::Tokens(512));
    assert_eq!(settings.prompt_timeout(), Duration::from_millis(100));
    assert_eq!(settings.prefix_hash_load_percent(), 150);
    assert_eq!(settings.request_threads().map(usize::from), Some(12));
    let rule = RecordingRule {
        dir: "/var/lib/recordings".into(),
        max_bytes: 1 << 20,
    };
    assert_eq!(settings.recording(), Some(rule));
    assert_eq!(settings.resume_streams, ResumeRule::All);
    assert_eq!(settings.completion_prompts, CompletionPrompts::TokenIds);
    assert_eq!(settings.multimodal, MultimodalRule::Render);
    assert_eq!(settings.tenant_hint, TenantHint::CacheSalt);
    assert_eq!(settings.worker_hint, WorkerHint::Follow);
    assert_eq!(Settings::default().recording(), None);
    let worker = "http://h:1,kv=tcp://h:2,id=a,ranks=2".parse().unwrap();
    assert_eq!(settings.workers, [worker]);
    for (origin, allowed) in [
        ("https://chat.example.org", true),
        ("http://localhost:3000", true),
        ("http://chat.example.org", false),
        ("null", false),
    ] {
        let origin = HeaderValue::from_static(origin);
        assert_eq!(settings.allows_origin(&origin), allowed, "{origin:?}");
    }
}

#[test]
fn added_routes_are_paths_or_their_beginnings() {
    let routes = r#"extra_routes = ["/v1/voices", "/v1/batches/", "/invocations"]"#;
    let settings = Settings::parse(routes).unwrap();
    for (path, added) in [
        ("/v1/voices", true),
        ("/v1/voices/x", false),
        ("/v1/batches", false),
        ("/v1/batches/b1", true),
        ("/v1/batches/b1/cancel", true),
        ("/v1/batchesx", false),
        ("/invocations", true),
    ] {
        assert_eq!(settings.adds_route(path), added, "{path}");
    }
}

/// `docs/REFERENCE.md` has a row with the default for each key of the example, which has all.
/// A key of a table is written `table.key`.
#[test]
fn the_documented_settings_are_the_real_ones() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let example = fs::read_to_string(format!("{root}/deploy/router.toml")).unwrap();
    let page = fs::read_to_string(format!("{root}/docs/REFERENCE.md")).unwrap();
    assert_eq!(Settings::parse(&example).unwrap(), Settings::default());
    let (mut rows, mut keys) = (Vec::new(), Vec::new());
    let mut table = String::new();
    for line in example.lines().filter(|line| !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[') {
            table = format!("{}.", name.trim_end_matches(']'));
        } else if let Some((key, value)) = line.split_once(" = ") {
            rows.push(format!("| `{table}{key}` | `{value}` |"));
            keys.push((table.clone(), key));
        }
    }
    let section = page
        .split("\n### ")
        .find(|text| text.starts_with("Settings file"));
    let documented = section
        .unwrap()
        .lines()
        .filter(|line| line.starts_with("| `"));
    let mut documented: Vec<&str> = documented.collect();
    rows.sort();
    documented.sort_unstable();
    assert_eq!(rows.len(), documented.len());
    for (row, line) in rows.iter().zip(documented) {
        assert!(line.starts_with(row.as_str()), "{row}: {line}");
    }
    let tables: BTreeSet<&str> = keys.iter().map(|(table, _)| table.as_str()).collect();
    for table in &tables {
        let header = match table.strip_suffix('.') {
            Some(name) => format!("[{name}]\n"),
            None => String::new(),
        };
        let unknown = refused(&format!("{header}x = 1"));
        let own = keys.iter().filter(|(of, _)| of == table);
        let mut names: Vec<&str> = own.map(|(_, key)| *key).collect();
        let inner = tables.iter().filter_map(|inner| inner.strip_prefix(table));
        let inner = inner.filter_map(|inner| inner.strip_suffix('.'));
        names.extend(inner.filter(|inner| !inner.contains('.')));
        for key in &names {
            assert!(unknown.contains(&format!("`{key}`")), "{key}: {unknown}");
        }
        let named = unknown.matches('`').count();
        assert_eq!(named, 2 * (names.len() + 1), "{unknown}");
    }
}

#[test]
fn an_empty_file_sets_the_defaults() {
    let settings = Settings::parse("").unwrap();
    assert_eq!(settings, Settings::default());
    assert_eq!(settings.engine_wait_timeout(), Duration::ZERO);
    assert_eq!(settings.first_token_timeout(), None);
    assert_eq!(settings.half_closed_clients(), HalfClosed::Abort);
    assert!(!settings.allows_origin(&HeaderValue::from_static("https://a")));
}

/// An operator finds the fault without a search.
#[test]
fn a_refused_file_names_the_line_and_the_fault() {
    for (line, fault) in [
        (
            "engine_wait_timeout = 3",
            "unknown field `engine_wait_timeout`",
        ),
        (
            "engine_wait_timeout_secs = 86401",
            "not between 0 and 86400",
        ),
        ("drain_timeout_secs = 86401", "not between 0 and 86400"),
        ("prefix_hash_load_percent = 99", "99 is not between 100"),
        ("request_threads = 1025", "not between 0 and 1024"),
        ("connect_timeout_ms = 0", "not between 1 and 60000"),
        ("connect_timeout_ms = 60001", "not between 1 and 60000"),
        (
            "first_token_timeout_secs = -1",
            "invalid value: integer `-1`",
        ),
        (
            "first_token_timeout_secs = 1.5",
            "invalid type: floating point",
        ),
        (
            "half_closed_clients = \"maybe\"",
            "unknown variant, expected `abort` or `serve`",
        ),
        ("cors_origins = [\"example.org\"]", "not an origin"),
        ("cors_origins = [\"https://a/b\"]", "not an origin"),
        ("extra_routes = [\"/v1/../x\"]", "not a plain path"),
        ("extra_routes = [\"/\"]", "not a plain path"),
        ("extra_routes = [\"v2/embed\"]", "not a plain path"),
        ("[http]", "unknown field `http`"),
        ("tracing.sample_ratio = 1.5", "1.5 is not between 0 and 1"),
        (
            "tracing.otlp_endpoint = \"c:4317\"",
            "is not http://HOST:PORT",
        ),
        ("workers = [{ url = \"h:1\" }]", "is not http://HOST:PORT"),
        (
            "workers = [{ url = \"http://h:1\", x = 1 }]",
            "unknown field `x`",
        ),
        ("x", "expected"),
    ] {
        let error = refused(&format!("# the first line\n{line}\n"));
        assert!(error.contains("line 2"), "{line}: {error}");
        assert!(error.contains(fault), "{line}: {error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_changed_file_applies_and_a_bad_one_keeps_the_settings() {
    let path = std::env::temp_dir().join(format!("wr-settings-{}", Uuid::new_v4()));
    fs::write(&path, "engine_wait_timeout_secs = 1\n").unwrap();
    let file = SettingsFile::load(&path, &WorkerRule::Embedded(Vec::new())).unwrap();
    let live = LiveSettings::new(file.settings.clone());
    let metrics = Arc::new(Metrics::new().unwrap());
    let watched = (Arc::clone(&live), Arc::clone(&metrics));
    let watcher = SettingsWatcher::new(Some(file), watched.0, watched.1).unwrap();
    let stop = CancellationToken::new();
    let tasks = tokio_util::task::TaskTracker::new();
    tasks.spawn(watcher.run(stop.clone()));
    let reloads = |outcome: &str| {
        let series = format!("settings_reloads_total{{outcome=\"{outcome}\"}}");
        metrics.value(&series)
    };
    for (text, secs, loaded, refused) in [
        ("engine_wait_timeout_secs = 1\n", 1, 0, 0),
        ("engine_wait_timeout_secs = 2\n", 2, 1, 0),
        ("engine_wait_timeout_secs = x\n", 2, 1, 1),
        ("engine_wait_timeout_secs = x\n", 2, 1, 1),
        ("engine_wait_timeout_secs = 3\n", 3, 2, 1),
    ] {
        fs::write(&path, text).unwrap();
        sleep(3 * CHECK_PERIOD).await;
        let wait = live.current().engine_wait_timeout();
        assert_eq!(wait, Duration::from_secs(secs), "{text}");
        assert_eq!(
            (reloads("loaded"), reloads("refused")),
            (loaded, refused),
            "{text}"
        );
    }
    fs::remove_file(&path).unwrap();
    sleep(3 * CHECK_PERIOD).await;
    assert_eq!(live.current().engine_wait_timeout(), Duration::from_secs(3));
    assert_eq!(reloads("refused"), 2);
    // Opening a pipe would wait for its writer.
    let made = std::process::Command::new("mkfifo").arg(&path).status();
    assert!(made.unwrap().success());
    sleep(3 * CHECK_PERIOD).await;
    assert_eq!(reloads("refused"), 3);
    fs::remove_file(&path).unwrap();
    fs::write(&path, "engine_wait_timeout_secs = 4\n").unwrap();
    sleep(3 * CHECK_PERIOD).await;
    assert_eq!(live.current().engine_wait_timeout(), Duration::from_secs(4));
    fs::remove_file(&path).unwrap();
    stop.cancel();
    tasks.close();
    tasks.wait().await;
}

/// A watcher of a new file with this text.
fn watched(text: &str) -> (PathBuf, SettingsWatcher) {
    let path = std::env::temp_dir().join(format!("wr-settings-{}", Uuid::new_v4()));
    fs::write(&path, text).unwrap();
    let file = SettingsFile::load(&path, &WorkerRule::Embedded(Vec::new())).unwrap();
    let live = LiveSettings::new(file.settings.clone());
    let metrics = Arc::new(Metrics::new().unwrap());
    (
        path,
        SettingsWatcher::new(Some(file), live, metrics).unwrap(),
    )
}

/// What follows the settings reads its files again when they are replaced.
#[tokio::test]
async fn a_signal_replaces_the_settings_without_a_file_too() {
    let (live, metrics) = (Arc::default(), Arc::new(Metrics::new().unwrap()));
    let mut watcher = SettingsWatcher::new(None, Arc::clone(&live), metrics).unwrap();
    let before = live.current();
    watcher.reload(ReloadCause::Period).await;
    assert!(Arc::ptr_eq(&before, &live.current()));
    watcher.reload(ReloadCause::Signal).await;
    assert!(!Arc::ptr_eq(&before, &live.current()));
    assert_eq!(before, live.current());
}

/// A half written file has fewer tables.
#[tokio::test]
async fn a_changed_file_opens_the_public_port_after_a_signal_only() {
    let (path, mut watcher) = watched("[[tenants]]\nname = \"t\"\n");
    let before = watcher.live.current();
    fs::write(&path, "").unwrap();
    watcher.reload(ReloadCause::Period).await;
    assert_eq!(watcher.live.current(), before);
    watcher.reload(ReloadCause::Signal).await;
    assert_eq!(*watcher.live.current(), Settings::default());
    fs::remove_file(&path).unwrap();
}

/// The rest of the file, such as the removal of a tenant's key, applies with it.
#[tokio::test]
async fn the_removal_of_the_last_admin_key_locks_the_port_until_a_signal() {
    let (path, mut watcher) = watched(&admin_key());
    let keys = |watcher: &SettingsWatcher| {
        let keys = watcher.live.current().admin_keys();
        keys.map(|keys| keys.len())
    };
    assert_eq!(keys(&watcher), Some(1));
    fs::write(&path, "max_prompt_bytes = 7\n").unwrap();
    for _ in 0..2 {
        watcher.reload(ReloadCause::Period).await;
        assert_eq!(keys(&watcher), Some(0));
        assert_eq!(watcher.live.current().max_prompt_bytes(), 7);
        assert_eq!(
            watcher
                .metrics
                .value("settings_reloads_total{outcome=\"loaded\"}"),
            1
        );
    }
    fs::write(&path, admin_key()).unwrap();
    watcher.reload(ReloadCause::Period).await;
    assert_eq!(keys(&watcher), Some(1));
    fs::write(&path, "").unwrap();
    watcher.reload(ReloadCause::Signal).await;
    assert_eq!(keys(&watcher), None);
    fs::remove_file(&path).unwrap();
}

fn admin_key() -> String {
    let hash = "0".repeat(64);
    format!("[admin]\nkeys = [{{ id = \"a\", sha256 = \"{hash}\", role = \"read\" }}]\n")
}

#[test]
fn the_workers_of_both_files_are_checked_together() {
    let dir = std::env::temp_dir().join(format!("wr-workers-{}", Uuid::new_v4()));
    fs::create_dir(&dir).unwrap();
    let path = dir.join("router.toml");
    let fixed = WorkerRule::Embedded(vec!["http://f:1,id=f".parse().unwrap()]);
    let load = |own: &str, other: &str, rule: &WorkerRule| {
        let own = format!("workers_file = \"w.toml\"\n{own}");
        fs::write(&path, own).unwrap();
        fs::write(dir.join("w.toml"), other).unwrap();
        Settings::load(&path, rule).map_err(|error| error.to_string())
    };
    let (a, b) = (
        "[[workers]]\nurl = \"http://a:1\"\nid = \"a\"\n",
        "[[workers]]\nurl = \"http://b:1\"\n",
    );
    let names: Vec<_> = load(a, b, &fixed).unwrap().workers;
    let names: Vec<_> = names.iter().map(|worker| worker.id.as_str()).collect();
    assert_eq!(names, ["a", "b:1"]);
    let flag = "[[workers]]\nurl = \"http://f:1\"\n";
    for (own, other, rule, fault) in [
        (a, a, &fixed, "two workers are named a"),
        (a, flag, &fixed, "two workers have the URL http://f:1"),
        (a, "x = 1", &fixed, "w.toml\": the settings are invalid"),
        (a, b, &WorkerRule::Registered, "no effect with --nats-url"),
    ] {
        let error = load(own, other, rule).unwrap_err();
        assert!(error.contains(fault), "{error}");
    }
    fs::remove_file(dir.join("w.toml")).unwrap();
    let gone = Settings::load(&path, &fixed).unwrap_err().to_string();
    assert!(
        gone.contains("workers_file") && gone.contains("cannot read"),
        "{gone}"
    );
    fs::remove_dir_all(&dir).unwrap();
}
