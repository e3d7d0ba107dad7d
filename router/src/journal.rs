//! The last decisions with their terms, in a bounded ring. Holds no prompts and no tokens.
//!
//! Every request writes to the ring and needs the core. A reader copies first and renders without a
//! lock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use serde::Serialize;
use serde_json::{Value, json};
use warmroute_process::access::keys::KeyId;
use warmroute_proto::query::SourceState;
use warmroute_proto::{Source, Tier, Tiers};

use crate::clock::unix_time;
use crate::route::{Decision, SourceId, Terms};

/// Decisions kept, about a MiB with the terms of the cheapest candidates of each.
const ENTRIES_MAX: usize = 1024;

/// A decision's number in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct EntryNumber(u64);

#[derive(Default)]
pub(crate) struct Journal {
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    next: u64,
    entries: VecDeque<Arc<JournalEntry>>,
}

/// The sources of decisions.
pub(crate) type Names = BTreeMap<SourceId, Source>;

struct JournalEntry {
    number: u64,
    unix_ms: u64,
    request_id: String,
    tenant: Option<KeyId>,
    model: String,
    candidates: usize,
    decision: Decision,
    /// The first choice, if the request was moved.
    moved_from: Option<Box<Decision>>,
    cached_tokens: OnceLock<u64>,
}

impl Journal {
    /// Records a decision and takes the candidates out of it. `moved_from`: the first
    /// choice, if the request was moved.
    pub(crate) fn record(
        &self,
        (request_id, tenant): (&str, Option<&KeyId>),
        model: &str,
        decision: &mut Decision,
        moved_from: Option<Box<Decision>>,
    ) -> EntryNumber {
        let weighed = std::mem::take(&mut decision.weighed);
        let candidates = std::mem::take(&mut decision.compared).len();
        let decision = Decision {
            weighed: by_cost(weighed),
            ..decision.clone()
        };
        let moved_from = moved_from.map(|mut first| {
            first.weighed = by_cost(std::mem::take(&mut first.weighed));
            first.compared = Vec::new();
            first
        });
        let mut ring = self.ring();
        let number = ring.next;
        ring.next += 1;
        if ring.entries.len() == ENTRIES_MAX {
            ring.entries.pop_front();
        }
        ring.entries.push_back(Arc::new(JournalEntry {
            number,
            unix_ms: u64::try_from(unix_time().as_millis()).unwrap_or(u64::MAX),
            request_id: request_id.to_owned(),
            tenant: tenant.cloned(),
            model: model.to_owned(),
            candidates,
            decision,
            moved_from,
            cached_tokens: OnceLock::new(),
        }));
        EntryNumber(number)
    }

    /// Adds the cached tokens that the engine reported, unless the entry is no longer kept.
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

    /// The newest decisions, newest first. `names` is called once, without a lock.
    pub(crate) fn newest(
        &self,
        limit: usize,
        names: impl FnOnce(&BTreeSet<SourceId>) -> Names,
    ) -> Vec<Value> {
        let newest: Vec<Arc<JournalEntry>> = {
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

impl JournalEntry {
    fn weighed(&self) -> impl Iterator<Item = &Terms> {
        let first = self.moved_from.iter().flat_map(|first| &first.weighed);
        self.decision.weighed.iter().chain(first)
    }

    fn show(&self, names: &Names) -> Value {
        let decision = &self.decision;
        let moved_from = self.moved_from.as_ref().map(|first| {
            json!({
                "worker": first.source.worker,
                "dp_rank": first.source.dp_rank,
                "overlap_blocks": first.overlap_blocks,
                "cheapest": show_all(first, names),
            })
        });
        json!({
            "number": self.number,
            "unix_ms": self.unix_ms,
            "policy": decision.policy.label(),
            "request_id": self.request_id,
            "tenant": self.tenant.as_ref().map(KeyId::as_str),
            "model": self.model,
            "worker": decision.source.worker,
            "dp_rank": decision.source.dp_rank,
            "rung": decision.basis().label(),
            "index_state": decision.index_state.label(),
            "tier_states": tiers(&decision.tier_states),
            "overlap_blocks": decision.overlap_blocks,
            "predicted_blocks": decision.predicted_blocks,
            "block_size": decision.claim.block_tokens(),
            "prefill_tokens": decision.prefill_tokens,
            "predicted_ttft_ms": millis(decision.predicted_ttft),
            "credited_tokens":
                u64::from(decision.overlap_blocks) * u64::from(decision.claim.block_tokens()),
            "cached_tokens": self.cached_tokens.get(),
            "candidates": self.candidates,
            "cheapest": show_all(decision, names),
            "moved_from": moved_from,
        })
    }
}

fn tiers(states: &Tiers<SourceState>) -> Value {
    let exist = Tier::ALL
        .iter()
        .filter(|tier| !states.get(**tier).is_absent());
    let labels = exist.map(|tier| (tier.label().to_owned(), states.get(*tier).label().into()));
    Value::Object(labels.collect())
}

fn by_cost(mut weighed: Vec<Terms>) -> Vec<Terms> {
    weighed.sort_by(|one, other| one.cost.total_cmp(&other.cost));
    weighed
}

fn show_all(decision: &Decision, names: &Names) -> Vec<Value> {
    let weighed = decision.weighed.iter();
    weighed.map(|terms| show(terms, names)).collect()
}

fn show(terms: &Terms, names: &Names) -> Value {
    let source = names.get(&terms.source);
    json!({
        "worker": source.map(|source| &source.worker),
        "dp_rank": source.map(|source| source.dp_rank),
        "state": terms.state.label(),
        "rung": terms.basis.label(),
        "overlap": terms.overlap,
        "reported_blocks": terms.reported_blocks,
        "predicted_blocks": terms.predicted_blocks,
        "prefill_blocks": terms.prefill_blocks,
        "prediction_blocks": terms.prediction_blocks(),
        "decode_blocks": terms.decode_blocks,
        "active_requests": terms.active_requests,
        "foreign_requests": terms.foreign_requests,
        "foreign_prefill_blocks": terms.foreign_prefill_blocks,
        "foreign_decode_blocks": terms.foreign_decode_blocks,
        "slowness": terms.factors.slowness,
        "time_ms": {
            "queue": terms.time.queue * 1e3,
            "foreign": terms.time.foreign * 1e3,
            "prefill": terms.time.prefill * 1e3,
            "decode": terms.time.decode * 1e3,
        },
        "factors": { "prefill": terms.factors.prefill, "decode": terms.factors.decode },
        "cost": terms.cost,
        "is_near": terms.is_near,
        "probability": terms.probability,
    })
}

fn millis(duration: std::time::Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_looked_up_without_the_rings_lock() {
        let journal = Journal::default();
        let newest = journal.newest(usize::MAX, |ids| {
            assert!(ids.is_empty());
            assert!(journal.ring.try_lock().is_ok());
            Names::new()
        });
        assert!(newest.is_empty());
    }
}
