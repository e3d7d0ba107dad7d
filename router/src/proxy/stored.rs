//! Answers that engines store: `/v1/responses/{id}` and its cancel go to the worker that has them.
//!
//! The router learns the worker of an id from the beginning of each answer to `/v1/responses`. It
//! asks for an id that it does not know (from before a restart, or of another router) with a `GET` at
//! up to [`WORKERS_ASKED_MAX`] workers, and keeps the one that has it. An id that no worker has costs
//! a request at each of them: [`SEARCHES_MAX`] bounds how many ids are asked for at a time.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use warmroute_process::access::keys::KeyId;
use warmroute_proto::WorkerId;

use super::App;
use super::call::Call;
use super::headers;
use super::passthrough::{self, Target};
use super::respond::respond_stored;
use crate::error::ProxyError;
use crate::metrics::RouteLabel;
use crate::tenants::TenantRefusal;

/// Ids that are kept, about 100 bytes each; the oldest go first.
const IDS_MAX: usize = 16_384;

/// Longest id that is kept, in bytes. Engines make ids of about 40.
const ID_BYTES_MAX: usize = 128;

/// Bytes of an answer that are searched for its id, which is its first field.
const SEARCHED_BYTES: usize = 512;

/// Workers that are asked for an unknown id.
const WORKERS_ASKED_MAX: usize = 64;

/// Workers that are asked at a time.
const ASKED_TOGETHER: usize = 16;

/// Longest wait for a worker's answer.
const ASKED_FOR_MAX: Duration = Duration::from_secs(5);

/// Longest search for one id.
const SEARCH_MAX: Duration = Duration::from_secs(10);

/// Ids that are asked for at a time. Further requests wait for their turn, up to [`ASKED_FOR_MAX`].
const SEARCHES_MAX: usize = 16;

/// Those of one tenant. While a worker hangs, one tenant with unknown ids leaves turns for others;
/// four such tenants do not.
const SEARCHES_OF_TENANT_MAX: usize = 4;

/// The worker and the tenant of each answer.
#[derive(Clone, Debug)]
pub(crate) struct StoredResponses {
    table: Arc<Mutex<OwnerTable>>,
    searches: Arc<Semaphore>,
    /// One for each tenant with a search that runs or waits.
    tenant_searches: Arc<Mutex<HashMap<KeyId, Arc<Semaphore>>>>,
}

/// The turn of one search.
struct SearchTurn {
    _all: OwnedSemaphorePermit,
    _of_tenant: Option<OwnedSemaphorePermit>,
}

impl Default for StoredResponses {
    fn default() -> Self {
        Self {
            table: Arc::default(),
            searches: Arc::new(Semaphore::new(SEARCHES_MAX)),
            tenant_searches: Arc::default(),
        }
    }
}

#[derive(Debug, Default)]
struct OwnerTable {
    owners: HashMap<Arc<str>, AnswerOwner>,
    oldest: VecDeque<Arc<str>>,
}

/// Where an answer is, and whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AnswerOwner {
    pub worker: WorkerId,
    /// `None`: of a time without tenants.
    pub tenant: Option<KeyId>,
}

impl StoredResponses {
    /// The worker that has an answer. Fails if it is another tenant's; an id that is not known is
    /// as secret as the client that got it keeps it.
    pub(super) fn worker_for(
        &self,
        id: &str,
        tenant: Option<&KeyId>,
    ) -> Result<Option<WorkerId>, ProxyError> {
        match self.table().owners.get(id) {
            None => Ok(None),
            Some(owner) if owner.tenant.as_ref() == tenant => Ok(Some(owner.worker.clone())),
            Some(_) => Err(TenantRefusal::ForeignAnswer.into()),
        }
    }

    /// Waits for a turn to search.
    async fn turn(&self, tenant: Option<&KeyId>) -> Result<SearchTurn, ProxyError> {
        let of_tenant = tenant.map(|tenant| self.of_tenant(tenant));
        let turn = async {
            // A request that waits for its tenant's others takes no turn of all.
            let of_tenant = match of_tenant {
                Some(turns) => Some(turns.acquire_owned().await?),
                None => None,
            };
            let all = Arc::clone(&self.searches).acquire_owned().await?;
            Ok::<_, AcquireError>(SearchTurn {
                _all: all,
                _of_tenant: of_tenant,
            })
        };
        match timeout(ASKED_FOR_MAX, turn).await {
            Ok(Ok(turn)) => Ok(turn),
            Ok(Err(_)) | Err(_) => Err(ProxyError::OwnerUnknown),
        }
    }

    fn of_tenant(&self, tenant: &KeyId) -> Arc<Semaphore> {
        let searches = self.tenant_searches.lock();
        let mut searches = searches.unwrap_or_else(PoisonError::into_inner);
        searches.retain(|_, turns| Arc::strong_count(turns) > 1);
        let turns = searches.entry(tenant.clone());
        Arc::clone(turns.or_insert_with(|| Arc::new(Semaphore::new(SEARCHES_OF_TENANT_MAX))))
    }

    /// Takes the beginning of an answer to `/v1/responses`.
    pub(super) fn learn(&self, owner: AnswerOwner, beginning: &[u8]) {
        if let Some(id) = response_id(beginning) {
            self.keep(owner, id);
        }
    }

    fn keep(&self, owner: AnswerOwner, id: &str) {
        let id: Arc<str> = id.into();
        let mut table = self.table();
        // A client can choose the id of its answer.
        let known = table.owners.get(&id);
        if known.is_some_and(|known| known.tenant != owner.tenant) {
            return;
        }
        if table.owners.insert(Arc::clone(&id), owner).is_none() {
            table.oldest.push_back(id);
        }
        if table.oldest.len() > IDS_MAX
            && let Some(oldest) = table.oldest.pop_front()
        {
            table.owners.remove(&oldest);
        }
    }

    fn table(&self) -> MutexGuard<'_, OwnerTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The value of the first `"id"`, of the JSON object or of the stream's first event.
fn response_id(beginning: &[u8]) -> Option<&str> {
    let searched = &beginning[..beginning.len().min(SEARCHED_BYTES)];
    let key = br#""id":"#;
    let at = searched.windows(key.len()).position(|bytes| bytes == key)?;
    let value = searched[at + key.len()..].trim_ascii_start();
    let value = value.strip_prefix(b"\"")?;
    let end = value.iter().position(|byte| *byte == b'"')?;
    let id = std::str::from_utf8(&value[..end]).ok()?;
    is_plain_id(id).then_some(id)
}

fn is_plain_id(id: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(is_plain)
}

impl App {
    /// The worker that has an answer, asked of the workers if this router does not know it. Fails if
    /// it is another tenant's.
    async fn answer_worker(
        &self,
        call: &Call,
        headers: &HeaderMap,
        id: &str,
    ) -> Result<Option<WorkerId>, ProxyError> {
        let known = || self.stored.worker_for(id, call.tenant_name());
        if let Some(worker) = known()? {
            return Ok(Some(worker));
        }
        let _turn = self.stored.turn(call.tenant_name()).await?;
        // Another request may have found it.
        if let Some(worker) = known()? {
            return Ok(Some(worker));
        }
        let search = timeout(SEARCH_MAX, self.ask_for_answer(call, headers, id));
        let found = search.await.unwrap_or(Err(ProxyError::OwnerUnknown))?;
        if let Some(worker) = &found {
            let owner = AnswerOwner {
                worker: worker.clone(),
                tenant: call.tenant_name().cloned(),
            };
            self.stored.keep(owner, id);
        }
        Ok(found)
    }

    /// The worker of the answer that a request goes on with, if it names one.
    pub(super) async fn previous_worker(
        &self,
        call: &Call,
        headers: &HeaderMap,
        previous: Option<String>,
    ) -> Result<Option<WorkerId>, ProxyError> {
        match previous {
            Some(id) => self.answer_worker(call, headers, &id).await,
            None => Ok(None),
        }
    }

    async fn ask_for_answer(
        &self,
        call: &Call,
        headers: &HeaderMap,
        id: &str,
    ) -> Result<Option<WorkerId>, ProxyError> {
        if !is_plain_id(id) {
            return Ok(None);
        }
        let mut headers = call.to_engine(headers.clone());
        headers.remove(header::CONTENT_TYPE);
        headers.remove(headers::ENGINE_RANK);
        let ask = async |(worker, url): (WorkerId, String)| {
            let mut headers = headers.clone();
            self.engines.keys().authorize(&worker, &url, &mut headers);
            let path = format!("/v1/responses/{id}");
            let request = || {
                let (headers, body) = (headers.clone(), Bytes::new());
                let built = self
                    .engines
                    .request(Method::GET, &url, &path, headers, body);
                built.ok()
            };
            let Some(first) = request() else {
                return WorkerReply::Unknown;
            };
            // Searches take no files that requests count on.
            let Some(_permit) = self.engines.permit() else {
                return WorkerReply::Unknown;
            };
            // The head is enough; the connection ends with the rest.
            match timeout(ASKED_FOR_MAX, self.engines.send(first, request)).await {
                Ok(Ok(answer)) if answer.status() == StatusCode::OK => WorkerReply::Has(worker),
                Ok(Ok(answer)) if !answer.status().is_server_error() => WorkerReply::HasNot,
                Ok(Ok(_) | Err(_)) | Err(_) => WorkerReply::Unknown,
            }
        };
        let asked = stream::iter(self.fleet.serving(WORKERS_ASKED_MAX)).map(ask);
        let mut replies = asked.buffer_unordered(ASKED_TOGETHER);
        let mut none = Ok(None);
        while let Some(reply) = replies.next().await {
            match reply {
                WorkerReply::Has(worker) => return Ok(Some(worker)),
                WorkerReply::HasNot => {}
                // It may have the answer: that all others have not is no proof, and is not kept.
                WorkerReply::Unknown => none = Err(ProxyError::OwnerUnknown),
            }
        }
        none
    }
}

/// Whether a worker has an answer.
enum WorkerReply {
    Has(WorkerId),
    HasNot,
    /// It did not answer, or failed.
    Unknown,
}

/// `GET /v1/responses/{id}` and `POST /v1/responses/{id}/cancel`.
pub(super) async fn find(State(app): State<Arc<App>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let mut call = Call::new(RouteLabel::Other, &parts, &app.sinks);
    if !crate::settings::is_plain_path(parts.uri.path()) {
        let path = parts.uri.path().chars().take(128).collect();
        return call.refuse(&ProxyError::UnknownPath(path));
    }
    // Neither request has a body: one that has must not be sent to each worker asked.
    app.bodies.skip(&parts.headers, body);
    let body = Bytes::new();
    let id = parts.uri.path().split('/').nth(3).unwrap_or_default();
    let worker = match app.answer_worker(&call, &parts.headers, id).await {
        Ok(found) => found,
        Err(error) => return call.refuse(&error),
    };
    // An engine's own answer where no worker has it.
    let any = || app.fleet.serving(1).pop().map(|(worker, _)| worker);
    let Some(target) = worker.or_else(any).map(Target::Only) else {
        return call.refuse(&ProxyError::NoWorker);
    };
    match passthrough::forward(&app, &mut call, &parts, &body, target).await {
        Ok(answer) => respond_stored(&app, call, answer),
        Err(error) => app.refuse(call, &error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_of_an_answer_or_of_a_first_event_is_found() {
        for (beginning, id) in [
            (
                &br#"{"id":"resp_1a","object":"response"}"#[..],
                Some("resp_1a"),
            ),
            (br#"{"id": "resp_2"}"#, Some("resp_2")),
            (
                b"event: response.created\ndata: {\"response\":{\"id\":\"resp_3\",",
                Some("resp_3"),
            ),
            (br#"{"id":7}"#, None),
            (br#"{"id":""}"#, None),
            (br#"{"id":"a/../b"}"#, None),
            (br#"{"id":"resp_"#, None),
            (b"", None),
        ] {
            let shown = String::from_utf8_lossy(beginning).into_owned();
            assert_eq!(response_id(beginning), id, "{shown}");
        }
    }

    /// Another tenant's answer may have an id that its client chose.
    #[test]
    fn an_id_stays_with_its_tenant() {
        let stored = StoredResponses::default();
        let [a, b] = ["a", "b"].map(|name| AnswerOwner {
            worker: name.into(),
            tenant: Some(name.parse().unwrap()),
        });
        let beginning = br#"{"id":"resp_1"}"#;
        stored.learn(a.clone(), beginning);
        stored.learn(b.clone(), beginning);
        assert_eq!(
            stored.worker_for("resp_1", a.tenant.as_ref()),
            Ok(Some(a.worker))
        );
        assert!(stored.worker_for("resp_1", b.tenant.as_ref()).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenant_with_unknown_ids_leaves_turns_to_the_others() {
        let stored = StoredResponses::default();
        let [a, b] = ["a", "b"].map(|name| name.parse::<KeyId>().unwrap());
        let mut turns = Vec::new();
        for _ in 0..SEARCHES_OF_TENANT_MAX {
            turns.push(stored.turn(Some(&a)).await.unwrap());
        }
        assert!(stored.turn(Some(&a)).await.is_err());
        turns.push(stored.turn(Some(&b)).await.unwrap());
        while turns.len() < SEARCHES_MAX {
            turns.push(stored.turn(None).await.unwrap());
        }
        assert!(stored.turn(Some(&b)).await.is_err(), "no more in all");
        turns.clear();
        assert!(stored.turn(Some(&a)).await.is_ok());
        stored.of_tenant(&b);
        let kept = stored.tenant_searches.lock().unwrap().len();
        assert_eq!(kept, 1, "tenants without a search are forgotten");
    }

    #[test]
    fn the_oldest_ids_are_forgotten() {
        let stored = StoredResponses::default();
        let owner = AnswerOwner {
            worker: "w".into(),
            tenant: None,
        };
        for number in 0..=IDS_MAX {
            let beginning = format!("{{\"id\":\"resp_{number}\"}}");
            stored.learn(owner.clone(), beginning.as_bytes());
            stored.learn(owner.clone(), beginning.as_bytes());
        }
        let known = |id: &str| stored.table().owners.get(id).cloned();
        assert_eq!(known("resp_0"), None);
        assert_eq!(known("resp_1"), Some(owner));
        assert_eq!(stored.table().owners.len(), IDS_MAX);
        assert_eq!(stored.table().oldest.len(), IDS_MAX);
    }
}
