//! The queue with its bounds, and the places given to requests that decide now. Pure.
//!
//! A request that leaves the queue has a *grant*: a place counts as taken from the grant until the
//! request has its slot. So no place is given twice, and no request overtakes the queue.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::displacement::victims;
use super::fair_queue::{FairQueue, QueueSize, QueueSpot, QueuedRequest, TicketNumber};
use super::free_places::FreePlaces;
use super::in_flight::InFlightTokens;
use super::leave_rate::{LeaveRate, RETRY_AFTER_MIN};
use super::line::{QueueAtBound, QueueBounds, QueueLine};

/// What a new request has for its place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct JoinedQueue<T> {
    pub spot: QueueSpot,
    /// Requests that gave it up.
    pub displaced: Vec<T>,
}

/// How a grant ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GrantEnd {
    /// The request has a slot.
    Admitted,
    /// The request ended without one.
    Unused,
}

/// One model's waiting requests, for metrics.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct QueueStatus {
    pub model: String,
    pub size: QueueSize,
    pub oldest: Option<Duration>,
    pub leaving_per_sec: Option<f64>,
}

#[derive(Debug)]
pub(crate) struct WaitingRoom<T> {
    queue: FairQueue<T>,
    models: BTreeMap<Arc<str>, WaitingModel>,
    tickets: u64,
}

/// What the queue holds of one model.
#[derive(Debug, Default)]
struct WaitingModel {
    size: QueueSize,
    grants: u32,
    rate: LeaveRate,
}

impl<T> Default for WaitingRoom<T> {
    fn default() -> Self {
        Self {
            queue: FairQueue::default(),
            models: BTreeMap::new(),
            tickets: 0,
        }
    }
}

impl WaitingModel {
    const fn is_in_use(&self) -> bool {
        self.grants > 0 || self.size.requests > 0
    }
}

impl<T> WaitingRoom<T> {
    /// Whether a new request of this model must queue: others of it wait, or each place that is free
    /// is given or waited for. `places`: those of the named models.
    pub(crate) fn is_engaged(
        &self,
        model: &str,
        places: impl FnOnce(Vec<Arc<str>>) -> FreePlaces,
    ) -> bool {
        if self
            .models
            .get(model)
            .is_some_and(|own| own.size.requests > 0)
        {
            return true;
        }
        let mut names = self.names_in_use();
        if names.is_empty() {
            return false;
        }
        names.push(model.into());
        let mut places = places(names);
        for (other, waiting) in &self.models {
            if waiting.size.requests > 0 {
                places.take_all(other);
            }
        }
        self.take_granted(&mut places);
        !places.has(model)
    }

    /// Adds a request, at a bound in others' place.
    pub(crate) fn join(
        &mut self,
        line: &QueueLine,
        request: QueuedRequest<T>,
        bounds: &QueueBounds,
    ) -> Result<JoinedQueue<T>, QueueAtBound> {
        let now = request.since;
        self.models
            .retain(|_, model| model.is_in_use() || model.rate.per_sec(now).is_some());
        let own = self.models.get(line.model.as_str());
        let of_model = own.map_or(0, |own| own.size.requests);
        let victims = victims(&self.queue, of_model, line, request.bytes, bounds)?;
        let displaced = victims.iter().filter_map(|spot| self.cancel(spot));
        let displaced = displaced.map(|request| request.payload).collect();
        self.tickets += 1;
        let spot = QueueSpot {
            model: line.model.as_str().into(),
            level: line.level,
            tenant: line.tenant.clone(),
            number: TicketNumber(self.tickets),
        };
        self.model(&spot.model).size.add(request.bytes);
        self.queue.push(&spot, request);
        Ok(JoinedQueue { spot, displaced })
    }

    /// Takes a request out, if it waits.
    pub(crate) fn cancel(&mut self, spot: &QueueSpot) -> Option<QueuedRequest<T>> {
        let request = self.queue.remove(spot)?;
        self.model(&spot.model).size.subtract(request.bytes);
        Some(request)
    }

    /// Gives a place to the next request that can use one. Its tokens are in flight from then on.
    pub(crate) fn grant(
        &mut self,
        places: &mut FreePlaces,
        in_flight: &mut InFlightTokens,
    ) -> Option<(QueueSpot, QueuedRequest<T>)> {
        let waiting = self.models.iter();
        let waiting = waiting.filter(|(_, model)| model.size.requests > 0);
        let fitting = waiting.filter(|(name, _)| places.has(name));
        let fitting: BTreeSet<_> = fitting.map(|(name, _)| Arc::clone(name)).collect();
        if fitting.is_empty() {
            return None;
        }
        let fits = |model: &str| fitting.contains(model);
        let (spot, request) = self.queue.pop(fits, in_flight)?;
        places.take(&spot.model);
        in_flight.began(&spot.tenant, request.cost);
        let model = self.model(&spot.model);
        model.grants += 1;
        model.size.subtract(request.bytes);
        Some((spot, request))
    }

    /// Takes a place for each grant.
    pub(crate) fn take_granted(&self, places: &mut FreePlaces) {
        for (name, model) in &self.models {
            for _ in 0..model.grants {
                places.take(name);
            }
        }
    }

    /// Ends a grant.
    pub(crate) fn settle(&mut self, model: &Arc<str>, end: GrantEnd, now: Instant) {
        let model = self.model(model);
        model.grants = model.grants.saturating_sub(1);
        match end {
            GrantEnd::Admitted => model.rate.left(now),
            GrantEnd::Unused => {}
        }
    }

    /// Ends a grant whose place was gone. The request is its tenant's first again.
    pub(crate) fn give_back(&mut self, spot: &QueueSpot, request: QueuedRequest<T>) {
        let model = self.model(&spot.model);
        model.grants = model.grants.saturating_sub(1);
        model.size.add(request.bytes);
        self.queue.push_back_first(spot, request);
    }

    /// The models with waiting requests or grants.
    pub(crate) fn names_in_use(&self) -> Vec<Arc<str>> {
        let in_use = self.models.iter().filter(|(_, model)| model.is_in_use());
        in_use.map(|(name, _)| Arc::clone(name)).collect()
    }

    /// Time after which a new request of the line would have left the queue.
    pub(crate) fn retry_after(&mut self, line: &QueueLine, now: Instant) -> Duration {
        let oldest = self.queue.oldest(&line.model);
        let longest = oldest.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let ahead = self.queue.ahead(line);
        let model = self.models.get_mut(line.model.as_str());
        model.map_or(RETRY_AFTER_MIN, |model| {
            model.rate.retry_after(ahead, longest, now)
        })
    }

    pub(crate) const fn size(&self) -> QueueSize {
        self.queue.size()
    }

    /// The models with waiting requests now or in the last minute.
    pub(crate) fn statuses(&mut self, now: Instant) -> Vec<QueueStatus> {
        let (queue, models) = (&self.queue, self.models.iter_mut());
        let statuses = models.map(|(name, model)| QueueStatus {
            model: name.to_string(),
            size: model.size,
            oldest: (queue.oldest(name)).map(|at| now.saturating_duration_since(at)),
            leaving_per_sec: model.rate.per_sec(now),
        });
        statuses.collect()
    }

    fn model(&mut self, name: &Arc<str>) -> &mut WaitingModel {
        self.models.entry(Arc::clone(name)).or_default()
    }
}

#[cfg(test)]
mod tests;
