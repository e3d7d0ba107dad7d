//! Judges the routers by what each says of itself.

use std::collections::BTreeMap;
use std::time::Duration;

use warmroute_proto::RouterId;

use super::page::duration;
use super::{Code, Findings, PlaneState};

/// Oldest entry of a router whose clock is right: it writes one each five seconds, on a busy machine
/// later.
const AGE_MAX: Duration = Duration::from_secs(10);

/// Difference of clocks that is worth a note.
const SKEW_MIN: Duration = Duration::from_secs(2);

pub(super) fn judge(state: &PlaneState, findings: &mut Findings) {
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
        let behind = Duration::from_nanos(state.unix_ns.saturating_sub(facts.unix_ns));
        if ahead >= SKEW_MIN || behind >= AGE_MAX {
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
