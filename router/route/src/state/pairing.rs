//! Whether a request goes to one source or to two ([`crate::pairing`]).

use std::time::Instant;

use super::{Core, RouteRequest};
use crate::candidates::{Leg, RouteRefusal};
use crate::decide::Decision;
use crate::pairing::{PairThreshold, PairTimes, SplitVerdict};
use crate::replica_roster::IndexReply;

impl Core {
    /// Compares the best source for the whole request with the best pair. Opens no slot.
    pub fn split(
        &mut self,
        request: &RouteRequest<'_>,
        answer: Option<&IndexReply>,
        threshold: PairThreshold,
        now: Instant,
    ) -> SplitVerdict {
        let mut best = |leg| -> Result<Decision, RouteRefusal> {
            let request = RouteRequest { leg, ..*request };
            let (decision, _) = self.decide(&request, answer, None, now)?;
            Ok(decision)
        };
        let Ok(whole) = best(Leg::Whole) else {
            return SplitVerdict::NoSource;
        };
        let (Ok(prefill), Ok(decode)) = (best(Leg::Prefill), best(Leg::Decode)) else {
            return SplitVerdict::NoPair;
        };
        let time = decode.chosen.time;
        threshold.judge(&PairTimes {
            uncached_tokens: whole.prefill_tokens,
            whole: whole.predicted_ttft.as_secs_f64(),
            delay: whole.chosen.time.delay(whole.chosen.requests()),
            prefill: prefill.predicted_ttft.as_secs_f64(),
            answer: time.queue + time.foreign + time.transfer,
        })
    }
}
