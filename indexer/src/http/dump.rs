//! `/dump`: every source with all that it holds, in pages.
//!
//! Each source is of one moment. The writer copies its nodes; they are sorted and encoded on a thread
//! of low priority, a page when the client has taken the last, so that memory is bounded by the
//! largest source. A client that reads too slowly would keep the others from a dump: its body ends
//! early. Such a body, whatever ended it, lacks the end of its chunked encoding.

use std::time::Duration;
use std::{io, vec};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::time::Instant;
use warmroute_index::view::SourceCut;
use warmroute_process::blocking;
use warmroute_proto::{Change, Source};

use super::{HttpError, Limited, Slot};

/// Bytes at which a page ends; one more line may exceed it.
const PAGE_BYTES: usize = 64 << 10;

/// The slowest client, 256 KiB/s, and how far it may fall behind that.
const PAGE_TIME_MAX: Duration = Duration::from_millis(250);
const BEHIND_MAX: Duration = Duration::from_secs(30);

/// A body in the making.
struct DumpBody {
    index: Limited,
    sources: vec::IntoIter<Source>,
    open: Option<OpenSource>,
    slot: Slot,
    client: Pace,
}

/// How long a client takes for the pages that it gets.
#[derive(Default)]
struct Pace {
    /// The time that it took, less what it may take.
    behind: Duration,
    /// When it got the last page.
    page_at: Option<Instant>,
}

impl Pace {
    /// It wants the next page. Returns false if it is too slow.
    fn wants(&mut self) -> bool {
        if let Some(at) = self.page_at.take() {
            let behind = self.behind + at.elapsed();
            self.behind = behind.saturating_sub(PAGE_TIME_MAX);
        }
        self.behind <= BEHIND_MAX
    }

    fn gets(&mut self) {
        self.page_at = Some(Instant::now());
    }
}

/// A source that is being sent.
enum OpenSource {
    Cut(SourceCut),
    /// Its rest.
    Changes(vec::IntoIter<Change>),
}

/// One JSON value a line: each source, then its image as changes, parents first.
pub(super) async fn dump(State(index): State<Limited>) -> Result<Response, HttpError> {
    let slot = index.slot().await?;
    let sources = index.read(&slot, |handle| handle.digest().sources).await?;
    let sources = sources.into_iter().map(|digest| Source {
        worker: digest.worker,
        dp_rank: digest.dp_rank,
    });
    let body = DumpBody {
        index,
        sources: sources.collect::<Vec<_>>().into_iter(),
        open: None,
        slot,
        client: Pace::default(),
    };
    let pages = stream::try_unfold(body, async |mut body| {
        Ok::<_, io::Error>(body.next_page().await?.map(|page| (page, body)))
    });
    let content_type = [(header::CONTENT_TYPE, "application/x-ndjson")];
    Ok((content_type, Body::from_stream(pages)).into_response())
}

impl DumpBody {
    async fn next_page(&mut self) -> io::Result<Option<Bytes>> {
        if !self.client.wants() {
            return Err(io::Error::other("the client reads too slowly"));
        }
        let Some(open) = self.next_open().await? else {
            return Ok(None);
        };
        let page = self.index.compute(&self.slot, move || open.page()).await;
        let (page, rest) = page.map_err(|error| io::Error::other(error.message))??;
        self.open = rest;
        self.client.gets();
        Ok(Some(page))
    }

    async fn next_open(&mut self) -> io::Result<Option<OpenSource>> {
        if let Some(open) = self.open.take() {
            return Ok(Some(open));
        }
        for source in self.sources.by_ref() {
            let cut = self
                .index
                .handle
                .cut_source(source, self.slot.clone())
                .await;
            if let Some(cut) = cut.map_err(io::Error::other)? {
                return Ok(Some(OpenSource::Cut(cut)));
            }
        }
        Ok(None)
    }
}

impl OpenSource {
    /// The next page, and what is left.
    fn page(self) -> io::Result<(Bytes, Option<Self>)> {
        let mut page = Vec::with_capacity(PAGE_BYTES);
        let mut changes = match self {
            Self::Cut(SourceCut { digest, nodes }) => {
                write_line(&mut page, &json!({ "source": digest }))?;
                let changes = nodes.map(|nodes| nodes.into_changes_in_steps(blocking::give_way));
                let changes = changes.unwrap_or_default();
                changes.into_iter()
            }
            Self::Changes(changes) => changes,
        };
        while page.len() < PAGE_BYTES {
            let Some(change) = changes.next() else {
                return Ok((page.into(), None));
            };
            write_line(&mut page, &change_value(&change))?;
            blocking::give_way();
        }
        Ok((page.into(), Some(Self::Changes(changes))))
    }
}

fn write_line(page: &mut Vec<u8>, line: &Value) -> io::Result<()> {
    serde_json::to_writer(&mut *page, line)?;
    page.push(b'\n');
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a client that takes this long for each of so many pages gets them all.
    async fn gets_all(pages: u32, each: Duration) -> bool {
        let mut client = Pace::default();
        for _ in 0..pages {
            if !client.wants() {
                return false;
            }
            client.gets();
            tokio::time::advance(each).await;
        }
        client.wants()
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_too_slowly_does_not_keep_the_others_from_a_dump() {
        assert!(gets_all(100_000, PAGE_TIME_MAX).await);
        let twice = 2 * PAGE_TIME_MAX;
        assert!(gets_all(120, twice).await, "for 60 s");
        assert!(!gets_all(122, twice).await);
        // Pauses count as what they add up to.
        assert!(gets_all(1, BEHIND_MAX + PAGE_TIME_MAX).await);
        assert!(!gets_all(1, BEHIND_MAX + twice).await);
    }
}
