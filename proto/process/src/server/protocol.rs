//! Which protocol a client speaks, by its first bytes, and its connection of that protocol.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{Request, Response};
use bytes::Bytes;
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::{http1, http2};
use hyper::service::HttpService;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio_util::task::TaskTracker;

use super::idle::{ConnectionActivity, InFlightBody, ObservedStream};
use super::untaken::until_untaken;
use super::{HEAD_BYTES_MAX, HEAD_TIMEOUT, HEADERS_MAX, HalfClosed, Http2Windows};

/// The first bytes of a client that speaks HTTP/2 without TLS and without an upgrade: RFC 9113,
/// section 3.4.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Requests in flight on one HTTP/2 connection. More wait at the client.
const STREAMS_MAX: u32 = 128;

/// Bytes of answers kept for an HTTP/2 stream whose client does not read.
const SEND_BYTES_MAX: usize = 64 << 10;

/// Time between two pings of an HTTP/2 client, and for its answer: a connection whose client is
/// gone without a word ends.
const PING_INTERVAL: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

/// Reads until the protocol is certain. Returns it with the bytes that were read.
pub(super) async fn detect(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<(Protocol, Bytes)> {
    let mut first = [0; PREFACE.len()];
    let mut length = 0;
    loop {
        let read = stream.read(&mut first[length..]).await?;
        length += read;
        let bytes = &first[..length];
        if read == 0 || !PREFACE.starts_with(bytes) {
            return Ok((Protocol::Http1, Bytes::copy_from_slice(bytes)));
        }
        if length == PREFACE.len() {
            return Ok((Protocol::Http2, Bytes::copy_from_slice(bytes)));
        }
    }
}

/// A connection of HTTP/1.1.
pub(super) fn http1<S>(
    stream: ObservedStream,
    half_closed: HalfClosed,
    service: S,
) -> http1::Connection<TokioIo<ObservedStream>, S>
where
    S: HttpService<Incoming, ResBody = InFlightBody, Error = Infallible>,
{
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .half_close(half_closed == HalfClosed::Serve)
        .serve_connection(TokioIo::new(stream), service)
}

/// A connection of HTTP/2, whose streams are tasks of `streams`.
pub(super) fn http2<S, F>(
    stream: ObservedStream,
    streams: StreamExecutor,
    windows: Http2Windows,
    service: S,
) -> http2::Connection<TokioIo<ObservedStream>, S, StreamExecutor>
where
    S: hyper::service::Service<
            Request<Incoming>,
            Response = Response<InFlightBody>,
            Error = Infallible,
            Future = F,
        >,
    F: Future<Output = Result<Response<InFlightBody>, Infallible>> + Send + 'static,
{
    http2::Builder::new(streams)
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(HEAD_BYTES_MAX).unwrap_or(u32::MAX))
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(windows.stream)
        .initial_connection_window_size(windows.connection)
        .max_send_buf_size(SEND_BYTES_MAX)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_INTERVAL)
        .serve_connection(TokioIo::new(stream), service)
}

/// Runs the streams of a connection where the shutdown waits for them.
#[derive(Clone)]
pub(super) struct StreamExecutor {
    pub tasks: TaskTracker,
    pub write_timeout: Option<Duration>,
    pub activity: Arc<ConnectionActivity>,
}

impl<F> Executor<F> for StreamExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, stream: F) {
        match self.write_timeout {
            Some(time_max) => {
                let activity = Arc::clone(&self.activity);
                self.tasks.spawn(until_untaken(stream, time_max, activity))
            }
            None => self.tasks.spawn(stream),
        };
    }
}
