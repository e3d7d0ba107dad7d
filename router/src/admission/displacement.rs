//! Which waiting requests yield to a new one at a bound. Pure.
//!
//! Each level below the first that waits has a share of the bound: an equal part of one of
//! [`LOW_TURN`], as such levels are served one of so many times. What a level has beyond its share
//! yields to earlier levels, and to later ones within their shares; the first level has the rest.
//! Within a level a request yields if its tenant has more in the queue than the new one's: more
//! requests at a bound of requests, more bytes at the bound of bytes. A tenant cannot fill the queue
//! against others, nor a level against later ones.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::fair_queue::{FairQueue, LOW_TURN, QueueSize, QueueSpot, TenantLine, TicketNumber};
use super::line::{QueueAtBound, QueueBounds, QueueLine, TenantName};

/// Most requests that yield to one.
const DISPLACED_MAX: usize = 64;

/// A bound that a new request exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExceededBound {
    ModelRequests,
    Requests,
    Bytes,
}

impl ExceededBound {
    const fn of(self, bounds: &QueueBounds) -> usize {
        match self {
            Self::ModelRequests => bounds.requests_per_model,
            Self::Requests => bounds.requests,
            Self::Bytes => bounds.bytes,
        }
    }
}

/// A line less its requests that yield.
struct ShortenedLine<'q, T> {
    level: i64,
    tenant: &'q TenantName,
    line: &'q TenantLine<T>,
    size: QueueSize,
    of_model: usize,
}

impl<T> ShortenedLine<'_, T> {
    const fn length(&self, bound: ExceededBound) -> usize {
        match bound {
            ExceededBound::ModelRequests => self.of_model,
            ExceededBound::Requests => self.size.requests,
            ExceededBound::Bytes => self.size.bytes,
        }
    }
}

/// What waits, less the requests that yield.
struct QueueFill {
    size: QueueSize,
    of_model: usize,
}

impl QueueFill {
    /// Bytes that a request of so many lacks.
    const fn missing(&self, bytes: usize, bounds: &QueueBounds) -> usize {
        let wanted = self.size.bytes.saturating_add(bytes);
        wanted.saturating_sub(bounds.bytes)
    }

    const fn exceeds(&self, bytes: usize, bounds: &QueueBounds) -> Option<ExceededBound> {
        if self.of_model >= bounds.requests_per_model {
            Some(ExceededBound::ModelRequests)
        } else if self.size.requests >= bounds.requests {
            Some(ExceededBound::Requests)
        } else if self.size.bytes.saturating_add(bytes) > bounds.bytes {
            Some(ExceededBound::Bytes)
        } else {
            None
        }
    }
}

/// At a bound of requests the newest one of the longest line yields. At the bound of bytes it is the
/// newest whose bytes suffice, or else the largest: small requests do not shield large ones.
///
/// The requests that yield to one of `bytes` on `new`, whose model has `of_model` waiting requests.
/// Fails if it would not fit even then.
pub(super) fn victims<T>(
    queue: &FairQueue<T>,
    of_model: usize,
    new: &QueueLine,
    bytes: usize,
    bounds: &QueueBounds,
) -> Result<Vec<QueueSpot>, QueueAtBound> {
    if bytes > bounds.bytes || bounds.requests.min(bounds.requests_per_model) == 0 {
        return Err(QueueAtBound);
    }
    let size = queue.size();
    let mut fill = QueueFill { size, of_model };
    let (mut victims, mut numbers) = (Vec::new(), BTreeSet::new());
    let mut lines = Vec::new();
    while let Some(bound) = fill.exceeds(bytes, bounds) {
        if victims.is_empty() {
            lines = shortened(queue, &new.model);
        }
        if victims.len() == DISPLACED_MAX {
            return Err(QueueAtBound);
        }
        let longest = longest(&mut lines, new, bytes, bound, bounds)?;
        let is_next = |(number, model, _): &(TicketNumber, &Arc<str>, usize)| {
            let counts = bound != ExceededBound::ModelRequests || ***model == *new.model;
            counts && !numbers.contains(number)
        };
        let newest = || longest.line.newest().filter(is_next);
        let victim = match bound {
            ExceededBound::ModelRequests | ExceededBound::Requests => newest().next(),
            ExceededBound::Bytes => {
                let missing = fill.missing(bytes, bounds);
                let suffices = newest().find(|(_, _, freed)| *freed >= missing);
                suffices.or_else(|| newest().min_by_key(|(_, _, freed)| Reverse(*freed)))
            }
        };
        let (number, model, freed) = victim.ok_or(QueueAtBound)?;
        numbers.insert(number);
        victims.push(QueueSpot {
            model: Arc::clone(model),
            level: longest.level,
            tenant: longest.tenant.clone(),
            number,
        });
        fill.size.subtract(freed);
        longest.size.subtract(freed);
        if **model == *new.model {
            fill.of_model -= 1;
            longest.of_model -= 1;
        }
    }
    Ok(victims)
}

fn shortened<'q, T>(queue: &'q FairQueue<T>, model: &str) -> Vec<ShortenedLine<'q, T>> {
    let lines = queue.lines().map(|(level, tenant, line)| ShortenedLine {
        level,
        tenant,
        line,
        size: line.size(),
        of_model: line.of_model(model),
    });
    lines.collect()
}

/// How much of a bound the levels have that wait, and the new request's.
struct LevelShares {
    first: i64,
    lengths: BTreeMap<i64, usize>,
    /// The first level's part.
    rest: usize,
    /// Each later level's part.
    share: usize,
}

impl LevelShares {
    fn new<T>(
        lines: &[ShortenedLine<'_, T>],
        new_level: i64,
        bound: ExceededBound,
        bounds: &QueueBounds,
    ) -> Self {
        let mut lengths = BTreeMap::from([(new_level, 0)]);
        for line in lines.iter().filter(|line| line.length(bound) > 0) {
            *lengths.entry(line.level).or_default() += line.length(bound);
        }
        let whole = bound.of(bounds);
        let later = lengths.len() - 1;
        // The only place is the first level's.
        let low_part = match whole {
            0 | 1 => 0,
            _ => (whole / LOW_TURN as usize).max(1),
        };
        let share = low_part.checked_div(later).unwrap_or(0);
        Self {
            first: lengths.keys().next().copied().unwrap_or(new_level),
            lengths,
            rest: whole.saturating_sub(share * later),
            share,
        }
    }

    /// Whether the level is beyond its share with so much more.
    fn is_beyond(&self, level: i64, added: usize) -> bool {
        let share = if level == self.first {
            self.rest
        } else {
            self.share
        };
        let length = self.lengths.get(&level).copied().unwrap_or(0);
        length.saturating_add(added) > share
    }
}

/// The longest line of the last level with one that yields.
fn longest<'l, 'q, T>(
    lines: &'l mut [ShortenedLine<'q, T>],
    new: &QueueLine,
    bytes: usize,
    bound: ExceededBound,
    bounds: &QueueBounds,
) -> Result<&'l mut ShortenedLine<'q, T>, QueueAtBound> {
    let mut own = lines.iter();
    let own = own.find(|line| line.level == new.level && *line.tenant == new.tenant);
    let own = own.map_or(0, |line| line.length(bound));
    let added = match bound {
        ExceededBound::ModelRequests | ExceededBound::Requests => 1,
        ExceededBound::Bytes => bytes,
    };
    let shares = LevelShares::new(lines, new.level, bound, bounds);
    let is_within = !shares.is_beyond(new.level, added);
    let yields = |line: &ShortenedLine<'q, T>| match line.level.cmp(&new.level) {
        Ordering::Less => is_within && shares.is_beyond(line.level, 0),
        Ordering::Equal => line.length(bound) > own.saturating_add(added),
        Ordering::Greater => shares.is_beyond(line.level, 0),
    };
    let yielding = lines.iter_mut().filter(|line| line.length(bound) > 0);
    yielding
        .filter(|line| yields(line))
        .max_by_key(|line| (line.level, line.length(bound)))
        .ok_or(QueueAtBound)
}
