//! The closed sets of label values.

/// Declares an enum whose variants are the values of one label.
macro_rules! label {
    ($(#[$about:meta])* $name:ident { $($(#[$when:meta])* $value:ident = $text:literal,)+ }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $name {
            $($(#[$when])* $value,)+
        }

        impl $name {
            pub(crate) const fn label(self) -> &'static str {
                match self {
                    $(Self::$value => $text,)+
                }
            }
        }
    };
}

label! {
    /// The route of a client's request.
    RouteLabel {
        Chat = "chat",
        Completions = "completions",
        Embeddings = "embeddings",
        Models = "models",
        Tokenize = "tokenize",
        Other = "other",
    }
}

label! {
    /// How a client's request ended.
    RequestEnd {
        Ok = "ok",
        /// The router refused it: malformed, too large, unknown model.
        Refused = "refused",
        /// The router had no worker or no room for it.
        Shed = "shed",
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

impl RequestEnd {
    pub(super) const ALL: [Self; 7] = [
        Self::Ok,
        Self::Refused,
        Self::Shed,
        Self::Engine4xx,
        Self::Engine5xx,
        Self::Failed,
        Self::ClientGone,
    ];
}

label! {
    /// What became of a request's record or line.
    RecordResult {
        Written = "written",
        /// The queue was full, the prompt too long for a file, or the write failed.
        Dropped = "dropped",
    }
}

label! {
    /// What became of a changed settings file.
    ReloadResult {
        Loaded = "loaded",
        Refused = "refused",
    }
}

label! {
    /// What became of a tokenizer's files.
    LoadResult {
        Loaded = "loaded",
        Failed = "failed",
    }
}

label! {
    /// A step on the way to a decision.
    DecisionStep {
        /// Parse, render, tokenize, hash.
        Read = "read",
        Index = "index",
    }
}

label! {
    /// How far the answer was when the client closed its connection.
    CancelPhase {
        /// Before the engine's response head.
        BeforeHead = "before_head",
        /// After the head, before the first byte of the body.
        BeforeFirstToken = "before_first_token",
        Stream = "stream",
    }
}

label! {
    /// What became of a stream whose worker died, with `resume_streams`.
    ResumeResult {
        /// Another worker generates the rest.
        Resumed = "resumed",
        /// At this point of the answer the rest may differ, or it was resumed too often.
        NotResumable = "not_resumable",
        /// No other worker took it.
        NoWorker = "no_worker",
    }
}

label! {
    /// Why a request was sent again.
    RetryReason {
        /// The connection was refused: the engine did not get the request.
        Connect = "connect",
        /// The engine closed the connection before it answered.
        Broken = "broken",
        /// The engine sent no output within `first_token_timeout_secs`.
        Silent = "silent",
        /// The engine answered 502 or 503.
        Status = "status",
        /// The engine closed a reused connection: sent again on a new one.
        StaleConnection = "stale_connection",
    }
}
