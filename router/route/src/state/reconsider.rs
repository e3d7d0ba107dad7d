//! Deciding again for a request whose choice another router's crossed ([`crate::moves`]).

use std::time::{Duration, Instant};

use warmroute_proto::RouterId;
use warmroute_proto::load::{LoadChange, OpenSlot, SlotEnd};
use warmroute_proto::query::IndexAnswer;

use super::{Admitted, Core, RouteRequest};
use crate::decide::{Decision, Terms};
use crate::ledger::LedgerError;

impl Core {
    /// This router's slots whose choice was crossed by an earlier one of another router since the last
    /// call: each worth [`Self::reconsider`].
    pub fn take_crossed(&mut self) -> Vec<u64> {
        self.moves.take_crossed()
    }

    /// How long a peer's messages are on their way; none: it is gone, or it is not known.
    pub fn set_delay(&mut self, peer: RouterId, delay: Option<Duration>) {
        self.moves.set_delay(peer, delay);
    }

    /// From here on requests stay where they are.
    pub fn stop_moves(&mut self) {
        self.moves.stop();
    }

    /// Decides again for a request of which nothing came yet, by all that is known and as if it were
    /// nowhere. Some: it has another slot, at another source, and stays there; the slot that it had was
    /// freed as aborted, and whoever was asked is to be told. None: it stays.
    pub fn reconsider(
        &mut self,
        slot: u64,
        ask: &RouteRequest<'_>,
        answer: Option<&IndexAnswer>,
        now: Instant,
    ) -> Result<Option<Admitted>, LedgerError> {
        let router = self.ledger.router();
        let stated = self.slots.open_slot(&self.table, router, slot);
        let Some(stated) = stated.filter(|_| self.moves.is_open(slot)) else {
            self.moves.counts.late += 1;
            return Ok(None);
        };
        let Some(decision) = self.better(&stated, ask, answer, now) else {
            self.moves.counts.stayed += 1;
            return Ok(None);
        };
        let (counter, end) = (slot, SlotEnd::Aborted);
        let (opening, change) = self.opening(ask.prompt, &decision);
        // In one message, so that nobody ever counts the request twice, or not at all.
        let changes = vec![LoadChange::Free { counter, end }, change];
        let entry = self.ledger.write_all(changes)?;
        self.apply(&entry.message, now);
        self.moves.settle(slot);
        self.sent.remove(&slot);
        self.stalls.ended(slot);
        self.moves.counts.moved += 1;
        Ok(Some(self.opened(opening, decision, entry.bytes, now)))
    }

    /// What would be decided without this slot of one's own, if that is another source and worth it.
    /// Everything stays as it is.
    fn better(
        &mut self,
        slot: &OpenSlot,
        ask: &RouteRequest<'_>,
        answer: Option<&IndexAnswer>,
        now: Instant,
    ) -> Option<Decision> {
        let (router, incarnation) = (self.ledger.router(), self.ledger.incarnation());
        let (counter, end) = (slot.counter, SlotEnd::Aborted);
        let source = self.table.id(&slot.source)?;
        self.tick(now);
        let free = LoadChange::Free { counter, end };
        self.slots
            .apply(&mut self.table, router, incarnation, &free);
        self.predictions.ended(router, counter, end, now);
        let decision = self.decide(ask, answer, now);
        self.slots
            .restore(&mut self.table, router, incarnation, slot);
        self.predictions.sent(router, counter, source, &slot.prompt);
        let (decision, _) = decision.ok()?;
        // One that is left out has a reason to be, which another request is to find out about.
        let at = |terms: &&Terms| terms.source == source;
        let stay = decision.weighed.iter().find(at)?.cost;
        let block_tokens = f64::from(ask.prompt.block_tokens());
        let margin_blocks = f64::from(self.knobs.move_margin_tokens) / block_tokens;
        let margin = self.knobs.overlap_score_weight * margin_blocks;
        (stay - decision.chosen.cost > margin).then_some(decision)
    }
}
