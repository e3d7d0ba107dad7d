//! Schedule, names, pointer and retention of snapshots.
//!
//! The pointer only moves forward, to a higher position of the same log. Exception: a *dead*
//! pointer, whose record is proven absent from the log (rolled back or replaced), names nothing
//! usable and is replaced. Two snapshots are kept. Names that sort before them are deleted; names
//! that sort behind may be in the making by another replica.

use std::fmt;
use std::time::{Duration, Instant};

use warmroute_proto::snapshot::{SnapshotPointer, SnapshotRef};
use warmroute_proto::{LogPosition, StreamIdentity};

/// The store deletes snapshots by age (7 days by default): an idle fleet's is rewritten before.
const REFRESH: Duration = Duration::from_secs(24 * 60 * 60);

/// Pause after a failed snapshot.
pub const PAUSE: Duration = Duration::from_secs(10);

/// Pause while another replica writes a snapshot.
pub const BUSY_PAUSE: Duration = Duration::from_secs(2);

/// Lease of the snapshot writer. Usually longer than writing takes; otherwise two replicas write
/// one. A dead writer delays the others by this time.
pub const LEASE: Duration = Duration::from_secs(10);

/// When a snapshot is due.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Bytes of log since the last snapshot.
    pub bytes: u64,
    /// Time since the last snapshot, if a record came since.
    pub every: Duration,
}

/// How far the log is read at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadProgress {
    pub at: Instant,
    pub position: LogPosition,
    /// Bytes of the log read since the start of the process.
    pub bytes: u64,
    /// The oldest record that the log keeps.
    pub first: LogPosition,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LastSnapshot {
    at: Instant,
    position: LogPosition,
    bytes: u64,
    /// It was written while this process ran; one found at startup may be of any age.
    seen: bool,
}

/// The last snapshot of any replica, as far as this one knows.
#[derive(Clone, Copy, Debug, Default)]
pub struct SnapshotProgress {
    taken: Option<LastSnapshot>,
    /// Earliest next attempt, after a failure.
    not_before: Option<Instant>,
    looked: bool,
}

impl SnapshotProgress {
    /// Returns true if a snapshot is due.
    #[must_use]
    pub fn is_due(&self, now: ReadProgress, schedule: &Schedule) -> bool {
        if now.position == LogPosition(0) || self.not_before.is_some_and(|until| now.at < until) {
            return false;
        }
        let Some(taken) = &self.taken else {
            return true;
        };
        let age = now.at.saturating_duration_since(taken.at);
        let refresh = if taken.seen { REFRESH } else { schedule.every };
        if now.position == taken.position {
            return age >= refresh;
        }
        let bytes = now.bytes.saturating_sub(taken.bytes);
        age >= schedule.every || bytes >= schedule.bytes || is_falling_off(now, taken.position)
    }

    /// This replica wrote a snapshot.
    pub const fn took(&mut self, at: ReadProgress) {
        self.looked = true;
        self.taken = Some(LastSnapshot {
            at: at.at,
            position: at.position,
            bytes: at.bytes,
            seen: true,
        });
    }

    /// The pointer names this position of the present log. Bytes between two observations are
    /// interpolated by position.
    pub fn learned(&mut self, now: ReadProgress, position: LogPosition) {
        let seen = std::mem::replace(&mut self.looked, true);
        if self.taken.is_some_and(|taken| taken.position >= position) {
            return;
        }
        let from = self
            .taken
            .map_or((LogPosition(0), 0), |t| (t.position, t.bytes));
        let span = now.position.0.saturating_sub(from.0.0).max(1);
        let part = position.0.saturating_sub(from.0.0).min(span);
        let read = u128::from(now.bytes.saturating_sub(from.1));
        let bytes = read * u128::from(part) / u128::from(span);
        self.taken = Some(LastSnapshot {
            at: now.at,
            position,
            bytes: from.1 + u64::try_from(bytes).unwrap_or(u64::MAX),
            seen,
        });
    }

    /// The pointer is absent, dead or of another log: the last snapshot is void.
    pub const fn nothing_there(&mut self) {
        self.looked = true;
        self.taken = None;
    }

    pub const fn wait_until(&mut self, at: Instant) {
        self.not_before = Some(at);
    }

    /// Minimum age of the last snapshot; `None` without one.
    #[must_use]
    pub fn age(&self, now: Instant) -> Option<Duration> {
        self.taken
            .map(|taken| now.saturating_duration_since(taken.at))
    }
}

/// Returns true if a log that drops old records approaches the snapshot's position: a quarter of
/// what it keeps came since.
fn is_falling_off(now: ReadProgress, taken: LogPosition) -> bool {
    let kept = now.position.next().0.saturating_sub(now.first.0);
    let since = now.position.0.saturating_sub(taken.0);
    now.first.0 > 1 && since.saturating_mul(4) >= kept
}

/// Order of snapshots: by the log's creation, then by position.
type Order = (u64, u64, LogPosition);

const fn order(log: StreamIdentity, position: LogPosition) -> Order {
    (log.created_unix_ns, log.nonce, position)
}

const fn order_of(snapshot: &SnapshotRef) -> Order {
    order(snapshot.log, snapshot.at.position)
}

/// A snapshot's name, which sorts it among the others. Unique: it contains writer and attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    pub log: StreamIdentity,
    pub position: LogPosition,
    pub suffix: String,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StreamIdentity {
            created_unix_ns,
            nonce,
        } = self.log;
        let position = self.position.0;
        write!(
            f,
            "s1-{created_unix_ns:016x}-{nonce:016x}-{position:016x}-{}",
            self.suffix
        )
    }
}

impl Name {
    /// Parses a name; `None` if it has another form.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let mut parts = name.strip_prefix("s1-")?.splitn(4, '-');
        let mut number = || u64::from_str_radix(parts.next()?, 16).ok();
        let log = StreamIdentity {
            created_unix_ns: number()?,
            nonce: number()?,
        };
        let parsed = Self {
            log,
            position: LogPosition(number()?),
            suffix: parts.next()?.to_owned(),
        };
        (parsed.to_string() == name).then_some(parsed)
    }

    fn order(&self) -> Order {
        order(self.log, self.position)
    }
}

/// Names of one log's snapshots, the newest first.
#[must_use]
pub fn candidates(names: &[String], log: StreamIdentity) -> Vec<(Name, &str)> {
    let ours = |name: &Name| name.log == log;
    let mut found: Vec<_> = names
        .iter()
        .filter_map(|name| Some((Name::parse(name).filter(ours)?, name.as_str())))
        .collect();
    found.sort_by(|a, b| (b.0.position, b.1).cmp(&(a.0.position, a.1)));
    found.dedup();
    found
}

/// The pointer after a new snapshot; `None` if it must stay. `is_dead`: the newest snapshot's
/// record is proven absent from the log. A live pointer to another log means that the new snapshot
/// is of an old log.
#[must_use]
pub fn moved(
    pointer: Option<&SnapshotPointer>,
    new: SnapshotRef,
    is_dead: bool,
) -> Option<SnapshotPointer> {
    let Some(present) = pointer else {
        return Some(SnapshotPointer {
            newest: new,
            older: None,
        });
    };
    let older = if is_dead {
        let older = present.older.clone();
        older.filter(|older| older.log == new.log && order_of(older) < order_of(&new))
    } else if present.newest.log == new.log && order_of(&present.newest) <= order_of(&new) {
        Some(present.newest.clone())
    } else {
        return None;
    };
    Some(SnapshotPointer { newest: new, older })
}

/// Names of a dead pointer that its replacement does not name.
pub fn dropped<'a>(
    dead: &'a SnapshotPointer,
    moved: &SnapshotPointer,
) -> impl Iterator<Item = &'a str> {
    let kept = moved.older.as_ref();
    let named = std::iter::once(&dead.newest).chain(&dead.older);
    named
        .filter(move |named| kept.is_none_or(|kept| kept.name != named.name))
        .map(|named| named.name.as_str())
}

/// Names that can be deleted while this is the pointer.
#[must_use]
pub fn outdated<'a>(names: &'a [String], pointer: &SnapshotPointer) -> Vec<&'a str> {
    let oldest = pointer.older.as_ref().unwrap_or(&pointer.newest);
    let kept = |name: &str| {
        let older = pointer.older.as_ref();
        name == pointer.newest.name || older.is_some_and(|older| older.name == name)
    };
    names
        .iter()
        .map(String::as_str)
        .filter(|name| !kept(name))
        .filter(|name| Name::parse(name).is_some_and(|name| name.order() < order_of(oldest)))
        .collect()
}

#[cfg(test)]
mod tests;
