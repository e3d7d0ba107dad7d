//! This replica's entry in the registry, under a lease: for operators and for clients of its HTTP.

use warmroute_plane::LeaseHolder;
use warmroute_process::build;
use warmroute_proto::registry::IndexerEntry;

use super::*;

impl ServiceContext {
    /// Keeps the entry until `stop`, then removes it.
    pub(super) async fn register(self, replica: Replica, stop: CancellationToken) {
        let key = self.subjects.indexer_key(&replica.id);
        let mut holder = LeaseHolder::new(Arc::clone(&self.plane), key);
        // Encoding into memory does not fail.
        let value =
            || codec::encode(&self.entry(&replica)).map_or_else(|_| Bytes::new(), Bytes::from);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                _event = holder.next(value) => {}
            }
        }
        holder.release().await;
    }

    fn entry(&self, replica: &Replica) -> IndexerEntry {
        let handle = Handle {
            shared: Arc::clone(&self.shared),
        };
        let ready = handle.is_ready();
        let fold = self.shared.read();
        IndexerEntry {
            id: replica.id.clone(),
            url: replica.url.clone(),
            version: build::version().to_owned(),
            ready,
            log: fold.log(),
            position: fold.position(),
        }
    }
}
