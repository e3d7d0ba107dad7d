//! Load in an engine's metrics under vLLM's names. Pure.

use std::collections::BTreeMap;

use warmroute_process::metrics_page::samples;

use crate::route::EngineReading;

const RUNNING: &str = "vllm:num_requests_running";
const WAITING: &str = "vllm:num_requests_waiting";
/// The older name is of versions before 0.10.
const KV_USAGE: [&str; 2] = ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"];

/// Why a page gives no reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LoadPageError {
    #[error("its metrics have no {RUNNING} and {WAITING}")]
    NoSeries,
    #[error("its metrics are of {found} ranks, not of {expected}")]
    Ranks { found: usize, expected: u32 },
}

/// The readings of an engine with so many ranks, in their order. vLLM numbers the ranks of one
/// deployment by the label `engine`, so that a server with the last rank alone begins above 0.
pub(super) fn readings(page: &str, ranks: u32) -> Result<Vec<EngineReading>, LoadPageError> {
    let (running, waiting) = (by_engine(page, RUNNING), by_engine(page, WAITING));
    let usages = KV_USAGE.map(|name| by_engine(page, name));
    let read = |(engine, &running): (&u64, &f64)| {
        let usages = usages.iter().filter_map(|usage| usage.get(engine));
        Some(EngineReading {
            running: count(running),
            waiting: count(*waiting.get(engine)?),
            kv_usage: usages.copied().find(|usage| (0.0..=1.0).contains(usage)),
        })
    };
    let readings: Vec<_> = running.iter().filter_map(read).collect();
    match readings.len() {
        0 => Err(LoadPageError::NoSeries),
        found if found != ranks as usize => Err(LoadPageError::Ranks {
            found,
            expected: ranks,
        }),
        _ => Ok(readings),
    }
}

fn by_engine(page: &str, name: &str) -> BTreeMap<u64, f64> {
    let by_engine = samples(page, name).filter_map(|sample| {
        let engine = sample.label("engine").unwrap_or("0");
        Some((engine.parse().ok()?, sample.value))
    });
    by_engine.collect()
}

/// A saturating cast of a gauge of whole numbers.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a saturating cast, NaN becomes 0"
)]
const fn count(value: f64) -> u32 {
    value as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(engines: &[u32]) -> String {
        let lines = engines.iter().rev().map(|engine| {
            let labels = format!("{{engine=\"{engine}\",model_name=\"m\"}}");
            format!(
                "{RUNNING}{labels} {engine}.0\n{WAITING}{labels} 2{engine}.0\n\
                 vllm:num_requests_waiting_by_reason{{engine=\"{engine}\"}} 99.0\n\
                 vllm:kv_cache_usage_perc{labels} 0.5\n"
            )
        });
        lines.collect()
    }

    #[test]
    fn ranks_are_in_the_order_of_their_numbers() {
        let read = |engines: &[u32]| {
            let ranks = u32::try_from(engines.len()).unwrap();
            let readings = readings(&page(engines), ranks).unwrap();
            let counts = readings.iter().map(|one| (one.running, one.waiting));
            counts.collect::<Vec<_>>()
        };
        assert_eq!(read(&[0]), [(0, 20)]);
        assert_eq!(read(&[0, 1, 2]), [(0, 20), (1, 21), (2, 22)]);
        assert_eq!(read(&[7]), [(7, 27)]);
    }

    #[test]
    fn the_older_name_of_the_usage_and_none_are_read() {
        let usage = |page: &str| readings(page, 1).unwrap()[0].kv_usage;
        assert_eq!(usage(&page(&[0])), Some(0.5));
        let old = page(&[0]).replace("kv_cache_usage", "gpu_cache_usage");
        assert_eq!(usage(&old), Some(0.5));
        assert_eq!(usage(&page(&[0]).replace("0.5", "NaN")), None);
        let without = format!("{RUNNING} 3\n{WAITING} 4\n");
        assert_eq!(usage(&without), None);
    }

    #[test]
    fn a_page_that_says_less_is_no_reading() {
        let sglang = "sglang:num_running_reqs{engine_type=\"unified\"} 3.0\n";
        assert_eq!(readings(sglang, 1), Err(LoadPageError::NoSeries));
        assert_eq!(
            readings(&page(&[0, 1]), 1),
            Err(LoadPageError::Ranks {
                found: 2,
                expected: 1
            })
        );
    }
}
