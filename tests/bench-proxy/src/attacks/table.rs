//! The table of attacks for the README beside this benchmark.

use super::quiet::Quiet;
use super::{Round, Row};

const HEAD: &str = "\
| attack | proxy | acts/s | p50 alone, ms | p99 alone, ms | p99 beside, ms | ratio | failed \
| peak MiB |
|---|---|---|---|---|---|---|---|---|
";

/// One line for each row; each figure is the median of its rounds.
pub fn render(rows: &[Row]) -> String {
    let mut text = HEAD.to_owned();
    for row in rows {
        let median = |of: &dyn Fn(&Round) -> f64| {
            let mut values: Vec<f64> = row.rounds.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
        };
        let alone = |percent| move |round: &Round| millis(&round.alone, percent);
        let beside = |round: &Round| millis(&round.beside, 99);
        let ratio = |round: &Round| beside(round) / millis(&round.alone, 99);
        text.push_str(&format!(
            "| {} | {} | {:.0} | {} | {} | {} | {} | {:.0} | {:.0} |\n",
            row.attack.name(),
            row.proxy,
            median(&|round| round.acts_per_sec),
            shown(median(&alone(50))),
            shown(median(&alone(99))),
            shown(median(&beside)),
            shown(median(&ratio)),
            median(&|round| round.beside.failed as f64),
            median(&|round| round.peak_mib),
        ));
    }
    text
}

/// Not a number if no request was answered.
fn millis(quiet: &Quiet, percent: usize) -> f64 {
    if quiet.measured.latencies.is_empty() {
        return f64::NAN;
    }
    quiet.measured.percentile(percent).as_secs_f64() * 1e3
}

fn shown(value: f64) -> String {
    if value.is_nan() {
        return "–".to_owned();
    }
    format!("{value:.2}")
}
