//! Admission: requests wait in front of the choice of a worker while all workers of their model are
//! at `--max-active-requests`.
//!
//! [`waiting_room`] decides who is next. Here a task gives places to waiting requests when slots are
//! freed, and each waiting request holds an [`AdmissionTicket`]. A ticket that is dropped (the
//! client is gone) leaves the queue, or returns its grant, so that the next request gets the place.

mod displacement;
mod fair_queue;
mod free_places;
mod in_flight;
mod leave_rate;
mod line;
mod waiting_room;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus::IntCounterVec;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tokio_util::sync::CancellationToken;
use warmroute_process::access::keys::KeyId;
use warmroute_proto::label_enum;

pub(crate) use fair_queue::QueueSize;
use fair_queue::{QueueSpot, QueuedRequest};
use free_places::FreePlaces;
use in_flight::InFlightTokens;
use leave_rate::RETRY_AFTER_MIN;
pub(crate) use line::QueueLine;
use line::{QueueBounds, TenantName};
pub(crate) use waiting_room::QueueStatus;
use waiting_room::{GrantEnd, JoinedQueue, WaitingRoom};

use crate::metrics::Metrics;
use crate::settings::QueueLengths;
use crate::shared_core::SharedCore;

/// Time between two looks for places that no event of a slot announces: another router died.
const SWEEP: Duration = Duration::from_millis(250);

/// Charged for each request beyond its prompt's tokens: about what it generates.
const OUTPUT_TOKENS: u64 = 256;

/// What a waiting request learns.
#[derive(Debug, PartialEq, Eq)]
enum QueueNotice {
    Granted,
    Displaced,
}

type Notices = oneshot::Sender<QueueNotice>;

label_enum! {
    /// Why a request does not wait, or no longer.
    pub(crate) enum ShedReason {
        /// Its client does not let it wait.
        NotQueued = "not_queued",
        /// The queue is at a bound.
        QueueFull = "queue_full",
        /// Another request got its place in the queue.
        Displaced = "displaced",
        /// It waited as long as it may.
        Timeout = "timeout",
        /// This router ends.
        RouterEnds = "router_ends",
    }
}

/// A request that got no place, and when another one may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShedRequest {
    pub reason: ShedReason,
    pub retry_after: Duration,
}

impl ShedRequest {
    /// Whole seconds, at least one.
    pub(crate) const fn retry_after_secs(&self) -> u64 {
        let secs = self.retry_after.as_millis().div_ceil(1000);
        if secs == 0 { 1 } else { secs as u64 }
    }
}

/// What a request asks of the queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueDemand {
    pub prompt_tokens: u32,
    /// Size of its body.
    pub bytes: usize,
    pub lengths: QueueLengths,
    pub until: Instant,
}

/// The queue of all models.
pub(crate) struct Admission {
    room: Mutex<WaitingRoom<Notices>>,
    /// Locked after `room`, where both are.
    in_flight: Mutex<InFlightTokens>,
    /// A request has queued since the start. Before, no request takes the lock.
    was_used: AtomicBool,
    core: Arc<SharedCore>,
    /// Bytes of all waiting requests.
    bytes_max: usize,
    closed: CancellationToken,
    shed: IntCounterVec,
}

/// A request's place in a queue, or its grant. Left or returned when it is dropped.
pub(crate) struct AdmissionTicket {
    admission: Arc<Admission>,
    spot: QueueSpot,
    demand: QueueDemand,
    since: Instant,
    stage: TicketStage,
}

/// A tenant's tokens in flight, until it is dropped.
pub(crate) struct PlaceUse {
    admission: Arc<Admission>,
    tenant: TenantName,
    tokens: u64,
}

impl Drop for PlaceUse {
    fn drop(&mut self) {
        if self.tenant.is_some() {
            self.admission.in_flight().ended(&self.tenant, self.tokens);
        }
    }
}

enum TicketStage {
    Waiting(oneshot::Receiver<QueueNotice>),
    Granted,
    Over,
}

impl Admission {
    /// `buffered_max`: bytes of all bodies. Half of them may wait.
    pub(crate) fn new(core: Arc<SharedCore>, buffered_max: usize, metrics: &Metrics) -> Arc<Self> {
        Arc::new(Self {
            room: Mutex::default(),
            in_flight: Mutex::default(),
            was_used: AtomicBool::new(false),
            core,
            bytes_max: buffered_max / 2,
            closed: CancellationToken::new(),
            shed: metrics.shed().clone(),
        })
    }

    /// Answers the waiting requests, and lets none wait from here on: this router ends.
    pub(crate) fn close(&self) {
        self.closed.cancel();
    }

    pub(crate) async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Gives places as they become free, until stopped.
    pub(crate) async fn run(
        self: Arc<Self>,
        mut fleet: watch::Receiver<()>,
        stop: CancellationToken,
    ) {
        let mut sweeps = interval(SWEEP);
        sweeps.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.core.room_changed() => {}
                Ok(()) = fleet.changed() => {}
                _ = sweeps.tick() => {}
            }
            self.give_places();
        }
    }

    /// Whether a new request of this model must queue.
    pub(crate) fn is_engaged(&self, model: &str) -> bool {
        let places = |models| self.places(models);
        self.was_used.load(Ordering::Relaxed) && self.room().is_engaged(model, places)
    }

    /// Puts a request into its queue.
    pub(crate) fn join(
        self: &Arc<Self>,
        line: &QueueLine,
        demand: QueueDemand,
    ) -> Result<AdmissionTicket, ShedRequest> {
        if self.closed.is_cancelled() {
            return Err(self.shed(ShedReason::RouterEnds, line));
        }
        self.was_used.store(true, Ordering::Relaxed);
        let (notices, notice) = oneshot::channel();
        let since = Instant::now();
        let request = queued(&demand, since, notices);
        let bounds = QueueBounds {
            requests: demand.lengths.all,
            requests_per_model: demand.lengths.per_model,
            bytes: self.bytes_max,
        };
        let mut room = self.room();
        // Before the look for a place below: what is freed after that look wakes the task.
        self.core.await_room();
        let joined = room.join(line, request, &bounds);
        drop(room);
        let JoinedQueue { spot, displaced } =
            joined.map_err(|_| self.shed(ShedReason::QueueFull, line))?;
        for notices in displaced {
            // A receiver that is gone has left the queue.
            drop(notices.send(QueueNotice::Displaced));
        }
        // A place may have become free since the request was refused.
        self.core.room_may_be_free();
        Ok(AdmissionTicket {
            admission: Arc::clone(self),
            spot,
            demand,
            since,
            stage: TicketStage::Waiting(notice),
        })
    }

    /// Counts a request that is not served. `line`: the one that it was in, or would have joined.
    pub(crate) fn shed(&self, reason: ShedReason, line: &QueueLine) -> ShedRequest {
        self.shed.with_label_values(&[reason.label()]).inc();
        let retry_after = match reason {
            // Another router may serve it.
            ShedReason::RouterEnds => RETRY_AFTER_MIN,
            ShedReason::NotQueued
            | ShedReason::QueueFull
            | ShedReason::Displaced
            | ShedReason::Timeout => self.room().retry_after(line, Instant::now().into_std()),
        };
        ShedRequest {
            reason,
            retry_after,
        }
    }

    /// The models with a queue now or in the last minute.
    pub(crate) fn statuses(&self) -> Vec<QueueStatus> {
        self.room().statuses(Instant::now().into_std())
    }

    pub(crate) fn size(&self) -> QueueSize {
        self.room().size()
    }

    /// Grants as many places as there are.
    fn give_places(&self) {
        // Held throughout: a ticket that is dropped finds its notice or its place, and a request
        // that gets its slot in this time counts at least once.
        let mut room = self.room();
        let mut places = self.places(room.names_in_use());
        room.take_granted(&mut places);
        let mut in_flight = self.in_flight();
        while let Some((spot, request)) = room.grant(&mut places, &mut in_flight) {
            if request.payload.send(QueueNotice::Granted).is_err() {
                room.settle(&spot.model, GrantEnd::Unused, Instant::now().into_std());
                in_flight.ended(&spot.tenant, request.cost);
                self.core.room_may_be_free();
            }
        }
        if room.size().requests == 0 {
            self.core.ignore_room();
        }
    }

    fn places(&self, models: Vec<Arc<str>>) -> FreePlaces {
        let mut places = FreePlaces::default();
        if models.is_empty() {
            return places;
        }
        let now = Instant::now().into_std();
        let core = self.core.core();
        for model in models {
            let free = core.free_places(&model, now);
            places.add(model, free);
        }
        places
    }

    fn room(&self) -> MutexGuard<'_, WaitingRoom<Notices>> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn in_flight(&self) -> MutexGuard<'_, InFlightTokens> {
        self.in_flight
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// A request has its slot without a wait.
    pub(crate) fn began(self: &Arc<Self>, tenant: Option<&KeyId>, prompt_tokens: u32) -> PlaceUse {
        let place = PlaceUse {
            admission: Arc::clone(self),
            tenant: tenant.cloned(),
            tokens: estimated_tokens(prompt_tokens),
        };
        if place.tenant.is_some() {
            self.in_flight().began(&place.tenant, place.tokens);
        }
        place
    }
}

fn estimated_tokens(prompt_tokens: u32) -> u64 {
    u64::from(prompt_tokens) + OUTPUT_TOKENS
}

fn queued(demand: &QueueDemand, since: Instant, payload: Notices) -> QueuedRequest<Notices> {
    QueuedRequest {
        cost: estimated_tokens(demand.prompt_tokens),
        bytes: demand.bytes,
        since: since.into_std(),
        payload,
    }
}

impl AdmissionTicket {
    /// Waits for a grant. Cancel-safe: a grant stays with the ticket.
    pub(crate) async fn granted(&mut self) -> Result<(), ShedRequest> {
        let TicketStage::Waiting(notice) = &mut self.stage else {
            return Ok(());
        };
        let closed = &self.admission.closed;
        let end = tokio::select! {
            notice = notice => Ok(notice.unwrap_or(QueueNotice::Displaced)),
            () = sleep_until(self.demand.until) => Err(ShedReason::Timeout),
            () = closed.cancelled() => Err(ShedReason::RouterEnds),
        };
        let notice = match end {
            Ok(notice) => notice,
            Err(reason) => match self.leave() {
                Some(late) => late,
                None => return Err(self.shed(reason)),
            },
        };
        match notice {
            QueueNotice::Granted => {
                self.stage = TicketStage::Granted;
                Ok(())
            }
            QueueNotice::Displaced => {
                self.stage = TicketStage::Over;
                Err(self.shed(ShedReason::Displaced))
            }
        }
    }

    /// The request has its slot.
    pub(crate) fn admitted(mut self) -> PlaceUse {
        let place = self.granted_place();
        self.end_grant(GrantEnd::Admitted);
        place
    }

    /// The use of a granted place, which its grant has counted.
    fn granted_place(&self) -> PlaceUse {
        PlaceUse {
            admission: Arc::clone(&self.admission),
            tenant: self.spot.tenant.clone(),
            tokens: estimated_tokens(self.demand.prompt_tokens),
        }
    }

    /// The granted place was gone: the request waits on, as its tenant's first.
    pub(crate) fn give_back(&mut self) {
        if matches!(self.stage, TicketStage::Granted) {
            drop(self.granted_place());
            let (notices, notice) = oneshot::channel();
            let request = queued(&self.demand, self.since, notices);
            let mut room = self.admission.room();
            self.admission.core.await_room();
            room.give_back(&self.spot, request);
            drop(room);
            self.stage = TicketStage::Waiting(notice);
            self.admission.core.room_may_be_free();
        }
    }

    fn shed(&self, reason: ShedReason) -> ShedRequest {
        self.admission.shed(reason, &self.spot.line())
    }

    /// Leaves the queue. Returns the notice if there is one.
    fn leave(&mut self) -> Option<QueueNotice> {
        let TicketStage::Waiting(notice) = &mut self.stage else {
            return None;
        };
        let mut room = self.admission.room();
        let notice = match room.cancel(&self.spot) {
            Some(_) => None,
            None => notice.try_recv().ok(),
        };
        drop(room);
        self.stage = match &notice {
            Some(QueueNotice::Granted) => TicketStage::Granted,
            Some(QueueNotice::Displaced) | None => TicketStage::Over,
        };
        notice
    }

    fn end_grant(&mut self, end: GrantEnd) {
        if matches!(self.stage, TicketStage::Granted) {
            if end == GrantEnd::Unused {
                drop(self.granted_place());
            }
            self.stage = TicketStage::Over;
            let now = Instant::now().into_std();
            self.admission.room().settle(&self.spot.model, end, now);
            // The place, or the count of it, is another one's now.
            self.admission.core.room_may_be_free();
        }
    }
}

impl Drop for AdmissionTicket {
    fn drop(&mut self) {
        self.leave();
        self.end_grant(GrantEnd::Unused);
    }
}

#[cfg(test)]
mod tests;
