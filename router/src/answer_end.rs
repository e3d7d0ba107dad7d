//! How an engine's answer ended, as its client saw it: the one place that judges statuses and
//! contents of answers. Metrics, access log, recording, circuit breakers, retries and what is
//! learned of engines follow from it.

use axum::http::StatusCode;
use warmroute_proto::label_enum;

use crate::metrics::RequestEnd;

/// How an engine's answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerEnd {
    /// The engine served the request.
    Served,
    /// The engine refused the request, as any other engine would.
    Refused,
    Failed(EngineFailure),
}

label_enum! {
    /// How an engine failed a request.
    pub(crate) enum EngineFailure {
        /// 5xx, but 501, 503 and 505.
        Status5xx = "status_5xx",
        /// 429 or 503.
        Overloaded = "overloaded",
        /// 401 or 403, for a request that the engine's model generates an answer to.
        Denied = "denied",
        /// 404, for a model that the engine lists.
        NotFound = "not_found",
        /// An error in place of an answer, or at its end, under the status 200.
        ErrorAnswer = "error_answer",
        /// The engine closed the connection before the end of its answer.
        Broken = "broken",
        /// The engine sent nothing in time, or too long nothing.
        Silent = "silent",
        /// The worker became unhealthy, stalled or fell asleep before it answered.
        Lost = "lost",
    }
}

/// What requests of a kind are answered with by an engine that works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerRule {
    /// An answer of the model, from any engine that serves it: no engine that works lacks the model
    /// or denies access to it, and a failed request can be sent to another engine.
    Generated,
    /// Anything: the request may be for what one engine has.
    Other,
}

impl AnswerEnd {
    /// The end of an answer with this status. `is_error`: its content is an error.
    pub(crate) fn of(status: StatusCode, is_error: bool, rule: AnswerRule) -> Self {
        let is_generated = rule == AnswerRule::Generated;
        match status.as_u16() {
            429 | 503 => Self::Failed(EngineFailure::Overloaded),
            501 | 505 => Self::Refused,
            500.. => Self::Failed(EngineFailure::Status5xx),
            401 | 403 if is_generated => Self::Failed(EngineFailure::Denied),
            404 if is_generated => Self::Failed(EngineFailure::NotFound),
            400.. => Self::Refused,
            200..300 if is_error => Self::Failed(EngineFailure::ErrorAnswer),
            _ => Self::Served,
        }
    }

    /// The label of a request that ended so, with this status.
    pub(crate) fn request_end(self, status: StatusCode) -> RequestEnd {
        match self {
            Self::Served => RequestEnd::Ok,
            Self::Refused | Self::Failed(_) if status.is_server_error() => RequestEnd::Engine5xx,
            Self::Refused | Self::Failed(_) if status.is_client_error() => RequestEnd::Engine4xx,
            Self::Refused | Self::Failed(_) => RequestEnd::Failed,
        }
    }

    pub(crate) const fn failure(self) -> Option<EngineFailure> {
        match self {
            Self::Failed(failure) => Some(failure),
            Self::Served | Self::Refused => None,
        }
    }
}

impl EngineFailure {
    /// Whether another engine may serve a request of this kind that an engine failed so, while its
    /// client has no byte.
    pub(crate) const fn is_repeatable(self, rule: AnswerRule) -> bool {
        match (self, rule) {
            (_, AnswerRule::Generated) => true,
            // The engine did not begin to serve it.
            (Self::Overloaded, AnswerRule::Other) => true,
            (_, AnswerRule::Other) => false,
        }
    }

    /// Whether a client's own mistake looks like it: a wrong key, or a name that is not served.
    pub(crate) const fn may_be_the_clients(self) -> bool {
        matches!(self, Self::Denied | Self::NotFound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_as_its_client_sees_it() {
        let end = |status: u16, is_error, rule| {
            let status = StatusCode::from_u16(status).unwrap();
            let end = AnswerEnd::of(status, is_error, rule);
            (end.failure(), end.request_end(status))
        };
        use AnswerRule::{Generated, Other};
        use EngineFailure::{Denied, ErrorAnswer, NotFound, Overloaded, Status5xx};
        for (status, is_error, rule, failure, label) in [
            (200, false, Generated, None, RequestEnd::Ok),
            (200, true, Generated, Some(ErrorAnswer), RequestEnd::Failed),
            (307, false, Generated, None, RequestEnd::Ok),
            (400, true, Generated, None, RequestEnd::Engine4xx),
            (401, false, Generated, Some(Denied), RequestEnd::Engine4xx),
            (401, false, Other, None, RequestEnd::Engine4xx),
            (404, false, Generated, Some(NotFound), RequestEnd::Engine4xx),
            (404, false, Other, None, RequestEnd::Engine4xx),
            (422, false, Generated, None, RequestEnd::Engine4xx),
            (429, false, Other, Some(Overloaded), RequestEnd::Engine4xx),
            (500, false, Other, Some(Status5xx), RequestEnd::Engine5xx),
            (501, false, Generated, None, RequestEnd::Engine5xx),
            (
                502,
                false,
                Generated,
                Some(Status5xx),
                RequestEnd::Engine5xx,
            ),
            (
                503,
                true,
                Generated,
                Some(Overloaded),
                RequestEnd::Engine5xx,
            ),
        ] {
            assert_eq!(end(status, is_error, rule), (failure, label), "{status}");
        }
    }
}
