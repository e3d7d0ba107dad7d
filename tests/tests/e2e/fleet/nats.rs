//! The distributed parts of a fleet: a real nats-server, shims, indexers.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use async_nats::{Client, ConnectOptions};
use tokio::sync::{Mutex, Semaphore, SemaphorePermit};

use super::lossy::Lossy;
use super::place::{Place, free_port};
use super::process::Process;
use super::{
    Access, Engines, Fleet, Form, INDEXER, Links, Proxy, ROUTER, SHIM, cluster, router_ports,
    signal, strings, text, worker_name,
};
use crate::nats_server::NatsServer;

/// The namespace of the shipped configuration.
pub(crate) const NAMESPACE: &str = "prod";
/// Routers on one machine differ by up to a millisecond in the arrival of a message.
const FAR: Duration = Duration::from_millis(8);

const PASSWORD: &str = "secret";

/// RFC 8032's first key, as an NKEY seed: routers authenticate with it instead of a password.
const SEED: &str = "SUAJ2YNRTXX72WTAXKCEV5ES5QWMIRCJYVUXWMTJDFYDXLADDSXH6YALCA";
const KEY: &str = "UDLVVGABQKYQVN6VJP7NHSLEA45A5YLS6PNKMIZFV4BBU2HXA5IRUVAL";

const SEED_FILE: &str = "router.nk";

/// What `credentials init` made.
const OPERATOR_DIR: &str = "operator";

/// Memory of a fleet: a dozen processes of the development build, which mostly wait.
const FLEET_BYTES: u64 = 2 << 30;

/// Fleets that run concurrently.
static FLEETS: LazyLock<Semaphore> = LazyLock::new(|| {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = info
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = free.and_then(|free| free.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let fleets = kib.map_or(2, |kib| (kib << 10) / FLEET_BYTES);
    Semaphore::new(usize::try_from(fleets).unwrap_or(2).clamp(1, 2))
});

pub(crate) struct Distributed {
    pub(crate) shims: Vec<Process>,
    pub(crate) indexers: Vec<Process>,
    /// The first server.
    pub(crate) server: Mutex<NatsServer>,
    /// The routers' own proxy to the server, if any.
    lossy: Option<Lossy>,
    /// The cluster's other servers, in the order of their names.
    pub(crate) peers: Mutex<Vec<NatsServer>>,
    /// Proxies by shim, unless linked directly.
    proxies: Vec<Proxy>,
    access: Access,
    /// The fleet's directory, which has the processes' keys.
    place: PathBuf,
}

/// Waits until a fleet may start.
pub(super) async fn turn() -> SemaphorePermit<'static> {
    FLEETS.acquire().await.expect("never closed")
}

impl Distributed {
    /// The NATS flags of every binary, as this user.
    fn plane_flags(&self, user: &str) -> Vec<String> {
        let url = self.urls();
        let url = match self.access {
            Access::LossyRouters | Access::FarRouters if user == "router" => {
                format!("nats://{}", self.lossy().address)
            }
            Access::Open | Access::Cluster | Access::LossyRouters | Access::FarRouters => url,
            Access::WithoutLog => {
                let user = format!("nats://{user}:{PASSWORD}@");
                url.replace("nats://", &user) + "?log=none"
            }
            Access::LeastPrivilege if user == "router" => {
                return self.file_flags(&url, &self.place.join(SEED_FILE));
            }
            Access::SignedUsers => return self.file_flags(&url, &self.credentials(user)),
            Access::LeastPrivilege | Access::MuteRouters => {
                let user = format!("nats://{user}:{PASSWORD}@");
                url.replace("nats://", &user)
            }
        };
        strings(&["--nats-url", &url, "--namespace", NAMESPACE])
    }

    fn file_flags(&self, url: &str, file: &Path) -> Vec<String> {
        let file = file.display().to_string();
        let flags = ["--nats-url", url, "--namespace", NAMESPACE];
        strings(&[&flags[..], &["--nats-creds", &file]].concat())
    }

    /// The credentials file of a role's process, or of `shim-` and a worker's name. Signed at the
    /// first use.
    pub(crate) fn credentials(&self, user: &str) -> PathBuf {
        let file = self.place.join(format!("{user}.creds"));
        match file.exists() {
            true => file,
            false => self.sign(user, &[]),
        }
    }

    /// Signs a new user and replaces its credentials file.
    pub(crate) fn sign(&self, user: &str, flags: &[&str]) -> PathBuf {
        let (role, name) = match user.strip_prefix("shim-") {
            Some(worker) => ("shim", worker),
            None => (user, user),
        };
        let key = self.place.join(format!("{OPERATOR_DIR}/{role}.nk"));
        let key = key.display().to_string();
        let mut arguments = vec!["sign", "--key", &key, "--name", name];
        arguments.extend(flags);
        let printed = credentials_command(&arguments);
        let file = self.place.join(format!("{user}.creds"));
        std::fs::write(&file, printed).expect("a file");
        file
    }

    /// Revokes the user of a credentials file and reloads the server. Returns the user's key.
    pub(crate) async fn revoke(&self, user: &str) -> String {
        let key = self.user_key(user);
        let dir = self.place.join(OPERATOR_DIR).display().to_string();
        credentials_command(&["revoke", "--dir", &dir, "--user", &key]);
        self.reload_accounts().await;
        key
    }

    /// The public key of a user, as its credentials file names it.
    pub(crate) fn user_key(&self, user: &str) -> String {
        let text = std::fs::read_to_string(self.credentials(user)).expect("credentials");
        let (_, key) = text.split_once(" is user ").expect("the user");
        key.lines().next().expect("a key").to_owned()
    }

    /// A connection as a user of the shipped file, or as a signed user.
    pub(crate) async fn client(&self, user: &str) -> Client {
        let (options, inbox) = if matches!(self.access, Access::SignedUsers) {
            let file = ConnectOptions::with_credentials_file(self.credentials(user)).await;
            (file.expect("credentials"), self.user_key(user))
        } else if user == "router" {
            (ConnectOptions::with_nkey(SEED.to_owned()), KEY.to_owned())
        } else {
            let (name, password) = (user.to_owned(), PASSWORD.to_owned());
            let options = ConnectOptions::with_user_and_password(name, password);
            (options, user.to_owned())
        };
        let options = options.custom_inbox_prefix(format!("_INBOX.{inbox}"));
        options.connect(self.urls()).await.expect("a connection")
    }

    pub(crate) async fn reload_accounts(&self) {
        signal(self.server.lock().await.pid(), "HUP");
    }

    pub(crate) fn lossy(&self) -> &Lossy {
        self.lossy.as_ref().expect("a fleet of lossy routers")
    }

    pub(crate) fn urls(&self) -> String {
        let server = self.server.try_lock().expect("no restart is in progress");
        let peers = self.peers.try_lock().expect("no restart is in progress");
        let urls = std::iter::once(server.url()).chain(peers.iter().map(NatsServer::url));
        urls.collect::<Vec<_>>().join(",")
    }
}

impl Fleet {
    /// Starts server and shims, in an operator's order.
    pub(super) async fn distribute(&mut self, setup: &Engines) {
        let access = self.flags.access;
        let (server, peers) = match access {
            Access::Cluster => cluster::start().await,
            Access::Open
            | Access::LeastPrivilege
            | Access::SignedUsers
            | Access::MuteRouters
            | Access::LossyRouters
            | Access::FarRouters
            | Access::WithoutLog => (start_server(access, &self.place).await, Vec::new()),
        };
        let lossy = match access {
            Access::LossyRouters | Access::FarRouters => {
                let address = server.url().replace("nats://", "");
                let is_far = matches!(access, Access::FarRouters);
                let far = if is_far { FAR } else { Duration::ZERO };
                Some(Lossy::start(address, format!("wr.{NAMESPACE}.load"), far).await)
            }
            Access::Open
            | Access::LeastPrivilege
            | Access::SignedUsers
            | Access::MuteRouters
            | Access::Cluster
            | Access::WithoutLog => None,
        };
        self.distributed = Some(Distributed {
            lossy,
            shims: Vec::new(),
            indexers: Vec::new(),
            server: Mutex::new(server),
            peers: Mutex::new(peers),
            proxies: Vec::new(),
            access,
            place: self.place.path(""),
        });
        self.init();
        for index in 0..setup.count {
            self.add_shim(index, setup).await;
        }
    }

    pub(crate) fn parts(&self) -> &Distributed {
        self.distributed.as_ref().expect("a fleet over NATS")
    }

    /// Replaces a text in the server's configuration, which has it once, and reloads the server.
    pub(crate) async fn reload_nats(&self, from: &str, to: &str) {
        let file = self.place.path("nats.conf");
        let text = std::fs::read_to_string(&file).expect("the server's configuration");
        assert_eq!(text.matches(from).count(), 1, "{from}");
        std::fs::write(&file, text.replace(from, to)).expect("a file");
        signal(self.parts().server.lock().await.pid(), "HUP");
    }

    /// URL of the server's monitoring port, with [`Access::LeastPrivilege`].
    pub(crate) fn monitor(&self) -> String {
        let file = self.place.path("nats.conf");
        let text = std::fs::read_to_string(&file).expect("the server's configuration");
        let (_, rest) = text.split_once("\nhttp: \"").expect("a monitoring port");
        let (address, _) = rest.split_once('"').expect("its end");
        format!("http://{address}")
    }

    /// One shim's link to the plane.
    pub(crate) fn link(&self, shim: usize) -> &Proxy {
        &self.parts().proxies[shim]
    }

    /// Output and exit code of a one-shot command of the indexer's binary.
    pub(crate) async fn command(&self, user: &str, command: &[&str]) -> (Option<i32>, String) {
        let mut arguments = self.parts().plane_flags(user);
        arguments.extend(strings(command));
        let run = move || {
            let mut command = Command::new(INDEXER);
            command.args(&arguments).env("WARMROUTE_LOG", "warn");
            command.output().expect("the indexer starts")
        };
        let ended = tokio::task::spawn_blocking(run).await.expect("it ended");
        eprint!("{}", String::from_utf8_lossy(&ended.stderr));
        let said = String::from_utf8(ended.stdout).expect("text");
        (ended.status.code(), said)
    }

    /// Runs `warmroute-indexer init`.
    pub(crate) fn init(&self) {
        let mut arguments = self.parts().plane_flags("init");
        arguments.push("init".to_owned());
        arguments.extend(strings(self.flags.init));
        if !arguments.iter().any(|argument| argument == "--max-bytes") {
            // The server reserves what the log may have.
            arguments.extend(strings(&["--max-bytes", "128MiB"]));
        }
        let made = Command::new(INDEXER).args(&arguments).output();
        let made = made.expect("the indexer starts");
        let said = String::from_utf8_lossy(&made.stderr);
        assert!(made.status.success(), "init failed: {said}");
    }

    pub(crate) async fn add_shim(&mut self, index: usize, setup: &Engines) {
        let base = self.engines[index].process.base();
        self.add_shim_at(index, setup, &base).await;
    }

    /// Adds a shim that reaches its engine's HTTP at another URL.
    pub(crate) async fn add_shim_at(&mut self, index: usize, setup: &Engines, base: &str) {
        let name = worker_name(index);
        let spec = self.worker_spec(index);
        let (port, ranks) = (free_port().to_string(), setup.ranks.to_string());
        let user = match self.flags.access {
            // Two workers have users of their own.
            Access::LeastPrivilege | Access::WithoutLog if index > 1 => "shim".to_owned(),
            Access::Open
            | Access::LeastPrivilege
            | Access::SignedUsers
            | Access::MuteRouters
            | Access::LossyRouters
            | Access::FarRouters
            | Access::Cluster
            | Access::WithoutLog => format!("shim-{name}"),
        };
        let mut arguments = self.parts().plane_flags(&user);
        if matches!(self.flags.links, Links::Proxied) {
            let server = self.parts().server.lock().await.url();
            let proxy = Proxy::start(&server).await;
            let through = arguments
                .iter()
                .map(|text| text.replace(&server, &proxy.url()));
            arguments = through.collect();
            let parts = self.distributed.as_mut().expect("made before");
            parts.proxies.push(proxy);
        }
        arguments.extend(strings(&["--host", "127.0.0.1", "--port", &port]));
        arguments.extend(strings(&["--worker-id", &name, "--worker-url", base]));
        arguments.extend(strings(&["--advertise-url", base, "--ranks", &ranks]));
        for (flag, key) in [("--kv-endpoint", "kv"), ("--kv-replay-endpoint", "replay")] {
            if let Some(endpoint) = spec.get(key) {
                arguments.extend([flag.to_owned(), text(endpoint)]);
            }
        }
        let form = Form::of(index, self.flags.forms);
        arguments.extend(strings(&["--role", form.role]));
        for what in form.assumed() {
            arguments.extend(strings(&["--assume", what]));
        }
        arguments.extend(self.placed(self.flags.shim));
        if index + 1 == setup.count {
            arguments.extend(self.placed(self.flags.last_shim));
        }
        let log = self.place.path(&format!("shim-{index}.log"));
        let shim = Process::start(SHIM, &log, arguments).await;
        self.distributed
            .as_mut()
            .expect("made before")
            .shims
            .push(shim);
    }

    /// Runs a shim of no engine, which is no part of the fleet, to its end. Returns its exit code and
    /// log.
    pub(crate) async fn stray_shim(&self, user: &str) -> (Option<i32>, String) {
        let mut arguments = self.parts().plane_flags(user);
        arguments.extend(strings(&["--host", "127.0.0.1", "--port", "0"]));
        arguments.extend(strings(&["--worker-id", "stray"]));
        let engine = "http://127.0.0.1:9";
        arguments.extend(strings(&[
            "--worker-url",
            engine,
            "--advertise-url",
            engine,
        ]));
        arguments.extend(strings(&["--kv-endpoint", "tcp://127.0.0.1:9"]));
        let run = move || Command::new(SHIM).args(&arguments).output();
        let ended = tokio::task::spawn_blocking(run).await.expect("it ended");
        let ended = ended.expect("the shim starts");
        let log = String::from_utf8(ended.stderr).expect("text");
        (ended.status.code(), log)
    }

    pub(crate) async fn add_indexer(&mut self) {
        let port = free_port().to_string();
        let mut arguments = self.parts().plane_flags("indexer");
        arguments.extend(strings(&["--host", "127.0.0.1", "--port", &port]));
        arguments.extend(self.placed(self.flags.indexer));
        let number = self.parts().indexers.len();
        let log = self.place.path(&format!("indexer-{number}.log"));
        let indexer = Process::start(INDEXER, &log, arguments).await;
        self.distributed
            .as_mut()
            .expect("made before")
            .indexers
            .push(indexer);
    }

    pub(crate) async fn add_router(&mut self) {
        self.start_router(self.router_arguments()).await;
    }

    /// Adds a router with other flags than the fleet's.
    pub(crate) async fn add_router_with(&mut self, flags: &[&str]) {
        self.start_router([router_ports(), strings(flags)].concat())
            .await;
    }

    async fn start_router(&mut self, flags: Vec<String>) {
        let arguments = [self.parts().plane_flags("router"), flags].concat();
        let log = self
            .place
            .path(&format!("router-{}.log", self.routers.len()));
        let router = Process::start(ROUTER, &log, arguments).await;
        self.routers.push(router);
    }

    /// Flags in which `PLACE` stands for the fleet's directory.
    pub(crate) fn placed(&self, flags: &[&str]) -> Vec<String> {
        let place = self.place.path("").to_string_lossy().into_owned();
        let flags = flags.iter().map(|flag| flag.replace("PLACE", &place));
        flags.collect()
    }
}

async fn start_server(access: Access, place: &Place) -> NatsServer {
    match access {
        Access::Open | Access::LossyRouters | Access::FarRouters | Access::Cluster => {
            NatsServer::start().await
        }
        Access::WithoutLog => {
            let file = place.path("nats.conf");
            let port = format!("127.0.0.1:{}", free_port());
            let text = shipped("nats-core.conf").replace(MONITOR, &port);
            std::fs::write(&file, text).expect("a file");
            start_with_passwords(&file).await
        }
        Access::LeastPrivilege => {
            let file = place.path("nats.conf");
            let port = format!("127.0.0.1:{}", free_port());
            let text = with_a_key().replace(MONITOR, &port);
            std::fs::write(&file, text).expect("a file");
            std::fs::write(place.path(SEED_FILE), SEED).expect("a file");
            start_with_passwords(&file).await
        }
        Access::SignedUsers => {
            let dir = place.path(OPERATOR_DIR).display().to_string();
            credentials_command(&["init", "--namespace", NAMESPACE, "--dir", &dir]);
            let file = place.path("nats.conf");
            std::fs::write(&file, with_signed_users()).expect("a file");
            // The monitoring port is fixed in the file.
            let arguments: [OsString; 4] = ["-c".into(), file.into(), "-m".into(), "-1".into()];
            NatsServer::start_with(&arguments, &[]).await
        }
        Access::MuteRouters => {
            let file = place.path("nats.conf");
            std::fs::write(&file, mute_routers()).expect("a file");
            let arguments: [OsString; 3] = ["-js".into(), "-c".into(), file.into()];
            NatsServer::start_with(&arguments, &[]).await
        }
    }
}

/// A server with a shipped configuration.
async fn start_with_passwords(file: &Path) -> NatsServer {
    let passwords = [
        "INIT", "DOCTOR", "INDEXER", "ROUTER", "SHIM", "SHIM_0", "SHIM_1",
    ];
    let names = passwords.map(|name| format!("WR_{name}_PASSWORD"));
    let environment = names.iter().map(|name| (&**name, PASSWORD));
    let arguments: [OsString; 2] = ["-c".into(), file.into()];
    NatsServer::start_with(&arguments, &environment.collect::<Vec<_>>()).await
}

/// The monitoring port in the shipped configuration.
const MONITOR: &str = "127.0.0.1:8222";

/// Output of `warmroute-indexer credentials`.
fn credentials_command(arguments: &[&str]) -> Vec<u8> {
    let mut command = Command::new(INDEXER);
    let ended = command.arg("credentials").args(arguments).output();
    let ended = ended.expect("the indexer starts");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{arguments:?}: {said}");
    ended.stdout
}

fn shipped(name: &str) -> String {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/nats");
    let file = dir.join(name);
    std::fs::read_to_string(file).expect("the shipped file")
}

/// The shipped configuration, with an operator's accounts instead of its own.
fn with_signed_users() -> String {
    let text = shipped("nats.conf");
    let (server, _) = text.split_once("\naccounts {").expect("accounts");
    format!("{server}\ninclude \"{OPERATOR_DIR}/accounts.conf\"\n")
}

/// The shipped configuration, with a key instead of a password for routers.
fn with_a_key() -> String {
    let mut text = shipped("nats.conf");
    for (from, to) in [
        (
            "user: router, password: $WR_ROUTER_PASSWORD",
            format!("nkey: {KEY}"),
        ),
        ("_INBOX.router.>", format!("_INBOX.{KEY}.>")),
    ] {
        assert!(text.contains(from), "no {from:?} in the shipped file");
        text = text.replace(from, &to);
    }
    text
}

fn mute_routers() -> String {
    let user = |name: &str, permissions: &str| {
        format!("{{user: {name}, password: {PASSWORD}{permissions}}}")
    };
    let shims = (0..8).map(|index| user(&format!("shim-{}", worker_name(index)), ""));
    let load = format!(r#""wr.{NAMESPACE}.load", "wr.{NAMESPACE}.load.>""#);
    // Without its key a router has no incarnation and sends no messages.
    let keys = format!(r#""$KV.wr_{NAMESPACE}.wr.{NAMESPACE}.router.>""#);
    let mute = format!(
        ", permissions: {{publish: {{deny: [{load}, {keys}]}}, subscribe: {{deny: [{load}]}}}}"
    );
    let mut users: Vec<String> = shims.collect();
    users.extend([user("init", ""), user("indexer", ""), user("router", &mute)]);
    format!("authorization {{users: [{}]}}", users.join(", "))
}
