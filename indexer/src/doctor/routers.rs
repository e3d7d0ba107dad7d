//! Judges the routers by what each says of itself.

use std::collections::BTreeMap;
use std::time::Duration;

use warmroute_proto::registry::{RouterFacts, UnreachableWorker};
use warmroute_proto::{EngineHealth, RouterId, WorkerId};

use super::page::duration;
use super::{Code, Findings, PlaneState, Registry};

/// Oldest entry of a router whose clock is right: it writes one each five seconds, on a busy machine
/// later.
const AGE_MAX: Duration = Duration::from_secs(10);

/// Difference of clocks that is worth a note.
const SKEW_MIN: Duration = Duration::from_secs(2);

pub(super) fn judge(state: &PlaneState, findings: &mut Findings) {
    missed_workers(state, findings);
    for (router, refused) in &state.registry.refusals {
        for refused in refused {
            findings.add(
                Code::PermissionMissing,
                format!("router {router}: {refused}"),
            );
        }
    }
    for (router, entry) in &state.registry.doubts {
        for doubt in &entry.doubts {
            let (about, had, cause) = (&doubt.about, &doubt.engine_had, &doubt.likely_cause);
            let about = format!("{about}: the engine had {had} ({cause}), at router {router}");
            findings.add(Code::CreditContradicted, about);
        }
        let shown = u32::try_from(entry.doubts.len()).unwrap_or(u32::MAX);
        if let more @ 1.. = entry.total.saturating_sub(shown) {
            let about = format!("{more} more at router {router}");
            findings.add(Code::CreditContradicted, about);
        }
    }
    let facts = &state.registry.facts;
    let mut settings: BTreeMap<u64, Vec<RouterId>> = BTreeMap::new();
    for (router, facts) in facts {
        settings.entry(facts.settings).or_default().push(*router);
        for failed in &facts.failed_checks {
            let (worker, check, why) = (&failed.worker, &failed.check, &failed.why);
            let about = format!("{worker}: {check}: {why}, at router {router}");
            findings.add(Code::RouterCheckFailed, about);
        }
        for problem in &facts.without_tokenizer {
            let (model, why) = (&problem.model, &problem.why);
            let about = format!("{model}: {why}, at router {router}");
            findings.add(Code::ModelWithoutTokenizer, about);
        }
        for worker in &facts.unregistered {
            if !state.registry.workers.contains_key(worker) {
                findings.add(
                    Code::WorkerUnregistered,
                    format!("{worker}, at router {router}"),
                );
            }
        }
        let ahead = Duration::from_nanos(facts.unix_ns.saturating_sub(state.unix_ns));
        let behind = age(facts, state.unix_ns);
        // Old facts of a router that writes none are no matter of its clock.
        let before = state.before.facts.get(router);
        let was_written = before.is_some_and(|before| before.unix_ns != facts.unix_ns);
        if ahead >= SKEW_MIN || behind >= AGE_MAX && was_written {
            let off = duration(ahead.max(behind));
            findings.add(Code::ClockSkew, format!("router {router}: {off} from here"));
        }
    }
    if settings.len() > 1 {
        for (digest, routers) in settings {
            let routers: Vec<String> = routers.iter().map(ToString::to_string).collect();
            let about = format!("settings {digest:016x}: routers {}", routers.join(", "));
            findings.add(Code::RoutersDiffer, about);
        }
    }
}

fn age(facts: &RouterFacts, unix_ns: u64) -> Duration {
    Duration::from_nanos(unix_ns.saturating_sub(facts.unix_ns))
}

/// Whether facts of a router look old. A second reading later shows whether the router writes any.
pub(super) fn look_old(registry: &Registry, unix_ns: u64) -> bool {
    let mut facts = registry.facts.values();
    facts.any(|facts| age(facts, unix_ns) >= AGE_MAX)
}

/// Workers that routers do not reach, or that are gone without a sign.
fn missed_workers(state: &PlaneState, findings: &mut Findings) {
    let registry = &state.registry;
    let mut lost: BTreeMap<&WorkerId, (u32, usize)> = BTreeMap::new();
    for (router, misses) in &registry.misses {
        for missed in &misses.unreachable {
            let UnreachableWorker { worker, url, why } = missed;
            let mut heard = state.heartbeats.iter();
            // The shim sees that too: the engine is the cause.
            let is_unhealthy = heard.any(|(source, heard)| {
                source.worker == *worker && heard.last.health == EngineHealth::Unhealthy
            });
            if registry.workers.contains_key(worker) && !is_unhealthy {
                let about = format!("{worker} at {url}: {why}, at router {router}");
                findings.add(Code::WorkerUnreachable, about);
            }
        }
        for missed in &misses.lost {
            let (silent_secs, routers) = lost.entry(&missed.worker).or_default();
            *silent_secs = missed.silent_secs.max(*silent_secs);
            *routers += 1;
        }
    }
    lost.retain(|worker, _| {
        !registry.workers.contains_key(*worker) && !registry.drained.contains_key(*worker)
    });
    for (worker, (silent_secs, routers)) in lost {
        let silent = duration(Duration::from_secs(silent_secs.into()));
        let about = format!("{worker}: not registered for {silent}, at {routers} routers");
        findings.add(Code::WorkerLost, about);
    }
}
