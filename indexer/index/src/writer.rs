//! Applies log messages under the lock: all in one turn, or in short turns while there are readers.
//!
//! Each record is applied as a whole in one turn, so both ways give equal results. With short
//! turns, most of a record's work is done before its turn, by [`Tree::warm`] and [`Tree::grow`].
//!
//! [`Tree::warm`]: crate::tree::Tree::warm
//! [`Tree::grow`]: crate::tree::Tree::grow

use std::time::Instant;

use warmroute_proto::{Change, LogPosition, PrefixHash};

use crate::fair_lock::FairWriter;
use crate::fold::{Fold, ParsedMessage, RecordVerdict};
use crate::tree::{Growth, SourceNumber};

/// Blocks of dead generations that are freed between two batches.
const RECLAIM_MAX: usize = 1024;

/// Blocks of dead generations that are freed under one lock while there are readers.
const RECLAIM_TURN: usize = 64;

/// Turns of one [`reclaim`]: some milliseconds of work.
const IDLE_TURNS: usize = 128;

/// Frees blocks of dead generations, between two looks at an idle log.
pub fn reclaim(fold: &FairWriter<Fold>) {
    for _ in 0..IDLE_TURNS {
        if !fold.write().reclaim(RECLAIM_TURN) {
            return;
        }
    }
}

/// Applies messages. Returns their verdicts, and the fold's position after them.
pub fn apply(
    fold: &FairWriter<Fold>,
    messages: &[ParsedMessage],
    now: Instant,
) -> (Vec<RecordVerdict>, LogPosition) {
    match fold.has_recent_readers() {
        true => in_short_turns(fold, messages, now),
        false => in_one_turn(fold, messages, now),
    }
}

fn in_one_turn(
    fold: &FairWriter<Fold>,
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

fn in_short_turns(
    fold: &FairWriter<Fold>,
    messages: &[ParsedMessage],
    now: Instant,
) -> (Vec<RecordVerdict>, LogPosition) {
    let mut scratch = Vec::new();
    let mut verdicts = Vec::with_capacity(messages.len());
    let mut rest = messages;
    while let Some(first) = rest.first() {
        let upcoming = fold.read().to_come(first);
        if let Some((number, changes)) = upcoming {
            prepare(fold, number, changes, &mut scratch);
        }
        let (taken, later) = rest.split_at(turn_len(rest));
        let mut fold = fold.write();
        verdicts.extend(taken.iter().map(|message| fold.apply_parsed(now, message)));
        rest = later;
    }
    for _ in 0..RECLAIM_MAX / RECLAIM_TURN {
        if !fold.write().reclaim(RECLAIM_TURN) {
            break;
        }
    }
    (verdicts, fold.read().position())
}

/// Messages applied in one turn: one, and short ones with it.
fn turn_len(messages: &[ParsedMessage]) -> usize {
    let mut blocks = 0;
    let fits = messages.iter().take_while(|message| {
        blocks += message.blocks();
        blocks <= Growth::TURN && !message.clears()
    });
    fits.count().max(1)
}

/// Prepares the changes of a record before readers are excluded.
fn prepare(
    fold: &FairWriter<Fold>,
    number: SourceNumber,
    changes: &[Change],
    scratch: &mut Vec<PrefixHash>,
) {
    let leave = match changes {
        [_] => Growth::TURN,
        _ => 0,
    };
    for change in changes {
        let mut growth = fold.read().tree().warm(number, change, scratch);
        while growth.left() > leave {
            fold.write().grow(change, &mut growth);
        }
    }
}

#[cfg(test)]
mod tests;
