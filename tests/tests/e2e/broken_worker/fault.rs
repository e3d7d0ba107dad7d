//! Faults of an engine that can begin and end while it serves.

use serde_json::{Value, json};

use crate::fleet::Fleet;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Accepts requests and computes nothing; `/health` is 200.
    Hang,
    /// SIGSTOP.
    Freeze,
    /// `POST /sleep`.
    Sleep,
    /// Every request fails immediately.
    Status(u16),
    /// Streams fail with an error event after so many events, other requests with status 500.
    ErrorEvent(usize),
    /// Every step takes so many times as long.
    Slowdown(u32),
    /// Requests with [`MARKER`] fail with status 500.
    Poison,
    /// Streams with [`MARKER`] are silent for so many seconds after their first event.
    Silence(u64),
}

/// A text in the requests of [`Fault::Poison`] and [`Fault::Silence`].
pub(super) const MARKER: &str = "Ponder this.";

impl Fault {
    pub(super) async fn begin(self, fleet: &Fleet, engine: usize) {
        match self {
            Self::Freeze => fleet.engines[engine].process.signal("STOP"),
            Self::Sleep => post(fleet, engine, "/sleep?level=1", &Value::Null).await,
            Self::Hang => set(fleet, engine, &json!({"hang": true})).await,
            Self::Slowdown(factor) => set(fleet, engine, &json!({"slowdown": factor})).await,
            Self::Status(status) => {
                set(fleet, engine, &json!({"answer": {"status": status}})).await;
            }
            Self::ErrorEvent(after) => {
                set(fleet, engine, &json!({"answer": {"error_event": after}})).await;
            }
            Self::Poison => {
                let fault = json!({"answer": {"status": 500}, "marker": MARKER});
                set(fleet, engine, &fault).await;
            }
            Self::Silence(secs) => {
                let fault = json!({"answer": {"silence_ms": secs * 1000}, "marker": MARKER});
                set(fleet, engine, &fault).await;
            }
        }
    }

    pub(super) async fn end(self, fleet: &Fleet, engine: usize) {
        match self {
            Self::Freeze => fleet.engines[engine].process.signal("CONT"),
            Self::Sleep => post(fleet, engine, "/wake_up", &Value::Null).await,
            Self::Hang => set(fleet, engine, &json!({"hang": false})).await,
            Self::Slowdown(_) => set(fleet, engine, &json!({"slowdown": 1})).await,
            Self::Status(_) | Self::ErrorEvent(_) | Self::Poison | Self::Silence(_) => {
                set(fleet, engine, &json!({"answer": "none"})).await;
            }
        }
    }
}

async fn set(fleet: &Fleet, engine: usize, fault: &Value) {
    post(fleet, engine, "/debug/fault", fault).await;
}

async fn post(fleet: &Fleet, engine: usize, path: &str, body: &Value) {
    let request = fleet.http.post(fleet.engine(engine, path)).json(body);
    let answer = request.send().await.expect("an engine that answers");
    assert!(answer.status().is_success(), "{path}: {}", answer.status());
}
