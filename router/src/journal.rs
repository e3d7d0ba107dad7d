//! The last decisions, for whoever asks "why this worker?": a bounded ring, oldest out first.
//!
//! No prompt, no token: sources, terms in blocks, and how many tokens the engine found cached.
//!
//! Every request writes here, and every request needs the core: whoever looks copies first and shows
//! afterwards, so that nobody waits for a page that is made up.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use serde::Serialize;
use serde_json::{Value, json};
use warmroute_proto::Source;

use crate::route::{Decision, SourceId, Terms};

/// Decisions kept. With [`WEIGHED_MAX`] candidates each about a MiB.
const ENTRIES_MAX: usize = 1024;

/// Candidates kept of a decision, the cheapest ones.
const WEIGHED_MAX: usize = 8;

/// A decision's place in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct EntryNumber(u64);

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Journal {
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    next: u64,
    entries: VecDeque<Arc<Entry>>,
}

/// The sources that decisions name.
pub(crate) type Names = BTreeMap<SourceId, Source>;

struct Entry {
    number: u64,
    request_id: String,
    model: String,
    candidates: usize,
    decision: Decision,
    /// The choice before it, if the request was moved.
    left: Option<Box<Decision>>,
    cached_tokens: OnceLock<u64>,
}

impl Journal {
    /// Takes the candidates' terms out of the decision; nobody else needs them. `left`: the choice before
    /// it, if the request was moved.
    pub(crate) fn record(
        &self,
        (request_id, model): (&str, &str),
        decision: &mut Decision,
        left: Option<Box<Decision>>,
    ) -> EntryNumber {
        let weighed = std::mem::take(&mut decision.weighed);
        let candidates = weighed.len();
        let decision = Decision {
            weighed: cheapest(weighed),
            ..decision.clone()
        };
        let left = left.map(|mut left| {
            left.weighed = cheapest(std::mem::take(&mut left.weighed));
            left
        });
        let mut ring = self.ring();
        let number = ring.next;
        ring.next += 1;
        if ring.entries.len() == ENTRIES_MAX {
            ring.entries.pop_front();
        }
        ring.entries.push_back(Arc::new(Entry {
            number,
            request_id: request_id.to_owned(),
            model: model.to_owned(),
            candidates,
            decision,
            left,
            cached_tokens: OnceLock::new(),
        }));
        EntryNumber(number)
    }

    /// The engine told how much of the prompt it had cached; it does so once. Late is no error.
    pub(crate) fn reported(&self, entry: EntryNumber, cached_tokens: u64) {
        let ring = self.ring();
        let first = ring.entries.front().map_or(0, |entry| entry.number);
        let index = entry.0.checked_sub(first).map(usize::try_from);
        if let Some(Ok(index)) = index
            && let Some(entry) = ring.entries.get(index)
        {
            entry.cached_tokens.get_or_init(|| cached_tokens);
        }
    }

    /// The newest decisions, newest first. `names` is asked once, for all sources at a time, and nothing is
    /// locked meanwhile.
    pub(crate) fn newest(
        &self,
        limit: usize,
        names: impl FnOnce(&BTreeSet<SourceId>) -> Names,
    ) -> Vec<Value> {
        let newest: Vec<Arc<Entry>> = {
            let ring = self.ring();
            ring.entries.iter().rev().take(limit).cloned().collect()
        };
        let weighed = newest.iter().flat_map(|entry| entry.weighed());
        let names = names(&weighed.map(|terms| terms.source).collect());
        newest.iter().map(|entry| entry.show(&names)).collect()
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn weighed(&self) -> impl Iterator<Item = &Terms> {
        let left = self.left.iter().flat_map(|left| &left.weighed);
        self.decision.weighed.iter().chain(left)
    }

    fn show(&self, names: &Names) -> Value {
        let decision = &self.decision;
        let moved_from = self.left.as_ref().map(|left| {
            json!({
                "worker": left.source.worker,
                "dp_rank": left.source.dp_rank,
                "overlap_blocks": left.overlap_blocks,
                "cheapest": show_all(left, names),
            })
        });
        json!({
            "number": self.number,
            "request_id": self.request_id,
            "model": self.model,
            "worker": decision.source.worker,
            "dp_rank": decision.source.dp_rank,
            "rung": decision.basis().label(),
            "index_state": decision.index_state.label(),
            "overlap_blocks": decision.overlap_blocks,
            "predicted_blocks": decision.predicted_blocks,
            "block_size": decision.claim.block_tokens,
            "prefill_tokens": decision.prefill_tokens,
            "predicted_ttft_ms": millis(decision.predicted_ttft),
            "credited_tokens":
                u64::from(decision.overlap_blocks) * u64::from(decision.claim.block_tokens),
            "cached_tokens": self.cached_tokens.get(),
            "candidates": self.candidates,
            "cheapest": show_all(decision, names),
            "moved_from": moved_from,
        })
    }
}

fn cheapest(mut weighed: Vec<Terms>) -> Vec<Terms> {
    let by_cost = |one: &Terms, other: &Terms| one.cost.total_cmp(&other.cost);
    if weighed.len() > WEIGHED_MAX {
        weighed.select_nth_unstable_by(WEIGHED_MAX, by_cost);
        weighed.truncate(WEIGHED_MAX);
        weighed.shrink_to_fit();
    }
    weighed.sort_by(by_cost);
    weighed
}

fn show_all(decision: &Decision, names: &Names) -> Vec<Value> {
    let weighed = decision.weighed.iter();
    weighed
        .map(|terms| show(terms, decision.probability(terms), names))
        .collect()
}

fn show(terms: &Terms, probability: f64, names: &Names) -> Value {
    let source = names.get(&terms.source);
    json!({
        "worker": source.map(|source| &source.worker),
        "dp_rank": source.map(|source| source.dp_rank),
        "state": terms.state.label(),
        "rung": terms.basis.label(),
        "overlap": terms.overlap,
        "predicted_blocks": terms.predicted_blocks,
        "prefill_blocks": terms.prefill_blocks,
        "prediction_blocks": terms.prediction_blocks,
        "decode_blocks": terms.decode_blocks,
        "active_requests": terms.active_requests,
        "slowness": terms.slowness,
        "cost": terms.cost,
        "probability": probability,
    })
}

fn millis(duration: std::time::Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who writes waits for nobody that looks.
    #[test]
    fn names_are_asked_with_the_ring_open() {
        let journal = Journal::default();
        let newest = journal.newest(usize::MAX, |ids| {
            assert!(ids.is_empty());
            assert!(journal.ring.try_lock().is_ok());
            Names::new()
        });
        assert!(newest.is_empty());
    }
}
