//! Operators' drains of workers: the last entry of each worker and what the registry lacks. Pure.
//!
//! Entries of one worker are ordered by their turn. A router that remembers a higher turn than the
//! registry has (the registry lost it, or was restored from an older copy) writes it again.

use std::collections::{BTreeMap, BTreeSet};

use warmroute_proto::WorkerId;
use warmroute_proto::registry::{DrainContext, DrainEntry, DrainState, DrainUntil};

/// The last drain entry of each worker that ever had one, some hundred bytes each.
#[derive(Debug, Default)]
pub(crate) struct DrainTable {
    records: BTreeMap<WorkerId, DrainRecord>,
    contexts: BTreeMap<WorkerId, DrainContext>,
}

#[derive(Debug)]
struct DrainRecord {
    entry: DrainEntry,
    stored: Option<u64>,
    /// The registry has an older entry, or none.
    is_missing: bool,
}

/// An entry to write, on the condition that the registry still has what it replaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DrainWrite {
    pub entry: DrainEntry,
    /// The registry revision that is replaced; `None`: the key is absent.
    pub replaces: Option<u64>,
}

impl DrainTable {
    pub(crate) fn entry(&self, worker: &WorkerId) -> Option<&DrainEntry> {
        self.records.get(worker).map(|record| &record.entry)
    }

    pub(crate) fn drain(&self, worker: &WorkerId) -> DrainState {
        self.entry(worker)
            .map_or(DrainState::Serving, |entry| entry.drain)
    }

    /// The registry has this context, of the drain of its turn.
    pub(crate) fn set_context(&mut self, context: DrainContext) {
        self.contexts.insert(context.worker.clone(), context);
    }

    /// What the worker's drain refers to. `None`: it is not drained, or by an earlier version.
    pub(crate) fn context(&self, worker: &WorkerId) -> Option<&DrainContext> {
        let entry = self.entry(worker)?;
        let context = self.contexts.get(worker)?;
        (entry.drain == DrainState::Draining && entry.turn == context.turn).then_some(context)
    }

    /// The context of a drain that ends when another shim registers the worker.
    pub(crate) fn ends_with_restart(&self, worker: &WorkerId) -> Option<&DrainContext> {
        let context = self.context(worker)?;
        (context.until == DrainUntil::Restart).then_some(context)
    }

    /// The write that drains a drained worker again, in a new turn.
    pub(crate) fn renewal(&self, worker: &WorkerId, now_unix_s: u64) -> Option<DrainWrite> {
        let known = self.records.get(worker)?;
        Some(next(worker, known.entry.drain, Some(known), now_unix_s))
    }

    /// The write that makes `drain` the last entry. `None`: it is.
    pub(crate) fn next_write(
        &self,
        worker: &WorkerId,
        drain: DrainState,
        now_unix_s: u64,
    ) -> Option<DrainWrite> {
        let known = self.records.get(worker);
        let stands = known.map_or(drain == DrainState::Serving, |record| {
            record.entry.drain == drain && !record.is_missing
        });
        if stands {
            return None;
        }
        Some(next(worker, drain, known, now_unix_s))
    }

    /// The registry has `entry` at `revision`.
    pub(crate) fn stored(&mut self, entry: DrainEntry, revision: u64) {
        let stored = Some(revision);
        match self.records.get_mut(&entry.worker) {
            // A late event or an older copy. If it is late, the write that replaces it fails.
            Some(known) if entry.turn < known.entry.turn => {
                known.stored = stored;
                known.is_missing = true;
            }
            Some(_) | None => {
                let record = DrainRecord {
                    entry,
                    stored,
                    is_missing: false,
                };
                self.records.insert(record.entry.worker.clone(), record);
            }
        }
    }

    /// The registry has no entry of this worker. A deletion does not end a drain.
    pub(crate) fn absent(&mut self, worker: &WorkerId) {
        if let Some(known) = self.records.get_mut(worker) {
            known.stored = None;
            known.is_missing = true;
        }
    }

    /// The registry has entries of these workers only.
    pub(crate) fn listed(&mut self, listed: &BTreeSet<WorkerId>) {
        for (_, known) in self
            .records
            .iter_mut()
            .filter(|(worker, _)| !listed.contains(worker))
        {
            known.stored = None;
            known.is_missing = true;
        }
    }

    /// Writes that restore what the registry lacks.
    pub(crate) fn missing(&self) -> Vec<DrainWrite> {
        let missing = self.records.values().filter(|record| record.is_missing);
        let writes = missing.map(|record| DrainWrite {
            entry: record.entry.clone(),
            replaces: record.stored,
        });
        writes.collect()
    }

    /// A conflict: the registry has another entry, which the watch reports.
    pub(crate) fn superseded(&mut self, worker: &WorkerId) {
        if let Some(known) = self.records.get_mut(worker) {
            known.is_missing = false;
        }
    }
}

fn next(
    worker: &WorkerId,
    drain: DrainState,
    known: Option<&DrainRecord>,
    now_unix_s: u64,
) -> DrainWrite {
    let entry = DrainEntry {
        worker: worker.clone(),
        drain,
        turn: known.map_or(0, |record| record.entry.turn.saturating_add(1)),
        set_unix_s: now_unix_s,
    };
    let replaces = known.and_then(|record| record.stored);
    DrainWrite { entry, replaces }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_event_is_not_taken_for_a_loss() {
        let (mut table, worker) = (DrainTable::default(), WorkerId::from("w"));
        let store = |table: &mut DrainTable, drain, revision| {
            let write = table.next_write(&worker, drain, 1).unwrap();
            table.stored(write.entry.clone(), revision);
            write.entry
        };
        let first = store(&mut table, DrainState::Draining, 10);
        let second = store(&mut table, DrainState::Serving, 11);
        // The first one's event comes after the second one's acknowledgement.
        table.stored(first, 10);
        assert_eq!(table.drain(&worker), DrainState::Serving);
        // Written over the late event's revision, which fails if the event was late.
        let write = DrainWrite {
            entry: second.clone(),
            replaces: Some(10),
        };
        assert_eq!(table.missing(), [write]);
        table.superseded(&worker);
        table.stored(second, 11);
        assert!(table.missing().is_empty());
    }
}
