//! The audit log. A process of its own: whether a log line is wanted is decided once in a process, by
//! the thread that reaches it first.
#![expect(clippy::unwrap_used, reason = "a test fails by it")]

use std::io::{Result, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::routing::{get, post};
use axum::{Extension, Router};
use tokio::time::timeout;
use tower::ServiceExt as _;
use warmroute_process::access::keys::{KeyHash, StoredKey};
use warmroute_process::access::{
    BindScope, ChangeSubject, OperatorKey, PortAccess, Role, RouteAccess, RouteTable,
};

const OPERATE: &str = "wr-operate-0123456789";
const READ: &str = "wr-read-0123456789";

fn key(id: &str, secret: &str, role: Role) -> OperatorKey {
    OperatorKey {
        key: StoredKey {
            id: id.parse().unwrap(),
            hash: KeyHash::of(secret.as_bytes()).unwrap(),
            expires_unix_s: None,
        },
        role,
    }
}

/// A port on the network with two keys.
fn port() -> Router {
    let keys: Arc<[_]> = Arc::new([
        key("ops", OPERATE, Role::Operate),
        key("grafana", READ, Role::Read),
    ]);
    let access = PortAccess::new(BindScope::Network, move || Some(Arc::clone(&keys)));
    let never = post(async |Extension(subject): Extension<ChangeSubject>| {
        subject.set("worker-a");
        std::future::pending::<&'static str>().await
    });
    let health = get(async || "alive");
    RouteTable::<()>::default()
        .route("/drain", RouteAccess::ByMethod, post(async || "ok"))
        .route("/slow", RouteAccess::ByMethod, never)
        .probes(&health, &health)
        .guarded(&access)
}

async fn status(router: &Router, path: &str, key: &str) -> u16 {
    let request = Request::post(path)
        .header("authorization", format!("Bearer {key}"))
        .body(Body::empty());
    let response = router.clone().oneshot(request.unwrap()).await.unwrap();
    response.status().as_u16()
}

#[derive(Clone, Default)]
struct LogLines(Arc<Mutex<Vec<u8>>>);

impl Write for LogLines {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn changes_are_logged_with_their_key_and_refused_ones_with_the_reason() {
    let lines = LogLines::default();
    let writer = lines.clone();
    let logs = tracing_subscriber::fmt().with_writer(move || writer.clone());
    let _logged = tracing::subscriber::set_default(logs.with_ansi(false).finish());
    let router = port();
    assert_eq!(status(&router, "/drain?until=restart", OPERATE).await, 200);
    let left = timeout(Duration::ZERO, status(&router, "/slow", OPERATE)).await;
    assert!(left.is_err(), "the client leaves");
    assert_eq!(status(&router, "/drain?x", READ).await, 403);

    let logged = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    let logged: Vec<&str> = logged
        .lines()
        .filter(|line| line.contains("warmroute_audit"))
        .collect();
    let [changed, left, refused] = logged[..] else {
        panic!("{logged:?}");
    };
    for (line, path) in [(changed, "/drain?until=restart"), (left, "/slow")] {
        assert!(line.contains("admin change "), "{line}");
        assert!(line.contains("key=\"ops\""), "{line}");
        assert!(line.contains(&format!("path={path:?}")), "{line}");
    }
    assert!(changed.contains("status=200"), "{changed}");
    assert!(!left.contains("status"), "{left}");
    assert!(left.contains("subject=\"worker-a\""), "{left}");
    assert!(refused.contains("admin change refused"), "{refused}");
    assert!(refused.contains("key=\"grafana\""), "{refused}");
    assert!(refused.contains("path=\"/drain?x\""), "{refused}");
    for line in logged {
        assert!(!line.contains(OPERATE) && !line.contains(READ), "{line}");
    }
}
