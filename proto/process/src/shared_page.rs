//! A page that takes milliseconds to make and that many may ask for.
//!
//! One is made at a time, also if its requester leaves. Requests that wait for it share the next one:
//! so none waits for more than two, however many there are, and none gets a page that was begun before
//! it came.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::blocking;

/// Clones share the page.
#[derive(Clone, Default)]
pub struct SharedPage(Arc<Mutex<Option<MadePage>>>);

struct MadePage {
    begun: Instant,
    page: Bytes,
}

impl SharedPage {
    /// A page that is begun after this call. `None` if `make` gives none, or panics.
    pub async fn get(
        &self,
        make: impl Future<Output = Option<Bytes>> + Send + 'static,
    ) -> Option<Bytes> {
        let asked = Instant::now();
        let mut last = Arc::clone(&self.0).lock_owned().await;
        if let Some(made) = last.as_ref().filter(|made| made.begun > asked) {
            return Some(made.page.clone());
        }
        let made = TaskTracker::new().spawn(async move {
            let begun = Instant::now();
            *last = None;
            let page = make.await?;
            *last = Some(MadePage {
                begun,
                page: page.clone(),
            });
            Some(page)
        });
        made.await.ok().flatten()
    }
}

/// A page that is made on a thread for blocking work. `None` with a log line if that fails.
pub async fn made(
    page: impl FnOnce() -> anyhow::Result<Vec<u8>> + Send + 'static,
) -> Option<Bytes> {
    let made = blocking::run(page).await;
    let made = made.map_err(anyhow::Error::from).flatten();
    let made = made.inspect_err(|error| tracing::warn!(%error, "cannot make a page"));
    made.ok().map(Bytes::from)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use futures_util::future::join_all;
    use tokio::time::sleep;

    use super::*;

    const TAKES: Duration = Duration::from_secs(1);

    /// Makes pages that have their number as text, and counts how many are being made.
    #[derive(Clone, Default)]
    struct Maker {
        begun: Arc<AtomicUsize>,
        ended: Arc<AtomicUsize>,
    }

    impl Maker {
        async fn make(self) -> Option<Bytes> {
            let number = self.begun.fetch_add(1, Ordering::Relaxed);
            assert_eq!(self.ended.load(Ordering::Relaxed), number, "one at a time");
            sleep(TAKES).await;
            self.ended.fetch_add(1, Ordering::Relaxed);
            Some(number.to_string().into())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_wait_share_the_page_that_is_begun_after_they_came() {
        let (page, maker) = (SharedPage::default(), Maker::default());
        let began = Instant::now();
        let first = page.get(maker.clone().make());
        let later = async {
            sleep(TAKES / 2).await;
            join_all((0..100).map(|_| page.get(maker.clone().make()))).await
        };
        let (first, later) = tokio::join!(first, later);
        assert_eq!(first.unwrap(), "0");
        assert!(later.into_iter().all(|page| page.unwrap() == "1"));
        assert_eq!(began.elapsed(), 2 * TAKES);
        assert_eq!(page.get(maker.make()).await.unwrap(), "2");
    }

    #[tokio::test(start_paused = true)]
    async fn clients_that_leave_have_no_more_than_one_page_made() {
        let (page, maker) = (SharedPage::default(), Maker::default());
        for _ in 0..100 {
            assert!(page.get(maker.clone().make()).now_or_never().is_none());
            sleep(TAKES / 100).await;
        }
        assert!(maker.begun.load(Ordering::Relaxed) <= 2);
        assert_eq!(page.get(async { None }).await, None);
        let panics = page.get(async { panic!("on purpose") }).await;
        assert_eq!(panics, None);
        assert!(page.get(maker.make()).await.is_some());
    }
}
