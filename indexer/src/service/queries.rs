//! Answers queries and view requests of the plane, several concurrently: a long one does not delay
//! the others.
//!
//! As many are worked at as there are processors, and a few more; the others wait in the plane's
//! queue, which is bounded and drops (and counts) what is beyond. A query or answer that does not
//! fit into a message is refused by the plane on the asker's side.

use tokio::sync::Semaphore;
use warmroute_proto::codec::Message;
use warmroute_proto::view::ReplicaFaultsRequest;

use super::*;

/// Beside one for each processor.
const MORE_AT_ONCE: usize = 2;

/// The places of one replica, whichever of its subjects a query comes to.
pub(super) fn places() -> Arc<Semaphore> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Arc::new(Semaphore::new(processors + MORE_AT_ONCE))
}

impl ServiceContext {
    pub(super) async fn serve(
        self,
        subject: String,
        places: Arc<Semaphore>,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) {
        let serve = async {
            loop {
                match self.plane.serve(subject.clone()).await {
                    Ok(mut requests) => {
                        while let Some(request) = requests.next().await {
                            // It is never closed.
                            let Ok(place) = Arc::clone(&places).acquire_owned().await else {
                                return;
                            };
                            let context = self.clone();
                            tasks.spawn(async move {
                                context.answer(request);
                                drop(place);
                            });
                        }
                    }
                    Err(error) => debug!(%error, "queries cannot be served"),
                }
                sleep(RETRY).await;
            }
        };
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = serve => {}
        }
    }

    /// A query that cannot be read is counted and not answered: there is no honest answer to it.
    /// The plane reports to its sender that it was dropped.
    fn answer(&self, request: ServiceRequest) {
        let handle = Handle {
            shared: Arc::clone(&self.shared),
        };
        let payload = &request.payload;
        let answer = match codec::kind(payload) {
            Some(ViewPageRequest::KIND) => answered(payload, |ask| handle.view(&ask)),
            Some(ReplicaFaultsRequest::KIND) => {
                answered(payload, |_: ReplicaFaultsRequest| handle.faults())
            }
            Some(HoldQuery::KIND) => answered(payload, |query| handle.hold(&query)),
            Some(RosterPageRequest::KIND) => answered(payload, |ask| handle.roster(&ask)),
            Some(HolderQuery::KIND) => answered(payload, |query| handle.holders(&query)),
            Some(_) | None => answered(payload, |query| handle.query(&query)),
        };
        let failed = |outcome| self.shared.metrics.queries.inc(outcome);
        match answer {
            Ok(answer) => {
                let (bytes, max) = (answer.len(), self.plane.payload_max());
                if bytes > max {
                    warn!(
                        bytes,
                        max, "an answer is larger than a message of the plane may be"
                    );
                    failed(QueryOutcome::TooLarge);
                    self.shared.answers_too_large.add(now());
                }
                // The plane reports an answer that is too large to its requester.
                request.reply.send(answer.into());
            }
            Err(NoAnswer::Encode(error)) => {
                warn!(%error, "an answer cannot be encoded");
                failed(QueryOutcome::Failed);
            }
            Err(NoAnswer::Decode(error)) => {
                debug!(%error, "query ignored");
                failed(QueryOutcome::Malformed);
            }
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum NoAnswer {
    #[error(transparent)]
    Decode(#[from] codec::DecodeError),
    #[error(transparent)]
    Encode(#[from] codec::EncodeError),
}

/// The encoded answer to an encoded request.
fn answered<Q: Message, A: Message>(
    payload: &[u8],
    answer: impl FnOnce(Q) -> A,
) -> Result<Vec<u8>, NoAnswer> {
    let request = codec::decode(payload)?;
    Ok(codec::encode(&answer(request))?)
}
