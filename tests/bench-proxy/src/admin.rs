//! The admin port of a router: what its decisions rest on.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, ensure};

const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Candidates that a decision lists.
const LISTED_MAX: usize = 8;

#[derive(Clone, Copy, Debug)]
pub struct Admin {
    address: SocketAddr,
}

/// Counts of decisions.
#[derive(Clone, Debug)]
pub struct Decided {
    /// By what they rested on.
    steps: BTreeMap<String, u64>,
    /// Prompt tokens that the router expected to be cached.
    pub credited_tokens: u64,
}

impl Decided {
    pub fn since(mut self, before: &Self) -> Self {
        for (step, count) in &mut self.steps {
            *count -= before.steps.get(step).unwrap_or(&0);
        }
        self.steps.retain(|_, count| *count > 0);
        self.credited_tokens -= before.credited_tokens;
        self
    }

    pub fn all(&self) -> u64 {
        self.steps.values().sum()
    }

    pub fn by_index(&self) -> u64 {
        self.steps.get("index").copied().unwrap_or_default()
    }
}

impl fmt::Display for Decided {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (step, count) in &self.steps {
            write!(f, "{count} by {step}, ")?;
        }
        write!(f, "{} tokens credited", self.credited_tokens)
    }
}

impl Admin {
    pub const fn at(address: SocketAddr) -> Self {
        Self { address }
    }

    pub const fn port(&self) -> u16 {
        self.address.port()
    }

    pub fn decided(&self) -> anyhow::Result<Decided> {
        let page = get(self.address, "/metrics")?;
        let mut decided = Decided {
            steps: BTreeMap::new(),
            credited_tokens: 0,
        };
        for (series, value) in page.lines().filter_map(|line| line.rsplit_once(' ')) {
            if let Some(labels) = series.strip_prefix("warmroute_router_ladder_total{step=\"") {
                let step = labels.trim_end_matches("\"}").to_owned();
                decided.steps.insert(step, value.parse()?);
            } else if series == "warmroute_router_overlap_credited_tokens_total" {
                decided.credited_tokens = value.parse()?;
            }
        }
        Ok(decided)
    }

    /// Fails unless the newest decision compared so many engines, and the index was exact for all.
    pub fn check_newest(&self, engines: usize) -> anyhow::Result<()> {
        let page = get(self.address, "/admin/decisions?limit=1")?;
        let compared = format!("\"candidates\":{engines},");
        ensure!(page.contains(&compared), "not {engines} engines: {page}");
        let exact = page.matches("\"state\":\"exact\"").count();
        ensure!(exact == engines.min(LISTED_MAX), "not exact: {page}");
        Ok(())
    }
}

/// The body of an answer with status 200.
pub fn get(address: SocketAddr, path: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, ANSWER_MAX)?;
    stream.set_read_timeout(Some(ANSWER_MAX))?;
    write!(stream, "GET {path} HTTP/1.0\r\nhost: {address}\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no head")?;
    let status = head.split(' ').nth(1);
    ensure!(status == Some("200"), "{path}: {head} {body}");
    Ok(body.to_owned())
}
