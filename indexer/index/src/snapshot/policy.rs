//! When a snapshot is due, what it is called, which the pointer names, and which may go.
//!
//! The pointer moves forward only: to a higher position of the same log. The one exception is a *dead*
//! pointer, whose record is proven to be in the log no more (the log was rolled back, or is another one,
//! whatever its creator's clock showed): it names nothing that anybody could use. Two snapshots are kept;
//! what sorts before them is deleted, what sorts behind may be one that another replica is writing.

use std::fmt;
use std::time::{Duration, Instant};

use warmroute_proto::snapshot::{SnapshotPointer, SnapshotRef};
use warmroute_proto::{LogPosition, StreamIdentity};

/// Snapshots go from the store by age (7 days by default): an idle fleet's is written anew in time.
const REFRESH: Duration = Duration::from_secs(24 * 60 * 60);

/// Until the next is tried after one that failed.
pub const PAUSE: Duration = Duration::from_secs(10);

/// The same while another replica is writing one.
pub const BUSY_PAUSE: Duration = Duration::from_secs(2);

/// The writer's. Longer than writing one takes, usually; if it is not, two replicas write one. A writer that
/// dies keeps the others waiting this long.
pub const LEASE: Duration = Duration::from_secs(10);

/// When a snapshot is due.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// After so many bytes of log since the last one.
    pub bytes: u64,
    /// After this time, if anything came since.
    pub every: Duration,
}

/// How far the log was read at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadProgress {
    pub at: Instant,
    pub position: LogPosition,
    /// Of the log, read since the start of the process.
    pub bytes: u64,
    /// The oldest record that the log keeps.
    pub first: LogPosition,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LastSnapshot {
    at: Instant,
    position: LogPosition,
    bytes: u64,
    /// Somebody wrote it while we watched; one found at the start may be of any age.
    seen: bool,
}

/// The last snapshot that anybody took, as far as this replica knows.
#[derive(Clone, Copy, Debug, Default)]
pub struct SnapshotProgress {
    taken: Option<LastSnapshot>,
    /// Nothing is tried before: something went wrong.
    not_before: Option<Instant>,
    looked: bool,
}

impl SnapshotProgress {
    /// Is one due?
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

    /// This replica took one.
    pub const fn took(&mut self, at: ReadProgress) {
        self.looked = true;
        self.taken = Some(LastSnapshot {
            at: at.at,
            position: at.position,
            bytes: at.bytes,
            seen: true,
        });
    }

    /// The pointer names this position of the log that is read. Bytes between two readings are spread
    /// evenly over their positions: good enough for when the next one is due.
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

    /// There is no pointer, or it is of another log, or it is dead: whatever was known is void.
    pub const fn nothing_there(&mut self) {
        self.looked = true;
        self.taken = None;
    }

    pub const fn wait_until(&mut self, at: Instant) {
        self.not_before = Some(at);
    }

    /// How old the last snapshot is at least, if it was seen being written.
    #[must_use]
    pub fn age(&self, now: Instant) -> Option<Duration> {
        self.taken
            .map(|taken| now.saturating_duration_since(taken.at))
    }
}

/// A log that lets old records go must not reach the snapshot: a quarter of what it keeps came since,
/// however few bytes that is.
fn is_falling_off(now: ReadProgress, taken: LogPosition) -> bool {
    let kept = now.position.next().0.saturating_sub(now.first.0);
    let since = now.position.0.saturating_sub(taken.0);
    now.first.0 > 1 && since.saturating_mul(4) >= kept
}

/// What the order of snapshots is: of logs by their creation, of one log by position.
type Order = (u64, u64, LogPosition);

const fn order(log: StreamIdentity, position: LogPosition) -> Order {
    (log.created_unix_ns, log.nonce, position)
}

const fn order_of(snapshot: &SnapshotRef) -> Order {
    order(snapshot.log, snapshot.at.position)
}

/// A snapshot's name tells its place among the others. Names are never used twice: writer and attempt
/// are in them.
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
    /// None if it is no name of ours.
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

/// The names of one log's snapshots, the newest first.
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

/// What the pointer becomes with a new snapshot; none if it must stay. `is_dead` says that the record
/// of its newest is proven to be in the log no more. A pointer to another log that is not dead is of the log
/// that is there now: the new snapshot's is not.
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

/// What a dead pointer named, and the one in its place does not.
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

/// Those that nobody needs while this is the pointer.
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
