//! Answers queries and view requests of the plane, several concurrently: a long one does not delay
//! the others.
//!
//! As many are worked at as there are processors, and a few more; the others wait in the plane's
//! queue, which is bounded and drops (and counts) what is beyond. A query or answer that does not
//! fit into a message is refused by the plane on the asker's side.

use tokio::sync::Semaphore;
use warmroute_proto::codec::Message as _;

use super::*;

/// Beside one for each processor.
const MORE_AT_ONCE: usize = 2;

/// The places of one replica, whichever of its subjects a query comes to.
pub(super) fn places() -> Arc<Semaphore> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Arc::new(Semaphore::new(processors + MORE_AT_ONCE))
}

impl Worker {
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
                            let worker = self.clone();
                            tasks.spawn(async move {
                                worker.answer(request);
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
            Some(ViewPageRequest::KIND) => codec::decode::<ViewPageRequest>(payload)
                .map(|ask| codec::encode(&handle.view(&ask))),
            Some(HoldQuery::KIND) => {
                codec::decode::<HoldQuery>(payload).map(|query| codec::encode(&handle.hold(&query)))
            }
            Some(_) | None => codec::decode::<IndexQuery>(payload)
                .map(|query| codec::encode(&handle.query(&query))),
        };
        match answer {
            Ok(Ok(answer)) => request.reply.send(answer.into()),
            Ok(Err(error)) => {
                warn!(%error, "an answer cannot be encoded");
                self.shared.metrics.query(QueryOutcome::Failed);
            }
            Err(error) => {
                debug!(%error, "query ignored");
                self.shared.metrics.query(QueryOutcome::Malformed);
            }
        }
    }
}
