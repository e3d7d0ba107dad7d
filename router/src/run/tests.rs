use std::fs;
use std::path::PathBuf;

use clap::Parser as _;
use reqwest::{Client, Method};
use tokio::time::sleep;
use warmroute_process::access::keys;

use super::*;
use crate::config::RouterArgs;

/// A router on loopback with settings.
struct Served {
    running: Running,
    settings: PathBuf,
    client: Client,
}

impl Served {
    async fn start(settings: &str) -> Self {
        let path = std::env::temp_dir().join(format!("wr-run-{}.toml", Uuid::new_v4()));
        fs::write(&path, settings).unwrap();
        let file = path.to_str().unwrap();
        let ports = ["--host=127.0.0.1", "--port=0", "--admin-port=0"];
        let args = ["warmroute-router", "--config", file];
        let args = RouterArgs::try_parse_from(args.iter().chain(&ports)).unwrap();
        let config = Config::try_from(args).unwrap();
        Self {
            running: Running::start(config).await.unwrap(),
            settings: path,
            client: crate::testing::http_client(),
        }
    }

    async fn admin(&self, method: Method, path: &str, key: Option<&str>) -> u16 {
        // A parameter of a path stands for itself.
        let url = format!("http://{}{path}", self.running.addresses.admin);
        let mut request = self.client.request(method, url);
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        request.send().await.unwrap().status().as_u16()
    }

    async fn stop(self) {
        let never = std::future::pending();
        self.running.stop(Leave::Immediate, never).await.unwrap();
        fs::remove_file(self.settings).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_admin_route_needs_its_key_until_the_key_is_revoked() {
    let (operate, operate_hash) = keys::generate().unwrap();
    let (read, read_hash) = keys::generate().unwrap();
    let row = |id: &str, hash: String, role: &str| {
        format!("{{ id = \"{id}\", sha256 = \"{hash}\", role = \"{role}\" }}")
    };
    let reader = row("r", read_hash.to_hex(), "read");
    let operator = row("o", operate_hash.to_hex(), "operate");
    let served = Served::start(&format!("[admin]\nkeys = [{reader}, {operator}]\n")).await;
    let routes = served.running.admin_routes.clone();
    assert!(routes.len() > 15, "{routes:?}");
    for (path, access) in routes {
        let open = access == RouteAccess::Open;
        let is_probe = warmroute_process::server::is_probe(path);
        let expected_open = path == "/metrics" || is_probe || live_page::is_file(path);
        assert_eq!(
            open, expected_open,
            "{path}: an open route shows nothing to protect"
        );
        for method in [Method::GET, Method::POST, Method::DELETE] {
            let is_change = access == RouteAccess::ByMethod && method != Method::GET;
            let status = served.admin(method.clone(), path, None).await;
            assert_eq!(status == 401, !open, "{method} {path}: {status}");
            let status = served.admin(method.clone(), path, Some("wr-other")).await;
            assert_eq!(status == 401, !open, "{method} {path}: {status}");
            let status = served.admin(method.clone(), path, Some(&read)).await;
            assert_eq!(status == 403, is_change, "{method} {path}: {status}");
            let status = served.admin(method.clone(), path, Some(&operate)).await;
            assert!(![401, 403].contains(&status), "{method} {path}: {status}");
        }
    }
    // A bad file keeps the keys, a good one takes effect at the next look at it.
    fs::write(&served.settings, "[admin]\nkeys = [{}]\n").unwrap();
    sleep(Duration::from_secs(3)).await;
    let workers = async |key| served.admin(Method::GET, "/workers", Some(key)).await;
    assert_eq!(workers(&operate).await, 200);
    fs::write(&served.settings, format!("[admin]\nkeys = [{reader}]\n")).unwrap();
    while workers(&operate).await != 401 {
        sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(workers(&read).await, 200);
    served.stop().await;
}
