//! One attempt: a request on its way to one engine, until that begins to answer.
//!
//! While the request may still be moved (see [`crate::route::moves`]) the answer's head is kept back
//! until the first byte of its body is there or the time for moving is over, a few milliseconds at
//! most: engines send heads long before their first token, and a client that got a head cannot be served
//! by another engine.

use std::time::Duration;

use axum::http::StatusCode;
use bytes::Bytes;

use super::App;
use super::forward::{Outgoing, Wish, request};
use crate::error::ApiError;
use crate::metrics::CancelPhase;
use crate::route::{Admitted, Decision, RouteRequest};
use crate::shared_core::{MoveSignal, MoveWatch, SlotHold};

/// Where a request is.
pub(super) struct Placed {
    pub decision: Decision,
    pub slot: SlotHold,
    /// It may still be moved.
    pub watch: Option<MoveWatch>,
    /// Where it was first, if it was moved.
    pub left: Option<Box<Decision>>,
}

/// An engine's head, and what came of its body so far.
pub(super) struct Begun {
    pub response: reqwest::Response,
    pub early: Option<Bytes>,
}

/// What an attempt waits for.
enum Waited {
    Begun(Result<Begun, reqwest::Error>),
    Crossed,
}

impl App {
    /// Sends the request where it is placed, or where it is moved to meanwhile.
    pub(super) async fn attempt(
        &self,
        outgoing: &Outgoing,
        wish: &Wish,
        placed: &mut Placed,
    ) -> Result<Result<Begun, reqwest::Error>, ApiError> {
        loop {
            let predicted = (!wish.streaming).then_some(placed.decision.predicted_ttft);
            let sent = self.client.execute(request(outgoing, &placed.decision)?);
            let waiting = Waiting::new(self);
            let begun = begin(sent, predicted, placed, |placed| self.moves(wish, placed)).await;
            waiting.over();
            match begun {
                Waited::Begun(result) => return Ok(result),
                // The connection is closed by now, which tells the engine that it may stop.
                Waited::Crossed => {}
            }
        }
    }

    /// Decides again; says whether the request has another place.
    fn moves(&self, wish: &Wish, placed: &mut Placed) -> bool {
        let ask = RouteRequest {
            model: &wish.model,
            prompt: &wish.prompt,
            exclude: &[],
        };
        let slot = placed.slot.counter();
        let Some(moved) = self.desk.reconsider(slot, &ask, wish.index.as_ref()) else {
            return false;
        };
        let Admitted { decision, slot, .. } = moved;
        placed.slot.take_over(slot);
        tracing::debug!(from = %placed.decision.source, to = %decision.source, "request moved");
        placed.left = Some(Box::new(std::mem::replace(&mut placed.decision, decision)));
        placed.watch = None;
        true
    }
}

/// Waits for the answer's beginning, and takes the prefill as ended when it should be, where nothing
/// will show it (`predicted`). `moves`: called when the choice was crossed.
async fn begin(
    sent: impl Future<Output = Result<reqwest::Response, reqwest::Error>>,
    predicted: Option<Duration>,
    placed: &mut Placed,
    mut moves: impl FnMut(&mut Placed) -> bool,
) -> Waited {
    tokio::pin!(sent);
    let due = async {
        match predicted {
            Some(after) => tokio::time::sleep(after).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(due);
    let mut head: Option<reqwest::Response> = None;
    let mut is_due = false;
    loop {
        let watch = placed.watch.as_ref();
        tokio::select! {
            // Nothing moves of which a byte is there.
            biased;
            result = &mut sent, if head.is_none() => match result {
                Ok(response) if watch.is_some() && may_take_long(&response) => head = Some(response),
                Ok(response) => return Waited::Begun(Ok(Begun { response, early: None })),
                Err(error) => return Waited::Begun(Err(error)),
            },
            early = first_bytes(head.as_mut()) => {
                let Some(response) = head.take() else { continue };
                return Waited::Begun(early.map(|early| Begun { response, early }));
            }
            crossed = hears(watch) => {
                if crossed && moves(placed) {
                    return Waited::Crossed;
                }
                if !crossed {
                    placed.watch = None;
                    if let Some(response) = head.take() {
                        return Waited::Begun(Ok(Begun { response, early: None }));
                    }
                }
            }
            () = &mut due, if !is_due => {
                is_due = true;
                // From here on it is taken to be past its prefill.
                placed.watch = None;
                placed.slot.prefill_predicted();
                if let Some(response) = head.take() {
                    return Waited::Begun(Ok(Begun { response, early: None }));
                }
            }
        }
    }
}

/// A stream's head tells nothing yet; every other answer is whole, or as good as.
fn may_take_long(response: &reqwest::Response) -> bool {
    response.status() == StatusCode::OK && response.content_length().is_none()
}

/// Cancel-safe: what came of a body stays with it. Never, without a head.
async fn first_bytes(
    head: Option<&mut reqwest::Response>,
) -> Result<Option<Bytes>, reqwest::Error> {
    match head {
        Some(response) => response.chunk().await,
        None => std::future::pending().await,
    }
}

/// Never, without a watch.
async fn hears(watch: Option<&MoveWatch>) -> bool {
    match watch {
        Some(watch) => watch.signal().await == MoveSignal::Crossed,
        None => std::future::pending().await,
    }
}

/// Dropped while the engine is still asked, the client is gone.
struct Waiting<'a> {
    app: &'a App,
    over: bool,
}

impl<'a> Waiting<'a> {
    const fn new(app: &'a App) -> Self {
        Self { app, over: false }
    }

    fn over(mut self) {
        self.over = true;
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.over {
            self.app.metrics.cancelled(CancelPhase::BeforeHead);
        }
    }
}
