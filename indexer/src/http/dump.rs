//! `/dump`: every source with all that it holds, in pages.
//!
//! Each source is of one moment. The writer copies its nodes; they are sorted and encoded on a
//! blocking thread, a page ahead of the client at most, so that memory is bounded by the largest
//! source. The server closes a connection whose client does not read; a body that ends early
//! because of it, or for another reason, lacks the end of its chunked encoding.

use std::io;
use std::pin::Pin;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use warmroute_index::tree::SourceNodes;
use warmroute_index::view::SourceCut;
use warmroute_process::blocking;
use warmroute_proto::{Change, Source};

use super::{HttpError, Limited};
use crate::service::Handle;

/// Bytes at which a page ends; one more line may exceed it.
const PAGE_BYTES: usize = 64 << 10;

/// A body in the making. Dropping it ends the dump.
struct DumpBody {
    /// Sends the pages; `None` once it has ended.
    producer: Option<Pin<Box<dyn Future<Output = io::Result<()>> + Send>>>,
    pages: mpsc::Receiver<Bytes>,
    outcome: io::Result<()>,
    _slot: OwnedSemaphorePermit,
}

/// One JSON value a line: each source, then its image as changes, parents first.
pub(super) async fn dump(State(index): State<Limited>) -> Result<Response, HttpError> {
    let slot = index.slot().await?;
    let (sender, pages) = mpsc::channel(1);
    let body = DumpBody {
        producer: Some(Box::pin(send_all(index.handle, sender))),
        pages,
        outcome: Ok(()),
        _slot: slot,
    };
    let pages = stream::unfold(Some(body), async |body| {
        let mut body = body?;
        match body.next_page().await {
            Ok(Some(page)) => Some((Ok(page), Some(body))),
            Ok(None) => None,
            Err(error) => Some((Err(error), None)),
        }
    });
    let content_type = [(header::CONTENT_TYPE, "application/x-ndjson")];
    Ok((content_type, Body::from_stream(pages)).into_response())
}

impl DumpBody {
    async fn next_page(&mut self) -> io::Result<Option<Bytes>> {
        while let Some(producer) = &mut self.producer {
            tokio::select! {
                biased;
                Some(page) = self.pages.recv() => return Ok(Some(page)),
                outcome = producer => {
                    self.outcome = outcome;
                    self.producer = None;
                }
            }
        }
        match self.pages.recv().await {
            Some(page) => Ok(Some(page)),
            None => std::mem::replace(&mut self.outcome, Ok(())).map(|()| None),
        }
    }
}

async fn send_all(handle: Handle, pages: mpsc::Sender<Bytes>) -> io::Result<()> {
    for digest in handle.digest().sources {
        let source = Source {
            worker: digest.worker,
            dp_rank: digest.dp_rank,
        };
        let cut = handle.cut_source(source).await.map_err(io::Error::other)?;
        let Some(cut) = cut else {
            continue;
        };
        let to = pages.clone();
        let sent = blocking::run_future(async move { send(cut, &to).await });
        sent.await??;
    }
    Ok(())
}

async fn send(cut: SourceCut, pages: &mpsc::Sender<Bytes>) -> io::Result<()> {
    let SourceCut { digest, nodes } = cut;
    let changes = nodes.map(SourceNodes::into_changes).unwrap_or_default();
    let changes = changes.iter().map(change_value);
    let mut page = Vec::with_capacity(PAGE_BYTES);
    for line in std::iter::once(json!({ "source": digest })).chain(changes) {
        serde_json::to_writer(&mut page, &line)?;
        page.push(b'\n');
        if page.len() >= PAGE_BYTES {
            let full = Bytes::from(std::mem::take(&mut page));
            pages.send(full).await.map_err(io::Error::other)?;
        }
    }
    pages.send(page.into()).await.map_err(io::Error::other)
}

fn change_value(change: &Change) -> Value {
    match change {
        Change::Stored {
            parent,
            blocks,
            tier,
        } => json!({ "stored": { "tier": tier, "parent": parent, "blocks": blocks } }),
        Change::Removed { blocks, tier } => {
            json!({ "removed": { "tier": tier, "blocks": blocks } })
        }
        Change::Cleared { tier } => json!({ "cleared": { "tier": tier } }),
    }
}
