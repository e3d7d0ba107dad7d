//! Loads the newest snapshot that fits the log: at the start, after falling off the log's end, and
//! when a source diverged here.
//!
//! Every snapshot that does not fit is skipped with an error and counted, and the next older one is
//! tried. The pointer is a hint: the store's list is what is there, so that a lost registry costs
//! nothing.

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Fuse};
use warmroute_proto::snapshot::SnapshotPointer;
use warmroute_proto::{Generation, StreamIdentity};

use super::*;
use crate::metrics::{RestoreCause, Skipped};
use crate::same_log::{self, LogMatch};
use crate::snapshot::{Name, Restored, policy};

/// A store that does not answer, or slowly, must not keep an indexer from starting: it has the log, and
/// the shims have what the log lost. The tries take this time together; 20 GB come in it through
/// 300 Mbit/s.
const START_TRIES: usize = 6;
const START_READ_MAX: Duration = Duration::from_secs(600);

/// Looking up a record that one server of a cluster may not have yet.
const LOOKUP_TRIES: usize = 3;
const LOOKUP_PAUSE: Duration = Duration::from_millis(300);

/// The longest time for which a running indexer waits for a snapshot; then images are the faster
/// repair of a source that diverged, or of a log that went on. 1 GB comes in 8 s through 1 Gbit/s.
const READ_MAX: Duration = Duration::from_secs(15);

/// A snapshot that fits the log and is of use, not yet adopted.
pub(super) struct Found {
    name: String,
    restored: Restored,
}

impl Found {
    /// Does a log that begins here go on from it?
    pub(super) fn is_followed_by(&self, first: LogPosition) -> bool {
        self.restored.head.at.position.next() >= first
    }
}

/// A snapshot that is being read while the writer goes on. Dropped, it has no effect.
pub(super) type Reading<'a> = Fuse<BoxFuture<'a, Option<Found>>>;

/// What a snapshot must have to be of use.
pub(super) enum Wanted {
    Any,
    /// More than is in already.
    Above(LogPosition),
    /// One of these sources, folded, in this generation.
    Holding(Vec<(Source, Generation)>),
}

impl FoldWriter {
    pub(super) async fn restore_at_start(&self, config: &SnapshotConfig, status: &LogStatus) {
        let begun = now();
        let mut left = START_READ_MAX;
        for attempt in 1..=START_TRIES {
            self.wait_until_connected().await;
            let asked = now();
            match self.find(Wanted::Any, left).await {
                Ok(Some(found)) => {
                    self.adopt(RestoreCause::Start, found);
                    let took = now().saturating_duration_since(begun);
                    info!(?took, replica = config.writer, "started from a snapshot");
                    return;
                }
                Ok(None) => break,
                Err(error) => warn!(%error, attempt, "snapshots cannot be read"),
            }
            left = left.saturating_sub(now().saturating_duration_since(asked));
            if left.is_zero() {
                break;
            }
            sleep(RETRY).await;
        }
        if same_log::goes_on_from(LogPosition(0), status) {
            info!("no snapshot is read: the log is whole, and read from its beginning");
        } else {
            let first = status.first;
            warn!(%first, "no snapshot is read, and the log is trimmed: sources are asked for images");
        }
    }

    /// Begins to read a snapshot. It takes no lock of the fold for writing.
    pub(super) fn read(&self, wanted: Wanted) -> Reading<'_> {
        let read = async move {
            let found = self.find(wanted, READ_MAX).await;
            found.unwrap_or_else(|error| {
                warn!(%error, "snapshots cannot be read");
                None
            })
        };
        read.boxed().fuse()
    }

    /// Goes back, or on, to the snapshot's position: a tail from there has to follow. Records since
    /// then that are folded already come again, and the fold keeps what it knows to exist.
    pub(super) fn adopt(&self, cause: RestoreCause, found: Found) {
        let Found { name, restored } = found;
        let (former, position) = {
            let mut fold = self.fold.write();
            let former = fold.adopt(now(), restored);
            (former, fold.position())
        };
        self.shared.position.send_replace(position);
        // Freeing a large tree takes long.
        blocking::detach(move || drop(former));
        self.shared.metrics.snapshots.restores.inc(cause);
        info!(name, %position, cause = cause.label(), "snapshot loaded");
    }
}

impl ServiceContext {
    /// Reads the newest snapshot that fits the log and is of use. Waits for the store up to `most` in
    /// all. What came is decoded, however long that takes: it could not be stopped.
    async fn find(&self, wanted: Wanted, most: Duration) -> Result<Option<Found>, PlaneError> {
        let until = Instant::now() + most;
        if self.snapshots.is_none() {
            return Ok(None);
        }
        if self.shared.read().room_for_another(0).is_none() {
            self.skip("any", Skipped::Memory, &"there is no room for another tree");
            return Ok(None);
        }
        let status = self.log_status().await?;
        let names = by(until, self.snapshot_names()).await?;
        let foreign = names
            .iter()
            .filter(|name| is_foreign(name, status.identity));
        foreign.for_each(|name| self.skip(name, Skipped::AnotherLog, &"of another log"));
        for (name, text) in policy::candidates(&names, status.identity) {
            if matches!(&wanted, Wanted::Above(position) if name.position <= *position) {
                break;
            }
            if !same_log::goes_on_from(name.position, &status) {
                // So are all older ones.
                self.skip(text, Skipped::Trimmed, &"the log behind it is trimmed");
                break;
            }
            let Some(restored) = self.load(text, &name, until).await? else {
                continue;
            };
            if let Wanted::Holding(sources) = &wanted
                && !sources.iter().any(|wanted| holds(&restored, wanted))
            {
                break;
            }
            let name = text.to_owned();
            return Ok(Some(Found { name, restored }));
        }
        Ok(None)
    }

    pub(super) async fn snapshot_names(&self) -> Result<Vec<String>, PlaneError> {
        let mut names = self.plane.snapshots().await?;
        let key = self.subjects.snapshot_pointer_key();
        // Without the registry the list is enough.
        if let Ok(Some(entry)) = self.plane.get(key).await {
            match codec::decode::<SnapshotPointer>(&entry.value) {
                Ok(pointer) => {
                    names.push(pointer.newest.name);
                    names.extend(pointer.older.map(|older| older.name));
                }
                Err(error) => {
                    warn!(%error, "unreadable pointer");
                    self.shared.metrics.bad_entries.inc();
                }
            }
        }
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    /// Reads one snapshot; `None` if it is not valid.
    async fn load(
        &self,
        text: &str,
        name: &Name,
        until: Instant,
    ) -> Result<Option<Restored>, PlaneError> {
        let blob = by(until, self.plane.get_snapshot(text.to_owned()));
        let Some(blob) = blob.await? else {
            self.skip(text, Skipped::Torn, &"it is gone or torn");
            return Ok(None);
        };
        // While a snapshot is read there are its bytes, and two trees.
        let Some(room) = self.shared.read().room_for_another(blob.len()) else {
            self.skip(text, Skipped::Memory, &"there is no room for another tree");
            return Ok(None);
        };
        let read = blocking::run(move || Restored::read_within(&blob, room));
        let restored = match read.await {
            Ok(Ok(restored)) => restored,
            Ok(Err(error)) => {
                self.skip(text, Skipped::Corrupt, &error);
                return Ok(None);
            }
            Err(error) => {
                self.skip(text, Skipped::Corrupt, &error);
                return Ok(None);
            }
        };
        let head = &restored.head;
        if head.log != name.log || head.at.position != name.position {
            self.skip(text, Skipped::Corrupt, &"it is not what its name says");
            return Ok(None);
        }
        match self.fit_of(&restored).await? {
            LogMatch::Same | LogMatch::Trimmed => Ok(Some(restored)),
            LogMatch::AnotherLog => {
                self.skip(text, Skipped::AnotherLog, &"of another log");
                Ok(None)
            }
            fit @ (LogMatch::Missing | LogMatch::LostEnd | LogMatch::OtherRecord) => {
                let why = format!("the record at its position: {}", fit.label());
                self.skip(text, Skipped::RecordDiffers, &why);
                Ok(None)
            }
        }
    }

    async fn fit_of(&self, restored: &Restored) -> Result<LogMatch, PlaneError> {
        let (log, at) = (restored.head.log, restored.head.at);
        let mut fit = LogMatch::Missing;
        for _ in 0..LOOKUP_TRIES {
            fit = self.fit(log, &at).await?;
            match fit {
                LogMatch::Same | LogMatch::Trimmed | LogMatch::AnotherLog => break,
                LogMatch::Missing | LogMatch::LostEnd | LogMatch::OtherRecord => {
                    sleep(LOOKUP_PAUSE).await
                }
            }
        }
        Ok(fit)
    }

    /// The log's status, within a second. The writer gets what its clock shows.
    async fn log_status(&self) -> Result<LogStatus, PlaneError> {
        let (status, clock) = self.timed_status().await?;
        self.shared.offer_clock(clock);
        Ok(status)
    }

    pub(super) async fn timed_status(&self) -> Result<(LogStatus, ClockAnswer), PlaneError> {
        let asked = now();
        let status = in_time(self.plane.log_status()).await?;
        let clock = ClockAnswer {
            asked,
            answered: now(),
            unix_ns: status.now_unix_ns,
        };
        Ok((status, clock))
    }

    /// Is this record in the log that is there now?
    pub(super) async fn fit(
        &self,
        log: StreamIdentity,
        at: &RecordMark,
    ) -> Result<LogMatch, PlaneError> {
        let status = self.log_status().await?;
        let found = if same_log::is_there(at, &status) {
            self.plane.at(at.position).await?
        } else {
            None
        };
        Ok(same_log::judge(log, Some(at), &status, found.as_ref()))
    }

    fn skip(&self, name: &str, why: Skipped, detail: &dyn std::fmt::Display) {
        self.shared.metrics.snapshots.skipped.inc(why);
        match why {
            Skipped::AnotherLog => info!(name, %detail, "snapshot skipped"),
            Skipped::Corrupt
            | Skipped::Torn
            | Skipped::Trimmed
            | Skipped::RecordDiffers
            | Skipped::Memory => error!(name, %detail, "snapshot skipped"),
        }
    }
}

/// What the store answers in time.
async fn by<T>(
    until: Instant,
    answer: impl Future<Output = Result<T, PlaneError>>,
) -> Result<T, PlaneError> {
    let answer = timeout_at(until, answer).await;
    answer.unwrap_or_else(|_| Err(unavailable("the snapshot store is too slow")))
}

fn is_foreign(name: &str, log: StreamIdentity) -> bool {
    Name::parse(name).is_some_and(|name| name.log != log)
}

fn holds(restored: &Restored, (source, generation): &(Source, Generation)) -> bool {
    let sources = &restored.head.sources;
    sources.iter().any(|entry| {
        entry.source == *source
            && entry.generation == *generation
            && entry.holding == SnapshotHolding::Folded
    })
}
