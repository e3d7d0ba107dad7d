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

/// The slowest client, and how far it may fall behind that.
const BYTES_PER_SEC_MIN: f64 = 262_144.0;
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
    /// When it got the last page, and how long it may take for that.
    page: Option<(Instant, Duration)>,
}

impl Pace {
    /// It wants the next page. Returns false if it is too slow.
    fn wants(&mut self) -> bool {
        if let Some((at, may_take)) = self.page.take() {
            let behind = self.behind + at.elapsed();
            self.behind = behind.saturating_sub(may_take);
        }
        self.behind <= BEHIND_MAX
    }

    fn gets(&mut self, bytes: usize) {
        let may_take = Duration::from_secs_f64(bytes as f64 / BYTES_PER_SEC_MIN);
        self.page = Some((Instant::now(), may_take));
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
        self.client.gets(page.len());
        Ok(Some(page))
    }

    async fn next_open(&mut self) -> io::Result<Option<OpenSource>> {
        if let Some(open) = self.open.take() {
            return Ok(Some(open));
        }
        for source in self.sources.by_ref() {
            let cut = self.index.handle.cut_source(source).await;
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

    const KIB: usize = 1 << 10;

    /// Whether a client gets all of so many pages of this length, each of which takes it so long.
    async fn gets_all(pages: u32, bytes: usize, each: Duration) -> bool {
        let mut client = Pace::default();
        for _ in 0..pages {
            if !client.wants() {
                return false;
            }
            client.gets(bytes);
            tokio::time::advance(each).await;
        }
        client.wants()
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_too_slowly_does_not_keep_the_others_from_a_dump() {
        let millis = Duration::from_millis;
        for pages in [1, 100_000] {
            assert!(gets_all(pages, 64 * KIB, millis(250)).await);
            assert!(gets_all(pages, 128 * KIB, millis(500)).await, "long lines");
        }
        assert!(gets_all(120, 64 * KIB, millis(500)).await, "for 60 s");
        assert!(!gets_all(122, 64 * KIB, millis(500)).await);
        assert!(!gets_all(130, KIB, millis(250)).await, "small sources");
        // One pause counts like many.
        assert!(gets_all(1, 64 * KIB, BEHIND_MAX + millis(250)).await);
        assert!(!gets_all(1, 64 * KIB, BEHIND_MAX + millis(251)).await);
    }
}
