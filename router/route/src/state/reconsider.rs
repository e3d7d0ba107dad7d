//! Deciding again after a choice of another router crossed one of this router ([`crate::moves`]).

use std::time::{Duration, Instant};

use warmroute_proto::RouterId;

use super::{Admitted, Core, RouteRequest};
use crate::ledger::LedgerError;
use crate::replica_roster::IndexReply;
use crate::slots::SlotKey;
use crate::source_table::SourceId;

impl Core {
    /// Takes this router's slots whose choice an earlier choice of another router crossed. Call
    /// [`Self::reconsider`] for each.
    pub fn take_crossed(&mut self) -> Vec<u64> {
        self.moves.take_crossed()
    }

    /// Sets the one-way delay of a peer's messages; `None` removes the peer.
    pub fn set_delay(&mut self, peer: RouterId, delay: Option<Duration>) {
        self.moves.set_delay(peer, delay);
    }

    /// Disables moves, for the shutdown.
    pub fn stop_moves(&mut self) {
        self.moves.stop();
    }

    /// Decides again for a request without an answer yet, as if it had no slot. If another source
    /// is better, frees the slot as aborted and returns the new one; the caller must cancel the
    /// request at the old source. Returns `None` if the request stays.
    pub fn reconsider(
        &mut self,
        slot: u64,
        request: &RouteRequest<'_>,
        answer: Option<&IndexReply>,
        now: Instant,
    ) -> Result<Option<Admitted>, LedgerError> {
        let Some(source) = self.moves.source_of(slot) else {
            self.moves.counts.late += 1;
            return Ok(None);
        };
        self.tick(now);
        let key = SlotKey {
            router: self.ledger.router(),
            counter: slot,
        };
        let decision = self.decide(request, answer, Some(key), now).ok();
        let better = decision.filter(|(decision, _)| {
            let margin = self.move_margin(request, source);
            // A source that is left out has a reason, which another request will find out.
            let at = |source| decision.compared.iter().find(|one| one.source == source);
            let (stay, go) = (at(source), at(decision.chosen.source));
            stay.zip(go)
                .is_some_and(|(stay, go)| stay.cost - go.cost > margin)
        });
        let Some((decision, _)) = better else {
            self.moves.counts.stayed += 1;
            return Ok(None);
        };
        let moved = self.open(request, decision, Some(slot), now)?;
        self.moves.settle(slot);
        self.pending.remove(&slot);
        self.stalls.ended(slot);
        self.moves.counts.moved += 1;
        Ok(Some(moved))
    }

    /// Cost that a move must save.
    fn move_margin(&self, request: &RouteRequest<'_>, source: SourceId) -> f64 {
        let tokens = f64::from(self.knobs.move_margin_tokens);
        if self.knobs.policy.is_timed() {
            return tokens * self.speed.of(source).ttft.secs_each;
        }
        let blocks = tokens / f64::from(request.prompt.block_tokens());
        self.knobs.overlap_score_weight * blocks
    }
}
