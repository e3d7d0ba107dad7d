//! The queues of all models, their bounds, and the places given to requests that decide now. Pure.
//!
//! A request that leaves its queue has a *grant*: a place counts as taken from the grant until the
//! request has its slot. So no place is given twice, and no request overtakes the queue.
//!
//! At a bound a new request takes the place of another one only if that one is of a later level, or
//! of the same level and of a tenant with more waiting requests. A tenant cannot fill the queue
//! against others.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::fair_queue::{
    FairQueue, LongestLine, QueueSize, QueueSpot, QueuedRequest, TenantName, TicketNumber,
};
use super::leave_rate::{LeaveRate, RETRY_AFTER_MIN};

/// What may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueBounds {
    /// Requests of all models.
    pub requests: usize,
    pub requests_per_model: usize,
    /// Bytes of all models' requests.
    pub bytes: usize,
}

/// The queue is at a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueAtBound;

/// The line that a request joins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueueLine {
    pub model: String,
    /// Lower is served first.
    pub level: i64,
    pub tenant: TenantName,
}

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

/// One model's queue, for metrics.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct QueueStatus {
    pub model: String,
    pub size: QueueSize,
    pub oldest: Option<Duration>,
    pub leaving_per_sec: Option<f64>,
}

#[derive(Debug)]
pub(crate) struct WaitingRoom<T> {
    models: BTreeMap<String, ModelQueue<T>>,
    size: QueueSize,
    tickets: u64,
}

#[derive(Debug)]
struct ModelQueue<T> {
    queue: FairQueue<T>,
    grants: u32,
    rate: LeaveRate,
}

impl<T> Default for WaitingRoom<T> {
    fn default() -> Self {
        Self {
            models: BTreeMap::new(),
            size: QueueSize::default(),
            tickets: 0,
        }
    }
}

impl<T> Default for ModelQueue<T> {
    fn default() -> Self {
        Self {
            queue: FairQueue::default(),
            grants: 0,
            rate: LeaveRate::default(),
        }
    }
}

impl<T> ModelQueue<T> {
    fn is_in_use(&self) -> bool {
        self.grants > 0 || !self.queue.is_empty()
    }
}

impl<T> WaitingRoom<T> {
    /// Whether a new request of this model must queue: others wait, or all places are given.
    /// `room`: the model's free places, up to a number.
    pub(crate) fn is_engaged(&self, model: &str, room: impl FnOnce(u32) -> u32) -> bool {
        self.models.get(model).is_some_and(|queue| {
            let are_given = |grants: u32| grants > 0 && room(grants.saturating_add(1)) <= grants;
            !queue.queue.is_empty() || are_given(queue.grants)
        })
    }

    /// Adds a request, at a bound in another one's place.
    pub(crate) fn join(
        &mut self,
        line: &QueueLine,
        request: QueuedRequest<T>,
        bounds: &QueueBounds,
    ) -> Result<JoinedQueue<T>, QueueAtBound> {
        let now = request.since;
        self.models
            .retain(|_, queue| queue.is_in_use() || queue.rate.per_sec(now).is_some());
        let displaced = self.make_room(line, request.bytes, bounds)?;
        self.tickets += 1;
        let spot = QueueSpot {
            level: line.level,
            tenant: line.tenant.clone(),
            number: TicketNumber(self.tickets),
        };
        self.add(request.bytes);
        let model = self.models.entry(line.model.clone()).or_default();
        model.queue.push(&spot, request);
        Ok(JoinedQueue { spot, displaced })
    }

    fn make_room(
        &mut self,
        line: &QueueLine,
        bytes: usize,
        bounds: &QueueBounds,
    ) -> Result<Vec<T>, QueueAtBound> {
        let mut displaced = Vec::new();
        if bytes > bounds.bytes || bounds.requests.min(bounds.requests_per_model) == 0 {
            return Err(QueueAtBound);
        }
        loop {
            let own = self.models.get(&line.model).map(|model| &model.queue);
            let of_model = own.map_or(0, |queue| queue.size().requests);
            let is_full = self.size.requests >= bounds.requests
                || self.size.bytes.saturating_add(bytes) > bounds.bytes;
            let longest = if of_model >= bounds.requests_per_model {
                self.longest_line(Some(&line.model))
            } else if is_full {
                self.longest_line(None)
            } else {
                return Ok(displaced);
            };
            let waiting = own.map_or(0, |queue| queue.waiting(line.level, &line.tenant));
            let yields = |other: &LongestLine| match other.level.cmp(&line.level) {
                Ordering::Less => false,
                Ordering::Equal => other.requests > waiting + 1,
                Ordering::Greater => true,
            };
            let (model, longest) = longest.ok_or(QueueAtBound)?;
            if !yields(&longest) {
                return Err(QueueAtBound);
            }
            let queue = self.models.get_mut(&model).ok_or(QueueAtBound)?;
            let newest = queue.queue.remove_newest(longest.level, &longest.tenant);
            let newest = newest.ok_or(QueueAtBound)?;
            self.subtract(newest.bytes);
            displaced.push(newest.payload);
        }
    }

    /// In one model or in all: the longest line of those that are served last.
    fn longest_line(&self, model: Option<&str>) -> Option<(String, LongestLine)> {
        let models = self.models.iter();
        let models = models.filter(|(name, _)| model.is_none_or(|model| model == name.as_str()));
        let lines = models.filter_map(|(name, model)| Some((name, model.queue.longest_line()?)));
        let longest = lines.max_by_key(|(_, line)| (line.level, line.requests))?;
        Some((longest.0.clone(), longest.1))
    }

    /// Takes a request out, if it waits.
    pub(crate) fn cancel(&mut self, model: &str, spot: &QueueSpot) -> Option<QueuedRequest<T>> {
        let request = self.models.get_mut(model)?.queue.remove(spot)?;
        self.subtract(request.bytes);
        Some(request)
    }

    /// Gives the next request one of `room` places, unless all of them are given.
    pub(crate) fn grant(
        &mut self,
        model: &str,
        room: u32,
    ) -> Option<(QueueSpot, QueuedRequest<T>)> {
        let queue = self.models.get_mut(model)?;
        if queue.grants >= room {
            return None;
        }
        let (spot, request) = queue.queue.pop()?;
        queue.grants += 1;
        self.subtract(request.bytes);
        Some((spot, request))
    }

    /// Ends a grant.
    pub(crate) fn settle(&mut self, model: &str, end: GrantEnd, now: Instant) {
        if let Some(queue) = self.models.get_mut(model) {
            queue.grants = queue.grants.saturating_sub(1);
            match end {
                GrantEnd::Admitted => queue.rate.left(now),
                GrantEnd::Unused => {}
            }
        }
    }

    /// Ends a grant whose place was gone. The request is its tenant's first again.
    pub(crate) fn give_back(&mut self, model: &str, spot: &QueueSpot, request: QueuedRequest<T>) {
        let queue = self.models.entry(model.to_owned()).or_default();
        queue.grants = queue.grants.saturating_sub(1);
        let bytes = request.bytes;
        queue.queue.push_back_first(spot, request);
        self.add(bytes);
    }

    /// The models with waiting requests, each with the places that it can use.
    pub(crate) fn wanting(&self) -> Vec<(String, u32)> {
        let waiting = self
            .models
            .iter()
            .filter(|(_, model)| !model.queue.is_empty());
        let wanting = waiting.map(|(name, model)| {
            let waiting = u32::try_from(model.queue.size().requests).unwrap_or(u32::MAX);
            (name.clone(), waiting.saturating_add(model.grants))
        });
        wanting.collect()
    }

    /// Time after which a new request of the model would have left the queue.
    pub(crate) fn retry_after(&mut self, model: &str, now: Instant) -> Duration {
        let queue = self.models.get_mut(model);
        queue.map_or(RETRY_AFTER_MIN, |model| {
            let oldest = model.queue.oldest();
            let longest = oldest.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
            let waiting = model.queue.size().requests;
            model.rate.retry_after(waiting, longest, now)
        })
    }

    pub(crate) const fn size(&self) -> QueueSize {
        self.size
    }

    /// The models with a queue now or in the last minute.
    pub(crate) fn statuses(&mut self, now: Instant) -> Vec<QueueStatus> {
        let models = self.models.iter_mut();
        let statuses = models.map(|(name, model)| QueueStatus {
            model: name.clone(),
            size: model.queue.size(),
            oldest: (model.queue.oldest()).map(|at| now.saturating_duration_since(at)),
            leaving_per_sec: model.rate.per_sec(now),
        });
        statuses.collect()
    }

    const fn add(&mut self, bytes: usize) {
        self.size.requests += 1;
        self.size.bytes += bytes;
    }

    const fn subtract(&mut self, bytes: usize) {
        self.size.requests -= 1;
        self.size.bytes -= bytes;
    }
}

#[cfg(test)]
mod tests;
