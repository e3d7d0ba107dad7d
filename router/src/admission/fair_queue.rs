//! The queue of waiting requests: priorities, fairness between tenants, order within a tenant. Pure.
//!
//! Models share sources (adapters, aliases), so there is one queue, and a free place goes to the next
//! request in order that can use it.
//!
//! The level with the lowest number is served first. One of [`LOW_TURN`] requests is of another
//! level, each level in turn, so that none starves. Within a level a tenant goes first that has less
//! in flight than the mean of those that wait: a tenant that floods holds most places when another
//! one begins, and turns alone would return them one by one. Tenants with their part in flight are
//! served by deficit round robin over estimated tokens: a tenant that sends many requests delays its
//! own. A tenant's requests of one level and model leave in the order of their arrival.

use std::cmp::Ordering;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::in_flight::InFlightTokens;
use super::line::{QueueLine, TenantName};

/// Tokens that a tenant may send before the next one's turn: about one short chat.
const QUANTUM_TOKENS: u64 = 1024;

/// Requests in a row that may leave before their tenant's turn. What is in flight is counted over all
/// models: a tenant with much in flight at one model gets its turns at others.
const BEFORE_TURN_MAX: u32 = 3;

/// One of so many requests is of a level below the first.
pub(super) const LOW_TURN: u32 = 8;

/// Order of arrival. A request that returns to the queue keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TicketNumber(pub u64);

/// Where a request waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueueSpot {
    pub model: Arc<str>,
    /// Lower is served first.
    pub level: i64,
    pub tenant: TenantName,
    pub number: TicketNumber,
}

/// A waiting request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct QueuedRequest<T> {
    /// Estimated tokens.
    pub cost: u64,
    /// Bytes that it holds.
    pub bytes: usize,
    pub since: Instant,
    pub payload: T,
}

/// Requests and bytes that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueueSize {
    pub requests: usize,
    pub bytes: usize,
}

impl QueueSize {
    pub(super) const fn add(&mut self, bytes: usize) {
        self.requests += 1;
        self.bytes += bytes;
    }

    pub(super) const fn subtract(&mut self, bytes: usize) {
        self.requests -= 1;
        self.bytes -= bytes;
    }
}

impl QueueSpot {
    pub(super) fn line(&self) -> QueueLine {
        QueueLine {
            model: self.model.to_string(),
            level: self.level,
            tenant: self.tenant.clone(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct FairQueue<T> {
    /// Without empty levels.
    levels: BTreeMap<i64, PriorityLevel<T>>,
    size: QueueSize,
    /// Requests since one of a lower level was served.
    turns: u32,
    /// The lower level that was served last.
    last_low: i64,
}

#[derive(Debug)]
struct PriorityLevel<T> {
    lines: BTreeMap<TenantName, TenantLine<T>>,
    /// The tenants that wait, in the order of their turns.
    ring: VecDeque<TenantName>,
    /// Requests that left before their tenant's turn, since the last turn.
    before_turn: u32,
}

/// One tenant's requests of one level.
#[derive(Debug)]
pub(super) struct TenantLine<T> {
    requests: BTreeMap<TicketNumber, (Arc<str>, QueuedRequest<T>)>,
    by_model: BTreeMap<Arc<str>, BTreeSet<TicketNumber>>,
    size: QueueSize,
    /// Tokens that it may send in its turn.
    deficit: u64,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self {
            levels: BTreeMap::new(),
            size: QueueSize::default(),
            turns: 0,
            last_low: i64::MAX,
        }
    }
}

impl<T> FairQueue<T> {
    pub(crate) const fn size(&self) -> QueueSize {
        self.size
    }

    /// Returns a request that left in vain: it is its tenant's first again, and has its turn.
    pub(crate) fn push_back_first(&mut self, spot: &QueueSpot, request: QueuedRequest<T>) {
        let cost = request.cost;
        self.push(spot, request);
        if let Some(level) = self.levels.get_mut(&spot.level) {
            level.gives_turn(&spot.tenant, cost);
        }
    }

    /// Adds a request to its tenant's line.
    pub(crate) fn push(&mut self, spot: &QueueSpot, request: QueuedRequest<T>) {
        self.size.add(request.bytes);
        let level = self.levels.entry(spot.level).or_default();
        let line = match level.lines.entry(spot.tenant.clone()) {
            Entry::Occupied(line) => line.into_mut(),
            Entry::Vacant(vacant) => {
                level.ring.push_back(spot.tenant.clone());
                vacant.insert(TenantLine::default())
            }
        };
        line.push(Arc::clone(&spot.model), spot.number, request);
    }

    /// Takes the next request of the models that `fits` accepts.
    pub(crate) fn pop(
        &mut self,
        fits: impl Fn(&str) -> bool,
        in_flight: &InFlightTokens,
    ) -> Option<(QueueSpot, QueuedRequest<T>)> {
        let level = self.next_level(&fits)?;
        let of_level = self.levels.get_mut(&level)?;
        let (spot, request) = of_level.pop(level, &fits, in_flight)?;
        self.left(level, request.bytes);
        Some((spot, request))
    }

    /// Takes a request out, if it waits.
    pub(crate) fn remove(&mut self, spot: &QueueSpot) -> Option<QueuedRequest<T>> {
        let level = self.levels.get_mut(&spot.level)?;
        let (_, request) = level.remove(&spot.tenant, spot.number)?;
        self.left(spot.level, request.bytes);
        Some(request)
    }

    /// All lines, with level and tenant.
    pub(super) fn lines(&self) -> impl Iterator<Item = (i64, &TenantName, &TenantLine<T>)> {
        let levels = self.levels.iter();
        levels.flat_map(|(level, of_level)| {
            let lines = of_level.lines.iter();
            lines.map(|(tenant, line)| (*level, tenant, line))
        })
    }

    /// When the model's request came that waits longest.
    pub(crate) fn oldest(&self, model: &str) -> Option<Instant> {
        let lines = self.lines().map(|(_, _, line)| line);
        lines.filter_map(|line| line.oldest(model)).min()
    }

    /// Requests of the model that leave before a new one of this level and tenant, by what waits now
    /// and with requests of one cost.
    pub(super) fn ahead(&self, new: &QueueLine) -> usize {
        let own_line = |of_level: &PriorityLevel<T>| {
            let own = of_level.lines.get(&new.tenant)?;
            Some(own.of_model(&new.model))
        };
        let own = self.levels.get(&new.level).and_then(own_line).unwrap_or(0);
        let (mut earlier, mut same, mut levels) = (0, 0, BTreeSet::from([new.level]));
        for (level, _, line) in self.lines() {
            let waiting = line.of_model(&new.model);
            if waiting == 0 {
                continue;
            }
            levels.insert(level);
            match level.cmp(&new.level) {
                Ordering::Less => earlier += waiting,
                // The tenants leave in turn, so the others send one each before each of its own.
                Ordering::Equal => same += waiting.min(own + 1),
                Ordering::Greater => {}
            }
        }
        // All but the first share the turns of later levels, also while the first waits.
        let turns = LOW_TURN as usize * (levels.len() - 1);
        let between = turns.saturating_sub(1).saturating_mul(same + 1);
        same + earlier.min(between)
    }

    fn next_level(&mut self, fits: &impl Fn(&str) -> bool) -> Option<i64> {
        let serves = |(level, of_level): (&i64, &PriorityLevel<T>)| {
            let mut lines = of_level.lines.values();
            lines
                .any(|line| line.next(fits).is_some())
                .then_some(*level)
        };
        let mut levels = self.levels.iter().filter_map(serves);
        let first = levels.next()?;
        let Some(lowest) = levels.next() else {
            return Some(first);
        };
        self.turns += 1;
        if self.turns < LOW_TURN {
            return Some(first);
        }
        self.turns = 0;
        // The one after the last, in a circle.
        let mut after = std::iter::once(lowest).chain(levels);
        let next = after.find(|&level| level > self.last_low);
        self.last_low = next.unwrap_or(lowest);
        Some(self.last_low)
    }

    fn left(&mut self, level: i64, bytes: usize) {
        self.size.subtract(bytes);
        let is_empty = |level: &PriorityLevel<T>| level.lines.is_empty();
        if self.levels.get(&level).is_some_and(is_empty) {
            self.levels.remove(&level);
        }
    }
}

impl<T> Default for PriorityLevel<T> {
    fn default() -> Self {
        Self {
            lines: BTreeMap::new(),
            ring: VecDeque::new(),
            before_turn: 0,
        }
    }
}

impl<T> Default for TenantLine<T> {
    /// A tenant that did not wait before has its turn when the ring comes to it.
    fn default() -> Self {
        Self {
            requests: BTreeMap::new(),
            by_model: BTreeMap::new(),
            size: QueueSize::default(),
            deficit: QUANTUM_TOKENS,
        }
    }
}

impl<T> TenantLine<T> {
    pub(super) const fn size(&self) -> QueueSize {
        self.size
    }

    /// Its waiting requests of one model.
    pub(super) fn of_model(&self, model: &str) -> usize {
        self.by_model.get(model).map_or(0, BTreeSet::len)
    }

    /// Its requests with model and bytes, the newest first.
    pub(super) fn newest(&self) -> impl Iterator<Item = (TicketNumber, &Arc<str>, usize)> {
        let requests = self.requests.iter().rev();
        requests.map(|(number, (model, request))| (*number, model, request.bytes))
    }

    fn oldest(&self, model: &str) -> Option<Instant> {
        let first = self.by_model.get(model)?.first()?;
        self.requests.get(first).map(|(_, request)| request.since)
    }

    fn push(&mut self, model: Arc<str>, number: TicketNumber, request: QueuedRequest<T>) {
        self.size.add(request.bytes);
        let of_model = self.by_model.entry(Arc::clone(&model)).or_default();
        of_model.insert(number);
        self.requests.insert(number, (model, request));
    }

    fn remove(&mut self, number: TicketNumber) -> Option<(Arc<str>, QueuedRequest<T>)> {
        let (model, request) = self.requests.remove(&number)?;
        self.size.subtract(request.bytes);
        if let Some(of_model) = self.by_model.get_mut(&model) {
            of_model.remove(&number);
            if of_model.is_empty() {
                self.by_model.remove(&model);
            }
        }
        Some((model, request))
    }

    /// Its first request of the models that fit.
    fn next(&self, fits: &impl Fn(&str) -> bool) -> Option<TicketNumber> {
        let fitting = self.by_model.iter().filter(|(model, _)| fits(model));
        fitting
            .filter_map(|(_, numbers)| numbers.first())
            .min()
            .copied()
    }

    /// Rounds of the ring until that request may leave; `None` if there is none.
    fn rounds(&self, fits: &impl Fn(&str) -> bool) -> Option<u64> {
        let (_, next) = self.requests.get(&self.next(fits)?)?;
        Some(
            next.cost
                .saturating_sub(self.deficit)
                .div_ceil(QUANTUM_TOKENS),
        )
    }
}

impl<T> PriorityLevel<T> {
    fn pop(
        &mut self,
        level: i64,
        fits: &impl Fn(&str) -> bool,
        in_flight: &InFlightTokens,
    ) -> Option<(QueueSpot, QueuedRequest<T>)> {
        let first = (self.before_turn < BEFORE_TURN_MAX)
            .then(|| self.below_its_part(fits, in_flight))
            .flatten();
        self.before_turn = first.as_ref().map_or(0, |_| self.before_turn + 1);
        let tenant = match first {
            Some(tenant) => tenant,
            None => self.next_in_turn(fits)?,
        };
        let number = self.lines.get(&tenant)?.next(fits)?;
        let (model, request) = self.remove(&tenant, number)?;
        if let Some(line) = self.lines.get_mut(&tenant) {
            line.deficit = line.deficit.saturating_sub(request.cost);
        }
        let spot = QueueSpot {
            model,
            level,
            tenant,
            number,
        };
        Some((spot, request))
    }

    /// The tenant with the fewest tokens in flight, if its next request leaves it within the mean of
    /// the tenants that wait for the same places.
    fn below_its_part(
        &self,
        fits: &impl Fn(&str) -> bool,
        in_flight: &InFlightTokens,
    ) -> Option<TenantName> {
        let (mut sum, mut count) = (0, 0);
        let mut least: Option<(u64, &TenantName, u64)> = None;
        for (tenant, line) in &self.lines {
            let Some(next) = line.next(fits) else {
                continue;
            };
            let own = in_flight.of(tenant);
            (sum, count) = (sum + own, count + 1);
            if least.is_none_or(|(tokens, ..)| own < tokens) {
                let cost = line.requests.get(&next).map(|(_, request)| request.cost)?;
                least = Some((own, tenant, cost));
            }
        }
        let (own, tenant, cost) = least?;
        (own.saturating_add(cost) <= sum / count).then(|| tenant.clone())
    }

    /// The tenant whose turn it is.
    fn next_in_turn(&mut self, fits: &impl Fn(&str) -> bool) -> Option<TenantName> {
        // Whole rounds in which no request could leave. Lines without a request that fits get
        // nothing.
        let rounds = |line: &TenantLine<T>| line.rounds(fits);
        let idle = self.lines.values().filter_map(rounds).min()?;
        let idle = idle.saturating_sub(1) * QUANTUM_TOKENS;
        for line in self
            .lines
            .values_mut()
            .filter(|line| rounds(line).is_some())
        {
            line.deficit = line.deficit.saturating_add(idle);
        }
        // At most one more round.
        loop {
            let tenant = self.ring.front()?.clone();
            let line = self.lines.get_mut(&tenant)?;
            match rounds(line) {
                Some(0) => return Some(tenant),
                Some(_) => line.deficit += QUANTUM_TOKENS,
                None => {}
            }
            self.ring.rotate_left(1);
        }
    }

    fn remove(
        &mut self,
        tenant: &TenantName,
        number: TicketNumber,
    ) -> Option<(Arc<str>, QueuedRequest<T>)> {
        let line = self.lines.get_mut(tenant)?;
        let removed = line.remove(number)?;
        if line.requests.is_empty() {
            self.lines.remove(tenant);
            self.ring.retain(|other| other != tenant);
        }
        Some(removed)
    }

    /// Makes a tenant the next one, with so many tokens more.
    fn gives_turn(&mut self, tenant: &TenantName, tokens: u64) {
        if let Some(line) = self.lines.get_mut(tenant) {
            line.deficit = line.deficit.max(tokens);
        }
        if let Some(at) = self.ring.iter().position(|other| other == tenant)
            && let Some(tenant) = self.ring.remove(at)
        {
            self.ring.push_front(tenant);
        }
    }
}

#[cfg(test)]
mod tests;
