//! The audit log: changes by operators, permitted and refused.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use axum::extract::Request;
use axum::http::Method;
use axum::response::Response;
use tokio::time::Instant;

use super::AccessRefusal;
use super::keys::KeyId;
use crate::server::PeerAddress;

/// Target of the log's lines. They are written whatever `--log` says of other targets.
pub const AUDIT_TARGET: &str = "warmroute_audit";

/// Clients without a key can cause refusals: more of them in a period are not logged.
const REFUSALS_MAX: u32 = 20;
const REFUSAL_PERIOD: Duration = Duration::from_secs(60);

/// Characters of a refused change's path.
const PATH_CHARS_MAX: usize = 256;

/// What a change is applied to, if its path does not say. A request that changes something has one
/// in its extensions, and its handler sets it.
#[derive(Clone, Debug, Default)]
pub struct ChangeSubject(Arc<OnceLock<String>>);

impl ChangeSubject {
    /// Counts once.
    pub fn set(&self, text: impl Into<String>) {
        self.0.get_or_init(|| text.into());
    }
}

/// A request that changes something. A permitted one is logged when it is dropped: the server drops
/// a handler whose client leaves, which may have had its effect.
pub(super) struct LoggedChange {
    peer: Option<String>,
    method: Method,
    /// With the query.
    path: String,
    subject: ChangeSubject,
    status: Option<u16>,
    /// `None`: not permitted.
    permit: Option<Permit>,
}

/// The key of a permitted change, if the port asks for one.
struct Permit(Option<KeyId>);

impl LoggedChange {
    pub(super) fn of(request: &Request) -> Self {
        let peer = request.extensions().get::<PeerAddress>();
        Self {
            peer: peer.map(|peer| peer.0.to_string()),
            method: request.method().clone(),
            path: request.uri().to_string(),
            subject: ChangeSubject::default(),
            status: None,
            permit: None,
        }
    }

    pub(super) fn permitted(&mut self, key: Option<KeyId>, request: &mut Request) {
        self.permit = Some(Permit(key));
        request.extensions_mut().insert(self.subject.clone());
    }

    pub(super) fn answered(&mut self, response: &Response) {
        self.status = Some(response.status().as_u16());
    }
}

impl Drop for LoggedChange {
    fn drop(&mut self) {
        let Some(Permit(key)) = &self.permit else {
            return;
        };
        let key = key.as_ref().map_or("-", KeyId::as_str);
        let peer = self.peer.as_deref();
        let subject = self.subject.0.get();
        let (method, path, status) = (&self.method, &self.path, self.status);
        tracing::info!(
            target: AUDIT_TARGET, key, peer, %method, path, subject, status, "admin change"
        );
    }
}

/// Logs refused changes, some of each period.
#[derive(Default)]
pub(super) struct RefusalLog(Mutex<Option<RefusalPeriod>>);

struct RefusalPeriod {
    began: Instant,
    refusals: u32,
}

impl RefusalLog {
    pub(super) fn add(&self, change: &LoggedChange, refusal: &AccessRefusal) {
        if !self.has_room(Instant::now()) {
            return;
        }
        let peer = change.peer.as_deref();
        let path: String = change.path.chars().take(PATH_CHARS_MAX).collect();
        let (method, key) = (&change.method, refusal.key().map_or("-", KeyId::as_str));
        tracing::warn!(
            target: AUDIT_TARGET, key, peer, %method, path, %refusal, "admin change refused"
        );
    }

    fn has_room(&self, now: Instant) -> bool {
        let mut period = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_current = |period: &RefusalPeriod| now < period.began + REFUSAL_PERIOD;
        let (current, past) = match period.take() {
            Some(period) if is_current(&period) => (Some(period), None),
            past => (None, past),
        };
        let unlogged = past.map_or(0, |past| past.refusals.saturating_sub(REFUSALS_MAX));
        if unlogged > 0 {
            tracing::warn!(target: AUDIT_TARGET, unlogged, "further admin changes were refused");
        }
        let current = period.insert(current.unwrap_or(RefusalPeriod {
            began: now,
            refusals: 0,
        }));
        current.refusals = current.refusals.saturating_add(1);
        current.refusals <= REFUSALS_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn refusals_of_a_period_are_logged_up_to_a_bound() {
        let log = RefusalLog::default();
        for _ in 0..2 {
            let now = Instant::now();
            let logged = (0..100).filter(|_| log.has_room(now)).count();
            assert_eq!(logged, REFUSALS_MAX as usize);
            tokio::time::advance(REFUSAL_PERIOD).await;
        }
    }
}
