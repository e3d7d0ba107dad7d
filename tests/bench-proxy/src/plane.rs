//! The processes between engines and a distributed router: nats-server, a shim for each engine, and
//! an indexer. They stand for other machines, so `--cores` does not bind them.

use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};

use crate::admin;
use crate::engines::{Engine, EventPorts};
use crate::options::Options;
use crate::process::{self, START_MAX, START_PERIOD};
use crate::usage::Usage;

/// Stopped when dropped, nats-server last.
pub struct Plane {
    nats: SocketAddr,
    /// The last started first.
    parts: Vec<Part>,
    folder: PathBuf,
}

/// Processes of one kind.
struct Part {
    name: &'static str,
    children: Vec<Child>,
}

impl Plane {
    /// Starts the processes, which are ready then.
    pub fn start(engines: &[Engine], options: &Options, folder: &Path) -> anyhow::Result<Self> {
        let nats_server = given(&options.nats_server, "--nats-server")?;
        let indexer = given(&options.indexer, "--indexer")?;
        let shim = given(&options.shim, "--shim")?;
        let mut plane = Self {
            nats: process::free_address()?,
            parts: Vec::new(),
            folder: folder.to_owned(),
        };
        plane.start_nats(nats_server)?;
        plane.init(indexer)?;
        plane.start_part("indexer", [plane.indexer(indexer)])?;
        let shims = engines.iter().enumerate();
        let shims = shims.map(|(number, engine)| plane.shim(shim, number, engine));
        let shims = shims.collect::<anyhow::Result<Vec<_>>>()?;
        plane.start_part("shims", shims)?;
        Ok(plane)
    }

    pub fn url(&self) -> String {
        format!("nats://{}", self.nats)
    }

    /// What the processes of each kind took so far.
    pub fn usage(&self) -> anyhow::Result<Vec<(&'static str, Usage)>> {
        let usage = |part: &Part| {
            let usage = Usage::of(part.children.iter().map(Child::id))?;
            anyhow::Ok((part.name, usage))
        };
        self.parts.iter().map(usage).collect()
    }

    fn start_nats(&mut self, binary: &Path) -> anyhow::Result<()> {
        let mut command = Command::new(binary);
        let port = self.nats.port().to_string();
        command
            .args(["-js", "-a", "127.0.0.1", "-p", &port, "-sd"])
            .arg(self.folder.join("streams"));
        self.spawn("nats-server", [command])?;
        let address = self.nats;
        let is_up = || Ok(TcpStream::connect(address).map(drop)?);
        self.wait("nats-server", is_up)
    }

    /// Creates the streams.
    fn init(&self, indexer: &Path) -> anyhow::Result<()> {
        let mut command = Command::new(indexer);
        command.args(["--nats-url", &self.url(), "--log", "warn", "init", "--max-bytes", "128MiB"]);
        let output = command.output().with_context(|| format!("{command:?}"))?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "init: {errors}");
        Ok(())
    }

    fn indexer(&self, binary: &Path) -> Command {
        let mut command = Command::new(binary);
        command.args(["--nats-url", &self.url()]);
        command
    }

    fn shim(&self, binary: &Path, number: usize, engine: &Engine) -> anyhow::Result<Command> {
        let EventPorts { live, replay } = engine.events.context("engines without events")?;
        let (name, url) = (
            format!("engine-{number}"),
            format!("http://{}", engine.address),
        );
        let mut command = Command::new(binary);
        command
            .args(["--nats-url", &self.url(), "--worker-id", &name])
            .args(["--worker-url", &url, "--advertise-url", &url])
            .arg(format!("--kv-endpoint=tcp://127.0.0.1:{live}"))
            .arg(format!("--kv-replay-endpoint=tcp://127.0.0.1:{replay}"))
            .arg("--state-dir")
            .arg(self.folder.join("state").join(name));
        Ok(command)
    }

    /// Starts processes that have probes, and waits for them.
    fn start_part(
        &mut self,
        name: &'static str,
        commands: impl IntoIterator<Item = Command>,
    ) -> anyhow::Result<()> {
        let (mut probes, mut bound) = (Vec::new(), Vec::new());
        for mut command in commands {
            let probe = process::free_address()?;
            let port = probe.port().to_string();
            command.args(["--host", "127.0.0.1", "--port", &port]);
            command.args(["--log", "warn"]);
            probes.push(probe);
            bound.push(command);
        }
        self.spawn(name, bound)?;
        self.wait(name, || {
            for probe in &probes {
                admin::get(*probe, "/readyz")?;
            }
            Ok(())
        })
    }

    fn spawn(
        &mut self,
        name: &'static str,
        commands: impl IntoIterator<Item = Command>,
    ) -> anyhow::Result<()> {
        let log = self.log(name);
        let part = Part {
            name,
            children: Vec::new(),
        };
        self.parts.insert(0, part);
        for command in commands {
            self.parts[0].children.push(process::spawn(command, &log)?);
        }
        Ok(())
    }

    fn wait(&self, name: &str, is_up: impl Fn() -> anyhow::Result<()>) -> anyhow::Result<()> {
        let began = Instant::now();
        while let Err(error) = is_up() {
            if began.elapsed() > START_MAX {
                let end = process::end_of(&self.log(name));
                bail!("{name} not ready: {error:#}; {end}");
            }
            std::thread::sleep(START_PERIOD);
        }
        Ok(())
    }

    fn log(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.log"))
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        for part in self.parts.drain(..) {
            process::stop(part.children);
        }
    }
}

fn given<'a>(binary: &'a Option<PathBuf>, flag: &str) -> anyhow::Result<&'a Path> {
    let binary = binary.as_deref();
    binary.with_context(|| format!("{flag} is not given"))
}
