//! Routers compare their credit with what engines report, and ask the index again, as
//! `router::audit` does. The index of this world is right, whatever engines evict: no strike is.

use std::time::Duration;

use warmroute_proto::query::{HoldAnswer, HoldQuery, HoldSpan};
use warmroute_router::route::audit::SETTLE;
use warmroute_router::route::{AuditVerdict, Decision, Prompt, RecheckVerdict};

use super::host::Timer;
use super::router::RouterRun;
use super::{Breakage, World};

/// More than clocks drift apart in [`SETTLE`].
const DRIFT_MAX: Duration = Duration::from_millis(100);

impl World {
    /// `Auditor::reported`.
    pub(super) fn usage_reported(
        &mut self,
        at: usize,
        run: &mut RouterRun,
        (decision, prompt): (&Decision, &Prompt),
        cached: u32,
    ) {
        let host = self.routers[at].host;
        let now = self.router_now(at);
        let verdict = run.books().core().audit(decision, prompt, cached, now);
        if let AuditVerdict::Less {
            recheck: Some(recheck),
            ..
        } = verdict
        {
            let no = run.next_request;
            run.next_request += 1;
            run.rechecks.insert(no, recheck);
            self.timer(host, SETTLE + DRIFT_MAX, Timer::Recheck(no));
        }
    }

    /// `Rechecks::recheck`, at an indexer that answers without delay.
    pub(super) fn recheck(&mut self, at: usize, run: &mut RouterRun, no: u64) {
        let Some(recheck) = run.rechecks.remove(&no) else {
            return;
        };
        let now = self.router_now(at);
        let query = run.books().core().hold_query(&recheck).unwrap();
        let indexer = no as usize % self.indexers.len();
        let is_away = self.hosts[self.indexers[indexer].host].is_paused;
        let Some(answer) = self.hold_as_read(indexer, &query).filter(|_| !is_away) else {
            return;
        };
        let verdict = run.books().core().recheck(&recheck, &answer, now);
        match verdict {
            RecheckVerdict::Unproven => {}
            RecheckVerdict::Repeat(again) => {
                let host = self.routers[at].host;
                let delay = again.not_before.saturating_duration_since(now);
                run.rechecks.insert(no, again);
                self.timer(host, delay + DRIFT_MAX, Timer::Recheck(no));
            }
            RecheckVerdict::Cleared => self.checks.routers.rechecks += 1,
            RecheckVerdict::Strike | RecheckVerdict::Demote => {
                let source = query.source;
                self.fail(format!(
                    "router {at}: {verdict:?} against {source}, of which {answer:?}"
                ));
            }
        }
    }

    fn hold_as_read(&self, indexer: usize, query: &HoldQuery) -> Option<HoldAnswer> {
        let mut answer = self.read_index(indexer, |handle| handle.hold(query))?;
        let is_found_again = answer.span == HoldSpan::Interrupted;
        if is_found_again && self.broken == Some(Breakage::InterruptionUnseen) {
            answer.span = HoldSpan::Held;
        }
        Some(answer)
    }
}
