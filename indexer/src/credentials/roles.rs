//! Permissions of each role, read from the shipped `nats.conf`, so that both set-ups grant the same.
//! Pure.

use serde_json::{Value, json};

const API: &str = "$JS.API.";

const SHIPPED: &str = include_str!("../../../deploy/nats/nats.conf");

/// Each has a signing key. `resize` is `init` with the permission for `init --resize`.
pub(super) const ROLES: [&str; 6] = ["init", "resize", "doctor", "indexer", "router", "shim"];

/// The call of `init --resize`.
const UPDATE: &str = "$JS.API.STREAM.UPDATE.wr_prod";

/// What the server makes of a template is one token each: the user's name, which is its worker's, and
/// its public key, after which a process names its inbox.
const NAME: &str = "{{name()}}";
const KEY: &str = "{{subject()}}";

/// Calls of the JetStream API that the streams' account imports.
pub(super) fn calls(namespace: &str) -> Vec<String> {
    let mut calls = imported("SYS", namespace);
    calls.retain(|subject| subject.starts_with(API));
    calls
}

pub(super) fn resize_call(namespace: &str) -> String {
    in_namespace(UPDATE, namespace)
}

/// Subjects of the streams' account on which shims publish, besides the JetStream API.
pub(super) fn written_by_shims(namespace: &str) -> Vec<String> {
    let mut subjects = imported("WARMROUTE", namespace);
    subjects.retain(|subject| !subject.starts_with(API));
    subjects
}

/// The subject under which the streams' account imports a call.
pub(super) fn mapped(call: &str, namespace: &str) -> String {
    call.replacen(API, &format!("wr.{namespace}.api."), 1)
}

/// Permissions of the users that a role's key signs.
pub(super) fn template(role: &str, namespace: &str) -> Value {
    let user = match role {
        "resize" => "init",
        "shim" => "shim-worker-0",
        role => role,
    };
    let granted = granted(user);
    let mut publish = subjects(&granted, "publish");
    if role == "resize" {
        publish.push(UPDATE);
    }
    let fitted = |subjects: Vec<&str>| -> Vec<String> {
        let fitted = subjects.into_iter().map(|subject| {
            let inbox = format!("_INBOX.{KEY}.");
            let subject = subject.replace(&format!("_INBOX.{user}."), &inbox);
            in_namespace(&subject.replace("worker-0", NAME), namespace)
        });
        fitted.collect()
    };
    let mut publish = fitted(publish);
    if role != "shim" {
        // The server compares the subject to which it maps a request.
        let calls = publish.clone().into_iter();
        let calls = calls.filter(|subject| subject.starts_with(API));
        publish.extend(calls.map(|call| mapped(&call, namespace)));
    }
    let mut template = json!({
        "pub": {"allow": publish},
        "sub": {"allow": fitted(subjects(&granted, "subscribe"))},
        "subs": -1, "data": -1, "payload": -1,
    });
    if granted.contains("allow_responses") {
        let minute_ns = 60_000_000_000_u64;
        template["resp"] = json!({"max": 1, "ttl": minute_ns});
    }
    template
}

fn in_namespace(subject: &str, namespace: &str) -> String {
    subject
        .replace("wr_prod", &format!("wr_{namespace}"))
        .replace("wr.prod", &format!("wr.{namespace}"))
}

/// Subjects of the shipped services that are imported from an account.
fn imported(account: &str, namespace: &str) -> Vec<String> {
    let import = format!("{{ service: {{ account: {account}, subject: \"");
    let lines = without_comments(SHIPPED).filter_map(|line| {
        let (_, after) = line.split_once(&import)?;
        let (subject, _) = after.split_once('"')?;
        Some(in_namespace(subject, namespace))
    });
    lines.collect()
}

/// The shipped lines of a user without comments.
fn granted(user: &str) -> String {
    let after = SHIPPED.split_once(&format!("user: {user},"));
    let after = after.map_or("", |(_, after)| after);
    let own = after.split("user: ").next().unwrap_or_default();
    without_comments(own).collect::<Vec<_>>().join("\n")
}

fn without_comments(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter(|line| !line.trim_start().starts_with('#'))
}

fn subjects<'a>(granted: &'a str, list: &str) -> Vec<&'a str> {
    let after = granted.split_once(&format!("{list} {{ allow: ["));
    let list = after.and_then(|(_, after)| after.split_once(']'));
    let list = list.map_or("", |(list, _)| list);
    list.split('"').skip(1).step_by(2).collect()
}
