use axum::body::Body;
use axum::routing::{get, post};
use tower::ServiceExt as _;

use super::*;

const OPERATE: &str = "wr-operate-0123456789";
const READ: &str = "wr-read-0123456789";
const OLD: &str = "wr-old-0123456789";

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

fn some_keys() -> Vec<OperatorKey> {
    let mut old = key("old", OLD, Role::Operate);
    old.key.expires_unix_s = Some(now_unix_s() - 1);
    vec![
        key("ops", OPERATE, Role::Operate),
        key("grafana", READ, Role::Read),
        old,
    ]
}

fn port(bound: BindScope, keys: Option<Vec<OperatorKey>>) -> Router {
    let keys: PortKeys = keys.map(Into::into);
    let access = PortAccess::new(bound, move || keys.clone());
    let health = get(|| async { "alive" });
    RouteTable::<()>::default()
        .route("/drain", RouteAccess::ByMethod, get(ok).post(ok))
        .route("/query", RouteAccess::Read, post(ok))
        .probes(&health, &health)
        .guarded(&access)
}

async fn ok() -> &'static str {
    "ok"
}

async fn status(router: &Router, method: &str, path: &str, headers: &[(&str, &str)]) -> u16 {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Body::empty()).unwrap();
    let response = router.clone().oneshot(request).await.unwrap();
    response.status().as_u16()
}

#[tokio::test]
async fn a_key_opens_what_its_role_permits() {
    for bound in [BindScope::Loopback, BindScope::Network] {
        let router = port(bound, Some(some_keys()));
        let bearer = |key: &str| format!("Bearer {key}");
        for (key, read, operate) in [
            (Some(bearer(OPERATE)), 200, 200),
            (Some(format!("bearer  {OPERATE} ")), 200, 200),
            (Some(bearer(READ)), 200, 403),
            (Some(bearer(OLD)), 401, 401),
            (Some(bearer("wr-operate-012345678")), 401, 401),
            (Some(bearer(&"x".repeat(10_000))), 401, 401),
            (Some(format!("Basic {OPERATE}")), 401, 401),
            (Some(String::new()), 401, 401),
            (None, 401, 401),
        ] {
            let headers = key.iter().map(|key| ("authorization", key.as_str()));
            let mut headers: Vec<_> = headers.collect();
            headers.push(("x-warmroute-admin", "1"));
            for (method, path, expected) in [
                ("GET", "/drain", read),
                ("POST", "/query", read),
                ("POST", "/drain", operate),
                ("GET", "/health", 200),
            ] {
                let got = status(&router, method, path, &headers).await;
                assert_eq!(got, expected, "{method} {path} {key:?}");
            }
        }
    }
}

/// Its last key was removed.
#[tokio::test]
async fn a_port_whose_keys_are_gone_admits_nobody() {
    let router = port(BindScope::Loopback, Some(Vec::new()));
    let key = format!("Bearer {OPERATE}");
    for headers in [
        vec![("x-warmroute-admin", "1")],
        vec![("authorization", &*key)],
    ] {
        for method in ["GET", "POST"] {
            assert_eq!(status(&router, method, "/drain", &headers).await, 401);
        }
    }
    assert_eq!(status(&router, "GET", "/readyz", &[]).await, 200);
}

/// Whatever the method: before the handler is looked up.
#[tokio::test]
async fn a_port_on_the_network_without_keys_serves_open_routes_only() {
    let router = port(BindScope::Network, None);
    let header = [("x-warmroute-admin", "1"), ("host", "localhost")];
    for method in ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"] {
        for path in ["/drain", "/query"] {
            assert_eq!(status(&router, method, path, &header).await, 403);
        }
    }
    assert_eq!(status(&router, "GET", "/readyz", &[]).await, 200);
    assert_eq!(status(&router, "GET", "/other", &[]).await, 404);
}

#[tokio::test]
async fn a_keyless_port_serves_this_machine_and_no_page_of_another_origin() {
    let router = port(BindScope::Loopback, None);
    let change = ("x-warmroute-admin", "1");
    let host = |name| vec![("host", name), change];
    let page = |name, header| vec![("host", name), change, header];
    let site = |value| page("localhost", ("sec-fetch-site", value));
    let origin = |value| page("localhost:1", ("origin", value));
    for (headers, read, operate) in [
        (vec![], 200, 403),
        (vec![change], 200, 200),
        (host("127.0.0.1:29000"), 200, 200),
        (host("localhost:4"), 200, 200),
        (host("[::1]:29000"), 200, 200),
        (host("[::1]"), 200, 200),
        (host("rebound.example:29000"), 403, 403),
        (host("127.0.0.1.example"), 403, 403),
        (host("10.0.0.1"), 403, 403),
        (site("same-origin"), 200, 200),
        (site("none"), 200, 200),
        (site("same-site"), 403, 403),
        (site("cross-site"), 403, 403),
        (origin("http://localhost:1"), 200, 200),
        (origin("http://localhost:2"), 403, 403),
        (origin("null"), 403, 403),
        (origin("https://evil.example"), 403, 403),
    ] {
        let got = status(&router, "GET", "/drain", &headers).await;
        assert_eq!(got, read, "{headers:?}");
        let got = status(&router, "POST", "/drain", &headers).await;
        assert_eq!(got, operate, "{headers:?}");
    }
    // The target may name the host too.
    let absolute = "http://rebound.example/drain";
    let local = [("host", "localhost")];
    assert_eq!(status(&router, "GET", absolute, &local).await, 403);
}

#[tokio::test]
async fn a_key_does_not_excuse_a_page_of_another_origin() {
    let router = port(BindScope::Network, Some(some_keys()));
    let key = format!("Bearer {OPERATE}");
    let headers = [
        ("authorization", key.as_str()),
        ("sec-fetch-site", "cross-site"),
    ];
    assert_eq!(status(&router, "POST", "/drain", &headers).await, 403);
}

#[test]
fn generated_keys_are_long_distinct_and_hashed_as_they_are_checked() {
    let (one, hash) = keys::generate().unwrap();
    let (other, _) = keys::generate().unwrap();
    assert_ne!(one, other);
    assert_eq!(one.len(), "wr-".len() + 64);
    assert_eq!(hash.to_hex().parse(), Ok(hash));
    assert_eq!(KeyHash::of(one.as_bytes()), Some(hash));
    assert_eq!(format!("{hash:?}"), "…");
    // From `printf abc | sha256sum`.
    let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(KeyHash::of(b"abc").unwrap().to_hex(), abc);
    for bad in ["", "ab", &abc[1..], &abc.replace('b', "x")] {
        assert!(bad.parse::<KeyHash>().is_err(), "{bad}");
    }
}

#[test]
fn ids_are_plain_names() {
    for (id, good) in [
        ("ops-2.a_b", true),
        ("", false),
        ("a b", false),
        ("é", false),
    ] {
        assert_eq!(id.parse::<KeyId>().is_ok(), good, "{id}");
    }
    assert!("a".repeat(65).parse::<KeyId>().is_err());
}
