//! The registry as every process keeps it. Time is an argument.
//!
//! A write is applied here and broadcast; of two writes of a key the one with the higher revision
//! counts everywhere. Leases expire by the clock of each process, not while the process is cut off
//! or after it stood still. A deleted or expired key is remembered for a while, so that a late
//! message does not bring it back.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use warmroute_proto::peers::{RegistryDigest, RegistryWrite};

use crate::registry_watch::PresentKeys;
use crate::{PlaneError, PutIf, RegistryEntry, Revision};

/// Most keys, those that are remembered too.
const KEYS_MAX: usize = 1 << 17;
/// Most bytes of keys and values.
const BYTES_MAX: usize = 64 << 20;

/// How long a deleted or expired key is remembered.
const GONE_KEPT: Duration = Duration::from_secs(3600);

/// A process that did not look for so long stood still, and may have missed renewals.
const STANDSTILL: Duration = Duration::from_secs(1);

/// Bits of a revision that name its writer.
const WRITER_BITS: u32 = 16;
/// Counters above this are no message: nothing could follow the last one.
const COUNTER_MAX: u64 = 1 << 46;

pub(super) struct SharedRegistry {
    keys: BTreeMap<String, RegistrySlot>,
    writer: u64,
    /// That of the last own write, at least.
    counter: u64,
    bytes: usize,
    looked: Instant,
    leases: LeaseClock,
    /// The first moment at which a key expires or is forgotten.
    next_due: Option<Instant>,
    digest: Option<RegistryDigest>,
}

/// Whether leases run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeaseClock {
    Running,
    /// The process is cut off from their holders.
    Held,
}

struct RegistrySlot {
    entry: RegistryEntry,
    life: SlotLife,
}

enum SlotLife {
    Kept,
    Leased { lease: Duration, expiry: Instant },
    Gone { forgotten: Instant },
}

/// What became of another process's write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Merged {
    Applied,
    /// It, or a later one, is known.
    Known,
    /// It exceeds a bound.
    Refused,
}

impl SharedRegistry {
    /// `counter` is above those of earlier lives of this plane: the time of day in milliseconds.
    pub(super) const fn new(now: Instant, writer: u64, counter: u64) -> Self {
        Self {
            keys: BTreeMap::new(),
            writer: writer & ((1 << WRITER_BITS) - 1),
            counter,
            bytes: 0,
            looked: now,
            leases: LeaseClock::Running,
            next_due: None,
            digest: None,
        }
    }

    pub(super) fn get(&mut self, now: Instant, key: &str) -> Option<RegistryEntry> {
        self.expire(now);
        self.present(key).cloned()
    }

    /// Applies an own write. Returns what to broadcast.
    pub(super) fn put(
        &mut self,
        now: Instant,
        key: String,
        value: Bytes,
        condition: PutIf,
        lease: Option<Duration>,
    ) -> Result<RegistryWrite, PlaneError> {
        self.expire(now);
        let present = self.present(&key).map(|entry| entry.revision);
        let holds = match condition {
            PutIf::Always => true,
            PutIf::Absent => present.is_none(),
            PutIf::Revision(revision) => present == Some(revision),
        };
        if !holds {
            return Err(PlaneError::Conflict);
        }
        let revision = self.next_revision(&key);
        let write = RegistryWrite {
            key,
            revision,
            value: Some(value.to_vec()),
            lease_ms: lease.map(millis),
        };
        applied(self.merge(now, write.clone()), write)
    }

    /// Applies an own deletion. Returns what to broadcast.
    pub(super) fn delete(
        &mut self,
        now: Instant,
        key: &str,
        revision: Revision,
    ) -> Result<RegistryWrite, PlaneError> {
        self.expire(now);
        if self.present(key).map(|entry| entry.revision) != Some(revision) {
            return Err(PlaneError::Conflict);
        }
        let write = RegistryWrite {
            key: key.to_owned(),
            revision: self.next_revision(key),
            value: None,
            lease_ms: Some(millis(GONE_KEPT)),
        };
        applied(self.merge(now, write.clone()), write)
    }

    /// Applies a write that may come late, twice or in another order.
    pub(super) fn merge(&mut self, now: Instant, write: RegistryWrite) -> Merged {
        let RegistryWrite {
            key,
            revision,
            value,
            lease_ms,
        } = write;
        let counter = revision >> WRITER_BITS;
        let known = self.keys.get(&key);
        let replaced = known.map_or(0, |known| known.bytes(&key));
        let more = key.len() + value.as_ref().map_or(0, Vec::len);
        let has_room = match known {
            Some(_) => more <= replaced || self.bytes - replaced + more <= BYTES_MAX,
            None => self.keys.len() < KEYS_MAX && self.bytes + more <= BYTES_MAX,
        };
        if counter > COUNTER_MAX || !has_room {
            return Merged::Refused;
        }
        if known.is_some_and(|known| !known.is_before(revision, value.as_deref())) {
            return Merged::Known;
        }
        let after = |ms| now + Duration::from_millis(ms).min(GONE_KEPT);
        let life = match (&value, lease_ms) {
            (Some(_), None) => SlotLife::Kept,
            (Some(_), Some(ms)) => SlotLife::Leased {
                lease: Duration::from_millis(ms).min(GONE_KEPT),
                expiry: after(ms),
            },
            (None, remembered) => SlotLife::Gone {
                forgotten: after(remembered.unwrap_or(0)),
            },
        };
        let entry = RegistryEntry {
            value: Bytes::from(value.unwrap_or_default()),
            revision: Revision(revision),
        };
        self.insert(key, RegistrySlot { entry, life });
        Merged::Applied
    }

    /// The keys behind this one, up to about `bytes_max` and at least one, and whether there are
    /// more.
    pub(super) fn page(
        &mut self,
        now: Instant,
        after: &str,
        bytes_max: usize,
    ) -> (Vec<RegistryWrite>, bool) {
        self.expire(now);
        let mut bytes = 0;
        let mut writes = Vec::new();
        let behind = (Bound::Excluded(after), Bound::Unbounded);
        for (key, slot) in self.keys.range::<str, _>(behind) {
            bytes += slot.bytes(key) + size_of::<RegistryWrite>();
            if bytes > bytes_max && !writes.is_empty() {
                return (writes, true);
            }
            writes.push(slot.write(key, now));
        }
        (writes, false)
    }

    /// The digest of the keys without leases. Leases are renewed within seconds, so that those that
    /// differ are not worth a comparison.
    pub(super) fn digest(&mut self) -> RegistryDigest {
        let keys = &self.keys;
        *self.digest.get_or_insert_with(|| {
            let mut digest = RegistryDigest::default();
            for (key, slot) in keys {
                if matches!(slot.life, SlotLife::Kept) {
                    digest.insert(key, slot.entry.revision.0);
                }
            }
            digest
        })
    }

    /// The process is cut off from the others.
    pub(super) const fn hold_leases(&mut self) {
        self.leases = LeaseClock::Held;
    }

    /// The process is connected again: every lease begins again.
    pub(super) fn run_leases(&mut self, now: Instant) {
        if self.leases == LeaseClock::Held {
            self.leases = LeaseClock::Running;
            self.begin_leases(now);
        }
    }

    pub(super) const fn next_due(&self) -> Option<Instant> {
        self.next_due
    }

    /// Removes what has expired. Called several times a second.
    pub(super) fn expire(&mut self, now: Instant) {
        if now.saturating_duration_since(self.looked) > STANDSTILL {
            self.begin_leases(now);
        }
        self.looked = now;
        if self.next_due.is_none_or(|due| now < due) {
            return;
        }
        let is_held = self.leases == LeaseClock::Held;
        for slot in self.keys.values_mut() {
            if let SlotLife::Leased { expiry, .. } = slot.life
                && expiry <= now
                && !is_held
            {
                self.bytes -= slot.entry.value.len();
                slot.entry.value = Bytes::new();
                let forgotten = now + GONE_KEPT;
                slot.life = SlotLife::Gone { forgotten };
            }
        }
        let bytes = &mut self.bytes;
        self.keys.retain(|key, slot| {
            let is_kept = !matches!(slot.life, SlotLife::Gone { forgotten } if forgotten <= now);
            if !is_kept {
                *bytes -= slot.bytes(key);
            }
            is_kept
        });
        self.note_due(now);
    }

    fn begin_leases(&mut self, now: Instant) {
        for slot in self.keys.values_mut() {
            if let SlotLife::Leased { lease, expiry } = &mut slot.life {
                *expiry = (*expiry).max(now + *lease);
            }
        }
        self.note_due(now);
    }

    fn note_due(&mut self, now: Instant) {
        let is_held = self.leases == LeaseClock::Held;
        let due = self.keys.values().filter_map(|slot| match slot.life {
            SlotLife::Kept => None,
            SlotLife::Leased { expiry, .. } if is_held => Some(expiry.max(now + STANDSTILL)),
            SlotLife::Leased { expiry, .. } => Some(expiry),
            SlotLife::Gone { forgotten } => Some(forgotten),
        });
        self.next_due = due.min();
    }

    fn insert(&mut self, key: String, slot: RegistrySlot) {
        let due = match slot.life {
            SlotLife::Kept => None,
            SlotLife::Leased { expiry, .. } => Some(expiry),
            SlotLife::Gone { forgotten } => Some(forgotten),
        };
        self.next_due = self.next_due.into_iter().chain(due).min();
        self.bytes += slot.bytes(&key);
        let before = self.keys.get(&key);
        if let Some(before) = before {
            self.bytes -= before.bytes(&key);
        }
        // Renewals of leases come all the time, and do not count.
        let counts = |slot: &RegistrySlot| matches!(slot.life, SlotLife::Kept);
        if counts(&slot) || before.is_some_and(counts) {
            self.digest = None;
        }
        self.keys.insert(key, slot);
    }

    /// Above the key's, and above those of earlier lives of this plane. Other keys do not count: a
    /// process can use up the revisions of the keys that it may write, and no others.
    fn next_revision(&mut self, key: &str) -> u64 {
        self.counter += 1;
        let known = self.keys.get(key);
        let above = known.map_or(0, |slot| (slot.entry.revision.0 >> WRITER_BITS) + 1);
        self.counter.max(above) << WRITER_BITS | self.writer
    }

    fn present(&self, key: &str) -> Option<&RegistryEntry> {
        self.keys.get(key)?.present()
    }
}

impl PresentKeys for SharedRegistry {
    fn from(&self, prefix: &str) -> impl Iterator<Item = (&String, &RegistryEntry)> {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let slots = self.keys.range::<str, _>(from);
        slots.filter_map(|(key, slot)| Some((key, slot.present()?)))
    }

    fn has(&self, key: &str) -> bool {
        self.present(key).is_some()
    }
}

impl RegistrySlot {
    fn present(&self) -> Option<&RegistryEntry> {
        match self.life {
            SlotLife::Kept | SlotLife::Leased { .. } => Some(&self.entry),
            SlotLife::Gone { .. } => None,
        }
    }

    /// Whether another write of the key is later. What has expired stays so.
    fn is_before(&self, revision: u64, value: Option<&[u8]>) -> bool {
        let present = self.present().map(|entry| &entry.value[..]);
        revision > self.entry.revision.0
            || revision == self.entry.revision.0 && present.is_some() && value > present
    }

    fn bytes(&self, key: &str) -> usize {
        key.len() + self.entry.value.len()
    }

    fn write(&self, key: &str, now: Instant) -> RegistryWrite {
        let left = |until: Instant| Some(millis(until.saturating_duration_since(now)));
        let (value, lease_ms) = match self.life {
            SlotLife::Kept => (Some(self.entry.value.to_vec()), None),
            SlotLife::Leased { expiry, .. } => (Some(self.entry.value.to_vec()), left(expiry)),
            SlotLife::Gone { forgotten } => (None, left(forgotten)),
        };
        RegistryWrite {
            key: key.to_owned(),
            revision: self.entry.revision.0,
            value,
            lease_ms,
        }
    }
}

fn applied(merged: Merged, write: RegistryWrite) -> Result<RegistryWrite, PlaneError> {
    match merged {
        Merged::Applied => Ok(write),
        Merged::Known | Merged::Refused => {
            Err(PlaneError::Unavailable("the registry is full".to_owned()))
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
