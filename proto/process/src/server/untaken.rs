//! Streams of HTTP/2 whose clients take nothing of their answers.
//!
//! The write timeout of the socket does not see them: a client can read its connection and give a
//! stream no room. Such a stream would never end, and its connection would never be idle.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Sleep, sleep};

use super::idle::{ClientWait, ConnectionActivity};

tokio::task_local! {
    /// The state of the stream that the task serves.
    static ANSWER: Cell<AnswerState>;
}

/// How far an answer is handed to the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct AnswerState {
    /// The head and parts of the body.
    parts: u64,
    /// The next part is not there yet.
    waits_for_part: bool,
}

/// A part is handed to the connection, which asks for the next one when the client has room.
pub(super) fn handed_over() {
    set(|before| AnswerState {
        parts: before.parts + 1,
        waits_for_part: false,
    });
}

/// The connection asks for a part that is not there yet.
pub(super) fn asked() {
    set(|before| AnswerState {
        waits_for_part: true,
        ..before
    });
}

/// Other tasks serve connections of HTTP/1.1, which the write timeout ends.
fn set(next: impl FnOnce(AnswerState) -> AnswerState) {
    ANSWER
        .try_with(|state| state.set(next(state.get())))
        .unwrap_or_default();
}

/// Serves a stream to its end, or until its client has had no room for a part for so long. A stream
/// that is dropped is reset.
pub(super) async fn until_untaken(
    stream: impl Future<Output = ()>,
    time_max: Duration,
    connection: Arc<ConnectionActivity>,
) {
    let waiting = AnswerState {
        parts: 0,
        waits_for_part: true,
    };
    let watched = async {
        let (mut stream, mut parts) = (pin!(stream), 0);
        let mut deadline: Option<(Pin<Box<Sleep>>, ClientWait)> = None;
        poll_fn(|context| {
            if stream.as_mut().poll(context).is_ready() {
                return Poll::Ready(());
            }
            let state = ANSWER.with(Cell::get);
            if state.waits_for_part || state.parts != parts {
                (parts, deadline) = (state.parts, None);
            }
            if state.waits_for_part {
                return Poll::Pending;
            }
            let begins = || (Box::pin(sleep(time_max)), connection.waits_for_client());
            let (deadline, _) = deadline.get_or_insert_with(begins);
            deadline.as_mut().poll(context)
        })
        .await;
    };
    ANSWER.scope(Cell::new(waiting), watched).await;
}
