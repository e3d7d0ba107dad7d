//! The plane and the other parts: all in this process (embedded), or a shared NATS (distributed).

use std::sync::Arc;

use warmroute_plane::Plane;
use warmroute_process::nats::{self, Nats, NatsRole};
use warmroute_process::tasks::Tasks;

use crate::config::Config;
use crate::embedded::Embedded;
use crate::index_client::IndexReplicas;

const NATS_ROLE: NatsRole = NatsRole {
    name: "warmroute-router",
    without: "requests are served and routed by load; other routers' load and limits, and changes \
              of workers, are not seen",
};

pub(crate) enum Deployment {
    Embedded(Embedded),
    Distributed(Nats),
}

impl Deployment {
    pub(crate) async fn start(config: &Config, tasks: &Tasks) -> anyhow::Result<Self> {
        Ok(match &config.nats {
            None => Self::Embedded(Embedded::start(config, tasks)?),
            Some(args) => Self::Distributed(nats::join(args, NATS_ROLE, tasks).await?),
        })
    }

    pub(crate) fn plane(&self) -> Arc<dyn Plane> {
        match self {
            Self::Embedded(embedded) => Arc::clone(&embedded.plane),
            Self::Distributed(nats) => nats.plane(),
        }
    }

    /// The indexer of this process.
    pub(crate) const fn index(&self) -> Option<&warmroute_indexer::Handle> {
        match self {
            Self::Embedded(embedded) => Some(&embedded.index),
            Self::Distributed(_) => None,
        }
    }

    pub(crate) const fn index_replicas(&self) -> IndexReplicas {
        match self {
            Self::Embedded(_) => IndexReplicas::Own,
            Self::Distributed(_) => IndexReplicas::Registered,
        }
    }

    pub(crate) const fn nats(&self) -> Option<&Nats> {
        match self {
            Self::Embedded(_) => None,
            Self::Distributed(nats) => Some(nats),
        }
    }
}
