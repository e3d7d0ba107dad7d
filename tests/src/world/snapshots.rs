//! The indexer's writer of snapshots as the world has it: `service::snapshots` without tasks.

use std::time::{Duration, Instant};

use warmroute_indexer::READY_LAG_MAX;
use warmroute_indexer::same_log;
use warmroute_indexer::snapshot::policy::{self, BUSY_PAUSE, LEASE, PAUSE, ReadProgress, Schedule};
use warmroute_indexer::snapshot::{Name, format};
use warmroute_plane::{LogStatus, PutIf, Revision};
use warmroute_proto::codec;
use warmroute_proto::registry::SnapshotLease;
use warmroute_proto::snapshot::{SnapshotPointer, SnapshotRef};

use super::host::Then;
use super::indexer::{IndexRun, IndexThen, Phase};
use super::plane::{Op, Reply};
use super::{Breakage, World};

const POINTER_TRIES: u32 = 8;

/// What has come of a writing so far.
#[derive(Clone, Debug)]
pub(super) struct Writing {
    lease: Revision,
    reading: ReadProgress,
    new: SnapshotRef,
}

#[derive(Clone, Debug)]
pub(super) enum SnapThen {
    Learn(ReadProgress),
    LearnStatus(ReadProgress, SnapshotPointer),
    LearnRecord(ReadProgress, SnapshotPointer, LogStatus),
    Leased,
    Put(Writing),
    Pointer(Writing, u32),
    PointerStatus(Writing, u32, Revision, SnapshotPointer),
    PointerRecord(Writing, u32, Revision, SnapshotPointer, LogStatus),
    Moved(Writing, u32, SnapshotPointer, Vec<String>),
    Names(Writing, SnapshotPointer),
    Nothing,
}

impl World {
    pub(super) fn snapshot_if_due(&mut self, at: usize, run: &mut IndexRun, now: Instant) {
        let is_in = run.fold.log().is_some() && run.fold.lag() <= READY_LAG_MAX;
        if run.is_writing || !run.started || !is_in {
            return;
        }
        if self.broken == Some(Breakage::ImageNotACut) {
            run.former_head = run.fold.cut(Vec::new()).ok().map(|cut| cut.head);
        }
        let reading = reading(run, now);
        if run.progress.is_due(reading, &self.rates.schedule) {
            run.is_writing = true;
            let key = self.subjects.snapshot_pointer_key();
            self.snapshot_call(at, Op::Get(key), SnapThen::Learn(reading));
        }
    }

    fn snapshot_call(&mut self, at: usize, op: Op, then: SnapThen) {
        let host = self.indexers[at].host;
        let then = Then::Index(IndexThen::Snapshot(Box::new(then)));
        self.call(host, op, then, Duration::from_secs(5));
    }

    pub(super) fn snapshot_then(
        &mut self,
        at: usize,
        run: &mut IndexRun,
        then: SnapThen,
        reply: Reply,
    ) {
        match (then, reply) {
            (SnapThen::Nothing, _) => {}
            (SnapThen::Learn(reading), Reply::Entry(entry)) => {
                let pointer = entry.and_then(|entry| codec::decode(&entry.value).ok());
                let ours = |pointer: &SnapshotPointer| Some(pointer.newest.log) == run.fold.log();
                match pointer.filter(ours) {
                    Some(pointer) => {
                        let then = SnapThen::LearnStatus(reading, pointer);
                        self.snapshot_call(at, Op::Status, then);
                    }
                    None => {
                        run.progress.nothing_there();
                        self.lease_snapshot(at, run);
                    }
                }
            }
            (SnapThen::LearnStatus(reading, pointer), Reply::Status(status)) => {
                let position = pointer.newest.at.position;
                let then = SnapThen::LearnRecord(reading, pointer, status);
                self.snapshot_call(at, Op::At(position), then);
            }
            (SnapThen::LearnRecord(reading, pointer, status), Reply::Message(found)) => {
                if is_dead(&pointer, &status, found.as_ref()) {
                    run.progress.nothing_there();
                } else {
                    run.progress.learned(reading, pointer.newest.at.position);
                }
                if run.progress.is_due(reading, &self.rates.schedule) {
                    self.lease_snapshot(at, run);
                } else {
                    run.is_writing = false;
                }
            }
            (SnapThen::Leased, Reply::Conflict) => self.stop_writing(at, run, BUSY_PAUSE),
            (SnapThen::Leased, Reply::Revision(lease)) => self.write_snapshot(at, run, lease),
            (SnapThen::Put(writing), Reply::Done) => {
                let key = self.subjects.snapshot_pointer_key();
                self.snapshot_call(at, Op::Get(key), SnapThen::Pointer(writing, 0));
            }
            (then @ (SnapThen::Pointer(..) | SnapThen::PointerStatus(..)), reply)
            | (then @ (SnapThen::PointerRecord(..) | SnapThen::Moved(..)), reply) => {
                self.pointer_then(at, run, then, reply);
            }
            (SnapThen::Names(writing, pointer), reply) => {
                if let Reply::Names(names) = reply {
                    for name in policy::outdated(&names, &pointer) {
                        let op = Op::DeleteBlob(name.to_owned());
                        self.snapshot_call(at, op, SnapThen::Nothing);
                    }
                }
                self.release_snapshot(at, run, writing.lease);
            }
            (_, _) => self.stop_writing(at, run, PAUSE),
        }
    }

    fn lease_snapshot(&mut self, at: usize, run: &mut IndexRun) {
        run.attempts += 1;
        let value = SnapshotLease {
            writer: run.writer.clone(),
            attempt: run.attempts,
        };
        let op = Op::Put {
            key: self.subjects.snapshot_lease_key(),
            value: codec::encode(&value).unwrap().into(),
            condition: PutIf::Absent,
            lease: Some(LEASE),
        };
        self.snapshot_call(at, op, SnapThen::Leased);
    }

    fn write_snapshot(&mut self, at: usize, run: &mut IndexRun, lease: Revision) {
        let now = self.local(self.indexers[at].host);
        let cut = if run.phase == Phase::Following && !Self::is_loading(run) {
            run.fold.cut(Vec::new()).ok()
        } else {
            None
        };
        let Some(mut cut) = cut else {
            self.stop_writing(at, run, PAUSE);
            return;
        };
        let reading = reading(run, now);
        self.bend_cut(run, &mut cut);
        let blob = format::encode(&cut.head, &cut.image).unwrap();
        self.check_snapshot(&cut.head, &blob);
        let name = Name {
            log: cut.head.log,
            position: cut.head.at.position,
            suffix: format!("{}-{}", run.writer, run.attempts),
        };
        self.note(|| format!("indexer {at}: writes {name}"));
        self.checks.snapshots += 1;
        let new = SnapshotRef {
            name: name.to_string(),
            log: cut.head.log,
            at: cut.head.at,
            bytes: blob.len() as u64,
        };
        let op = Op::PutBlob(new.name.clone(), blob.into());
        let writing = Writing {
            lease,
            reading,
            new,
        };
        self.snapshot_call(at, op, SnapThen::Put(writing));
    }

    fn pointer_then(&mut self, at: usize, run: &mut IndexRun, then: SnapThen, reply: Reply) {
        match (then, reply) {
            (SnapThen::Pointer(writing, tries), Reply::Entry(entry)) => {
                let revision = entry.as_ref().map(|entry| entry.revision);
                let pointer: Option<SnapshotPointer> =
                    entry.and_then(|entry| codec::decode(&entry.value).ok());
                match (revision, pointer) {
                    (Some(revision), Some(pointer)) => {
                        let then = SnapThen::PointerStatus(writing, tries, revision, pointer);
                        self.snapshot_call(at, Op::Status, then);
                    }
                    (revision, pointer) => {
                        let known = (revision, pointer, false);
                        self.move_pointer(at, run, writing, tries, known);
                    }
                }
            }
            (SnapThen::PointerStatus(writing, tries, revision, pointer), Reply::Status(status)) => {
                let position = pointer.newest.at.position;
                let then = SnapThen::PointerRecord(writing, tries, revision, pointer, status);
                self.snapshot_call(at, Op::At(position), then);
            }
            (
                SnapThen::PointerRecord(writing, tries, revision, pointer, status),
                Reply::Message(found),
            ) => {
                let is_dead = is_dead(&pointer, &status, found.as_ref());
                let known = (Some(revision), Some(pointer), is_dead);
                self.move_pointer(at, run, writing, tries, known);
            }
            (SnapThen::Moved(writing, _, pointer, dead), Reply::Revision(_)) => {
                run.progress.took(writing.reading);
                for dead in dead {
                    self.snapshot_call(at, Op::DeleteBlob(dead), SnapThen::Nothing);
                }
                self.snapshot_call(at, Op::Blobs, SnapThen::Names(writing, pointer));
            }
            (SnapThen::Moved(writing, tries, ..), Reply::Conflict) if tries < POINTER_TRIES => {
                let key = self.subjects.snapshot_pointer_key();
                self.snapshot_call(at, Op::Get(key), SnapThen::Pointer(writing, tries + 1));
            }
            (_, _) => self.stop_writing(at, run, PAUSE),
        }
    }

    fn move_pointer(
        &mut self,
        at: usize,
        run: &mut IndexRun,
        writing: Writing,
        tries: u32,
        (revision, pointer, is_dead): (Option<Revision>, Option<SnapshotPointer>, bool),
    ) {
        let Some(moved) = policy::moved(pointer.as_ref(), writing.new.clone(), is_dead) else {
            let op = Op::DeleteBlob(writing.new.name.clone());
            self.snapshot_call(at, op, SnapThen::Nothing);
            self.stop_writing(at, run, PAUSE);
            return;
        };
        let op = Op::Put {
            key: self.subjects.snapshot_pointer_key(),
            value: codec::encode(&moved).unwrap().into(),
            condition: revision.map_or(PutIf::Absent, PutIf::Revision),
            lease: None,
        };
        let dead = pointer.filter(|_| is_dead).map_or_else(Vec::new, |dead| {
            let dropped = policy::dropped(&dead, &moved);
            dropped.map(str::to_owned).collect()
        });
        self.snapshot_call(at, op, SnapThen::Moved(writing, tries, moved, dead));
    }

    fn release_snapshot(&mut self, at: usize, run: &mut IndexRun, lease: Revision) {
        run.is_writing = false;
        let op = Op::Delete(self.subjects.snapshot_lease_key(), lease);
        self.snapshot_call(at, op, SnapThen::Nothing);
    }

    fn stop_writing(&mut self, at: usize, run: &mut IndexRun, pause: Duration) {
        run.is_writing = false;
        let now = self.local(self.indexers[at].host);
        run.progress.wait_until(now + pause);
    }
}

fn reading(run: &IndexRun, now: Instant) -> ReadProgress {
    ReadProgress {
        at: now,
        position: run.fold.position(),
        bytes: run.fold.bytes_read(),
        first: run.log_first,
    }
}

fn is_dead(
    pointer: &SnapshotPointer,
    status: &LogStatus,
    found: Option<&warmroute_plane::LogMessage>,
) -> bool {
    let newest = &pointer.newest;
    same_log::judge(newest.log, Some(&newest.at), status, found).is_broken()
}

/// Often enough that a short world sees several.
pub(super) const SCHEDULE: Schedule = Schedule {
    bytes: 8 << 10,
    every: Duration::from_secs(5),
};
