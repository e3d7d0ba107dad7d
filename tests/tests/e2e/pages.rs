//! The admin port's pages of all parts in one process.

use std::collections::BTreeSet;

use warmroute_process::build;

use crate::fleet::{Engines, Flags, Fleet, Mode};

/// Router, indexer and every shim on one page for Prometheus: each metric is described once, each
/// series appears once.
#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_of_all_parts_are_one_page() {
    let engines = Engines {
        count: 2,
        ranks: 2,
        blocks: 100,
        flags: &["--profile", "instant"],
    };
    let fleet = Fleet::start(Mode::Embedded, engines, Flags::default()).await;
    fleet
        .until("every shim has its sources", async |fleet| {
            fleet.metric("warmroute_shim_connected").await >= 4.0
        })
        .await;
    let answer = fleet.http.get(fleet.admin(0, "/metrics")).send().await;
    let page = answer.unwrap().text().await.unwrap();
    assert!(page.contains(&build::metrics_text()), "{page}");
    let mut described = BTreeSet::new();
    let mut series = BTreeSet::new();
    for line in page.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let words: Vec<_> = comment.splitn(3, ' ').collect();
            assert!(
                described.insert((words[0], words[1])),
                "described twice: {line}"
            );
        } else {
            let (name, _) = line.rsplit_once(' ').unwrap();
            assert!(series.insert(name), "series appears twice: {line}");
        }
    }
    for (worker, rank) in [
        ("worker-0", 0),
        ("worker-0", 1),
        ("worker-1", 0),
        ("worker-1", 1),
    ] {
        let name = format!("warmroute_shim_generation{{worker=\"{worker}\",dp_rank=\"{rank}\"}}");
        assert!(series.contains(name.as_str()), "{name}");
    }
    for part in ["warmroute_router_", "warmroute_indexer_", "warmroute_shim_"] {
        assert!(series.iter().any(|name| name.starts_with(part)), "{part}");
    }
}
