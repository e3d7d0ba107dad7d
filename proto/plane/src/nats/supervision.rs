//! Signs of a missing subscription besides the server's error text, which the client may drop. The
//! tests' simulated client runs this code, too.

use std::time::Duration;

use futures_util::{Stream, StreamExt};
use tokio::time::timeout;

use crate::PlaneError;

/// Period without an answer after which the inbox is probed by a request.
pub const INBOX_PROBE: Duration = Duration::from_secs(2);

/// Probes without an answer in a row that show a dead inbox.
const UNANSWERED_MAX: u32 = 2;

/// Silence after which a subscription is made again. A server that removed it sends an error, which
/// the client may drop; it then sends one again.
const SILENCE_MAX: Duration = Duration::from_secs(15);

/// Detects an inbox that receives nothing.
#[derive(Debug, Default)]
pub struct InboxProbe {
    /// Messages in the inbox up to the last probe.
    received: u64,
    unanswered: u32,
}

impl InboxProbe {
    /// Whether the inbox received nothing since the last probe: a request must show that it works.
    #[must_use]
    pub const fn is_due(&self, received: u64) -> bool {
        received == self.received
    }

    /// Ends a probe. Returns whether requests are unanswered, if the probe shows either.
    pub fn end(&mut self, received: u64, is_up: bool) -> Option<bool> {
        if received != self.received {
            self.received = received;
            self.unanswered = 0;
            return Some(false);
        }
        if !is_up || self.unanswered == UNANSWERED_MAX {
            return None;
        }
        self.unanswered += 1;
        Some(self.unanswered == UNANSWERED_MAX)
    }

    /// Ends a probe whose request the server refuses: its silence shows nothing.
    pub(super) const fn end_refused(&mut self, received: u64) {
        self.received = received;
        self.unanswered = 0;
    }
}

/// The next message of a subscription. `again` makes the subscription again after each silence;
/// `Ok(None)`: not while the connection is down. `None` at the end of the connection.
pub async fn next_supervised<S, F>(
    subscription: &mut S,
    mut again: impl FnMut() -> F,
) -> Option<S::Item>
where
    S: Stream + Unpin,
    F: Future<Output = Result<Option<S>, PlaneError>>,
{
    loop {
        if let Ok(message) = timeout(SILENCE_MAX, subscription.next()).await {
            return message;
        }
        if let Some(made) = again().await.ok()? {
            *subscription = made;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_probes_without_an_answer_show_a_dead_inbox() {
        let mut probe = InboxProbe::default();
        assert!(probe.is_due(0));
        assert_eq!(probe.end(0, true), Some(false));
        assert_eq!(probe.end(0, false), None, "the connection is down");
        assert_eq!(probe.end(0, true), Some(true));
        assert_eq!(probe.end(0, true), None, "reported before");
        assert_eq!(probe.end(3, true), Some(false));
        assert!(!probe.is_due(4));
        assert_eq!(probe.end(4, true), Some(false));
        assert_eq!(probe.end(4, true), Some(false));
        probe.end_refused(4);
        assert_eq!(probe.end(4, true), Some(false), "counted anew");
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_subscription_is_made_again() {
        let mut silent = futures_util::stream::pending().boxed();
        let mut made = 0;
        let next = next_supervised(&mut silent, || {
            made += 1;
            let again = (made > 1).then(|| futures_util::stream::iter([7]).boxed());
            async { Ok(again) }
        });
        assert_eq!(next.await, Some(7));
        assert_eq!(made, 2, "the first time it was down");
    }
}
