//! The table for the README beside this benchmark.

use std::time::Duration;

use crate::Cell;
use crate::client::Load;
use crate::usage::Usage;

const HEAD: &str = "\
| load | proxy | CPU s / 1,000 | req/s | added p50, ms | added p99, ms | peak MiB |
|---|---|---|---|---|---|---|
";

const HEAD_BESIDE: &str = "
| load | other processes | CPU s / 1,000 | peak MiB |
|---|---|---|---|
";

/// One line for each cell. Added times are those above direct connections in the same rounds; for
/// streams they are times to the first token.
pub fn render(cells: &[Cell]) -> String {
    let mut text = HEAD.to_owned();
    for cell in cells {
        let direct = cells
            .iter()
            .find(|other| other.proxy == "direct" && other.load.name() == cell.load.name())
            .unwrap_or(cell);
        let added = |percent: usize| {
            let of = |cell: &Cell| median(cell, |round| millis(round.measured.percentile(percent)));
            of(cell) - of(direct)
        };
        let rate = median(cell, |round| count(round.measured.requests) / secs(round));
        let cpu = median(cell, |round| per_1000(round, round.usage));
        let rate = match cell.load {
            Load::Plain { .. } | Load::Prompts { .. } => format!("{rate:.0}"),
            // The backend sets the pace.
            Load::Streams { .. } => "–".to_owned(),
        };
        let peak = median(cell, |round| round.usage.peak_mib);
        text.push_str(&format!(
            "| {} | {} | {cpu:.3} | {rate} | {:.2} | {:.2} | {peak:.0} |\n",
            cell.load.name(),
            cell.proxy,
            added(50),
            added(99),
        ));
    }
    text
}

/// One line for each kind of other processes that a proxy needs. Empty if none needs any.
pub fn render_beside(cells: &[Cell]) -> String {
    let mut text = String::new();
    for cell in cells {
        let parts = cell.rounds.first().map_or(&[][..], |round| &round.beside);
        for (place, (name, _)) in parts.iter().enumerate() {
            let cpu = median(cell, |round| per_1000(round, round.beside[place].1));
            let peak = median(cell, |round| round.beside[place].1.peak_mib);
            text.push_str(&format!(
                "| {} | {}: {name} | {cpu:.3} | {peak:.0} |\n",
                cell.load.name(),
                cell.proxy,
            ));
        }
    }
    if !text.is_empty() {
        text.insert_str(0, HEAD_BESIDE);
    }
    text
}

/// Processor time in seconds.
fn per_1000(round: &crate::Round, usage: Usage) -> f64 {
    usage.cpu_secs / count(round.measured.requests) * 1e3
}

fn median(cell: &Cell, of: impl Fn(&crate::Round) -> f64) -> f64 {
    let mut values: Vec<f64> = cell.rounds.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn secs(round: &crate::Round) -> f64 {
    round.measured.wall.as_secs_f64().max(1e-9)
}

#[allow(clippy::cast_precision_loss)]
fn count(requests: usize) -> f64 {
    requests as f64
}
