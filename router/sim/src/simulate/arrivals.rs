//! Arrival times: a slice of the trace at a rate.
//!
//! An open trace keeps its pattern and is scaled to the rate. Requests with equal time stamps are
//! spread up to the next time stamp, since published traces have a resolution of seconds.
//!
//! Sessions keep their delays; the rate is the number of open sessions. When one ends the next
//! starts. The first ones start one after the other, so that their cold prompts do not arrive
//! together.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use fastrand::Rng;

use crate::trace::Trace;

/// Selected requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TraceSlice {
    /// The whole trace, or so many requests from a random place; sessions are taken whole.
    pub(crate) requests: Option<usize>,
    pub(crate) seed: u64,
}

/// Rate of arrivals.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ArrivalRate {
    /// Requests a second.
    Rate(f64),
    /// Open sessions, and the time between the starts of the first ones.
    Sessions { open: usize, apart: Duration },
}

/// Arrival of a request, by its index in the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    pub(crate) at: Duration,
    pub(crate) request: usize,
}

/// Future arrivals.
#[derive(Clone, Debug)]
pub(crate) struct Arrivals {
    /// Known from the start.
    pub(crate) first: Vec<Arrival>,
    /// Sessions that begin when others end.
    waiting: VecDeque<Range<usize>>,
    has_sessions: bool,
}

impl Arrivals {
    #[must_use]
    pub(crate) fn new(trace: &Trace, stretch: TraceSlice, pace: ArrivalRate) -> Self {
        let mut rng = Rng::with_seed(stretch.seed);
        match pace {
            ArrivalRate::Rate(rate) => Self::open(trace, stretch, rate, &mut rng),
            ArrivalRate::Sessions { open, apart } => {
                let mut waiting = sessions(trace, stretch, &mut rng);
                let first = waiting.drain(..open.min(waiting.len()));
                let mut next = Duration::ZERO;
                let first = first.map(|session| {
                    let at = next + apart.mul_f64(rng.f64());
                    next += apart;
                    Arrival {
                        at,
                        request: session.start,
                    }
                });
                Self {
                    first: first.collect(),
                    waiting,
                    has_sessions: true,
                }
            }
        }
    }

    /// The request that follows an ended one: the session's next, or the first of another session.
    pub(crate) fn after(&mut self, trace: &Trace, ended: usize, at: Duration) -> Option<Arrival> {
        if !self.has_sessions {
            return None;
        }
        let session = trace
            .sessions
            .partition_point(|session| session.end <= ended);
        let next = ended + 1;
        if next < trace.sessions.get(session)?.end {
            let delay = Duration::from_secs_f64(trace.requests[next].millis / 1000.0);
            return Some(Arrival {
                at: at + delay,
                request: next,
            });
        }
        let request = self.waiting.pop_front()?.start;
        Some(Arrival { at, request })
    }

    fn open(trace: &Trace, stretch: TraceSlice, rate: f64, rng: &mut Rng) -> Self {
        let all = trace.requests.len();
        let count = stretch.requests.unwrap_or(all).min(all);
        let start = match stretch.requests {
            Some(_) => rng.usize(0..=all - count),
            None => 0,
        };
        let range = start..start + count;
        let times = spread(trace, range.clone(), rng);
        let (begin, end) = (times[0], times[count - 1]);
        let natural = (end - begin) / count.max(1) as f64;
        let scale = if natural > 0.0 {
            1.0 / (rate * natural)
        } else {
            0.0
        };
        let first = range.zip(times).map(|(request, millis)| Arrival {
            at: Duration::try_from_secs_f64((millis - begin) * scale).unwrap_or(Duration::MAX),
            request,
        });
        Self {
            first: first.collect(),
            waiting: VecDeque::new(),
            has_sessions: false,
        }
    }
}

/// Milliseconds, ascending; equal time stamps spread up to the next one.
fn spread(trace: &Trace, range: Range<usize>, rng: &mut Rng) -> Vec<f64> {
    let stamps: Vec<f64> = trace.requests[range].iter().map(|r| r.millis).collect();
    let mut times = Vec::with_capacity(stamps.len());
    for group in stamps.chunk_by(|one, other| one == other) {
        let start = group[0];
        let next = stamps.get(times.len() + group.len());
        let room = next.map_or(0.0, |next| next - start);
        let mut drawn: Vec<f64> = group.iter().map(|_| start + room * rng.f64()).collect();
        drawn.sort_by(f64::total_cmp);
        times.append(&mut drawn);
    }
    times
}

/// Whole sessions, in the trace's order from a place that the seed chooses, and round its end.
fn sessions(trace: &Trace, stretch: TraceSlice, rng: &mut Rng) -> VecDeque<Range<usize>> {
    let mut order: VecDeque<Range<usize>> = trace.sessions.iter().cloned().collect();
    if let Some(wanted) = stretch.requests {
        order.rotate_left(rng.usize(0..order.len()));
        let mut so_far = 0;
        let enough = order.iter().take_while(|session| {
            let before = so_far;
            so_far += session.len();
            before < wanted
        });
        let enough = enough.count();
        order.truncate(enough);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn trace(stamps: &[u32]) -> Trace {
        let row = |at| {
            format!(r#"{{"timestamp":{at},"input_length":9,"output_length":1,"hash_ids":[]}}"#)
        };
        let rows: Vec<String> = stamps.iter().map(row).collect();
        Trace::parse(&rows.join("\n")).unwrap()
    }

    fn sessions_of(lengths: &[usize]) -> Trace {
        let mut rows = Vec::new();
        for (id, &length) in lengths.iter().enumerate() {
            for _ in 0..length {
                rows.push(format!(
                    r#"{{"session_id":{id},"delay":100,"input_length":9,"output_length":1,"hash_ids":[]}}"#
                ));
            }
        }
        Trace::parse(&rows.join("\n")).unwrap()
    }

    const WHOLE: TraceSlice = TraceSlice {
        requests: None,
        seed: 1,
    };

    #[test]
    fn a_sessions_request_comes_after_the_one_before_and_the_next_session_after_the_last() {
        let trace = sessions_of(&[2, 1, 1]);
        let pace = ArrivalRate::Sessions {
            open: 2,
            apart: Duration::from_secs(1),
        };
        let mut arrivals = Arrivals::new(&trace, WHOLE, pace);
        let begun: Vec<usize> = arrivals.first.iter().map(|a| a.request).collect();
        assert_eq!(begun, [0, 2]);
        let at = Duration::from_secs(7);
        let mut after = |ended| arrivals.after(&trace, ended, at);
        let delayed = at + Duration::from_millis(100);
        assert_eq!(
            after(0),
            Some(Arrival {
                at: delayed,
                request: 1
            })
        );
        assert_eq!(after(2), Some(Arrival { at, request: 3 }));
        assert_eq!(after(1), None);
        assert_eq!(after(3), None);
    }

    #[test]
    fn a_stretch_of_sessions_is_whole_sessions() {
        let trace = sessions_of(&[3, 3, 3, 3]);
        let pace = ArrivalRate::Sessions {
            open: 9,
            apart: Duration::ZERO,
        };
        let requests = Some(4);
        let starts = |seed| Arrivals::new(&trace, TraceSlice { requests, seed }, pace).first;
        for seed in 0..20 {
            assert_eq!(starts(seed).len(), 2);
        }
        assert!((0..20).any(|seed| starts(seed) != starts(0)));
    }

    #[test]
    fn no_request_of_an_open_trace_has_a_successor() {
        let trace = trace(&[0, 5]);
        let mut arrivals = Arrivals::new(&trace, WHOLE, ArrivalRate::Rate(1.0));
        assert_eq!(arrivals.after(&trace, 0, Duration::ZERO), None);
    }

    proptest! {
        /// In order, at the rate, and equal stamps spread before the next one.
        #[test]
        fn open_requests_keep_their_order_and_rate(
            gaps in proptest::collection::vec(0_u32..4, 2..60), rate in 0.1_f64..50.0, seed in 0_u64..9,
        ) {
            let stamps: Vec<u32> = gaps.iter().scan(0, |at, gap| { *at += gap * 1000; Some(*at) }).collect();
            let trace = trace(&stamps);
            let stretch = TraceSlice { requests: None, seed };
            let arrivals = Arrivals::new(&trace, stretch, ArrivalRate::Rate(rate)).first;
            prop_assert!(arrivals.is_sorted_by_key(|arrival| arrival.at));
            prop_assert!(arrivals.iter().map(|arrival| arrival.request).eq(0..stamps.len()));
            let span = arrivals[stamps.len() - 1].at.as_secs_f64();
            if span > 0.0 {
                let found = stamps.len() as f64 / span;
                prop_assert!((found / rate - 1.0).abs() < 1e-6, "{} for {}", found, rate);
            }
            let again = Arrivals::new(&trace, stretch, ArrivalRate::Rate(rate)).first;
            prop_assert_eq!(arrivals, again);
        }
    }
}
