//! The closed sets of label values.

/// Declares the label of a status code: the codes with a value of their own, the others by class.
macro_rules! codes {
    ($($name:ident = $code:literal,)+) => {
        /// The status code of an answer. Engines choose theirs, so that not each has its own value.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum CodeLabel {
            /// The client closed its connection before a status was sent.
            None,
            $($name,)+
            Success,
            Redirect,
            ClientError,
            ServerError,
        }

        impl CodeLabel {
            pub(super) const ALL: &[Self] = &[
                Self::None,
                $(Self::$name,)+
                Self::Success,
                Self::Redirect,
                Self::ClientError,
                Self::ServerError,
            ];

            /// The label of a status; 0 stands for no status.
            pub(crate) const fn of(status: u16) -> Self {
                match status {
                    0 => Self::None,
                    $($code => Self::$name,)+
                    500.. => Self::ServerError,
                    400.. => Self::ClientError,
                    300.. => Self::Redirect,
                    1.. => Self::Success,
                }
            }

            pub(crate) const fn label(self) -> &'static str {
                match self {
                    Self::None => "none",
                    $(Self::$name => stringify!($code),)+
                    Self::Success => "2xx",
                    Self::Redirect => "3xx",
                    Self::ClientError => "4xx",
                    Self::ServerError => "5xx",
                }
            }
        }
    };
}

// What the router answers by itself, and what engines and what is before them usually do.
codes! {
    Ok = 200,
    BadRequest = 400,
    Unauthorized = 401,
    Forbidden = 403,
    NotFound = 404,
    MethodNotAllowed = 405,
    RequestTimeout = 408,
    TooLarge = 413,
    UnsupportedType = 415,
    Unprocessable = 422,
    TooManyRequests = 429,
    InternalError = 500,
    NotImplemented = 501,
    BadGateway = 502,
    Unavailable = 503,
    GatewayTimeout = 504,
}

use warmroute_proto::label_enum;

use crate::openai::UnsplitBody;
use crate::route::SplitVerdict;

label_enum! {
    /// The route of a client's request.
    pub(crate) enum RouteLabel {
        Chat = "chat",
        Completions = "completions",
        Embeddings = "embeddings",
        Models = "models",
        Tokenize = "tokenize",
        Other = "other",
    }
}

label_enum! {
    /// How a client's request ended.
    pub(crate) enum RequestEnd {
        Ok = "ok",
        /// The router refused it: malformed, too large, unknown model.
        Refused = "refused",
        /// The router had no worker or no room for it.
        Shed = "shed",
        /// It exceeded a limit of its tenant.
        Limited = "limited",
        /// The engine answered 4xx.
        Engine4xx = "engine_4xx",
        /// The engine answered 5xx.
        Engine5xx = "engine_5xx",
        /// No worker answered, or one closed its connection before the end of the answer.
        Failed = "failed",
        /// The client closed its connection before the end of the answer.
        ClientGone = "client_gone",
    }
}

label_enum! {
    /// What became of a request's record or line.
    pub(crate) enum RecordResult {
        Written = "written",
        /// The queue was full, the prompt too long for a file, or the write failed.
        Dropped = "dropped",
    }
}

label_enum! {
    /// What became of a changed settings file.
    pub(crate) enum ReloadResult {
        Loaded = "loaded",
        Refused = "refused",
    }
}

label_enum! {
    /// What became of a tokenizer's files.
    pub(crate) enum LoadResult {
        Loaded = "loaded",
        Failed = "failed",
    }
}

label_enum! {
    /// A step on the way to a decision.
    pub(crate) enum DecisionStep {
        /// Parse, render, tokenize, hash.
        Read = "read",
        /// Wait for an engine that renders images.
        Render = "render",
        Index = "index",
    }
}

label_enum! {
    /// Why a prompt with images was not rendered.
    pub(crate) enum RenderFailure {
        /// No worker of the model is known to render prompts of the route.
        NotOffered = "render_not_offered",
        /// As many renderings as allowed are in progress, or the engine answers 429.
        Busy = "render_busy",
        /// All workers are paused after failures.
        Paused = "render_paused",
        Timeout = "render_timeout",
        /// No connection, a broken answer, no such route, or 5xx but 500.
        Failed = "render_failed",
        /// The engine refused the prompt, or could not fetch an image.
        Refused = "render_refused",
        /// The answer is too large: the engine sends processed images.
        TooLarge = "render_too_large",
        /// The answer does not place the images.
        Unusable = "render_unusable",
        /// The engine found media besides images.
        OtherMedia = "other_media",
    }
}

impl RenderFailure {
    /// Whether the same engine would probably fail again.
    pub(crate) const fn is_the_engines(self) -> bool {
        match self {
            Self::Failed => true,
            // An answer contains parts of the request.
            Self::TooLarge
            | Self::NotOffered
            | Self::Busy
            | Self::Paused
            // Probably a slow address in the request.
            | Self::Timeout
            | Self::Refused
            | Self::Unusable
            | Self::OtherMedia => false,
        }
    }
}

label_enum! {
    /// How far the answer was when the client closed its connection.
    pub(crate) enum CancelPhase {
        /// Before the engine's response head.
        BeforeHead = "before_head",
        /// After the head, before the first byte of the body.
        BeforeFirstToken = "before_first_token",
        Stream = "stream",
    }
}

label_enum! {
    /// What became of a stream whose worker died, with `resume_streams`.
    pub(crate) enum ResumeResult {
        /// Another worker generates the rest.
        Resumed = "resumed",
        /// At this point of the answer the rest may differ, or it was resumed too often.
        NotResumable = "not_resumable",
        /// No other worker took it.
        NoWorker = "no_worker",
    }
}

label_enum! {
    /// Why a request was sent again.
    pub(crate) enum RetryReason {
        /// The connection was refused: the engine did not get the request.
        Connect = "connect",
        /// The engine closed the connection before it answered.
        Broken = "broken",
        /// The engine sent no output, or no head, in time.
        Silent = "silent",
        /// The engine answered with a status that another engine may not answer with.
        Status = "status",
        /// The engine answered 200 with an error in place of an answer.
        ErrorAnswer = "error_answer",
        /// The worker became unhealthy, stalled or fell asleep before it answered.
        Lost = "lost",
        /// The engine closed a reused connection: sent again on a new one.
        StaleConnection = "stale_connection",
        /// The gateway sent the request to another endpoint than the first of the picker's list.
        Gateway = "gateway",
    }
}

label_enum! {
    /// How a stream of the endpoint picker ended.
    pub(crate) enum PickerEnd {
        /// Both bodies were passed on.
        Complete = "complete",
        /// The router answered in place of an engine.
        Refused = "refused",
        /// The gateway ended it: its client or its engine is gone.
        Abandoned = "abandoned",
        /// The gateway answered before an endpoint was chosen.
        Answered = "answered",
        /// An answer was cut, or a message was none that could follow.
        Failed = "failed",
    }
}

label_enum! {
    /// How a selection ended.
    pub(crate) enum SelectionEnd {
        Completed = "completed",
        Failed = "failed",
        Aborted = "aborted",
        /// The router refused the request.
        Refused = "refused",
        /// The ticket was not freed in time.
        Expired = "expired",
    }
}

label_enum! {
    /// What became of a leg.
    pub(crate) enum LegEnd {
        /// The engine answered it.
        Served = "served",
        /// The prefill engine's answer has no parameters: another engine computes the prompt again.
        NoTransfer = "no_transfer",
        /// The prefill engine refused it: another engine answers the client.
        Refused = "refused",
        /// The engine failed it. Parameters of a decode leg are spent.
        Failed = "failed",
        /// No connection to the engine: the parameters are good for another decode leg.
        Unsent = "unsent",
        /// No bytes are left for the decode leg's body.
        NoMemory = "no_memory",
        /// No decode worker takes the request.
        NoWorker = "no_worker",
    }
}

/// Why one engine serves a request, where others compute prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WholeReason {
    /// By the expected times, or the threshold.
    Verdict(SplitVerdict),
    Body(UnsplitBody),
    /// Its route has no parameters.
    Route,
    /// A gateway sends it.
    Gateway,
    /// Its client names a worker.
    Hint,
    /// No bytes are left for another body.
    Memory,
    /// As many pairs as allowed have failed.
    PairsFailed,
}

impl WholeReason {
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Verdict(verdict) => verdict.label(),
            Self::Body(reason) => reason.label(),
            Self::Route => "route",
            Self::Gateway => "gateway",
            Self::Hint => "hint",
            Self::Memory => "memory",
            Self::PairsFailed => "pairs_failed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_status_has_one_of_few_labels() {
        for (status, label) in [
            (0, "none"),
            (200, "200"),
            (204, "2xx"),
            (307, "3xx"),
            (404, "404"),
            (418, "4xx"),
            (503, "503"),
            (599, "5xx"),
            (u16::MAX, "5xx"),
        ] {
            assert_eq!(CodeLabel::of(status).label(), label);
        }
        let mut labels: Vec<_> = (0..=u16::MAX)
            .map(|status| CodeLabel::of(status).label())
            .collect();
        labels.sort_unstable();
        labels.dedup();
        assert_eq!(labels.len(), CodeLabel::ALL.len());
        for (at, code) in CodeLabel::ALL.iter().enumerate() {
            assert_eq!(*code as usize, at, "the place of its counter");
        }
    }
}
