//! Operators' drains of workers: the last entry of each worker and what the registry lacks. Pure.
//!
//! Entries of one worker are ordered by their turn. A router that remembers a higher turn than the
//! registry has (the registry lost it, or was restored from an older copy) writes it again.
//!
//! Names of workers may never return, so entries are collected. Invariant: an entry is deleted only if
//! its absence means the same, which is that the worker serves, and only [`KEPT`] after it was
//! written, when each router has read it. A drain until undone is never deleted. Turns begin again
//! after a deletion: the later drain of a name wins over an entry that was old enough to be deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use warmroute_proto::WorkerId;
use warmroute_proto::registry::{DrainEntry, DrainState, DrainUntil};

/// Age of an entry that may be collected. A router that was cut off for longer may restore a drain
/// that was undone.
const KEPT: Duration = Duration::from_secs(7 * 86_400);

/// Time between an entry and a lower turn that is the later one. Between two turns of a worker, routers'
/// clocks differ by less.
const RENAMED: Duration = Duration::from_secs(KEPT.as_secs() / 2);

/// The last drain entry of each worker, some hundred bytes each.
#[derive(Debug, Default)]
pub(crate) struct DrainTable {
    records: BTreeMap<WorkerId, DrainRecord>,
}

/// An entry that has no effect any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OutdatedDrain {
    pub worker: WorkerId,
    /// The entry's in the registry.
    pub revision: u64,
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

impl DrainRecord {
    /// This router was cut off while the entry was deleted and the worker drained again.
    const fn was_collected(&self, later: &DrainEntry) -> bool {
        let apart = later.set_unix_s.saturating_sub(self.entry.set_unix_s);
        matches!(self.entry.drain, DrainState::Serving) && apart >= RENAMED.as_secs()
    }
}

impl DrainTable {
    pub(crate) fn entry(&self, worker: &WorkerId) -> Option<&DrainEntry> {
        self.records.get(worker).map(|record| &record.entry)
    }

    pub(crate) fn drain(&self, worker: &WorkerId) -> DrainState {
        self.entry(worker)
            .map_or(DrainState::Serving, |entry| entry.drain)
    }

    /// The drain of a worker, if it ends when another shim registers the worker.
    pub(crate) fn ends_with_restart(&self, worker: &WorkerId) -> Option<&DrainEntry> {
        let entry = self.entry(worker)?;
        let ends = entry.drain == DrainState::Draining && entry.until == DrainUntil::Restart;
        ends.then_some(entry)
    }

    /// The write that drains a worker, `None` if it is drained at least that long.
    pub(crate) fn drain_write(
        &self,
        worker: &WorkerId,
        until: DrainUntil,
        now_unix_s: u64,
    ) -> Option<DrainWrite> {
        let known = self.records.get(worker);
        let stands = known.is_some_and(|known| {
            let of = &known.entry;
            let lasts = until == DrainUntil::Restart || of.until == DrainUntil::Undone;
            of.drain == DrainState::Draining && lasts && !known.is_missing
        });
        if stands {
            return None;
        }
        let mut write = next(worker, DrainState::Draining, known, now_unix_s);
        write.entry.until = until;
        Some(write)
    }

    /// The write that ends a worker's drain, `None` if there is none.
    pub(crate) fn end_write(&self, worker: &WorkerId, now_unix_s: u64) -> Option<DrainWrite> {
        let known = self.records.get(worker)?;
        let serves = known.entry.drain == DrainState::Serving;
        let ends = || next(worker, DrainState::Serving, Some(known), now_unix_s);
        (!serves || known.is_missing).then(ends)
    }

    /// The registry has `entry` at `revision`.
    pub(crate) fn stored(&mut self, entry: DrainEntry, revision: u64) {
        let stored = Some(revision);
        match self.records.get_mut(&entry.worker) {
            // A late event or an older copy. If it is late, the write that replaces it fails.
            Some(known) if entry.turn < known.entry.turn && !known.was_collected(&entry) => {
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
        match self.drain(worker) {
            DrainState::Serving => drop(self.records.remove(worker)),
            DrainState::Draining => {
                if let Some(known) = self.records.get_mut(worker) {
                    known.stored = None;
                    known.is_missing = true;
                }
            }
        }
    }

    /// The registry has entries of these workers only.
    pub(crate) fn listed(&mut self, listed: &BTreeSet<WorkerId>) {
        let known = self.records.keys();
        let absent: Vec<_> = known
            .filter(|worker| !listed.contains(*worker))
            .cloned()
            .collect();
        for worker in &absent {
            self.absent(worker);
        }
    }

    /// Entries to delete: of workers that have served for long.
    pub(crate) fn outdated(&self, now_unix_s: u64) -> Vec<OutdatedDrain> {
        let old = self.old(now_unix_s).filter_map(|(worker, record)| {
            let serves = record.entry.drain == DrainState::Serving;
            Some(OutdatedDrain {
                worker: worker.clone(),
                revision: record.stored.filter(|_| serves)?,
            })
        });
        old.collect()
    }

    /// Writes that end drains until a restart, of workers that have been gone for long: whichever shim
    /// registers the name would end them.
    pub(crate) fn abandoned(
        &self,
        is_known: impl Fn(&WorkerId) -> bool,
        now_unix_s: u64,
    ) -> Vec<DrainWrite> {
        let gone = self
            .old(now_unix_s)
            .filter(|(worker, _)| self.ends_with_restart(worker).is_some() && !is_known(worker));
        gone.map(|(worker, record)| next(worker, DrainState::Serving, Some(record), now_unix_s))
            .collect()
    }

    fn old(&self, now_unix_s: u64) -> impl Iterator<Item = (&WorkerId, &DrainRecord)> {
        self.records.iter().filter(move |(_, record)| {
            let age = now_unix_s.saturating_sub(record.entry.set_unix_s);
            age >= KEPT.as_secs() && !record.is_missing
        })
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

/// The write that follows what is known. Its shim is not known here.
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
        shim: None,
        until: DrainUntil::default(),
    };
    let replaces = known.and_then(|record| record.stored);
    DrainWrite { entry, replaces }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_collected_when_their_absence_means_the_same() {
        let (mut table, week) = (DrainTable::default(), KEPT.as_secs());
        let worker = |name: &str| WorkerId::from(name);
        let store = |table: &mut DrainTable, write: DrainWrite, revision| {
            table.stored(write.entry, revision);
        };
        for (name, until) in [
            ("gone", DrainUntil::Restart),
            ("here", DrainUntil::Restart),
            ("kept", DrainUntil::Undone),
            ("back", DrainUntil::Undone),
        ] {
            let write = table.drain_write(&worker(name), until, 100);
            store(&mut table, write.unwrap(), 1);
        }
        let write = table.end_write(&worker("back"), 200);
        store(&mut table, write.unwrap(), 2);
        let is_known = |worker: &WorkerId| worker.as_str() == "here";

        assert_eq!(table.abandoned(is_known, 99 + week), []);
        let ends = table.abandoned(is_known, 100 + week);
        assert_eq!(ends.len(), 1);
        let (entry, replaces) = (&ends[0].entry, ends[0].replaces);
        assert_eq!(
            (entry.worker.as_str(), entry.turn, replaces),
            ("gone", 1, Some(1))
        );
        assert_eq!(entry.drain, DrainState::Serving);
        store(&mut table, ends[0].clone(), 3);

        let outdated = |name, revision| OutdatedDrain {
            worker: worker(name),
            revision,
        };
        assert_eq!(table.outdated(199 + week), []);
        assert_eq!(table.outdated(200 + week), [outdated("back", 2)]);
        // The ended drain is kept for as long again.
        let later = table.outdated(100 + 2 * week);
        assert_eq!(later, [outdated("back", 2), outdated("gone", 3)]);

        // Routers forget what was collected, and restore a drain that was lost.
        table.listed(&BTreeSet::new());
        assert!(table.entry(&worker("back")).is_none());
        let restored = table.missing();
        let restored: Vec<_> = restored
            .iter()
            .map(|write| write.entry.worker.as_str())
            .collect();
        assert_eq!(restored, ["here", "kept"]);
    }

    /// Without this, a router that was cut off for some minutes undoes the drain of an operator.
    #[test]
    fn a_drain_after_a_deletion_stands_against_routers_that_missed_the_deletion() {
        let worker = WorkerId::from("w");
        let entry = |drain, turn, set_unix_s| DrainEntry {
            worker: worker.clone(),
            drain,
            turn,
            set_unix_s,
            shim: None,
            until: DrainUntil::Undone,
        };
        let week = KEPT.as_secs();
        for (drain, set, state, missing) in [
            (DrainState::Serving, week + 100, DrainState::Draining, 0),
            // An older copy, or a late event of a router whose clock is a day ahead.
            (DrainState::Serving, 99, DrainState::Serving, 1),
            (DrainState::Serving, 100 + 86_400, DrainState::Serving, 1),
            // A drain until undone is never deleted: this is a copy that was written again.
            (DrainState::Draining, week + 100, DrainState::Draining, 1),
        ] {
            let mut table = DrainTable::default();
            table.stored(entry(drain, 5, 100), 10);
            table.stored(entry(DrainState::Draining, 0, set), 20);
            assert_eq!(table.drain(&worker), state, "set at {set}");
            assert_eq!(table.missing().len(), missing, "set at {set}");
        }
    }

    #[test]
    fn a_late_event_is_not_taken_for_a_loss() {
        let (mut table, worker) = (DrainTable::default(), WorkerId::from("w"));
        let store = |table: &mut DrainTable, write: Option<DrainWrite>, revision| {
            let entry = write.unwrap().entry;
            table.stored(entry.clone(), revision);
            entry
        };
        let write = table.drain_write(&worker, DrainUntil::Undone, 1);
        let first = store(&mut table, write, 10);
        let write = table.end_write(&worker, 1);
        let second = store(&mut table, write, 11);
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
