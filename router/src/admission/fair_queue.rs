//! The queue of one model's requests: priorities, fairness between tenants, order within a tenant.
//! Pure.
//!
//! The level with the lowest number is served first. One of [`LOW_TURN`] requests is of another
//! level, each level in turn, so that none starves. Within a level the tenants are served by
//! deficit round robin over estimated tokens: a tenant that sends many requests delays its own. A
//! tenant's requests of one level leave in the order of their arrival.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::time::Instant;

use warmroute_process::access::keys::KeyId;

/// Tokens that a tenant may send before the next one's turn: about one short chat.
const QUANTUM_TOKENS: u64 = 1024;

/// One of so many requests is of a level below the first.
const LOW_TURN: u32 = 8;

/// Order of arrival. A request that returns to the queue keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TicketNumber(pub u64);

/// The requests of one tenant share a line. `None`: there are no tenants.
pub(crate) type TenantName = Option<KeyId>;

/// Where a request waits in its model's queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueueSpot {
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

/// The line that gives up its newest request for another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LongestLine {
    pub level: i64,
    pub tenant: TenantName,
    pub requests: usize,
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
}

#[derive(Debug)]
struct TenantLine<T> {
    requests: BTreeMap<TicketNumber, QueuedRequest<T>>,
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

    pub(crate) const fn is_empty(&self) -> bool {
        self.size.requests == 0
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
        self.size.requests += 1;
        self.size.bytes += request.bytes;
        let level = self.levels.entry(spot.level).or_default();
        let line = match level.lines.entry(spot.tenant.clone()) {
            Entry::Occupied(line) => line.into_mut(),
            Entry::Vacant(vacant) => {
                level.ring.push_back(spot.tenant.clone());
                vacant.insert(TenantLine::default())
            }
        };
        line.requests.insert(spot.number, request);
    }

    /// Takes the next request.
    pub(crate) fn pop(&mut self) -> Option<(QueueSpot, QueuedRequest<T>)> {
        let level = self.next_level()?;
        let (tenant, number, request) = self.levels.get_mut(&level)?.pop()?;
        self.left(level, request.bytes);
        let spot = QueueSpot {
            level,
            tenant,
            number,
        };
        Some((spot, request))
    }

    /// Takes a request out, if it waits.
    pub(crate) fn remove(&mut self, spot: &QueueSpot) -> Option<QueuedRequest<T>> {
        let level = self.levels.get_mut(&spot.level)?;
        let request = level.remove(&spot.tenant, spot.number)?;
        self.left(spot.level, request.bytes);
        Some(request)
    }

    /// Takes the newest request of a line.
    pub(crate) fn remove_newest(
        &mut self,
        level: i64,
        tenant: &TenantName,
    ) -> Option<QueuedRequest<T>> {
        let requests = &self.levels.get(&level)?.lines.get(tenant)?.requests;
        let number = *requests.last_key_value()?.0;
        let tenant = tenant.clone();
        self.remove(&QueueSpot {
            level,
            tenant,
            number,
        })
    }

    /// The longest line of the level that is served last.
    pub(crate) fn longest_line(&self) -> Option<LongestLine> {
        let (&level, last) = self.levels.last_key_value()?;
        let lengths = last.lines.iter().map(|(tenant, line)| LongestLine {
            level,
            tenant: tenant.clone(),
            requests: line.requests.len(),
        });
        lengths.max_by_key(|line| line.requests)
    }

    /// When the request came that waits longest.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        let lines = self.levels.values().flat_map(|level| level.lines.values());
        let first = lines.filter_map(|line| line.requests.first_key_value());
        first.map(|(_, request)| request.since).min()
    }

    /// Requests of one line.
    pub(crate) fn waiting(&self, level: i64, tenant: &TenantName) -> usize {
        let lines = self.levels.get(&level).map(|level| &level.lines);
        lines
            .and_then(|lines| lines.get(tenant))
            .map_or(0, |line| line.requests.len())
    }

    fn next_level(&mut self) -> Option<i64> {
        let first = *self.levels.first_key_value()?.0;
        let above_first = (Bound::Excluded(first), Bound::Unbounded);
        let mut lower = self.levels.range(above_first).map(|(level, _)| *level);
        let Some(lowest) = lower.next() else {
            return Some(first);
        };
        self.turns += 1;
        if self.turns < LOW_TURN {
            return Some(first);
        }
        self.turns = 0;
        // The one after the last, in a circle.
        let after = std::iter::once(lowest).chain(lower);
        let next = after.into_iter().find(|&level| level > self.last_low);
        self.last_low = next.unwrap_or(lowest);
        Some(self.last_low)
    }

    fn left(&mut self, level: i64, bytes: usize) {
        self.size.requests -= 1;
        self.size.bytes -= bytes;
        if self.levels.get(&level).is_some_and(PriorityLevel::is_empty) {
            self.levels.remove(&level);
        }
    }
}

impl<T> Default for PriorityLevel<T> {
    fn default() -> Self {
        Self {
            lines: BTreeMap::new(),
            ring: VecDeque::new(),
        }
    }
}

impl<T> Default for TenantLine<T> {
    /// A tenant that did not wait before has its turn when the ring comes to it.
    fn default() -> Self {
        Self {
            requests: BTreeMap::new(),
            deficit: QUANTUM_TOKENS,
        }
    }
}

impl<T> TenantLine<T> {
    /// Rounds of the ring until its first request may leave.
    fn rounds(&self) -> u64 {
        let cost = self.requests.first_key_value();
        let cost = cost.map_or(0, |(_, request)| request.cost);
        cost.saturating_sub(self.deficit).div_ceil(QUANTUM_TOKENS)
    }
}

impl<T> PriorityLevel<T> {
    fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    fn pop(&mut self) -> Option<(TenantName, TicketNumber, QueuedRequest<T>)> {
        // Whole rounds in which no request could leave.
        let idle = self.lines.values().map(TenantLine::rounds).min()?;
        let idle = idle.saturating_sub(1) * QUANTUM_TOKENS;
        for line in self.lines.values_mut() {
            line.deficit = line.deficit.saturating_add(idle);
        }
        // At most one more round.
        loop {
            let tenant = self.ring.front()?.clone();
            let line = self.lines.get_mut(&tenant)?;
            if line.rounds() > 0 {
                line.deficit += QUANTUM_TOKENS;
                self.ring.rotate_left(1);
                continue;
            }
            let number = *line.requests.first_key_value()?.0;
            let request = self.remove(&tenant, number)?;
            if let Some(line) = self.lines.get_mut(&tenant) {
                line.deficit = line.deficit.saturating_sub(request.cost);
            }
            return Some((tenant, number, request));
        }
    }

    fn remove(&mut self, tenant: &TenantName, number: TicketNumber) -> Option<QueuedRequest<T>> {
        let line = self.lines.get_mut(tenant)?;
        let request = line.requests.remove(&number)?;
        if line.requests.is_empty() {
            self.lines.remove(tenant);
            self.ring.retain(|other| other != tenant);
        }
        Some(request)
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
