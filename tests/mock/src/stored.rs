//! Answers of `/v1/responses` that clients can read again, and cancel while they are generated in
//! the background.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde_json::{Value, json};
use tokio::task::AbortHandle;

use crate::error::Error;
use crate::server::Server;

/// The oldest go first.
const ANSWERS_MAX: usize = 4_096;

#[derive(Default)]
pub(crate) struct StoredAnswers(Mutex<AnswerTable>);

#[derive(Default)]
struct AnswerTable {
    answers: BTreeMap<String, StoredAnswer>,
    oldest: VecDeque<String>,
}

struct StoredAnswer {
    answer: Value,
    /// Generates it in the background.
    task: Option<AbortHandle>,
}

impl StoredAnswers {
    /// Stores an answer, or replaces one that was not cancelled.
    pub(crate) fn put(&self, id: &str, answer: Value) {
        let mut table = self.table();
        if let Some(stored) = table.answers.get_mut(id) {
            if stored.answer["status"] != "cancelled" {
                stored.answer = answer;
            }
            return;
        }
        let stored = StoredAnswer { answer, task: None };
        table.answers.insert(id.to_owned(), stored);
        table.oldest.push_back(id.to_owned());
        if table.oldest.len() > ANSWERS_MAX
            && let Some(oldest) = table.oldest.pop_front()
        {
            table.answers.remove(&oldest);
        }
    }

    pub(crate) fn generated_by(&self, id: &str, task: AbortHandle) {
        if let Some(stored) = self.table().answers.get_mut(id) {
            stored.task = Some(task);
        }
    }

    pub(crate) fn get(&self, id: &str) -> Result<Value, Error> {
        let table = self.table();
        let stored = table.answers.get(id);
        stored.map(|stored| stored.answer.clone()).ok_or_else(|| {
            let message = format!("Response with id '{id}' not found.");
            Error::invalid(StatusCode::NOT_FOUND, message, "response_id")
        })
    }

    fn cancel(&self, id: &str) -> Result<Value, Error> {
        let mut answer = self.get(id)?;
        if !matches!(answer["status"].as_str(), Some("queued" | "in_progress")) {
            let message = "Cannot cancel a synchronous response.";
            return Err(Error::invalid(
                StatusCode::BAD_REQUEST,
                message,
                "response_id",
            ));
        }
        answer["status"] = json!("cancelled");
        self.put(id, answer.clone());
        let task = self
            .table()
            .answers
            .get_mut(id)
            .and_then(|stored| stored.task.take());
        if let Some(task) = task {
            task.abort();
        }
        Ok(answer)
    }

    fn table(&self) -> MutexGuard<'_, AnswerTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) async fn retrieve(
    State(server): State<Arc<Server>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, Error> {
    server.stored.get(&id).map(Json)
}

pub(crate) async fn cancel(
    State(server): State<Arc<Server>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, Error> {
    server.stored.cancel(&id).map(Json)
}
