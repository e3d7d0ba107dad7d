//! Judges the replicas: presence, log, lag, and agreement.

use std::collections::BTreeMap;
use std::time::Duration;

use warmroute_proto::view::ViewPage;
use warmroute_proto::{Digest, Generation, RecordNumber, Source};

use super::page::duration;
use super::{Code, Findings, PlaneState, StatusLine};

/// Lag up to which a replica is ready.
const LAG_MESSAGES_MAX: u64 = 1000;

const LAG_MAX: Duration = Duration::from_secs(5);

/// Digests by source, generation and number, each with its replica.
type DigestsAt<'a> = BTreeMap<(&'a Source, Generation, RecordNumber), Vec<(&'a str, Digest)>>;

pub(super) fn judge(state: &PlaneState, findings: &mut Findings, rest: &mut Vec<StatusLine>) {
    let answered = state.answers().count();
    for (id, view) in &state.views {
        match view {
            Ok(view) => judge_replica(state, (id, view), findings, rest),
            // A replica that deregistered in between need not answer.
            Err(why) if state.registry.indexers.contains_key(id) => {
                findings.add(Code::IndexerSilent, format!("{id}: {why}"));
            }
            Err(_) => {}
        }
    }
    if state.registry.indexers.is_empty() && answered == 0 {
        findings.add(Code::NoIndexer, "indexers");
    }
    match state.indexers_expected {
        Some(expected) if answered < expected => {
            let about = format!("{answered} of {expected} answer");
            findings.add(Code::IndexersMissing, about);
        }
        None if answered == 1 && state.views.len() == 1 => {
            findings.add(Code::OneIndexer, "indexers")
        }
        Some(_) | None => {}
    }
    let compared = agreement(state, findings);
    rest.push((
        "agreement",
        format!("{compared} comparisons at equal numbers"),
    ));
}

fn judge_replica(
    state: &PlaneState,
    (id, view): (&str, &ViewPage),
    findings: &mut Findings,
    rest: &mut Vec<StatusLine>,
) {
    let lag = view.lag_ms.map(Duration::from_millis);
    let shown = lag.map_or_else(|| "unknown".to_owned(), duration);
    let lagging = format!("{} messages, {shown}", view.lag_messages);
    let text = format!("{id}: position {}, behind by {lagging}", view.position);
    rest.push(("indexer", text));
    match (&state.log_after, view.log) {
        (Some(log), Some(read)) if read != log.identity => {
            findings.add(Code::IndexerOtherLog, id);
        }
        (Some(log), Some(_)) if view.position > log.last => {
            let about = format!("{id}: at {}, the log ends at {}", view.position, log.last);
            findings.add(Code::IndexerAhead, about);
        }
        (Some(_) | None, Some(_) | None) => {}
    }
    if view.lag_messages > LAG_MESSAGES_MAX || lag.is_none_or(|lag| lag > LAG_MAX) {
        findings.add(Code::IndexerBehind, format!("{id}: {lagging}"));
    } else if !view.ready {
        findings.add(Code::IndexerNotReady, id);
    }
}

/// Compares digests of shims and indexers at equal generation and number. Returns the number of
/// comparisons.
fn agreement(state: &PlaneState, findings: &mut Findings) -> usize {
    let mut digests: DigestsAt<'_> = BTreeMap::new();
    for (id, view) in state.answers() {
        for source in &view.sources {
            let point = source.generation.zip(source.number).zip(source.digest);
            if let Some(((generation, number), digest)) = point {
                let point = (&source.source, generation, number);
                digests.entry(point).or_default().push((id, digest));
            }
        }
    }
    let mut compared = 0;
    for (&(source, generation, number), held) in &digests {
        let at = format!("{source} at generation {generation}, number {number}");
        let Some((first, rest)) = held.split_first() else {
            continue;
        };
        compared += rest.len();
        for other in rest.iter().filter(|other| other.1 != first.1) {
            let about = format!(
                "{at}: {} at {}, {} at {}",
                digest_text(first.1),
                first.0,
                digest_text(other.1),
                other.0
            );
            findings.add(Code::IndexersDiffer, about);
        }
        let shim = state.heartbeats.get(source).map(|heard| &heard.last);
        let shim = shim.filter(|shim| (shim.generation, shim.number) == (generation, Some(number)));
        if let Some(shim) = shim {
            compared += held.len();
            for (id, digest) in held.iter().filter(|(_, digest)| *digest != shim.after) {
                let about = format!(
                    "{at}: {} at {id}, {} at its shim",
                    digest_text(*digest),
                    digest_text(shim.after)
                );
                findings.add(Code::MirrorDiffers, about);
            }
        }
    }
    compared
}

fn digest_text(digest: Digest) -> String {
    format!("{} pairs {}", digest.count, digest.hex())
}
