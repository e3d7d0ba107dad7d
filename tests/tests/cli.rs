//! What the binaries print, and their exit codes, without a server.
#![expect(
    clippy::unwrap_used,
    reason = "a test fails by panicking, its helpers too"
)]

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;

const ROUTER: &str = env!("CARGO_BIN_EXE_warmroute-router-under-test");
const INDEXER: &str = env!("CARGO_BIN_EXE_warmroute-indexer-under-test");
const SHIM: &str = env!("CARGO_BIN_EXE_warmroute-shim-under-test");

const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/tiny");

/// Exit code, stdout and stderr.
fn ran(binary: &str, arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(binary).args(arguments).output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|t| String::from_utf8(t).unwrap());
    (output.status.code(), stdout, stderr)
}

/// The exit code of a command whose output cannot be written, and what it says.
fn ran_into_a_full_disk(binary: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut command = Command::new(binary);
    let child = command.args(arguments).stdout(full).stderr(Stdio::piped());
    let output = child.spawn().unwrap().wait_with_output().unwrap();
    (
        output.status.code(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

fn file(dir: &Path, name: &str, text: &str) -> String {
    let path = dir.join(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_check_accepts_what_a_start_accepts_and_opens_no_port() {
    let dir = TempDir::new().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = format!("--port={}", taken.local_addr().unwrap().port());
    let settings = format!("[models.chat]\ntokenizer = {TOKENIZER:?}\n");
    let settings = format!("--config={}", file(dir.path(), "router.toml", &settings));
    let creds = format!("--nats-creds={}", file(dir.path(), "creds", "me:secret"));
    let key = format!("--engine-key-file={}", file(dir.path(), "key", "k1"));
    let keys = format!(
        "--api-key-file={}",
        file(dir.path(), "keys", &"k".repeat(20))
    );
    let (host, nats) = ("--host=127.0.0.1", "--nats-url=nats://127.0.0.1:1");
    let worker = "--worker=http://127.0.0.1:1";
    let worker_flags = ["--worker-id=w", "--worker-url=http://10.0.0.1:1"];
    for (binary, flags, read) in [
        (
            ROUTER,
            vec![worker, &settings],
            "router.toml, 1 tokenizer\n",
        ),
        (ROUTER, vec![nats, &creds], "valid: flags, 0 tokenizers\n"),
        (INDEXER, vec![nats, &creds, &keys], "credentials\n"),
        (
            SHIM,
            [&worker_flags[..], &[nats, &creds, &key]].concat(),
            "credentials\n",
        ),
    ] {
        let flags = [&["--check", host, &port][..], &flags].concat();
        let (code, stdout, stderr) = ran(binary, &flags);
        assert_eq!(code, Some(0), "{stderr}");
        assert!(stdout.ends_with(read), "{stdout}");
    }
}

#[test]
fn a_check_exits_with_2_and_names_what_is_wrong() {
    let dir = TempDir::new().unwrap();
    let config = |text: &str| format!("--config={}", file(dir.path(), "router.toml", text));
    let broken = TempDir::new().unwrap();
    file(broken.path(), "tokenizer.json", "{");
    let broken = broken.path();
    let nats = "--nats-url=nats://127.0.0.1:1".to_owned();
    let missing = "--nats-creds=/nonexistent/creds".to_owned();
    let check = |binary: &str, flags: &[String], fault: &str| {
        let flags = flags.iter().map(String::as_str);
        let (code, _, stderr) = ran(
            binary,
            &["--check"].into_iter().chain(flags).collect::<Vec<_>>(),
        );
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.contains(fault), "{stderr}");
        assert_eq!(stderr.matches(fault).count(), 1, "{stderr}");
    };
    check(ROUTER, &["--port=x".into()], "--port");
    check(ROUTER, &[config("port = 1")], "there is a flag --port");
    check(ROUTER, &[config("[admin]\nkeys = [\"a\"]")], "line 2");
    let models = format!("[models.m]\ntokenizer = {broken:?}");
    check(ROUTER, &[config(&models)], "tokenizer.json");
    check(
        ROUTER,
        &[config("models_dir = \"/nonexistent\"")],
        "models_dir",
    );
    let tokenizer = format!("--tokenizer={}", broken.display());
    check(ROUTER, &[tokenizer], "tokenizer.json");
    for binary in [ROUTER, INDEXER] {
        check(
            binary,
            &[nats.clone(), missing.clone()],
            "/nonexistent/creds",
        );
    }
    let tls = "--nats-tls=ca=/nonexistent/ca".to_owned();
    check(INDEXER, &[nats.clone(), tls], "/nonexistent/ca");
    let worker = ["--worker-id=w", "--worker-url=http://10.0.0.1:1"].map(str::to_owned);
    let key = "--engine-key-file=/nonexistent/key".to_owned();
    let flags = [&worker[..], &[nats, key]].concat();
    check(SHIM, &flags, "/nonexistent/key");
}

#[test]
fn output_that_is_lost_is_a_failure() {
    let dir = TempDir::new().unwrap();
    let operator = dir.path().join("operator");
    let operator = operator.to_str().unwrap();
    let init = ["credentials", "init", "--namespace", "n", "--dir", operator];
    assert_eq!(ran(INDEXER, &init).0, Some(0));
    let key = format!("{operator}/shim.nk");
    let sign = ["credentials", "sign", "--key", &key, "--name", "w"];
    for (binary, command) in [
        (ROUTER, &["key", "new"][..]),
        (INDEXER, &sign),
        (ROUTER, &["completions", "bash"]),
        (INDEXER, &["completions", "zsh"]),
        (SHIM, &["completions", "fish"]),
    ] {
        assert_eq!(ran(binary, command).0, Some(0), "{command:?}");
        let (code, stderr) = ran_into_a_full_disk(binary, command);
        assert_eq!(code, Some(1), "{command:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}

#[test]
fn completions_know_the_flags_of_their_binary() {
    for (binary, flag) in [
        (ROUTER, "max-body-bytes"),
        (INDEXER, "snapshot-every-secs"),
        (SHIM, "worker-id"),
    ] {
        for shell in ["bash", "zsh", "fish"] {
            let (code, stdout, stderr) = ran(binary, &["completions", shell]);
            assert_eq!(code, Some(0), "{stderr}");
            assert!(stdout.contains(flag), "{shell}: {stdout}");
        }
    }
}

#[test]
fn help_shows_flags_of_nats_where_they_have_an_effect() {
    for (binary, command, has_nats) in [
        (ROUTER, &[][..], true),
        (ROUTER, &["simulate"], false),
        (ROUTER, &["tune"], false),
        (ROUTER, &["trace", "fit"], false),
        (ROUTER, &["key", "new"], false),
        (ROUTER, &["completions"], false),
        (INDEXER, &[], true),
        (INDEXER, &["init"], true),
        (INDEXER, &["doctor"], true),
        (INDEXER, &["credentials", "init"], false),
        (INDEXER, &["credentials", "sign"], false),
        (INDEXER, &["completions"], false),
        (SHIM, &[], true),
        (SHIM, &["completions"], false),
    ] {
        let (code, help, _) = ran(binary, &[command, &["--help"]].concat());
        assert_eq!(code, Some(0));
        assert_eq!(help.contains("--nats-url"), has_nats, "{command:?}: {help}");
        if command.is_empty() {
            assert!(
                help.contains("Exit codes:") && help.contains("Example:"),
                "{help}"
            );
        }
    }
    let (_, help, _) = ran(INDEXER, &["credentials", "init", "--help"]);
    assert!(help.contains("--namespace"), "{help}");
}
