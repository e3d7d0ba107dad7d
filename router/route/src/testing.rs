//! What the tests of several modules need.

use std::time::Instant;

use warmroute_proto::load::SampledPrefix;
use warmroute_proto::{DpRank, LocalHash, Source};

use crate::source_table::{SourceId, SourceTable};

#[expect(clippy::disallowed_methods, reason = "only differences matter")]
pub(crate) fn start() -> Instant {
    Instant::now()
}

/// The worker's first rank.
pub(crate) fn source(worker: &str) -> Source {
    Source {
        worker: worker.into(),
        dp_rank: DpRank(0),
    }
}

pub(crate) fn source_id() -> SourceId {
    SourceTable::default().intern(&source("w"))
}

/// A prompt of these blocks.
pub(crate) fn sampled(blocks: impl IntoIterator<Item = u64>) -> SampledPrefix {
    let blocks: Vec<LocalHash> = blocks.into_iter().map(LocalHash).collect();
    SampledPrefix::of(&blocks)
}
