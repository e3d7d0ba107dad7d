//! Asks any indexer what the fleet holds of a prompt, over the plane, and never waits long.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use warmroute_proto::LocalHash;
use warmroute_proto::bus::{Plane, PlaneError};
use warmroute_proto::codec;
use warmroute_proto::query::{Answer, Query};

/// Later than this an answer is worth less than the time: the ladder goes on without it.
const DEADLINE: Duration = Duration::from_millis(10);

#[derive(Debug, thiserror::Error)]
pub(crate) enum IndexError {
    #[error("the question cannot be asked")]
    Encode(#[from] codec::EncodeError),
    #[error("no answer")]
    Plane(#[from] PlaneError),
    #[error("the answer makes no sense")]
    Decode(#[from] codec::DecodeError),
}

/// See the module's documentation.
#[derive(Clone)]
pub(crate) struct IndexClient {
    plane: Arc<dyn Plane>,
    subject: Arc<str>,
}

impl IndexClient {
    pub(crate) fn new(plane: Arc<dyn Plane>, subject: String) -> Self {
        Self {
            plane,
            subject: subject.into(),
        }
    }

    pub(crate) async fn ask(&self, blocks: &[LocalHash]) -> Result<Answer, IndexError> {
        let query = Query {
            blocks: blocks.to_vec(),
            at_least: None,
        };
        let payload = Bytes::from(codec::encode(&query)?);
        let subject = self.subject.as_ref().to_owned();
        let answer = self.plane.request(subject, payload, DEADLINE).await?;
        Ok(codec::decode(&answer)?)
    }
}
