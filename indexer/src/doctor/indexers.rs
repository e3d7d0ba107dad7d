//! Judges the replicas: presence, log, lag, and agreement.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use warmroute_proto::view::{PAGE_SOURCES_MAX, ReplicaFaults, SourceView, ViewPage};
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
    for (id, faults) in &state.faults {
        judge_faults(id, faults, findings);
    }
    if state.registry.indexers.is_empty() && answered == 0 {
        findings.add(Code::NoIndexer, "indexers");
    }
    match state.expected.indexers {
        Some(expected) if answered < expected => {
            let about = format!("{answered} of {expected} answer");
            findings.add(Code::IndexersMissing, about);
        }
        None if answered == 1 && state.views.len() == 1 => {
            findings.add(Code::OneIndexer, "indexers")
        }
        Some(_) | None => {}
    }
    unlisted(state, findings);
    positions(state, findings);
    rest.push(("agreement", agreement(state, findings)));
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

fn judge_faults(id: &str, faults: &ReplicaFaults, findings: &mut Findings) {
    for refused in &faults.refused {
        findings.add(Code::PermissionMissing, format!("indexer {id}: {refused}"));
    }
    for (code, count) in [
        (Code::AnswersTooLarge, faults.answers_too_large),
        (Code::ApiOverloaded, faults.turned_away),
    ] {
        if count > 0 {
            findings.add(code, format!("indexer {id}: {count} within ten minutes"));
        }
    }
}

/// A ready replica lists every source that was registered all the time and sent heartbeats.
fn unlisted(state: &PlaneState, findings: &mut Findings) {
    let was_there = |source: &&Source| {
        let registries = [&state.before, &state.registry];
        registries.map(|then| then.workers.contains_key(&source.worker)) == [true, true]
    };
    for (id, view) in state.answers().filter(|(_, view)| view.ready) {
        let listed: BTreeSet<&Source> = view.sources.iter().map(|one| &one.source).collect();
        let sources = state.heartbeats.keys().filter(was_there);
        for source in sources.filter(|source| !listed.contains(source)) {
            findings.add(Code::NotCompared, format!("{source}: not at indexer {id}"));
        }
    }
}

/// At one position of one log, replicas have applied the same record of each source. Views of more
/// than one page are of several moments, and not compared.
fn positions(state: &PlaneState, findings: &mut Findings) {
    let is_one_page = |view: &ViewPage| view.sources.len() <= PAGE_SOURCES_MAX as usize;
    let mut views = state.answers().filter(|(_, view)| is_one_page(view));
    let Some((first_id, first)) = views.next() else {
        return;
    };
    let numbers = |view: &ViewPage| -> BTreeMap<Source, (Generation, RecordNumber)> {
        let credited = view
            .sources
            .iter()
            .filter(|one| one.states.gpu.gives_credit());
        let point = |one: &SourceView| Some((one.source.clone(), one.generation.zip(one.number)?));
        credited.filter_map(point).collect()
    };
    let own = numbers(first);
    let is_there = |view: &ViewPage| (view.log, view.position) == (first.log, first.position);
    for (id, view) in views.filter(|(_, view)| is_there(view)) {
        for (source, (generation, number)) in numbers(view) {
            let Some(known) = own
                .get(&source)
                .filter(|known| **known != (generation, number))
            else {
                continue;
            };
            let about = format!(
                "{source} at position {}: number {} of generation {} at {first_id}, {number} of \
                 {generation} at {id}",
                first.position, known.1, known.0
            );
            findings.add(Code::IndexersDiffer, about);
        }
    }
}

/// Compares digests of shims and indexers at equal generation and number. Returns the status line:
/// a busy source may have no equal number.
fn agreement(state: &PlaneState, findings: &mut Findings) -> String {
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
    let sources: BTreeSet<&Source> = digests.keys().map(|point| point.0).collect();
    let (mut compared, mut met) = (0, BTreeSet::new());
    for (&(source, generation, number), held) in &digests {
        let at = format!("{source} at generation {generation}, number {number}");
        let Some((first, rest)) = held.split_first() else {
            continue;
        };
        compared += rest.len();
        met.extend(rest.first().map(|_| source));
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
            met.insert(source);
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
    let (met, all) = (met.len(), sources.len());
    format!("{compared} comparisons at equal numbers, of {met} of {all} sources")
}

fn digest_text(digest: Digest) -> String {
    format!("{} pairs {}", digest.count, digest.hex())
}
