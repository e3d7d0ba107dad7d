//! The body of an engine's answer, from the engine's connection or from a gateway in between.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::mpsc;

/// Body of an engine's answer.
pub(super) enum EngineBody {
    Engine(Incoming),
    Gateway(GatewayBody),
}

/// A piece of a body, and whether it is the last one.
pub(crate) struct BodyPiece {
    pub bytes: Bytes,
    pub is_last: bool,
}

/// A body as a gateway sends it on. It never breaks: a gateway whose client or engine is gone ends
/// its request, which drops the body.
pub(crate) struct GatewayBody {
    pieces: mpsc::Receiver<BodyPiece>,
    is_over: bool,
}

impl GatewayBody {
    /// A body, and the way into it.
    pub(crate) fn channel() -> (mpsc::Sender<BodyPiece>, Self) {
        let (sender, pieces) = mpsc::channel(1);
        let body = Self {
            pieces,
            is_over: false,
        };
        (sender, body)
    }

    /// The body of an answer without one.
    pub(crate) fn empty() -> Self {
        let (_, body) = Self::channel();
        Self {
            is_over: true,
            ..body
        }
    }

    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        while !self.is_over {
            let Some(piece) = ready!(self.pieces.poll_recv(context)) else {
                return Poll::Pending;
            };
            self.is_over = piece.is_last;
            if !piece.bytes.is_empty() {
                return Poll::Ready(Some(piece.bytes));
            }
        }
        Poll::Ready(None)
    }
}

impl Body for GatewayBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = ready!(self.poll_piece(context));
        Poll::Ready(piece.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over
    }
}

impl From<Incoming> for EngineBody {
    fn from(body: Incoming) -> Self {
        Self::Engine(body)
    }
}

impl Body for EngineBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        match self.get_mut() {
            Self::Engine(body) => Pin::new(body).poll_frame(context),
            Self::Gateway(body) => {
                let piece = ready!(body.poll_piece(context));
                Poll::Ready(piece.map(|bytes| Ok(Frame::data(bytes))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Engine(body) => body.is_end_stream(),
            Self::Gateway(body) => body.is_over,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Engine(body) => body.size_hint(),
            Self::Gateway(body) if body.is_over => SizeHint::with_exact(0),
            Self::Gateway(_) => SizeHint::default(),
        }
    }
}
