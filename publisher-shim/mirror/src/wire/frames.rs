//! The ZMQ frames around a payload, live and replayed.

use warmroute_proto::EngineSeq;

/// The sequence that ends a replay: −1 as the engine writes it.
pub const END_OF_REPLAY: u64 = u64::MAX;

/// The parts of a live message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveFrames<'a> {
    /// Empty without a topic.
    pub topic: &'a [u8],
    /// `None` in two-frame messages, whose losses are not detectable.
    pub seq: Option<EngineSeq>,
    pub payload: &'a [u8],
}

/// One message of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayFrames<'a> {
    Batch { seq: EngineSeq, payload: &'a [u8] },
    End,
}

/// Decodes `[topic] [seq] [payload]` or `[topic] [payload]`; `None` for anything else.
#[must_use]
pub fn live_frames<F: AsRef<[u8]>>(frames: &[F]) -> Option<LiveFrames<'_>> {
    let (topic, seq, payload) = match frames {
        [topic, payload] => (topic, None, payload),
        [topic, seq, payload] => (topic, Some(batch_seq(sequence(seq.as_ref())?)?), payload),
        _ => return None,
    };
    Some(LiveFrames {
        topic: topic.as_ref(),
        seq,
        payload: payload.as_ref(),
    })
}

/// Decodes the last two frames: vLLM 0.26 added a topic frame before them. `None` if malformed.
#[must_use]
pub fn replay_frames<F: AsRef<[u8]>>(frames: &[F]) -> Option<ReplayFrames<'_>> {
    let [.., seq, payload] = frames else {
        return None;
    };
    let payload = payload.as_ref();
    match sequence(seq.as_ref())? {
        END_OF_REPLAY if payload.is_empty() => Some(ReplayFrames::End),
        seq => Some(ReplayFrames::Batch {
            seq: batch_seq(seq)?,
            payload,
        }),
    }
}

/// The frames that a DEALER sends to request every batch from `from` on.
#[must_use]
pub fn replay_request(from: EngineSeq) -> [Vec<u8>; 2] {
    [Vec::new(), from.0.to_be_bytes().to_vec()]
}

/// The sequence number of a batch. None has that of the end, after which no further one could come.
fn batch_seq(seq: u64) -> Option<EngineSeq> {
    (seq != END_OF_REPLAY).then_some(EngineSeq(seq))
}

fn sequence(frame: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(frame.try_into().ok()?))
}
