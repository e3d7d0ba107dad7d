//! Judges the sources: which give no credit, why, and since when.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use warmroute_proto::query::{SourceState, UnknownReason};
use warmroute_proto::view::SourceView;
use warmroute_proto::{Tier, TierState};

use super::page::duration;
use super::{Code, Findings, PlaneState, SETTLING, StatusLine};

/// Absence after which a worker counts as taken out.
const TAKEN_OUT: Duration = Duration::from_secs(30);

/// Generations within ten minutes that show a resync loop.
const BEGUN_MAX: u8 = 4;

pub(super) fn judge(state: &PlaneState, findings: &mut Findings, rest: &mut Vec<StatusLine>) {
    let mut words: BTreeMap<&'static str, BTreeSet<&warmroute_proto::Source>> = BTreeMap::new();
    for (id, view) in state.answers() {
        for source in &view.sources {
            words
                .entry(source.label())
                .or_default()
                .insert(&source.source);
            if has_left(state, source) {
                findings.add(Code::SourceGone, about(id, source));
                continue;
            }
            if let Some(code) = code(state, source) {
                findings.add(code, about(id, source));
            }
            judge_tiers(id, source, findings);
            if source.begun_lately >= BEGUN_MAX {
                let about = format!(
                    "{}: {} generations within ten minutes",
                    source.source, source.begun_lately
                );
                findings.add(Code::SourceBeginsAgain, about);
            }
        }
    }
    nothing_credited(state, findings);
    let counts = words
        .iter()
        .map(|(word, sources)| format!("{} {word}", sources.len()));
    let counts: Vec<String> = counts.collect();
    rest.push(("sources", counts.join(", ")));
}

/// Names the lower tiers that are weaker than the GPU's, which the source's state hides.
fn judge_tiers(id: &str, source: &SourceView, findings: &mut Findings) {
    let gpu = source.states.gpu;
    for tier in [Tier::Cpu, Tier::Disk] {
        let state = *source.states.get(tier);
        let code = if state == SourceState::Unverified {
            Code::TierUnverified
        } else if state.gives_credit() || state.is_absent() {
            continue;
        } else {
            Code::TierUncredited
        };
        if gpu.gives_credit() && state > gpu {
            let label = state.label();
            findings.add(code, format!("{}: {tier} {label}, at {id}", source.source));
        }
    }
}

fn code(state: &PlaneState, source: &SourceView) -> Option<Code> {
    let heard = state.heartbeats.get(&source.source);
    // A shim that has sent its image is behind its engine, not the indexer behind the shim.
    let waits_for_engine = heard.is_some_and(|heard| {
        heard.last.states.gpu == TierState::CatchingUp && heard.last.number.is_some()
    });
    let age = Duration::from_millis(source.state_age_ms);
    let lasts = age >= SETTLING;
    match source.states.gpu {
        SourceState::Exact | SourceState::Absent => None,
        SourceState::Partial => Some(Code::SourcePartial),
        SourceState::Unverified => Some(Code::SourceUnverified),
        SourceState::Stale => lasts.then_some(Code::SourceStale),
        SourceState::CatchingUp if waits_for_engine => lasts.then_some(Code::SourceUnproven),
        SourceState::CatchingUp => lasts.then_some(Code::SourceCatchingUp),
        SourceState::Unknown => match source.reason {
            Some(UnknownReason::Memory) => Some(Code::SourceUnknown),
            Some(UnknownReason::ShimGone | UnknownReason::NoProof) => {
                lasts.then_some(Code::SourceUnknown)
            }
            None => lasts.then_some(Code::SourceWithoutEvents),
        },
    }
}

/// What the indexer keeps of a worker that was taken out.
fn has_left(state: &PlaneState, source: &SourceView) -> bool {
    let worker = &source.source.worker;
    let registered = [&state.before, &state.registry].map(|then| then.workers.contains_key(worker));
    let age = Duration::from_millis(source.state_age_ms);
    registered == [false, false] && source.states.gpu == SourceState::Unknown && age >= TAKEN_OUT
}

/// Names the tiers on which registered sources exist and none is credited.
fn nothing_credited(state: &PlaneState, findings: &mut Findings) {
    for (id, view) in state.answers() {
        let registered = |source: &&SourceView| {
            let worker = &source.source.worker;
            state.registry.workers.contains_key(worker)
                && Duration::from_millis(source.state_age_ms) >= SETTLING
                && !source.is_without_events()
        };
        let sources: Vec<_> = view.sources.iter().filter(registered).collect();
        for tier in [Tier::Gpu, Tier::Cpu, Tier::Disk] {
            let credited = sources
                .iter()
                .any(|source| source.states.get(tier).gives_credit());
            if !sources.is_empty() && !credited {
                let about = format!("{tier}: none of {} sources, at {id}", sources.len());
                findings.add(Code::NothingCredited, about);
            }
        }
    }
}

fn about(id: &str, source: &SourceView) -> String {
    let reason = match (source.reason, source.doubt) {
        (Some(reason), _) => &format!("{}, ", reason.label()),
        (None, Some(doubt)) => &format!("{}, ", doubt.label()),
        (None, None) => "",
    };
    let age = duration(Duration::from_millis(source.state_age_ms));
    format!("{}: {reason}for {age}, at {id}", source.source)
}
