//! `/workers/{id}` and `POST /workers` of the admin port: an embedded router's workers come and go.

use std::sync::Arc;

use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Value, json};
use warmroute_process::access::ChangeSubject;
use warmroute_process::tls::socket_of;
use warmroute_proto::WorkerId;

use super::{Admin, setup_faults};
use crate::config::WorkerSpec;
use crate::embedded::supervisor::{AddError, EmbeddedWorkers, LifePhase};
use crate::embedded::worker_plan::{PlanChange, PlanError};

/// Why a worker is not added, shown or removed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkersApiError {
    #[error(
        "this router has its workers from NATS: to add one, start a warmroute-shim with its \
         --worker-id; to remove one, drain it (POST /admin/workers/ID/drain) and end its shim"
    )]
    Registered,
    #[error("{0}")]
    Body(#[from] JsonRejection),
    #[error("key_file is for files and flags, which name files of this host: send the key as key")]
    KeyFile,
    #[error("a socket is for files and flags, which name files of this host")]
    Socket,
    #[error(transparent)]
    Add(#[from] AddError),
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl IntoResponse for WorkersApiError {
    fn into_response(self) -> Response {
        let status = match &self {
            Self::Body(rejection) => rejection.status(),
            Self::KeyFile | Self::Socket => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Plan(PlanError::NoWorker) => StatusCode::NOT_FOUND,
            Self::Add(AddError::Start(_)) => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Add(AddError::Ending) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Registered | Self::Add(AddError::Plan(_)) | Self::Plan(_) => StatusCode::CONFLICT,
        };
        (status, Json(json!({ "error": self.to_string() }))).into_response()
    }
}

/// 201: the worker's life begins; 200: an equal declaration stands.
pub(crate) async fn add(
    State(admin): State<Arc<Admin>>,
    Extension(subject): Extension<ChangeSubject>,
    spec: Result<Json<WorkerSpec>, JsonRejection>,
) -> Result<Response, WorkersApiError> {
    let workers = embedded(&admin)?;
    let Json(spec) = spec?;
    // An operator's key reads no files of the router, nor sends them to a URL.
    if spec.key_file.is_some() {
        return Err(WorkersApiError::KeyFile);
    }
    if socket_of(&spec.url).is_some() {
        return Err(WorkersApiError::Socket);
    }
    let worker = spec.id.clone();
    subject.set(format!("{worker} {}", spec.url));
    let status = match workers.add(spec).await? {
        PlanChange::Added => StatusCode::CREATED,
        PlanChange::None => StatusCode::OK,
    };
    let shown = shown(&admin, workers, worker).await?;
    Ok((status, shown).into_response())
}

pub(crate) async fn show(
    State(admin): State<Arc<Admin>>,
    Path(worker): Path<String>,
) -> Result<Json<Value>, WorkersApiError> {
    let workers = embedded(&admin)?;
    shown(&admin, workers, WorkerId::from(worker)).await
}

/// Answers when the worker has left: its requests are done or the drain time is over, and its shim
/// has ended. `requests`: those that are still open at the engine.
pub(crate) async fn remove(
    State(admin): State<Arc<Admin>>,
    Path(worker): Path<String>,
) -> Result<Json<Value>, WorkersApiError> {
    let worker = WorkerId::from(worker);
    match embedded(&admin)?.remove(worker.clone()).await {
        Some(removed) => removed?,
        None => return Err(AddError::Ending.into()),
    }
    let requests = admin.app.core.core().active_requests(&worker);
    Ok(Json(
        json!({ "worker": worker, "phase": "removed", "requests": requests }),
    ))
}

fn embedded(admin: &Admin) -> Result<&EmbeddedWorkers, WorkersApiError> {
    admin.workers.as_ref().ok_or(WorkersApiError::Registered)
}

async fn shown(
    admin: &Admin,
    workers: &EmbeddedWorkers,
    worker: WorkerId,
) -> Result<Json<Value>, WorkersApiError> {
    let shown = workers.show(worker.clone()).await;
    let shown = shown.ok_or(PlanError::NoWorker)?;
    let requests = admin.app.core.core().active_requests(&worker);
    let mut waiting = setup_faults::waiting(admin).into_iter();
    let waiting = match shown.phase {
        LifePhase::Running => waiting.find(|one| one.worker == worker),
        LifePhase::Waiting | LifePhase::Leaving => None,
    };
    let phase = waiting
        .as_ref()
        .map_or_else(|| shown.phase.label(), |one| one.state);
    Ok(Json(json!({
        "worker": worker,
        "url": shown.url,
        "declared_by": shown.origin,
        "phase": phase,
        "reason": waiting.as_ref().map(|one| &one.reason),
        "since_unix_s": waiting.as_ref().map(|one| one.since_unix_s),
        "requests": requests,
    })))
}
