//! When a source's shim is asked for a new generation: the last resort.
//!
//! A resync stays wanted until the source is proven right or a new generation begins. It is
//! requested at most once per [`INTERVAL`] and source, and at most [`AT_ONCE`] requests are
//! pending, those that waited longest first: each answer is a whole image through the log.

use std::time::{Duration, Instant};

use warmroute_proto::registry::{ResyncReason, ResyncRequest};
use warmroute_proto::{Generation, Source};

/// Deadline of a request; afterwards it may be repeated.
const INTERVAL: Duration = Duration::from_secs(10);
const AT_ONCE: usize = 8;

#[derive(Clone, Copy, Debug)]
struct SentRequest {
    at: Instant,
    above: Generation,
}

/// Resync state of one source.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResyncState {
    wanted: Option<ResyncReason>,
    asked: Option<SentRequest>,
}

impl ResyncState {
    pub(super) const fn new() -> Self {
        Self {
            wanted: None,
            asked: None,
        }
    }

    /// Wants a resync. The first reason stays: later ones are mostly its consequences.
    pub(super) fn request(&mut self, reason: ResyncReason) {
        self.wanted.get_or_insert(reason);
    }

    pub(super) const fn settle(&mut self) {
        self.wanted = None;
    }

    /// Keeps a request from before a snapshot was adopted, so that it is not repeated immediately.
    pub(super) const fn remember(&mut self, known: &Self) {
        self.asked = known.asked;
    }

    fn recent_request(&self, now: Instant) -> Option<&SentRequest> {
        self.asked
            .as_ref()
            .filter(|asked| now.saturating_duration_since(asked.at) < INTERVAL)
    }
}

/// Requests to send now. `sources` are those whose shim can answer, with their fences.
pub(super) fn poll<'a>(
    now: Instant,
    sources: impl Iterator<Item = (&'a Source, Option<Generation>, &'a mut ResyncState)>,
) -> Vec<ResyncRequest> {
    let mut under_way = 0;
    let mut waiting = Vec::new();
    for (source, fence, state) in sources {
        match (state.recent_request(now), state.wanted, fence) {
            (Some(asked), _, Some(fence)) if fence <= asked.above => under_way += 1,
            (None, Some(reason), Some(above)) => waiting.push((source, state, reason, above)),
            (Some(_) | None, Some(_) | None, Some(_) | None) => {}
        }
    }
    // Sources without a request sort first. The sort is stable: ties keep the order of sources.
    waiting.sort_by_key(|(_, state, ..)| state.asked.map(|asked| asked.at));
    waiting
        .into_iter()
        .take(AT_ONCE.saturating_sub(under_way))
        .map(|(source, state, reason, above)| {
            state.asked = Some(SentRequest { at: now, above });
            ResyncRequest {
                source: source.clone(),
                above,
                reason,
            }
        })
        .collect()
}
