//! Judges the snapshots: readable, of this log, and recent enough to start from.

use std::time::Duration;

use super::page::{bytes, duration};
use super::{Code, Findings, PlaneState, SnapshotSeen, StatusLine};
use crate::same_log::{LogMatch, goes_on_from};

/// The default snapshot interval.
const EVERY: Duration = Duration::from_secs(600);

/// Tolerated intervals without a snapshot, plus the time for writing one.
const INTERVALS_MAX: u32 = 3;
const WRITING: Duration = Duration::from_secs(60);

pub(super) fn judge(state: &PlaneState, findings: &mut Findings, rest: &mut Vec<StatusLine>) {
    let Some(newest) = state.snapshots.first() else {
        let is_trimmed = state.log.is_some_and(|log| log.first.0 > 1);
        if is_trimmed {
            findings.add(
                Code::SnapshotMissing,
                "the log has been trimmed, and there is none",
            );
        }
        rest.push(("snapshot", "none yet".to_owned()));
        return;
    };
    for snapshot in &state.snapshots {
        if let Some(why) = &snapshot.unreadable {
            findings.add(
                Code::SnapshotUnreadable,
                format!("{}: {why}", snapshot.name),
            );
        }
    }
    fits(state, newest, findings);
    age(state, newest, findings);
    let writer = state.registry.writer.as_ref();
    let writer = writer.map_or(String::new(), |lease| {
        format!(", {} writes one", lease.writer)
    });
    let behind = state
        .log
        .map_or(0, |log| log.last.0.saturating_sub(newest.position.0));
    let text = format!(
        "{} of {}, {behind} messages behind the log{writer}",
        newest.name,
        bytes(newest.bytes)
    );
    rest.push(("snapshot", text));
}

fn fits(state: &PlaneState, newest: &SnapshotSeen, findings: &mut Findings) {
    match newest.fit {
        Some(fit @ (LogMatch::AnotherLog | LogMatch::LostEnd | LogMatch::OtherRecord)) => {
            let about = format!("{}: {}", newest.name, fit.label());
            findings.add(Code::SnapshotMisfit, about);
        }
        Some(LogMatch::Same | LogMatch::Trimmed | LogMatch::Missing) | None => {
            let log = state.log.filter(|log| !goes_on_from(newest.position, log));
            if let Some(log) = log {
                let about = format!("{}: the log begins at {}", newest.name, log.first);
                findings.add(Code::SnapshotBehindLog, about);
            }
        }
    }
}

fn age(state: &PlaneState, newest: &SnapshotSeen, findings: &mut Findings) {
    let Some(outdated) = newest.outdated_unix_ns else {
        return;
    };
    let every = state
        .answers()
        .filter_map(|(_, view)| view.snapshot_every_secs);
    let every = every.max().map_or(EVERY, Duration::from_secs);
    // Compares two times of the server's clock, if its offset is known.
    let ahead = state
        .setup
        .clock
        .map_or(0, |clock| clock.ahead_ms.saturating_mul(1_000_000));
    let now = state.unix_ns.saturating_add_signed(ahead);
    let age = Duration::from_nanos(now.saturating_sub(outdated));
    if age > every * INTERVALS_MAX + WRITING {
        let about = format!(
            "{}: records came for {}, one is due each {}",
            newest.name,
            duration(age),
            duration(every)
        );
        findings.add(Code::SnapshotOld, about);
    }
}
