//! Folds messages of the log: at once, or in short turns while somebody reads.
//!
//! Either way a record is applied as a whole in one turn, and the end is the same. In short turns, as much
//! as can be of what it takes is done before that: see [`Tree::warm`] and [`Tree::grow`].
//!
//! [`Tree::warm`]: crate::tree::Tree::warm
//! [`Tree::grow`]: crate::tree::Tree::grow

use std::time::Instant;

use warmroute_proto::{Change, LogPosition, PrefixHash};

use crate::fair_lock::FairRwLock;
use crate::fold::{Fold, ParsedMessage, RecordVerdict};
use crate::tree::{Growth, SourceNumber};

/// Blocks of dead generations that are freed between two batches.
pub const RECLAIM_MAX: usize = 1024;

/// Blocks of dead generations that are freed under one lock while there are readers.
const RECLAIM_TURN: usize = 64;

/// Applies messages. Returns their verdicts, and the fold's position after them.
pub fn apply(
    fold: &FairRwLock<Fold>,
    messages: &[ParsedMessage],
    now: Instant,
) -> (Vec<RecordVerdict>, LogPosition) {
    match fold.has_recent_readers() {
        true => beside_readers(fold, messages, now),
        false => at_once(fold, messages, now),
    }
}

fn at_once(
    fold: &FairRwLock<Fold>,
    messages: &[ParsedMessage],
    now: Instant,
) -> (Vec<RecordVerdict>, LogPosition) {
    let mut fold = fold.write();
    let verdicts = messages
        .iter()
        .map(|message| fold.apply_parsed(now, message))
        .collect();
    fold.reclaim(RECLAIM_MAX);
    (verdicts, fold.position())
}

fn beside_readers(
    fold: &FairRwLock<Fold>,
    messages: &[ParsedMessage],
    now: Instant,
) -> (Vec<RecordVerdict>, LogPosition) {
    let mut scratch = Vec::new();
    let mut verdicts = Vec::with_capacity(messages.len());
    let mut rest = messages;
    while let Some(first) = rest.first() {
        let to_come = fold.read_as_writer().to_come(first);
        if let Some((number, changes)) = to_come {
            make_ready(fold, number, changes, &mut scratch);
        }
        let (now_taken, later) = rest.split_at(turn(rest));
        let mut fold = fold.write();
        verdicts.extend(
            now_taken
                .iter()
                .map(|message| fold.apply_parsed(now, message)),
        );
        rest = later;
    }
    for _ in 0..RECLAIM_MAX / RECLAIM_TURN {
        if !fold.write().reclaim(RECLAIM_TURN) {
            break;
        }
    }
    (verdicts, fold.read_as_writer().position())
}

/// How many messages are folded in one turn: one, and short ones with it.
fn turn(messages: &[ParsedMessage]) -> usize {
    let mut blocks = 0;
    let fits = messages.iter().take_while(|message| {
        blocks += message.blocks();
        blocks <= Growth::TURN && !message.clears()
    });
    fits.count().max(1)
}

/// Does for the changes of a record what can be done before readers are kept out.
fn make_ready(
    fold: &FairRwLock<Fold>,
    number: SourceNumber,
    changes: &[Change],
    scratch: &mut Vec<PrefixHash>,
) {
    let leave = match changes {
        [_] => Growth::TURN,
        _ => 0,
    };
    for change in changes {
        let mut growth = fold.read_as_writer().tree().warm(number, change, scratch);
        while growth.left() > leave {
            fold.write().grow(change, &mut growth);
        }
    }
}

#[cfg(test)]
mod tests;
