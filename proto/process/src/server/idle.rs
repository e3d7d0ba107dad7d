//! The idle connections of a server, so that a full server can close the one idle longest.
//!
//! A connection is idle from its beginning or the last byte of an answer to the end of the next
//! request head. If none is idle, the one is closed that waits for its client for longest: clients
//! could otherwise hold all connections by asking for answers that they do not take, or by beginning
//! bodies that they do not send. Each table holds at most one entry for each connection.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};
use tokio_util::sync::CancellationToken;

use super::protocol::Protocol;
use super::stream::ClientStream;
use super::untaken;

/// Slices of so few bytes in all, such as those of a stream's event, are written as one: the system
/// call takes 0.2 µs less.
const JOINED_BYTES_MAX: usize = 1 << 10;

/// A part of an HTTP/2 answer of so few bytes may wait for the client behind its stream's end.
const UNTAKEN_BYTES_MAX: usize = 1 << 10;

/// Idle connections in the order in which they became idle.
#[derive(Default)]
pub(super) struct IdleConnections(Mutex<IdleTable>);

#[derive(Default)]
struct IdleTable {
    next: u64,
    connections: BTreeMap<u64, CancellationToken>,
    /// Connections that wait for their clients, in the order in which the waits began.
    waiting: BTreeMap<u64, CancellationToken>,
}

/// One connection's place in [`IdleConnections`].
pub(super) struct ConnectionActivity {
    idle: Arc<IdleConnections>,
    evicted: CancellationToken,
    state: Mutex<ActivityState>,
    waits: Mutex<ClientWaits>,
}

/// What of a connection waits for its client.
#[derive(Default)]
struct ClientWaits {
    count: usize,
    /// The number in the table.
    listed: Option<u64>,
}

/// An answer or a body that waits for the client, until it is dropped.
pub(super) struct ClientWait(Arc<ConnectionActivity>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ActivityState {
    /// With the number in the table.
    Idle(u64),
    /// So many requests; HTTP/1.1 has one at a time.
    InFlight(usize),
    /// The answer's body is complete and not yet written.
    Flushing,
    /// Something of it is left that has no part in its end, as a body that is discarded.
    Closed,
}

/// A request in flight, until it is dropped.
pub(super) struct InFlightRequest(Arc<ConnectionActivity>);

impl IdleConnections {
    /// Closes the connection that is idle longest. Returns whether there is one.
    pub(super) fn evict(&self) -> bool {
        let mut table = self.table();
        let idle = table.connections.pop_first();
        let evicted = idle.or_else(|| table.waiting.pop_first());
        evicted.inspect(|(_, token)| token.cancel()).is_some()
    }

    fn add_waiting(&self, connection: &CancellationToken) -> u64 {
        let mut table = self.table();
        let number = table.next;
        table.next += 1;
        table.waiting.insert(number, connection.clone());
        number
    }

    fn remove_waiting(&self, number: u64) {
        self.table().waiting.remove(&number);
    }

    fn add(&self, connection: &CancellationToken) -> u64 {
        let mut table = self.table();
        let number = table.next;
        table.next += 1;
        table.connections.insert(number, connection.clone());
        number
    }

    fn remove(&self, number: u64) {
        self.table().connections.remove(&number);
    }

    fn table(&self) -> MutexGuard<'_, IdleTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionActivity {
    pub(super) fn new(idle: Arc<IdleConnections>) -> Arc<Self> {
        let evicted = CancellationToken::new();
        let state = ActivityState::Idle(idle.add(&evicted));
        Arc::new(Self {
            idle,
            evicted,
            state: Mutex::new(state),
            waits: Mutex::default(),
        })
    }

    /// An answer or a body begins to wait for the client.
    pub(super) fn waits_for_client(self: &Arc<Self>) -> ClientWait {
        self.count_waits(|count| count + 1);
        ClientWait(Arc::clone(self))
    }

    /// The connection ends, and is no longer listed: its place is another one's.
    pub(super) fn close(&self) {
        let before = std::mem::replace(&mut *self.state(), ActivityState::Closed);
        if let ActivityState::Idle(number) = before {
            self.idle.remove(number);
        }
        self.count_waits(|count| count);
    }

    /// Returns when the connection has been idle for `time`, or up to twice as long.
    pub(super) async fn idle_for(&self, time: Duration) {
        let mut before = None;
        loop {
            let idle = match *self.state() {
                ActivityState::Idle(number) => Some(number),
                ActivityState::InFlight(_) | ActivityState::Flushing | ActivityState::Closed => {
                    None
                }
            };
            if idle.is_some() && idle == before {
                return;
            }
            before = idle;
            sleep(time).await;
        }
    }

    /// A connection is listed while each of its requests waits: one that moves on needs it. A write
    /// that waits counts with the connection's requests, of which HTTP/1.1 has one.
    fn count_waits(&self, next: impl FnOnce(usize) -> usize) {
        let requests = match *self.state() {
            ActivityState::InFlight(requests) => requests,
            ActivityState::Idle(_) | ActivityState::Flushing => 1,
            ActivityState::Closed => usize::MAX,
        };
        let mut waits = self.waits();
        waits.count = next(waits.count);
        if waits.count < requests {
            if let Some(number) = waits.listed.take() {
                self.idle.remove_waiting(number);
            }
        } else if waits.listed.is_none() {
            waits.listed = Some(self.idle.add_waiting(&self.evicted));
        }
    }

    /// Returns when the connection is to be closed.
    pub(super) async fn evicted(&self) {
        self.evicted.cancelled().await;
    }

    pub(super) fn begin(self: &Arc<Self>) -> InFlightRequest {
        let mut state = self.state();
        *state = match *state {
            ActivityState::Idle(number) => {
                self.idle.remove(number);
                ActivityState::InFlight(1)
            }
            ActivityState::InFlight(requests) => ActivityState::InFlight(requests + 1),
            ActivityState::Flushing => ActivityState::InFlight(1),
            ActivityState::Closed => ActivityState::Closed,
        };
        drop(state);
        self.count_waits(|count| count);
        InFlightRequest(Arc::clone(self))
    }

    /// All bytes that were to be written are written.
    fn flushed(&self) {
        let mut state = self.state();
        if *state == ActivityState::Flushing {
            *state = ActivityState::Idle(self.idle.add(&self.evicted));
        }
    }

    fn waits(&self) -> MutexGuard<'_, ClientWaits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, ActivityState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ConnectionActivity {
    fn drop(&mut self) {
        if let ActivityState::Idle(number) = *self.state() {
            self.idle.remove(number);
        }
    }
}

impl Drop for ClientWait {
    fn drop(&mut self) {
        self.0.count_waits(|count| count.saturating_sub(1));
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        let mut state = self.0.state();
        *state = match *state {
            ActivityState::InFlight(requests) if requests > 1 => {
                ActivityState::InFlight(requests - 1)
            }
            ActivityState::InFlight(_) | ActivityState::Idle(_) | ActivityState::Flushing => {
                ActivityState::Flushing
            }
            ActivityState::Closed => ActivityState::Closed,
        };
        drop(state);
        self.0.count_waits(|count| count);
    }
}

/// An answer's body, which keeps its request in flight.
pub(super) struct InFlightBody {
    body: Body,
    _request: InFlightRequest,
    protocol: Protocol,
    /// The last byte of the part before.
    last: Option<Bytes>,
}

impl InFlightBody {
    pub(super) const fn new(body: Body, request: InFlightRequest, protocol: Protocol) -> Self {
        Self {
            body,
            _request: request,
            protocol,
            last: None,
        }
    }

    /// A stream of HTTP/2 ends when its last part is handed over, however little room the client has
    /// for it. The last byte of a part is one of its own, which is handed over when the client has
    /// taken the others.
    fn cut(&mut self, frame: &mut Frame<Bytes>) {
        if let (Protocol::Http2, Some(data)) = (self.protocol, frame.data_mut())
            && data.len() > UNTAKEN_BYTES_MAX
        {
            self.last = Some(data.split_off(data.len() - 1));
        }
    }
}

impl HttpBody for InFlightBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Some(last) = self.last.take() {
            untaken::handed_over();
            return Poll::Ready(Some(Ok(Frame::data(last))));
        }
        let mut polled = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &mut polled {
            self.cut(frame);
        }
        if polled.is_ready() {
            untaken::handed_over();
        } else {
            untaken::asked();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.last.is_none() && self.body.is_end_stream()
    }

    /// Asked before the first part only.
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A request's body, which reports while its next piece does not come.
pub(super) struct ArrivingBody {
    body: Incoming,
    activity: Arc<ConnectionActivity>,
    wait: Option<ClientWait>,
}

impl ArrivingBody {
    pub(super) const fn new(body: Incoming, activity: Arc<ConnectionActivity>) -> Self {
        Self {
            body,
            activity,
            wait: None,
        }
    }
}

impl HttpBody for ArrivingBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if polled.is_ready() {
            self.wait = None;
        } else if self.wait.is_none() {
            self.wait = Some(self.activity.waits_for_client());
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A socket that reports when its writes are complete.
pub(super) struct ObservedStream {
    /// Bytes that were read already.
    pub begun: Bytes,
    pub stream: ClientStream,
    pub activity: Arc<ConnectionActivity>,
    pub write_timeout: Option<Duration>,
    /// Present while a write waits for the client.
    pub write_deadline: Option<(Pin<Box<Sleep>>, ClientWait)>,
}

impl ObservedStream {
    /// The outcome of a write: an error if it has waited too long.
    fn timed<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.write_deadline = None;
            return written;
        }
        let Some(timeout) = self.write_timeout else {
            return Poll::Pending;
        };
        let activity = &self.activity;
        let begins = || (Box::pin(sleep(timeout)), activity.waits_for_client());
        let (deadline, _) = self.write_deadline.get_or_insert_with(begins);
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the client does not read");
        deadline.as_mut().poll(context).map(|()| Err(late()))
    }
}

impl AsyncRead for ObservedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.begun.is_empty() {
            let length = self.begun.len().min(buffer.remaining());
            buffer.put_slice(&self.begun.split_to(length));
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for ObservedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.timed(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let bytes: usize = slices.iter().map(|slice| slice.len()).sum();
        let stream = Pin::new(&mut self.stream);
        let written = if slices.len() > 1 && bytes <= JOINED_BYTES_MAX {
            let mut joined = [0; JOINED_BYTES_MAX];
            let mut end = 0;
            for slice in slices {
                joined[end..end + slice.len()].copy_from_slice(slice);
                end += slice.len();
            }
            stream.poll_write(context, &joined[..end])
        } else {
            stream.poll_write_vectored(context, slices)
        };
        self.timed(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// The HTTP server flushes only when its own buffer is empty.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // TLS keeps bytes that the socket does not take.
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        let flushed = self.timed(context, flushed);
        if flushed.is_ready() {
            self.activity.flushed();
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut_down = Pin::new(&mut self.stream).poll_shutdown(context);
        self.timed(context, shut_down)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A body that is discarded keeps the activity of its connection for a while.
    #[test]
    fn a_closed_connection_is_not_evicted() {
        let idle = Arc::new(IdleConnections::default());
        let closed = ConnectionActivity::new(Arc::clone(&idle));
        let (discarded, wait) = (Arc::clone(&closed), closed.waits_for_client());
        closed.close();
        assert!(!idle.evict(), "its place is another one's");
        drop((closed, wait));
        assert!(!idle.evict());
        drop(discarded.begin());
        discarded.flushed();
        assert!(!idle.evict());
        let open = ConnectionActivity::new(Arc::clone(&idle));
        assert!(idle.evict());
        drop(open);
    }
}
