//! The one writer: follows log, heartbeats and registry, and folds them in.
//!
//! A *session* is one log and one tail of it. It begins by asking whether the log is still the one
//! that was read, and ends when that is in doubt; the next one asks again and acts on it. In
//! between a second look is taken every [`TICK`], and at the applied record every [`COMPARE_EVERY`]
//! of them and after a reconnect, without holding up the folding.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};

use futures_util::FutureExt as _;
use futures_util::future::{Fuse, FusedFuture as _};
use warmroute_plane::{Broadcast, LogTail, PlaneStream, RegistryWatch};

use super::restore::{Found, Reading, Wanted};
use super::*;
use crate::fold::{NoSnapshot, ParsedMessage, ReaderStall, SnapshotCut};
use crate::metrics::RestoreCause;
use crate::same_log::{self, LogMatch};

/// Looks at the log's end between two at the applied record: 3 s.
const COMPARE_EVERY: u32 = 6;

/// More than a subscription keeps.
const WAITING_MAX: usize = 1 << 16;

/// A verdict that throws away what was read is asked for twice: one server of a cluster may be
/// behind.
const SECOND_OPINION: Duration = Duration::from_millis(300);

/// A cut, or why there is none, and how long it took.
pub(super) struct CutMade {
    pub(super) cut: Result<SnapshotCut, NoSnapshot>,
    pub(super) reading: ReadProgress,
    pub(super) took: Duration,
}

/// The time by which our clock falls behind the log's that is logged.
const CLOCK_STOOD_MIN: Duration = Duration::from_secs(1);

/// What to cut, and where the cut is wanted.
pub(super) enum CutRequest {
    /// The whole fold, with the image in this buffer.
    Snapshot(Vec<u8>, oneshot::Sender<CutMade>),
    Source(Source, oneshot::Sender<Option<SourceCut>>),
}

impl CutRequest {
    /// Whether the requester is gone.
    fn is_given_up(&self) -> bool {
        match self {
            Self::Snapshot(_, made) => made.is_closed(),
            Self::Source(_, made) => made.is_closed(),
        }
    }
}

/// The writer waits for each cut. Between two it does other work for a multiple of that time, at most
/// [`CUT_REST_MAX`]: so cuts, however many are asked for, leave the log most of the writer's time.
const CUT_RESTS: u32 = 4;
const CUT_REST_MAX: Duration = Duration::from_secs(2);

/// Requests for cuts, and until when they wait.
pub(super) struct Cuts {
    requests: mpsc::Receiver<CutRequest>,
    not_before: Instant,
}

impl Cuts {
    pub(super) fn new(requests: mpsc::Receiver<CutRequest>) -> Self {
        Self {
            requests,
            not_before: Instant::now(),
        }
    }

    /// The next whose requester waits. Cancel-safe.
    pub(super) async fn next(&mut self) -> CutTurn<'_> {
        sleep_until(self.not_before).await;
        loop {
            match self.requests.recv().await {
                Some(request) if request.is_given_up() => {}
                Some(request) => {
                    return CutTurn {
                        request: Some(request),
                        begun: Instant::now(),
                        not_before: &mut self.not_before,
                    };
                }
                // The service, which has the sender, is going.
                None => std::future::pending().await,
            }
        }
    }
}

/// A request's turn, which ends with the cut.
pub(super) struct CutTurn<'a> {
    pub(super) request: Option<CutRequest>,
    begun: Instant,
    not_before: &'a mut Instant,
}

impl Drop for CutTurn<'_> {
    fn drop(&mut self) {
        let rest = self.begun.elapsed() * CUT_RESTS;
        *self.not_before = Instant::now() + rest.min(CUT_REST_MAX);
    }
}

/// What a session follows.
struct Session {
    log: LogTail,
    /// The log's end at the beginning.
    live_from: LogPosition,
    heartbeats: PlaneStream<Broadcast>,
    stall: ReaderStall,
}

/// The log's answer about itself.
pub(super) struct Look {
    /// The log answered at or after this time.
    at: std::time::Instant,
    pub(super) status: LogStatus,
    fit: LogMatch,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Compare {
    Record,
    EndOnly,
}

/// Which of the two frequent inputs is taken if both have a message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Preferred {
    Log,
    Heartbeats,
    /// A batch is held until a snapshot is read: those behind it wait.
    HeartbeatsOnly,
}

/// A message of one of the two frequent inputs; `None` at its end.
enum Followed {
    Batch(Option<Vec<LogMessage>>),
    Heartbeat(Option<Broadcast>),
}

/// The next message of the log or of a heartbeat. Cancel-safe, as both streams are.
async fn next_followed(
    log: &mut LogTail,
    heartbeats: &mut PlaneStream<Broadcast>,
    preferred: Preferred,
) -> Followed {
    match preferred {
        Preferred::Log => tokio::select! {
            biased;
            batch = log.next() => Followed::Batch(batch),
            heartbeat = heartbeats.next() => Followed::Heartbeat(heartbeat),
        },
        Preferred::Heartbeats => tokio::select! {
            biased;
            heartbeat = heartbeats.next() => Followed::Heartbeat(heartbeat),
            batch = log.next() => Followed::Batch(batch),
        },
        Preferred::HeartbeatsOnly => Followed::Heartbeat(heartbeats.next().await),
    }
}

impl FoldWriter {
    pub(super) async fn follow(self, cuts: mpsc::Receiver<CutRequest>, stop: CancellationToken) {
        let mut cuts = Cuts::new(cuts);
        let follow = async {
            loop {
                let Err(error) = self.follow_once(&mut cuts).await;
                match self.log_failed(&error) {
                    true => warn!(%error, "the log is taken up again"),
                    false => debug!(%error, "the log is taken up again"),
                }
                self.shared.metrics.reconnects.inc();
                self.tick_fold();
                // Other tasks may get answers of the log that this one did not.
                self.beside_clock(sleep(RETRY)).await;
            }
        };
        // Every step on the fold is one synchronous call: being dropped at an await harms nothing.
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = follow => {}
        }
    }

    /// Returns whether to report it: a lost connection is reported once for the process.
    fn log_failed(&self, error: &PlaneError) -> bool {
        let connection = *self.shared.connection.borrow();
        let reach = &self.shared.log_reach;
        match connection {
            Connection::Up => reach.failed(error.to_string(), now()),
            Connection::Down => {
                reach.cut_off();
                false
            }
        }
    }

    /// Takes up the log where it was left.
    async fn begin(&self) -> Result<Session, PlaneError> {
        self.wait_until_connected().await;
        self.open_log().await?;
        let heartbeats = self.plane.subscribe(self.subjects.all_heartbeats()).await?;
        let stall = ReaderStall::new(now());
        {
            let mut fold = self.fold.write();
            fold.watch_begins();
            // The last session's reading ended with it.
            fold.reload_ended();
        }
        let position = self.fold.read().position();
        info!(%position, "following the log");
        let log = self.plane.tail(position, BATCH_MAX).await?;
        // The tail follows the log that is there now.
        let live_from = self.looked(self.look(Compare::EndOnly).await?)?;
        Ok(Session {
            log,
            live_from,
            heartbeats,
            stall,
        })
    }

    /// Follows the log until the session ends.
    async fn follow_once(&self, cuts: &mut Cuts) -> Result<Infallible, PlaneError> {
        let Session {
            mut log,
            live_from,
            mut heartbeats,
            mut stall,
        } = self.beside_clock(self.begin()).await?;
        let plane = Arc::clone(&self.plane);
        let mut registry = RegistryWatch::new(plane, self.subjects.worker_keys());
        let mut connection = self.plane.connection();
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let until_compared = AtomicU32::new(0);
        let mut looks = Box::pin(self.looks(&until_compared));
        let mut preferred = Preferred::Log;
        let mut reading = Fuse::terminated();
        // What comes behind a hole in the log, while a snapshot is read that may fill it.
        let mut held: Option<Vec<LogMessage>> = None;
        loop {
            stall.turn(now());
            tokio::select! {
                // The rare inputs first; log and heartbeats take turns. No input starves another.
                biased;
                Ok(()) = connection.changed() => {
                    self.see_connection(*connection.borrow_and_update());
                    until_compared.store(0, Ordering::Relaxed);
                }
                () = self.clock_answered() => self.take_in_clock(),
                turn = cuts.next() => self.cut(turn).await,
                Some(look) = looks.next() => {
                    self.end_stall(&mut stall, &mut heartbeats, look.as_ref().ok())?;
                    self.looked_again(look)?;
                }
                _ = ticks.tick() => self.tick(&mut reading, held.is_some()).await,
                found = &mut reading => {
                    self.has_read(found, held.is_some())?;
                    if let Some(batch) = held.take() {
                        preferred = Preferred::Log;
                        self.fold_batch(&batch, live_from).await;
                    }
                }
                event = registry.next() => self.registry(event),
                followed = next_followed(&mut log, &mut heartbeats, preferred) => match followed {
                    Followed::Heartbeat(heartbeat) => {
                        if preferred == Preferred::Heartbeats {
                            preferred = Preferred::Log;
                        }
                        self.heartbeat(&mut stall, &heartbeat.ok_or_else(ended)?);
                    }
                    Followed::Batch(batch) => {
                        let batch = batch.ok_or_else(ended)?;
                        if let Some(jump) = self.jumped(&batch) {
                            (reading, held) = (jump, Some(batch));
                            preferred = Preferred::HeartbeatsOnly;
                        } else {
                            preferred = Preferred::Heartbeats;
                            self.fold_batch(&batch, live_from).await;
                        }
                    }
                },
            }
        }
    }

    /// Waits, and takes in what other tasks read of the log's clock in the meantime. Not while a cut is
    /// made, whose reader holds the lock.
    pub(super) async fn beside_clock<T>(&self, wait: impl Future<Output = T>) -> T {
        let mut wait = pin!(wait);
        loop {
            tokio::select! {
                biased;
                () = self.clock_answered() => self.take_in_clock(),
                value = &mut wait => return value,
            }
        }
    }

    /// Another task left an answer about the log's clock. Cancel-safe.
    async fn clock_answered(&self) {
        let mut waiting = self.shared.clock.subscribe();
        if waiting.wait_for(Option::is_some).await.is_err() {
            // The service, which has the sender, is going.
            std::future::pending::<()>().await;
        }
    }

    fn take_in_clock(&self) {
        if let Some(answer) = self.shared.take_clock_answer() {
            self.observe_clock(answer);
        }
    }

    /// What was read of the log's clock comes first: it shows how much time passed.
    fn tick_fold(&self) {
        self.take_in_clock();
        self.fold.write().tick(now());
    }

    fn see_connection(&self, connection: Connection) {
        let mut fold = self.fold.write();
        match connection {
            Connection::Up => fold.reconnected(now()),
            Connection::Down => fold.cut_off(now()),
        }
    }

    pub(super) async fn wait_until_connected(&self) {
        let mut connection = self.plane.connection();
        loop {
            let is = *connection.borrow_and_update();
            self.see_connection(is);
            match is {
                Connection::Up => return,
                // Time goes on without the plane. Whether it changed is looked at above.
                Connection::Down => drop(timeout(TICK, connection.changed()).await),
            }
            self.tick_fold();
        }
    }

    // --- the log's identity

    /// Makes sure that the fold is one of the log that is there, whatever that takes.
    async fn open_log(&self) -> Result<(), PlaneError> {
        let mut look = self.look(Compare::Record).await?;
        if look.fit.is_broken() {
            sleep(SECOND_OPINION).await;
            look = self.look(Compare::Record).await?;
        }
        self.start(&look.status).await;
        let mut fold = self.fold.write();
        if look.fit.is_broken() {
            let (position, fit) = (fold.position(), look.fit.label());
            error!(%position, fit, "the log is not the one that was read: it is read anew");
            self.shared.metrics.logs_broken.inc(look.fit);
        }
        match look.fit {
            LogMatch::LostEnd | LogMatch::OtherRecord => fold.log_lost_records(),
            LogMatch::AnotherLog | LogMatch::Same | LogMatch::Trimmed | LogMatch::Missing => {}
        }
        fold.follow(look.status.identity);
        fold.observe_end(look.at, look.status.last, look.status.now_unix_ns);
        let position = fold.position();
        drop(fold);
        self.shared.position.send_replace(position);
        Ok(())
    }

    /// The start's decision, once: a snapshot, or the log from its beginning.
    async fn start(&self, status: &LogStatus) {
        if self.shared.started.load(Ordering::Acquire) {
            return;
        }
        if let Some(snapshots) = &self.snapshots {
            self.fold.write().reload_first();
            self.restore_at_start(snapshots, status).await;
        }
        self.shared.started.store(true, Ordering::Release);
    }

    /// The log's clock shows whether this process's clock stood still.
    fn observe_clock(&self, answer: ClockAnswer) {
        let stood = self.fold.write().observe_clock(answer);
        if stood > CLOCK_STOOD_MIN {
            warn!(
                ?stood,
                "this process's clock stood still, or the log's clock jumped ahead"
            );
        }
    }

    async fn look(&self, compare: Compare) -> Result<Look, PlaneError> {
        let at = now();
        let (log, mark) = {
            let fold = self.fold.read();
            (fold.log(), fold.mark())
        };
        let (status, clock) = self.timed_status().await?;
        self.observe_clock(clock);
        let wanted = mark.filter(|mark| {
            let comparable = log == Some(status.identity) && same_log::is_there(mark, &status);
            compare == Compare::Record && comparable
        });
        let found = match wanted {
            Some(mark) => in_time(self.plane.at(mark.position)).await?,
            None => None,
        };
        let log = log.unwrap_or(status.identity);
        let fit = same_log::judge(log, mark.as_ref(), &status, found.as_ref());
        Ok(Look { at, status, fit })
    }

    /// A look now and then, for as long as the session lasts.
    fn looks(
        &self,
        until_compared: &AtomicU32,
    ) -> impl futures_util::Stream<Item = Result<Look, PlaneError>> {
        futures_util::stream::unfold((), async move |()| {
            sleep(TICK).await;
            let left = until_compared.load(Ordering::Relaxed);
            let (compare, left) = match left.checked_sub(1) {
                None => (Compare::Record, COMPARE_EVERY),
                Some(left) => (Compare::EndOnly, left),
            };
            until_compared.store(left, Ordering::Relaxed);
            Some((self.look(compare).await, ()))
        })
    }

    /// Takes a look in; the log's end as of it. An error ends the session.
    fn looked(&self, look: Look) -> Result<LogPosition, PlaneError> {
        if look.fit.is_broken() {
            let why = format!("the log changed: {}", look.fit.label());
            return Err(PlaneError::Unavailable(why));
        }
        self.shared.log_reach.answered();
        let (last, unix_ns) = (look.status.last, look.status.now_unix_ns);
        self.fold.write().observe_end(look.at, last, unix_ns);
        let first = look.status.first.0;
        self.shared.log_first.store(first, Ordering::Relaxed);
        Ok(look.status.last)
    }

    /// A look that failed proves nothing: the plane comes back by itself, and so do the streams.
    fn looked_again(&self, look: Result<Look, PlaneError>) -> Result<(), PlaneError> {
        match look {
            Ok(look) => self.looked(look).map(drop),
            Err(error) => {
                debug!(%error, "the log's state cannot be asked for");
                self.log_failed(&error);
                self.shared.metrics.looks_failed.inc();
                Ok(())
            }
        }
    }

    // --- folding

    /// Folds a batch; what lies behind `live_from` is timed, what came before was stored long ago.
    async fn fold_batch(&self, batch: &[LogMessage], live_from: LogPosition) {
        let mut rest = batch;
        while !rest.is_empty() {
            rest = self.fold_some(rest, live_from);
            // Between two locks readers and other tasks have their turn.
            tokio::task::yield_now().await;
        }
    }

    /// If the log went on without us: a newer snapshot saves the sources that a gap would cost.
    fn jumped(&self, batch: &[LogMessage]) -> Option<Reading<'_>> {
        let to = batch.first()?.position;
        let fold = self.fold.read();
        let position = fold.position();
        if !fold.would_jump(to) {
            return None;
        }
        error!(%position, %to, "the log let records go before they were read");
        Some(self.read(Wanted::Above(position)))
    }

    /// Takes a snapshot in, if it is of use still; then the session ends. Without one, what is
    /// missing is found by numbers and digests, and asked for.
    fn has_read(&self, found: Option<Found>, has_jumped: bool) -> Result<(), PlaneError> {
        let mut fold = self.fold.write();
        let cause = match has_jumped {
            true => Some(RestoreCause::FellOff),
            false => fold.is_reloading().then_some(RestoreCause::Mismatch),
        };
        fold.reload_ended();
        drop(fold);
        let first = LogPosition(self.shared.log_first.load(Ordering::Relaxed));
        let (Some(found), Some(cause)) = (found, cause) else {
            return Ok(());
        };
        if !found.is_followed_by(first) {
            warn!(%first, "the log was trimmed while a snapshot was read");
            return Ok(());
        }
        self.adopt(cause, found);
        Err(unavailable("a snapshot was loaded"))
    }

    /// Folds the first messages, as many as one lock may take; returns the others.
    fn fold_some<'a>(&self, batch: &'a [LogMessage], live_from: LogPosition) -> &'a [LogMessage] {
        let mut bytes = 0;
        let taken = batch.iter().take_while(|message| {
            let fits = bytes <= LOCKED_BYTES_MAX;
            bytes += message.payload.len();
            fits
        });
        let (now_taken, rest) = batch.split_at(taken.count());
        // Parsing takes longer than folding; it is done before the lock is taken.
        let parsed: Vec<ParsedMessage> = now_taken
            .iter()
            .map(|message| ParsedMessage::of(&self.subjects, message))
            .collect();
        let (verdicts, position) = writer::apply(&self.fold, &parsed, now());
        self.shared.position.send_replace(position);
        for (message, verdict) in now_taken.iter().zip(verdicts) {
            self.shared.metrics.records.inc(verdict);
            report(message, verdict);
        }
        let live = now_taken
            .iter()
            .filter(|message| message.position > live_from);
        self.shared
            .metrics
            .visible(live.map(|message| message.stored_unix_ns));
        rest
    }

    /// After a standstill: reads all heartbeats that came before this answer of the plane.
    fn end_stall(
        &self,
        stall: &mut ReaderStall,
        heartbeats: &mut PlaneStream<Broadcast>,
        look: Option<&Look>,
    ) -> Result<(), PlaneError> {
        stall.turn(now());
        if !look.is_some_and(|look| stall.ends_with(look.at)) {
            return Ok(());
        }
        for _ in 0..WAITING_MAX {
            // Not cut short by the runtime's fairness: an empty queue is what is waited for.
            let next = tokio::task::unconstrained(heartbeats.next());
            let Some(heartbeat) = next.now_or_never() else {
                stall.ended();
                break;
            };
            self.heartbeat(stall, &heartbeat.ok_or_else(ended)?);
        }
        Ok(())
    }

    fn heartbeat(&self, stall: &mut ReaderStall, message: &Broadcast) {
        let now = now();
        let came = stall.turn(now);
        let verdict = self.fold.write().heartbeat_of(now, came, message);
        self.shared.metrics.heartbeats.inc(verdict);
        match verdict {
            HeartbeatVerdict::Mismatch => warn!("a source differs from its shim's heartbeat"),
            HeartbeatVerdict::WrongSource
            | HeartbeatVerdict::WrongSubject
            | HeartbeatVerdict::Implausible => {
                let (subject, verdict) = (&message.subject, verdict.label());
                warn!(subject, verdict, "a heartbeat is not believed");
            }
            HeartbeatVerdict::Proof
            | HeartbeatVerdict::NotFolded
            | HeartbeatVerdict::Behind
            | HeartbeatVerdict::Late
            | HeartbeatVerdict::Old
            | HeartbeatVerdict::Undecodable => debug!(verdict = verdict.label(), "heartbeat"),
        }
    }

    fn registry(&self, event: RegistryEvent) {
        let mut fold = self.fold.write();
        match event {
            RegistryEvent::Put { key, entry } => {
                if let Err(error) = fold.worker_put(&key, &entry.value) {
                    warn!(key, %error, "registry entry ignored");
                    self.shared.metrics.bad_entries.inc();
                }
            }
            RegistryEvent::Gone { key } => {
                info!(key, "worker gone from the registry");
                fold.worker_gone(now(), &key);
            }
            RegistryEvent::Current => {
                fold.watch_is_current(now());
                self.shared.registry_read.store(true, Ordering::Release);
            }
        }
    }

    async fn tick<'a>(&'a self, reading: &mut Reading<'a>, is_held: bool) {
        self.tick_fold();
        // One snapshot at a time: what else diverged waits for its turn.
        let diverged = match reading.is_terminated() {
            true => self.fold.write().poll_reload(now()),
            false => Vec::new(),
        };
        writer::reclaim(&self.fold);
        if !diverged.is_empty() {
            *reading = self.read(Wanted::Holding(diverged));
        }
        // What heartbeats name may be in the records that are held.
        if is_held {
            return;
        }
        let requests = self.fold.write().poll_resyncs(now());
        for request in requests {
            self.beside_clock(self.ask_for_resync(&request)).await;
        }
    }

    /// A request that is not sent is made again after its interval.
    async fn ask_for_resync(&self, request: &ResyncRequest) {
        let (source, reason) = (&request.source, request.reason);
        warn!(%source, above = %request.above, reason = reason.label(), "asking for a new generation");
        self.shared.metrics.resyncs.inc(reason);
        let payload = match codec::encode(request) {
            Ok(payload) => payload,
            Err(error) => return warn!(%error, "a resync request cannot be encoded"),
        };
        let subject = self.subjects.resync(&source.worker);
        if let Err(error) = self.plane.publish(subject, payload.into()).await {
            warn!(%error, "a resync request cannot be sent");
        }
    }

    /// Cuts while the writer waits here. Readers go on beside it.
    async fn cut(&self, mut turn: CutTurn<'_>) {
        let Some(request) = turn.request.take() else {
            return;
        };
        let shared = Arc::clone(&self.shared);
        // The requester may give up.
        let cut = move || match request {
            CutRequest::Snapshot(buffer, made) => {
                let fold = shared.read();
                let reading = shared.reading(&fold);
                let cut = fold.cut(buffer);
                let took = now().saturating_duration_since(reading.at);
                drop(made.send(CutMade { cut, reading, took }));
            }
            CutRequest::Source(source, made) => {
                drop(made.send(view::cut(&shared.read(), &source, now())));
            }
        };
        if let Err(error) = blocking::run(cut).await {
            error!(%error, "a cut failed");
        }
    }
}

fn report(message: &LogMessage, verdict: RecordVerdict) {
    let (subject, position) = (&message.subject, message.position);
    match verdict {
        RecordVerdict::Applied
        | RecordVerdict::Started
        | RecordVerdict::Duplicate
        | RecordVerdict::NotFolded => {}
        RecordVerdict::Old | RecordVerdict::Replayed => {
            debug!(subject, %position, verdict = verdict.label(), "record dropped");
        }
        RecordVerdict::StartedBehind
        | RecordVerdict::Ahead
        | RecordVerdict::Violation
        | RecordVerdict::Contradiction
        | RecordVerdict::Mismatch
        | RecordVerdict::Undecodable
        | RecordVerdict::WrongSource
        | RecordVerdict::WrongSubject
        | RecordVerdict::Implausible => {
            warn!(subject, %position, verdict = verdict.label(), "record does not fit");
        }
    }
}

fn ended() -> PlaneError {
    unavailable("a stream of the plane ended")
}
