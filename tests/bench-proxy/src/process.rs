//! The proxies: how each is started, and what its processes take.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::admin::{Admin, Decided};
use crate::client::{self, Load};
use crate::engines::{Engine, EventPorts};
use crate::options::{Cores, Mode, Options};
use crate::plane::Plane;
use crate::usage::{self, Usage};

/// Longest start of a proxy, and of each process beside it.
pub const START_MAX: Duration = Duration::from_secs(40);

/// Between two looks at a process that starts.
pub const START_PERIOD: Duration = Duration::from_millis(200);

/// Requests that show whether a proxy is ready.
const PROBE_REQUESTS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyKind {
    Direct,
    Nginx,
    HaProxy,
    Warmroute,
    WarmrouteCache,
    /// Like `WarmrouteCache`, with shims and an indexer as processes of their own.
    WarmrouteNats,
    WarmrouteKv,
    VllmRouter,
    VllmRouterCache,
    SglangRouter,
    SglangRouterCache,
}

impl ProxyKind {
    pub const PROXYING: [Self; 8] = [
        Self::Direct,
        Self::Nginx,
        Self::HaProxy,
        Self::Warmroute,
        Self::VllmRouter,
        Self::VllmRouterCache,
        Self::SglangRouter,
        Self::SglangRouterCache,
    ];

    pub const CACHE_AWARE: [Self; 5] = [
        Self::Direct,
        Self::WarmrouteCache,
        Self::WarmrouteNats,
        Self::VllmRouterCache,
        Self::SglangRouterCache,
    ];

    pub const ATTACKED: [Self; 2] = [Self::Nginx, Self::WarmrouteKv];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Nginx => "nginx",
            Self::HaProxy => "HAProxy",
            Self::Warmroute => "warmroute round-robin",
            Self::WarmrouteCache => "warmroute, default policy",
            Self::WarmrouteNats => "warmroute over NATS",
            Self::WarmrouteKv => "warmroute kv",
            Self::VllmRouter => "vllm-router round_robin",
            Self::VllmRouterCache => "vllm-router cache_aware",
            Self::SglangRouter => "sglang-router round_robin",
            Self::SglangRouterCache => "sglang-router cache_aware",
        }
    }

    /// It decides by an index of the engines' caches.
    const fn has_index(self) -> bool {
        matches!(self, Self::WarmrouteCache | Self::WarmrouteNats)
    }
}

/// A running proxy, stopped when dropped.
pub struct Proxy {
    pub kind: ProxyKind,
    pub address: SocketAddr,
    /// Takes HTTP/2 without TLS.
    pub http2_address: SocketAddr,
    child: Option<Child>,
    /// `Some`: it decides by an index.
    admin: Option<Admin>,
    /// The other processes of a distributed router.
    plane: Option<Plane>,
    folder: Option<PathBuf>,
}

impl Proxy {
    pub fn start(kind: ProxyKind, engines: &[Engine], options: &Options) -> anyhow::Result<Self> {
        let ProxyKind::Direct = kind else {
            return Self::start_process(kind, engines, options);
        };
        Ok(Self {
            kind,
            address: engines[0].address,
            http2_address: engines[0].address,
            child: None,
            admin: None,
            plane: None,
            folder: None,
        })
    }

    fn start_process(
        kind: ProxyKind,
        engines: &[Engine],
        options: &Options,
    ) -> anyhow::Result<Self> {
        let address = free_address()?;
        let folder = std::env::temp_dir().join(format!("bench-proxy-{}", address.port()));
        fs::create_dir_all(&folder)?;
        let mut proxy = Self {
            kind,
            address,
            http2_address: match kind {
                // One port of nginx takes either version only.
                ProxyKind::Nginx => free_address()?,
                _ => address,
            },
            child: None,
            admin: None,
            plane: None,
            folder: Some(folder.clone()),
        };
        if kind.has_index() {
            proxy.admin = Some(Admin::at(free_address()?));
        }
        if kind == ProxyKind::WarmrouteNats {
            proxy.plane = Some(Plane::start(engines, options, &folder)?);
        }
        let command = proxy.command(engines, options, &folder)?;
        proxy.child = Some(spawn(pinned(command, options), &folder.join("log"))?);
        proxy.wait_until_ready(engines.len())?;
        Ok(proxy)
    }

    fn wait_until_ready(&self, engines: usize) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let Err(error) = self.probe(engines) else {
                return Ok(());
            };
            if began.elapsed() > START_MAX {
                let log = self.folder.as_ref().map(|folder| folder.join("log"));
                let end = log.map(|log| end_of(&log)).unwrap_or_default();
                bail!("not ready: {error:#}; {end}");
            }
            std::thread::sleep(START_PERIOD);
        }
    }

    /// Sends some requests, which repeat those of earlier probes.
    fn probe(&self, engines: usize) -> anyhow::Result<()> {
        let load = Load::Plain {
            prompt_bytes: 200,
            requests: PROBE_REQUESTS,
        };
        let before = self.decided()?;
        client::run(self.address, &load, 0, 1)?;
        if let (Some(admin), Some(before)) = (&self.admin, before) {
            let decided = admin.decided()?.since(&before);
            let is_by_index = decided.by_index() == PROBE_REQUESTS as u64;
            ensure!(is_by_index && decided.credited_tokens > 0, "{decided}");
            admin.check_newest(engines)?;
        }
        Ok(())
    }

    /// The decisions so far. `None`: it has no index.
    pub fn decided(&self) -> anyhow::Result<Option<Decided>> {
        self.admin.map(|admin| admin.decided()).transpose()
    }

    /// What the proxy's own processes took so far.
    pub fn usage(&self) -> anyhow::Result<Usage> {
        Usage::of(self.child.iter().map(Child::id))
    }

    /// What the other processes took so far that it needs, by their names.
    pub fn usage_beside(&self) -> anyhow::Result<Vec<(&'static str, Usage)>> {
        self.plane.as_ref().map_or(Ok(Vec::new()), Plane::usage)
    }

    fn command(
        &self,
        engines: &[Engine],
        options: &Options,
        folder: &Path,
    ) -> anyhow::Result<Command> {
        let ports = Ports {
            address: self.address,
            http2_address: self.http2_address,
        };
        let mut command = command(self.kind, ports, engines, options, folder)?;
        if let Some(admin) = &self.admin {
            let port = admin.port().to_string();
            command.args(["--admin-port", &port]);
        }
        if let Some(plane) = &self.plane {
            command.arg("--nats-url").arg(plane.url());
        }
        Ok(command)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        stop(self.child.take());
        drop(self.plane.take());
        if let Some(folder) = &self.folder {
            drop(fs::remove_dir_all(folder));
        }
    }
}

/// Starts a process that writes to the file what it prints.
pub fn spawn(mut command: Command, log: &Path) -> anyhow::Result<Child> {
    let log = fs::File::options().create(true).append(true).open(log)?;
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    command.spawn().with_context(|| format!("{command:?}"))
}

/// Stops processes and their descendants: by SIGTERM, and what still runs then by SIGKILL.
pub fn stop(children: impl IntoIterator<Item = Child>) {
    let mut children: Vec<Child> = children.into_iter().collect();
    if children.is_empty() {
        return;
    }
    let pids = usage::with_descendants(children.iter().map(Child::id));
    let ids = pids.iter().map(u32::to_string);
    drop(Command::new("kill").args(ids).status());
    std::thread::sleep(Duration::from_millis(300));
    for child in &mut children {
        drop(child.kill());
        drop(child.wait());
    }
}

/// The end of a log.
pub fn end_of(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let start = text.len().saturating_sub(600);
    text[text.ceil_char_boundary(start)..].to_owned()
}

pub fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

#[derive(Clone, Copy)]
struct Ports {
    address: SocketAddr,
    http2_address: SocketAddr,
}

fn command(
    kind: ProxyKind,
    ports: Ports,
    engines: &[Engine],
    options: &Options,
    folder: &Path,
) -> anyhow::Result<Command> {
    let port = ports.address.port().to_string();
    let urls: Vec<String> = engines
        .iter()
        .map(|engine| format!("http://{}", engine.address))
        .collect();
    let python = |program: &str, policy: &str| {
        let mut command = Command::new(options.peers.join(program));
        if program == "sglang-router" {
            command.arg("launch");
        }
        let metrics = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        let metrics = metrics.map_or(0, |address| address.port()).to_string();
        command
            .args(["--host", "127.0.0.1", "--port", &port, "--policy", policy])
            .args(["--log-level", "error", "--prometheus-port", &metrics])
            .arg("--worker-urls")
            .args(&urls);
        command
    };
    Ok(match kind {
        ProxyKind::Direct => bail!("no process"),
        ProxyKind::Warmroute
        | ProxyKind::WarmrouteCache
        | ProxyKind::WarmrouteNats
        | ProxyKind::WarmrouteKv => warmroute(kind, &port, engines, options),
        ProxyKind::VllmRouter => python("vllm-router", "round_robin"),
        ProxyKind::VllmRouterCache => python("vllm-router", "cache_aware"),
        ProxyKind::SglangRouter => python("sglang-router", "round_robin"),
        ProxyKind::SglangRouterCache => python("sglang-router", "cache_aware"),
        ProxyKind::Nginx => {
            let file = folder.join("nginx.conf");
            fs::write(&file, nginx(ports, engines, options, folder))?;
            let mut command = Command::new("nginx");
            command.arg("-c").arg(file);
            command
        }
        ProxyKind::HaProxy => {
            let file = folder.join("haproxy.cfg");
            fs::write(&file, haproxy(ports.address, engines, options))?;
            let mut command = Command::new("haproxy");
            command.args(["-q", "-db", "-f"]).arg(file);
            command
        }
    })
}

fn warmroute(kind: ProxyKind, port: &str, engines: &[Engine], options: &Options) -> Command {
    let mut command = Command::new(&options.router);
    command
        .args(["--host", "127.0.0.1", "--port", port])
        .args(["--log", "warn"]);
    if !kind.has_index() {
        command.args(["--admin-port", "0"]);
    }
    if kind != ProxyKind::WarmrouteNats {
        command.args(engines.iter().map(worker));
    }
    if kind == ProxyKind::Warmroute {
        command.args(["--policy", "round-robin"]);
    } else {
        command.arg("--tokenizer").arg(&options.tokenizer);
    }
    if kind == ProxyKind::WarmrouteKv {
        command.args(["--policy", "kv", "--block-size", "16"]);
    }
    command
}

/// The command on the processors that a proxy may use.
fn pinned(command: Command, options: &Options) -> Command {
    let Some(cores) = &options.cores else {
        return command;
    };
    let mut pinned = Command::new("taskset");
    pinned.args(["-c", &cores.to_string()]);
    pinned.arg(command.get_program()).args(command.get_args());
    pinned
}

/// Threads of a proxy that does not choose their number.
fn threads(options: &Options) -> usize {
    options.cores.as_ref().map_or(2, Cores::count)
}

/// An engine as the router's flag declares it.
fn worker(engine: &Engine) -> String {
    let url = format!("--worker=http://{}", engine.address);
    match engine.events {
        None => url,
        Some(EventPorts { live, replay }) => {
            format!("{url},kv=tcp://127.0.0.1:{live},replay=tcp://127.0.0.1:{replay}")
        }
    }
}

fn nginx(ports: Ports, engines: &[Engine], options: &Options, folder: &Path) -> String {
    let servers: String = engines
        .iter()
        // By default it stops using an engine for 10 s after one reset.
        .map(|engine| format!("server {} max_fails=0; ", engine.address))
        .collect();
    let (folder, threads) = (folder.display(), threads(options));
    // Idle connections are among the attacks.
    let connections = match options.mode {
        Mode::Attacks => 8192,
        Mode::Compare | Mode::Attacker { .. } => 1024,
    };
    let Ports {
        address,
        http2_address,
    } = ports;
    format!(
        "daemon off; worker_processes {threads}; pid {folder}/pid; error_log {folder}/error warn;
events {{ worker_connections {connections}; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_max_body_size 64m; client_body_buffer_size 256k; keepalive_requests 1000000;
  upstream engines {{ {servers} keepalive 128; keepalive_requests 1000000; }}
  server {{
    listen {address}; listen {http2_address} http2;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection '';
      proxy_buffering off;
    }}
  }}
}}\n"
    )
}

fn haproxy(address: SocketAddr, engines: &[Engine], options: &Options) -> String {
    let threads = threads(options);
    let servers: String = engines
        .iter()
        .enumerate()
        .map(|(number, engine)| format!("  server s{number} {}\n", engine.address))
        .collect();
    format!(
        "global
  nbthread {threads}
  maxconn 1024
defaults
  mode http
  option http-no-delay
  http-reuse always
  timeout connect 5s
  timeout client 1h
  timeout server 1h
frontend clients
  bind {address}
  default_backend engines
backend engines
  balance roundrobin
{servers}"
    )
}
