//! What a router learns of its sources' speed, from the requests of all routers: replicas that see
//! the same messages know the same speeds. A peer's times are measured between its messages.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use warmroute_proto::RouterId;
use warmroute_proto::load::SlotEnd;

use super::backlog::{BacklogTime, PrefillBacklog};
use super::fit::Line;
use super::itl::{AnswerTiming, ItlModel};
use super::slots::SlotKey;
use super::source_table::{PerSource, SourceId};
use super::transfer::TransferTimes;
use super::ttft::TtftModel;

/// How often what was learned of an unused source fades, and how much of it stays: half in 7 s.
const FADE_EVERY: Duration = Duration::from_secs(5);
const FADE_KEEP: f64 = 0.6;

/// Longer than the delay between routers of one site. With longer times, requests that did not cross
/// count too, and the learned speeds become wrong.
const CROSSING: Duration = Duration::from_millis(15);

#[derive(Clone, Debug, Default)]
pub struct SpeedTracker {
    pub ttft: TtftModel,
    pub itl: ItlModel,
    pub transfers: TransferTimes,
    backlog: PrefillBacklog,
    /// Requests without a first token, of each source.
    prefills: PerSource<BTreeMap<SlotKey, PrefillInProgress>>,
    /// Where each of them is.
    prefilling: BTreeMap<SlotKey, SourceId>,
    answers: BTreeMap<SlotKey, AnswerInProgress>,
    faded_at: Option<Instant>,
}

/// A request that was accepted: measures the time to first token.
#[derive(Clone, Copy, Debug)]
struct PrefillInProgress {
    source: SourceId,
    since: Instant,
    /// Its own tokens to prefill.
    tokens: u32,
    /// Tokens to prefill before its first token, its own included.
    tokens_ahead: u64,
    block_tokens: u32,
}

/// A request that a source accepted.
#[derive(Clone, Copy, Debug)]
pub struct AcceptedPrefill {
    pub source: SourceId,
    pub tokens: u32,
    /// The source's outstanding prefill before it.
    pub outstanding_tokens: u64,
    /// Prompts of waiting requests from elsewhere.
    pub foreign_tokens: u64,
    pub block_tokens: u32,
}

/// An answer that began: measures the time between tokens.
#[derive(Clone, Copy, Debug)]
struct AnswerInProgress {
    source: SourceId,
    since: Instant,
    /// Active requests of the source at its first token.
    active_requests: u32,
    block_tokens: u32,
    tokens: u64,
}

/// Coefficients of a source's predicted times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SourceSpeed {
    /// Time to first token over tokens to prefill.
    pub ttft: Line,
    /// Time between tokens over active requests.
    pub itl: Line,
}

impl SpeedTracker {
    /// Processes deadlines.
    pub fn tick(&mut self, now: Instant) {
        let faded_at = *self.faded_at.get_or_insert(now);
        if now.saturating_duration_since(faded_at) >= FADE_EVERY {
            self.faded_at = Some(now);
            self.ttft.fits.fade(FADE_KEEP);
            self.itl.fits.fade(FADE_KEEP);
        }
        self.transfers.expire(now);
    }

    /// Resets a source, whose engine restarted.
    pub fn restarted(&mut self, source: SourceId) {
        self.ttft.fits.restarted(source);
        self.itl.fits.restarted(source);
        self.transfers.restarted(source);
    }

    /// A source accepted a request.
    pub fn accepted(&mut self, slot: SlotKey, prefill: AcceptedPrefill, now: Instant) {
        let AcceptedPrefill {
            source,
            tokens,
            outstanding_tokens,
            foreign_tokens,
            block_tokens,
        } = prefill;
        let queued = self.queue_secs(source, outstanding_tokens, self.backlog_time(now));
        let queued = queued / self.ttft.fits.line(source).secs_each;
        let secs = self.prefill_secs(source, tokens.into());
        self.backlog.added(source, secs, now);
        let prefill = PrefillInProgress {
            source,
            since: now,
            tokens,
            // A saturating cast of a number of at least 0.
            tokens_ahead: u64::from(tokens)
                .saturating_add((queued as u64).saturating_sub(self.crossing(slot, source, now)))
                .saturating_add(foreign_tokens),
            block_tokens,
        };
        self.prefills.get_mut(source).insert(slot, prefill);
        self.prefilling.insert(slot, source);
    }

    /// Outstanding tokens at a source that the router of this request did not know when it counted
    /// what the source must compute for it. Such requests move, or share their prefix with it.
    fn crossing(&self, slot: SlotKey, source: SourceId, now: Instant) -> u64 {
        let at_source = self.prefills.get(source).into_iter().flatten();
        let near = at_source.filter(|(other, earlier)| {
            other.router != slot.router && now.saturating_duration_since(earlier.since) <= CROSSING
        });
        near.map(|(_, earlier)| u64::from(earlier.tokens)).sum()
    }

    /// The first token of a request will not be measured: its router only predicts its time.
    pub fn unmeasured(&mut self, slot: SlotKey) {
        self.take_prefill(slot);
    }

    fn take_prefill(&mut self, slot: SlotKey) -> Option<PrefillInProgress> {
        let source = self.prefilling.remove(&slot)?;
        self.prefills.get_mut(source).remove(&slot)
    }

    /// A request's prefill ended, at a source with so many active requests.
    pub fn first_token(&mut self, slot: SlotKey, active_requests: u32, now: Instant) {
        let Some(prefill) = self.take_prefill(slot) else {
            return;
        };
        let elapsed = now.saturating_duration_since(prefill.since);
        // What has nothing to prefill waits for blocks of another source.
        if prefill.tokens > 0 {
            self.ttft
                .learn(prefill.source, prefill.tokens_ahead, elapsed);
        }
        let answer = AnswerInProgress {
            source: prefill.source,
            since: now,
            active_requests,
            block_tokens: prefill.block_tokens,
            tokens: 0,
        };
        self.answers.insert(slot, answer);
    }

    /// A request generated so many blocks.
    pub fn grew(&mut self, slot: SlotKey, blocks: u32) {
        if let Some(answer) = self.answers.get_mut(&slot) {
            answer.tokens += u64::from(blocks) * u64::from(answer.block_tokens);
        }
    }

    /// A request ended. Its source has so many active requests, itself included.
    pub fn ended(&mut self, slot: SlotKey, end: SlotEnd, active_requests: u32, now: Instant) {
        if let Some(prefill) = self.take_prefill(slot) {
            self.leaves_queue(&prefill, now);
        }
        let answer = self.answers.remove(&slot);
        if let Some(answer) = answer.filter(|_| end == SlotEnd::Completed) {
            let timing = AnswerTiming {
                tokens: answer.tokens,
                decode: now.saturating_duration_since(answer.since),
                active_requests: answer.active_requests.midpoint(active_requests),
            };
            self.itl.learn(answer.source, timing);
        }
    }

    /// A request left before its first token, as one that moves does: later ones do not wait for what
    /// was not computed of it. Otherwise a source that many requests leave would seem fast.
    fn leaves_queue(&mut self, left: &PrefillInProgress, now: Instant) {
        let elapsed = now.saturating_duration_since(left.since).as_secs_f64();
        let computed = elapsed / self.ttft.fits.line(left.source).secs_each;
        // A saturating cast of a number of at least 0.
        let rest = u64::from(left.tokens).saturating_sub(computed as u64);
        for later in self.prefills.get_mut(left.source).values_mut() {
            if later.since >= left.since {
                later.tokens_ahead = later
                    .tokens_ahead
                    .saturating_sub(rest)
                    .max(later.tokens.into());
            }
        }
    }

    /// Drops at most `most` requests of a router. Returns true while more may remain.
    pub fn release_step(&mut self, router: RouterId, most: usize) -> bool {
        let prefills = first_of(&self.prefilling, router, most);
        for slot in &prefills {
            self.take_prefill(*slot);
        }
        let answers = first_of(&self.answers, router, most);
        for slot in &answers {
            self.answers.remove(slot);
        }
        prefills.len() == most || answers.len() == most
    }

    /// A prefill ended; so many tokens are outstanding.
    pub fn prefilled(&mut self, source: SourceId, outstanding_tokens: u64, now: Instant) {
        let secs = self.prefill_secs(source, outstanding_tokens);
        self.backlog.shortened(source, secs, now);
    }

    /// The time for [`Self::queue_secs`].
    #[must_use]
    pub fn backlog_time(&self, now: Instant) -> BacklogTime {
        self.backlog.time(now)
    }

    /// Seconds until the source has computed the prompts that it accepted, so many tokens in all.
    #[must_use]
    #[inline]
    pub fn queue_secs(&self, source: SourceId, outstanding_tokens: u64, now: BacklogTime) -> f64 {
        let secs = self.prefill_secs(source, outstanding_tokens);
        self.backlog.secs(source, secs, now)
    }

    /// Seconds that so many tokens of prefill take.
    #[must_use]
    #[inline]
    pub fn prefill_secs(&self, source: SourceId, tokens: u64) -> f64 {
        tokens as f64 * self.ttft.fits.line(source).secs_each
    }

    #[must_use]
    pub fn of(&self, source: SourceId) -> SourceSpeed {
        SourceSpeed {
            ttft: self.ttft.fits.line(source),
            itl: self.itl.fits.line(source),
        }
    }
}

/// At most `most` slots of a router.
fn first_of<T>(slots: &BTreeMap<SlotKey, T>, router: RouterId, most: usize) -> Vec<SlotKey> {
    let key = |counter| SlotKey { router, counter };
    let open = slots.range(key(0)..=key(u64::MAX));
    open.take(most).map(|(slot, _)| *slot).collect()
}

#[cfg(test)]
mod tests {

    use super::*;

    use crate::testing::{source_id, start};

    const fn slot(router: u8, counter: u64) -> SlotKey {
        SlotKey {
            router: RouterId([router; 16]),
            counter,
        }
    }

    /// 4,000 tokens behind so many others.
    fn prefill(outstanding_tokens: u64) -> AcceptedPrefill {
        AcceptedPrefill {
            source: source_id(),
            tokens: 4_000,
            outstanding_tokens,
            foreign_tokens: 0,
            block_tokens: 16,
        }
    }

    /// Seconds for each token, after a request whose first token comes 200 ms after it.
    fn learned(speed: &mut SpeedTracker, slot: SlotKey, sent: Instant) -> f64 {
        speed.first_token(slot, 1, sent + Duration::from_millis(200));
        speed.of(source_id()).ttft.secs_each
    }

    fn learned_alone() -> f64 {
        let (mut speed, now) = (SpeedTracker::default(), start());
        speed.accepted(slot(1, 0), prefill(0), now);
        learned(&mut speed, slot(1, 0), now)
    }

    /// Neither router knew of the other's request: they share a prefix, or one of them moves.
    #[test]
    fn a_request_of_another_router_within_the_delay_is_not_ahead() {
        let (mut speed, now) = (SpeedTracker::default(), start());
        speed.accepted(slot(1, 0), prefill(0), now);
        let later = now + Duration::from_millis(1);
        speed.accepted(slot(2, 0), prefill(4_000), later);
        assert_eq!(learned(&mut speed, slot(2, 0), later), learned_alone());
        // Another one, after the delay, waits for both.
        let queued = later + 2 * CROSSING;
        speed.accepted(slot(3, 0), prefill(4_000), queued);
        let waits = speed.prefills.get(source_id()).unwrap()[&slot(3, 0)];
        assert!(waits.tokens_ahead > 5_000, "{}", waits.tokens_ahead);
    }

    #[test]
    fn a_request_that_leaves_the_queue_is_not_ahead_of_later_ones() {
        let (mut speed, now) = (SpeedTracker::default(), start());
        speed.accepted(slot(1, 0), prefill(0), now);
        speed.accepted(slot(1, 1), prefill(4_000), now);
        speed.ended(slot(1, 0), SlotEnd::Aborted, 2, now);
        assert_eq!(learned(&mut speed, slot(1, 1), now), learned_alone());
    }

    /// Its requests will not end here.
    #[test]
    fn what_is_measured_of_a_dead_router_is_dropped() {
        let (mut speed, now) = (SpeedTracker::default(), start());
        for one in [slot(1, 0), slot(1, 1), slot(2, 0), slot(2, 1)] {
            speed.accepted(one, prefill(0), now);
        }
        speed.first_token(slot(1, 0), 1, now);
        speed.first_token(slot(2, 0), 1, now);
        let before = speed.of(source_id());
        let dead = RouterId([1; 16]);
        assert!(speed.release_step(dead, 1));
        while speed.release_step(dead, 1) {}
        assert_eq!((speed.prefilling.len(), speed.answers.len()), (1, 1));
        speed.first_token(slot(1, 1), 1, now + Duration::from_secs(60));
        assert_eq!(speed.of(source_id()), before);
    }
}
