//! Which waiting requests yield to a new one at a bound. Pure.
//!
//! A request yields if it is of a later level, or of the same level and of a tenant that has more in
//! the queue than the new one's: more requests at a bound of requests, more bytes at the bound of
//! bytes. A tenant cannot fill the queue against others.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeSet;
use std::sync::Arc;

use super::fair_queue::{FairQueue, QueueSize, QueueSpot, TenantLine, TicketNumber};
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
        let longest = longest(&mut lines, new, bytes, bound)?;
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

/// The longest line of the level that is served last, if it yields.
fn longest<'l, 'q, T>(
    lines: &'l mut [ShortenedLine<'q, T>],
    new: &QueueLine,
    bytes: usize,
    bound: ExceededBound,
) -> Result<&'l mut ShortenedLine<'q, T>, QueueAtBound> {
    let mut own = lines.iter();
    let own = own.find(|line| line.level == new.level && *line.tenant == new.tenant);
    let own = own.map_or(0, |line| line.length(bound));
    let added = match bound {
        ExceededBound::ModelRequests | ExceededBound::Requests => 1,
        ExceededBound::Bytes => bytes,
    };
    let waiting = lines.iter_mut().filter(|line| line.length(bound) > 0);
    let longest = waiting.max_by_key(|line| (line.level, line.length(bound)));
    let yields = |line: &ShortenedLine<'q, T>| match line.level.cmp(&new.level) {
        Ordering::Less => false,
        Ordering::Equal => line.length(bound) > own.saturating_add(added),
        Ordering::Greater => true,
    };
    longest.filter(|line| yields(line)).ok_or(QueueAtBound)
}
