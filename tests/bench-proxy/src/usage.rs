//! Processor time and memory of processes, from `/proc`.

use std::fs;

use anyhow::Context as _;

/// Units of `utime` and `stime`, the same on every Linux.
const TICKS_PER_SEC: f64 = 100.0;

/// What processes and their descendants took together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub cpu_secs: f64,
    /// Sum of the peaks of resident memory.
    pub peak_mib: f64,
}

impl Usage {
    pub fn of(roots: impl IntoIterator<Item = u32>) -> anyhow::Result<Self> {
        let (mut ticks, mut peak_mib) = (0, 0.0);
        for pid in with_descendants(roots) {
            ticks += ticks_of(pid)?;
            peak_mib += peak_mib_of(pid)?;
        }
        #[allow(clippy::cast_precision_loss)]
        let cpu_secs = ticks as f64 / TICKS_PER_SEC;
        Ok(Self { cpu_secs, peak_mib })
    }

    /// Processor time since then; the peak so far.
    pub const fn since(self, before: Self) -> Self {
        Self {
            cpu_secs: self.cpu_secs - before.cpu_secs,
            peak_mib: self.peak_mib,
        }
    }
}

/// The processes and their descendants.
pub fn with_descendants(roots: impl IntoIterator<Item = u32>) -> Vec<u32> {
    let mut pids: Vec<u32> = roots.into_iter().collect();
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

/// Processor time so far. A process that ended has none.
fn ticks_of(pid: u32) -> anyhow::Result<u64> {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return Ok(0);
    };
    let fields = stat.rsplit(") ").next().unwrap_or_default();
    let fields: Vec<&str> = fields.split(' ').collect();
    let mut ticks = 0;
    for field in [11, 12] {
        ticks += fields.get(field).context("no times")?.parse::<u64>()?;
    }
    Ok(ticks)
}

fn peak_mib_of(pid: u32) -> anyhow::Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = peak.and_then(|text| text.trim().split(' ').next());
    Ok(kib.map_or(Ok(0.0), str::parse::<f64>)? / 1024.0)
}
