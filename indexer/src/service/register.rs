//! This replica's entry in the registry, under a lease: for operators, and for who looks for its HTTP.

use warmroute_plane::Lease;
use warmroute_proto::registry::IndexerEntry;

use super::*;

const LEASE: Duration = Duration::from_secs(6);
const RENEW: Duration = Duration::from_secs(2);

impl Worker {
    /// Keeps the entry there for as long as it runs; takes it away at the end.
    pub(super) async fn register(self, replica: Replica, stop: CancellationToken) {
        let mut lease = None;
        loop {
            if let Err(error) = self.renew(&replica, &mut lease).await {
                debug!(%error, "this replica cannot be registered now");
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = sleep(RENEW) => {}
            }
        }
        if let Some(lease) = lease
            && let Err(error) = lease.release().await
        {
            debug!(%error, "this replica's entry runs out by itself");
        }
    }

    async fn renew(&self, replica: &Replica, lease: &mut Option<Lease>) -> Result<(), PlaneError> {
        let value = codec::encode(&self.entry(replica));
        let value: Bytes = match value {
            Ok(value) => value.into(),
            Err(error) => return Err(PlaneError::Unavailable(error.to_string())),
        };
        if let Some(held) = lease
            && held.renew(value.clone()).await?.is_ok()
        {
            return Ok(());
        }
        let key = self.subjects.indexer_key(&replica.id);
        let plane = Arc::clone(&self.plane);
        *lease = Lease::acquire(plane, key, value, LEASE).await?;
        Ok(())
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
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ready,
            log: fold.log(),
            position: fold.position(),
        }
    }
}
