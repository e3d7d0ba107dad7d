//! Why a request to an engine failed, by the causes in its error.

use std::error::Error;
use std::io::{self, ErrorKind};

use hyper_util::client::legacy;
use warmroute_process::open_files;

/// An error of an HTTP client.
pub(crate) trait ClientError: Error {
    /// No connection was opened.
    fn is_connect(&self) -> bool;
}

impl ClientError for reqwest::Error {
    fn is_connect(&self) -> bool {
        Self::is_connect(self)
    }
}

impl ClientError for legacy::Error {
    fn is_connect(&self) -> bool {
        Self::is_connect(self)
    }
}

/// No process listens there; a Unix socket may be absent. One such failure is proof; other failures
/// to connect are not.
pub(crate) fn is_refused(error: &impl ClientError) -> bool {
    let is_refused = |cause| {
        let kind = io_kind(cause);
        matches!(
            kind,
            Some(ErrorKind::ConnectionRefused | ErrorKind::NotFound)
        )
    };
    error.is_connect() && causes(error).any(is_refused)
}

/// No connection was tried: no further file may be open here.
pub(crate) fn lacks_files(error: &impl ClientError) -> bool {
    error.is_connect() && error.source().is_some_and(open_files::are_cause_of)
}

/// The connection closed before the answer's head was complete.
pub(crate) fn is_closed(error: &impl ClientError) -> bool {
    let is_close = |cause: &(dyn Error + 'static)| {
        let hyper = cause.downcast_ref::<hyper::Error>();
        hyper.is_some_and(hyper::Error::is_incomplete_message)
            || matches!(
                io_kind(cause),
                Some(
                    ErrorKind::ConnectionReset
                        | ErrorKind::BrokenPipe
                        // TLS that ends without a word.
                        | ErrorKind::UnexpectedEof
                )
            )
    };
    !error.is_connect() && causes(error).any(is_close)
}

/// An error with what led to it.
pub(crate) fn with_causes(error: &impl ClientError) -> String {
    let mut text = error.to_string();
    for cause in causes(error) {
        text.push_str(": ");
        text.push_str(&cause.to_string());
    }
    text
}

fn io_kind(cause: &(dyn Error + 'static)) -> Option<ErrorKind> {
    cause.downcast_ref::<io::Error>().map(io::Error::kind)
}

fn causes(error: &impl ClientError) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(error.source(), |&cause| cause.source())
}
