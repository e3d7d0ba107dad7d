//! The proxies: how each is started, and what its processes take.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use crate::client::{self, Load};
use crate::engines::{Engine, EventPorts};
use crate::options::{Cores, Options};

/// Longest start of a proxy.
const START_MAX: Duration = Duration::from_secs(40);

/// Units of `utime` and `stime`, the same on every Linux.
const TICKS_PER_SEC: f64 = 100.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyKind {
    Direct,
    Nginx,
    HaProxy,
    Warmroute,
    WarmrouteCache,
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

    pub const CACHE_AWARE: [Self; 4] = [
        Self::Direct,
        Self::WarmrouteCache,
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
            Self::WarmrouteKv => "warmroute kv",
            Self::VllmRouter => "vllm-router round_robin",
            Self::VllmRouterCache => "vllm-router cache_aware",
            Self::SglangRouter => "sglang-router round_robin",
            Self::SglangRouterCache => "sglang-router cache_aware",
        }
    }
}

/// A running proxy, stopped when dropped.
pub struct Proxy {
    pub kind: ProxyKind,
    pub address: SocketAddr,
    /// Takes HTTP/2 without TLS.
    pub http2_address: SocketAddr,
    child: Option<Child>,
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
        let http2_address = match kind {
            // One port of nginx takes either version only.
            ProxyKind::Nginx => free_address()?,
            _ => address,
        };
        let ports = Ports {
            address,
            http2_address,
        };
        let command = command(kind, ports, engines, options, &folder)?;
        let mut command = pinned(command, options);
        let log = fs::File::create(folder.join("log"))?;
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let child = command.spawn().with_context(|| format!("{command:?}"))?;
        let proxy = Self {
            kind,
            address,
            http2_address,
            child: Some(child),
            folder: Some(folder),
        };
        proxy.wait_until_ready()?;
        Ok(proxy)
    }

    fn wait_until_ready(&self) -> anyhow::Result<()> {
        let began = Instant::now();
        let probe = Load::Plain {
            prompt_bytes: 200,
            requests: 8,
        };
        loop {
            let error = match client::run(self.address, &probe, 0, 1) {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            if began.elapsed() > START_MAX {
                let log = self.folder.as_ref().map(|folder| folder.join("log"));
                let log = log
                    .and_then(|log| fs::read_to_string(log).ok())
                    .unwrap_or_default();
                let end: String = log.chars().rev().take(600).collect();
                bail!(
                    "not ready: {error:#}; {}",
                    end.chars().rev().collect::<String>()
                );
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Processor time of all processes so far.
    pub fn cpu_secs(&self) -> anyhow::Result<f64> {
        let mut ticks = 0;
        for pid in self.pids() {
            let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
                continue;
            };
            let fields = stat.rsplit(") ").next().unwrap_or_default();
            let fields: Vec<&str> = fields.split(' ').collect();
            for field in [11, 12] {
                ticks += fields.get(field).context("no times")?.parse::<u64>()?;
            }
        }
        #[allow(clippy::cast_precision_loss)]
        Ok(ticks as f64 / TICKS_PER_SEC)
    }

    /// Peak of resident memory of all processes together.
    pub fn peak_mib(&self) -> anyhow::Result<f64> {
        let mut sum = 0.0;
        for pid in self.pids() {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let kib = peak.and_then(|text| text.trim().split(' ').next());
            sum += kib.map_or(Ok(0.0), str::parse::<f64>)? / 1024.0;
        }
        Ok(sum)
    }

    /// The process and its descendants.
    fn pids(&self) -> Vec<u32> {
        let mut pids: Vec<u32> = self.child.iter().map(Child::id).collect();
        let mut next = 0;
        while let Some(pid) = pids.get(next) {
            let tasks = fs::read_dir(format!("/proc/{pid}/task"))
                .into_iter()
                .flatten();
            let children: Vec<u32> = tasks
                .filter_map(|task| fs::read_to_string(task.ok()?.path().join("children")).ok())
                .flat_map(|list| {
                    let ids = list.split_whitespace().filter_map(|id| id.parse().ok());
                    ids.collect::<Vec<u32>>()
                })
                .collect();
            pids.extend(children);
            next += 1;
        }
        pids
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let pids = self.pids();
        if let Some(child) = &mut self.child {
            let ids = pids.iter().map(u32::to_string);
            drop(Command::new("kill").args(ids).status());
            std::thread::sleep(Duration::from_millis(300));
            drop(child.kill());
            drop(child.wait());
        }
        if let Some(folder) = &self.folder {
            drop(fs::remove_dir_all(folder));
        }
    }
}

fn free_address() -> anyhow::Result<SocketAddr> {
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
        ProxyKind::Warmroute | ProxyKind::WarmrouteCache | ProxyKind::WarmrouteKv => {
            warmroute(kind, &port, engines, options)
        }
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
        .args(["--host", "127.0.0.1", "--port", port, "--admin-port", "0"])
        .args(["--log", "warn"])
        .args(engines.iter().map(worker));
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
        .map(|engine| format!("server {}; ", engine.address))
        .collect();
    let (folder, threads) = (folder.display(), threads(options));
    let Ports {
        address,
        http2_address,
    } = ports;
    format!(
        "daemon off; worker_processes {threads}; pid {folder}/pid; error_log {folder}/error warn;
events {{ worker_connections 1024; }}
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
