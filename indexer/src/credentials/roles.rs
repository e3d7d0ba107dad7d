//! Permissions of each role, read from the shipped `nats.conf`, so that both set-ups grant the same.
//! Pure.

use serde_json::{Value, json};

const SHIPPED: &str = include_str!("../../../deploy/nats/nats.conf");

/// Each has a signing key. `resize` is `init` with the permission for `init --resize`.
pub(super) const ROLES: [&str; 6] = ["init", "resize", "doctor", "indexer", "router", "shim"];

/// What the server makes of a template is one token each: the user's name, which is its worker's, and
/// its public key, after which a process names its inbox.
const NAME: &str = "{{name()}}";
const KEY: &str = "{{subject()}}";

/// The scope of a role's signing key.
pub(super) fn template(role: &str, namespace: &str) -> Value {
    let user = match role {
        "resize" => "init",
        "shim" => "shim-worker-0",
        role => role,
    };
    let granted = granted(user);
    let mut publish = subjects(&granted, "publish");
    if role == "resize" {
        publish.push("$JS.API.STREAM.UPDATE.wr_prod");
    }
    let fitted = |subjects: Vec<&str>| -> Vec<String> {
        let fitted = subjects.into_iter().map(|subject| {
            subject
                .replace(&format!("_INBOX.{user}."), &format!("_INBOX.{KEY}."))
                .replace("worker-0", NAME)
                .replace("wr_prod", &format!("wr_{namespace}"))
                .replace("wr.prod", &format!("wr.{namespace}"))
        });
        fitted.collect()
    };
    let mut template = json!({
        "pub": {"allow": fitted(publish)},
        "sub": {"allow": fitted(subjects(&granted, "subscribe"))},
        "subs": -1, "data": -1, "payload": -1,
    });
    if granted.contains("allow_responses") {
        let minute_ns = 60_000_000_000_u64;
        template["resp"] = json!({"max": 1, "ttl": minute_ns});
    }
    template
}

/// The shipped lines of a user without comments.
fn granted(user: &str) -> String {
    let after = SHIPPED.split_once(&format!("user: {user},"));
    let after = after.map_or("", |(_, after)| after);
    let own = after.split("user: ").next().unwrap_or_default();
    let lines = own
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'));
    lines.collect::<Vec<_>>().join("\n")
}

fn subjects<'a>(granted: &'a str, list: &str) -> Vec<&'a str> {
    let after = granted.split_once(&format!("{list} {{ allow: ["));
    let list = after.and_then(|(_, after)| after.split_once(']'));
    let list = list.map_or("", |(list, _)| list);
    list.split('"').skip(1).step_by(2).collect()
}
