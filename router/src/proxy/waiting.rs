//! Requests that wait for a worker of their model, while an engine starts or loads a model.
//!
//! A waiting request holds its body (bounded by `--max-buffered-bytes`), and [`WAITING_MAX`] bounds
//! their number. Each change of the fleet lets all of them try again. A client that closes its
//! connection ends its wait.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use prometheus::IntGauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep_until};

use super::App;
use super::call::Call;
use super::queueing::QueueHints;
use crate::error::ProxyError;

/// Requests that wait at a time. More get the answer that they would get without a wait.
const WAITING_MAX: usize = 1024;

/// The places of waiting requests.
pub(crate) struct HeldRequests {
    places: Arc<Semaphore>,
    count: IntGauge,
}

/// One request's wait, which begins at the first refusal.
#[derive(Default)]
pub(super) struct WorkerWait {
    begun: Option<BegunWait>,
    is_refused: bool,
    /// As demand for a model that sleeps.
    is_counted: bool,
    hints: QueueHints,
}

struct BegunWait {
    until: Instant,
    changes: watch::Receiver<()>,
}

/// The place of a request until a worker or a queue has it. It is kept from one change of the fleet
/// to the next: requests that come later must not take it.
pub(super) struct HeldPlace {
    count: IntGauge,
    _place: OwnedSemaphorePermit,
}

impl HeldRequests {
    pub(crate) fn new(count: IntGauge) -> Self {
        Self {
            places: Arc::new(Semaphore::new(WAITING_MAX)),
            count,
        }
    }

    fn take(&self) -> Option<HeldPlace> {
        let place = Arc::clone(&self.places).try_acquire_owned().ok()?;
        self.count.inc();
        Some(HeldPlace {
            count: self.count.clone(),
            _place: place,
        })
    }

    /// Takes all places but so many, until the result is dropped.
    #[cfg(test)]
    pub(super) fn occupied_but(&self, free: usize) -> OwnedSemaphorePermit {
        let count = u32::try_from(WAITING_MAX - free).unwrap();
        let places = Arc::clone(&self.places);
        places.try_acquire_many_owned(count).unwrap()
    }
}

impl WorkerWait {
    /// A wait within the client's own time.
    pub(super) fn new(hints: QueueHints) -> Self {
        Self {
            hints,
            ..Self::default()
        }
    }

    /// For a request that fails while no worker can serve it.
    pub(super) fn refused() -> Self {
        Self {
            is_refused: true,
            ..Self::default()
        }
    }

    /// Waits until another attempt may succeed. Returns false if `error` is the answer.
    pub(super) async fn before_retry(
        &mut self,
        app: &App,
        call: &mut Call,
        error: &ProxyError,
    ) -> bool {
        // An engine that has not reported its models may have this one.
        let may_come =
            matches!(error, ProxyError::UnknownModel(_)) && app.fleet.catalog().incomplete;
        if !may_come && *error != ProxyError::NoWorker {
            return false;
        }
        self.want_awake(app, call);
        if self.is_refused {
            return false;
        }
        let Some(wait) = &mut self.begun else {
            self.begun = BegunWait::begin(app, self.hints.until(call));
            // The fleet may have changed since the refusal.
            return self.begun.is_some();
        };
        if call.held.is_none() {
            call.held = app.held.take();
        }
        if call.held.is_none() {
            return false;
        }
        call.report.wait_begins();
        let changed = tokio::select! {
            changed = wait.changes.changed() => changed.is_ok(),
            () = sleep_until(wait.until) => false,
            () = app.admission.closed() => false,
        };
        call.report.wait_ends();
        changed
    }
}

impl WorkerWait {
    /// Reports the demand for a model whose workers sleep, and has one woken where the settings say
    /// so.
    fn want_awake(&mut self, app: &App, call: &Call) {
        let Some(series) = &call.report.series else {
            return;
        };
        if !app.fleet.is_asleep(&series.model) {
            return;
        }
        if !std::mem::replace(&mut self.is_counted, true) {
            series.totals.asleep.fetch_add(1, Ordering::Relaxed);
        }
        if app.settings.current().wakes_engines() {
            app.fleet.wake(&series.model);
        }
    }
}

impl BegunWait {
    /// `own`: the end of the client's own time.
    fn begin(app: &App, own: Option<Instant>) -> Option<Self> {
        let now = Instant::now();
        let longest = now + app.settings.current().engine_wait_timeout();
        let until = own.map_or(longest, |own| own.min(longest));
        (until > now).then(|| Self {
            until,
            changes: app.fleet.changes(),
        })
    }
}

impl Drop for HeldPlace {
    fn drop(&mut self) {
        self.count.dec();
    }
}
