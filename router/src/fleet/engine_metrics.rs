//! Load in an engine's metrics under vLLM's or SGLang's names. Pure.

use std::collections::BTreeMap;

use warmroute_process::metrics_page::samples;

use crate::route::EngineReading;

/// An engine's names.
struct LoadNames {
    running: &'static str,
    waiting: &'static str,
    kv_usage: &'static [&'static str],
    /// The label with a rank's number; absent where there is one rank.
    rank: &'static str,
}

/// The older name of the usage is of versions before 0.10.
const VLLM: LoadNames = LoadNames {
    running: "vllm:num_requests_running",
    waiting: "vllm:num_requests_waiting",
    kv_usage: &["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"],
    rank: "engine",
};

const SGLANG: LoadNames = LoadNames {
    running: "sglang:num_running_reqs",
    waiting: "sglang:num_queue_reqs",
    kv_usage: &["sglang:token_usage"],
    rank: "dp_rank",
};

/// Why a page gives no reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LoadPageError {
    #[error("its metrics have neither vLLM's nor SGLang's counts of running and waiting requests")]
    NoSeries,
    #[error("its metrics are of {found} ranks, not of {expected}")]
    Ranks { found: usize, expected: u32 },
}

/// The readings of an engine with so many ranks, in their order. vLLM numbers the ranks of one
/// deployment by the label `engine`, so that a server with the last rank alone begins above 0.
pub(super) fn readings(page: &str, ranks: u32) -> Result<Vec<EngineReading>, LoadPageError> {
    let named = [VLLM, SGLANG].map(|names| named_readings(page, &names));
    let found = named.into_iter().find(|readings| !readings.is_empty());
    match found {
        None => Err(LoadPageError::NoSeries),
        Some(found) if found.len() != ranks as usize => Err(LoadPageError::Ranks {
            found: found.len(),
            expected: ranks,
        }),
        Some(found) => Ok(found),
    }
}

fn named_readings(page: &str, names: &LoadNames) -> Vec<EngineReading> {
    let series = |name| by_rank(page, name, names.rank);
    let (running, waiting) = (series(names.running), series(names.waiting));
    let usages: Vec<_> = names.kv_usage.iter().map(|name| series(name)).collect();
    let read = |(rank, &running): (&u64, &f64)| {
        let usages = usages.iter().filter_map(|usage| usage.get(rank));
        Some(EngineReading {
            running: count(running),
            waiting: count(*waiting.get(rank)?),
            kv_usage: usages.copied().find(|usage| (0.0..=1.0).contains(usage)),
        })
    };
    running.iter().filter_map(read).collect()
}

/// SGLang may have a series for each tensor-parallel rank; they count the same requests.
fn by_rank(page: &str, name: &str, label: &str) -> BTreeMap<u64, f64> {
    let by_rank = samples(page, name).filter_map(|sample| {
        let rank = sample.label(label).unwrap_or("0");
        Some((rank.parse().ok()?, sample.value))
    });
    by_rank.collect()
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
                "vllm:num_requests_running{labels} {engine}.0\n\
                 vllm:num_requests_waiting{labels} 2{engine}.0\n\
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
        let without = "vllm:num_requests_running 3\nvllm:num_requests_waiting 4\n";
        assert_eq!(usage(without), None);
    }

    #[test]
    fn sglangs_names_are_read() {
        let line = |name: &str, labels: &str, value: &str| {
            format!("sglang:{name}{{model_name=\"m\",engine_type=\"unified\"{labels}}} {value}\n")
        };
        let page = |labels: &str| {
            line("num_running_reqs", labels, "3.0")
                + &line("num_running_reqs_offline_batch", labels, "9.0")
                + &line("num_queue_reqs", labels, "4.0")
                + &line("token_usage", labels, "0.25")
        };
        let expected = EngineReading {
            running: 3,
            waiting: 4,
            kv_usage: Some(0.25),
        };
        assert_eq!(readings(&page(",tp_rank=\"0\""), 1), Ok(vec![expected]));
        let of_rank = |tp: u32, dp: u32| page(&format!(",tp_rank=\"{tp}\",dp_rank=\"{dp}\""));
        let two = of_rank(0, 0) + &of_rank(1, 0) + &of_rank(2, 1) + &of_rank(3, 1);
        assert_eq!(readings(&two, 2), Ok(vec![expected; 2]));
    }

    #[test]
    fn a_page_that_says_less_is_no_reading() {
        let running = "sglang:num_running_reqs{engine_type=\"unified\"} 3.0\n";
        assert_eq!(readings(running, 1), Err(LoadPageError::NoSeries));
        assert_eq!(
            readings(&page(&[0, 1]), 1),
            Err(LoadPageError::Ranks {
                found: 2,
                expected: 1
            })
        );
    }
}
