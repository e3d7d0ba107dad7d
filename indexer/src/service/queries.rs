//! Answers queries and view requests of the plane, several concurrently: a long one does not delay
//! the others.
//!
//! As many are worked at as there are processors, and a few more; a few of the others wait. Routers
//! wait for milliseconds: an answer that is later is work for nothing, and the queries behind it get
//! theirs later still. So of those that wait the oldest is refused first, which the plane reports to
//! its sender. A query or answer that does not fit into a message is refused by the plane on the
//! asker's side.

use std::collections::VecDeque;

use tokio::sync::Semaphore;
use warmroute_plane::PlaneStream;
use warmroute_proto::codec::Message;
use warmroute_proto::view::ReplicaFaultsRequest;

use super::*;

/// Beside one for each processor.
const MORE_AT_ONCE: usize = 2;

/// Queries that wait: a few milliseconds of work.
pub(super) const WAITING_MAX: usize = 128;

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
                    Ok(requests) => self.answer_all(requests, &places, &tasks).await,
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

    /// Until the requests end.
    async fn answer_all(
        &self,
        mut requests: PlaneStream<ServiceRequest>,
        places: &Arc<Semaphore>,
        tasks: &TaskTracker,
    ) {
        let mut waiting = VecDeque::new();
        loop {
            tokio::select! {
                biased;
                // It is never closed.
                Ok(place) = Arc::clone(places).acquire_owned(), if !waiting.is_empty() => {
                    let context = self.clone();
                    let request = waiting.pop_front();
                    tasks.spawn(async move {
                        if let Some(request) = request {
                            context.answer(request);
                        }
                        drop(place);
                    });
                }
                request = requests.next() => match request {
                    Some(request) => waiting.push_back(request),
                    None => return,
                },
            }
            if waiting.len() > WAITING_MAX {
                waiting.pop_front();
                self.shared.metrics.queries.inc(QueryOutcome::Overload);
            }
        }
    }

    /// A query that cannot be read is counted and not answered: there is no honest answer to it.
    /// The plane reports to its sender that it was dropped.
    fn answer(&self, request: ServiceRequest) {
        let handle = Handle {
            shared: Arc::clone(&self.shared),
        };
        let payload = &request.payload;
        let part_bytes = roster::part_bytes_within(self.plane.payload_max());
        let answer = match codec::kind(payload) {
            Some(ViewPageRequest::KIND) => answered(payload, |ask| handle.view(&ask)),
            Some(ReplicaFaultsRequest::KIND) => {
                answered(payload, |_: ReplicaFaultsRequest| handle.faults())
            }
            Some(HoldQuery::KIND) => answered(payload, |query| handle.hold(&query)),
            Some(RosterPageRequest::KIND) => {
                answered(payload, |ask| handle.roster(&ask, part_bytes))
            }
            Some(HolderQuery::KIND) => answered(payload, |query: HolderQuery| {
                let prepared = query::PreparedQuery::of_blocks(&query.blocks);
                handle.holders_of(&prepared.in_parts_of(part_bytes), query.known, query.from)
            }),
            Some(DeepHolderQuery::KIND) => answered(payload, |deep: DeepHolderQuery| {
                let prepared = query::PreparedQuery::below(deep.before, &deep.blocks);
                let no_changes = RosterPageRequest::default();
                handle.holders_of(&prepared.in_parts_of(part_bytes), no_changes, deep.from)
            }),
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
