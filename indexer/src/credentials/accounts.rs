//! What each account exports, imports and maps. Pure.
//!
//! As in `nats.conf`, what a server publishes for itself, an answer or a delivery, reaches no call
//! that changes a stream. JWTs allow no imports with overlapping subjects. So the plane's account
//! imports nothing as `$JS.API.>`, and the calls under subjects to which it maps its clients'
//! requests. A server maps messages of clients and of other accounts, none of its own.

use serde_json::{Value, json};

use super::roles;

/// The system account. `$JS.NONE` is nothing.
pub(super) fn system() -> Value {
    let mut account = unlimited();
    account["exports"] = json!([
        {"type": "service", "subject": "$JS.API.>"},
        {"type": "service", "subject": "$JS.NONE.>"},
    ]);
    account
}

/// The account of the streams. It imports these calls of the JetStream API.
pub(super) fn plane(system: &str, namespace: &str, calls: &[String], scopes: Vec<Value>) -> Value {
    let mapped = |call: &str| roles::mapped(call, namespace);
    let mut imports = vec![import(system, "$JS.NONE.>", "$JS.API.>")];
    imports.extend(calls.iter().map(|call| import(system, call, &mapped(call))));
    let [stream, consumer] = ["$JS.API.STREAM.>", "$JS.API.CONSUMER.CREATE.>"];
    let read = "$JS.API.DIRECT.GET.>";
    let mut account = scoped(scopes);
    for limit in ["mem_storage", "disk_storage", "streams", "consumer"] {
        account["limits"][limit] = (-1).into();
    }
    account["imports"] = imports.into();
    // One export for all that shims import: the server carries an answer through no import of the
    // export that its request came by, and so not to another worker's subjects.
    account["exports"] = json!([
        {"type": "service", "subject": ">", "token_req": true},
        {"type": "stream", "subject": resync(namespace), "token_req": true},
    ]);
    account["mappings"] = json!({
        stream: [{"subject": mapped(stream)}],
        consumer: [{"subject": mapped(consumer)}],
        // A stream of the account answers it.
        mapped(read): [{"subject": read}],
    });
    account
}

/// The account of shims, without streams. The tokens are for services and for the stream.
pub(super) fn shims(
    plane: &str,
    namespace: &str,
    tokens: &[String; 2],
    scopes: Vec<Value>,
) -> Value {
    let [service, stream] = tokens;
    // It stands for the whole API, which the server would otherwise import under this name.
    let api = import(plane, &roles::mapped("$JS.API.>", namespace), "$JS.API.>");
    let mut imports = vec![api];
    for subject in roles::written_by_shims(namespace) {
        imports.push(import(plane, &subject, &subject));
    }
    for import in &mut imports {
        import["token"] = json!(service);
    }
    let resync = resync(namespace);
    imports.push(json!({
        "type": "stream", "account": plane, "subject": resync, "token": stream,
    }));
    let mut account = scoped(scopes);
    account["imports"] = imports.into();
    account
}

/// Indexers' requests for images.
pub(super) fn resync(namespace: &str) -> String {
    format!("wr.{namespace}.resync.*")
}

fn import(account: &str, subject: &str, local: &str) -> Value {
    json!({
        "type": "service", "account": account, "subject": subject, "local_subject": local,
    })
}

/// An account whose users are signed with scoped keys.
fn scoped(scopes: Vec<Value>) -> Value {
    let mut account = unlimited();
    account["signing_keys"] = scopes.into();
    account["revocations"] = json!({});
    account
}

fn unlimited() -> Value {
    json!({
        "type": "account", "version": 2,
        "limits": {
            "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true,
            "conn": -1, "leaf": -1,
        },
    })
}
