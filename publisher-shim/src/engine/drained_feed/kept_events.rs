//! The events of one rank that were read and may still be asked for. Pure.

use std::collections::VecDeque;

use bytes::Bytes;
use warmroute_proto::{BlockSize, EngineSeq};

use crate::engine::trtllm::{NumberedEvent, Translator};

/// Bytes of payloads that are kept. The oldest go first; a reader that lacks them sees a gap.
const KEPT_BYTES_MAX: usize = 16 << 20;
/// What a payload takes beside its bytes, about.
const PAYLOAD_OVERHEAD: usize = 96;

/// How an event's number follows the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Continuity {
    Next,
    /// The first event that was read is not the engine's first.
    JoinedLate,
    /// Events between were lost.
    Gap,
    /// The engine began to count again.
    Restarted,
}

pub(super) struct KeptEvents {
    rank: u32,
    block_size: Option<BlockSize>,
    translator: Translator,
    last: Option<u64>,
    payloads: VecDeque<(EngineSeq, Bytes)>,
    bytes: usize,
    /// Payloads dropped so far: the position of the first one that is kept.
    dropped: u64,
    /// Distinguishes equal events of two lives, and of one life before and behind a pause.
    lives: u32,
    /// Events may be lost that no number shows yet.
    is_doubtful: bool,
}

impl KeptEvents {
    pub(super) fn new(rank: u32, block_size: Option<BlockSize>) -> Self {
        Self {
            rank,
            block_size,
            translator: Translator::new(rank, block_size),
            last: None,
            payloads: VecDeque::new(),
            bytes: 0,
            dropped: 0,
            lives: 0,
            is_doubtful: true,
        }
    }

    /// A read failed.
    pub(super) const fn doubt(&mut self) {
        self.is_doubtful = true;
    }

    /// Another reader may have taken events: what comes next is the first that was read.
    pub(super) fn forget(&mut self) {
        self.last = None;
        self.begin_life();
        self.is_doubtful = true;
    }

    fn begin_life(&mut self) {
        self.translator = Translator::new(self.rank, self.block_size);
        self.drop_first(self.payloads.len());
        self.lives += 1;
    }

    /// Nothing that the engine published before the last read is missing, but for gaps in the
    /// numbers.
    pub(super) fn is_provable(&self) -> bool {
        !self.is_doubtful && !self.payloads.is_empty() && !self.translator.is_waiting()
    }

    /// Takes the next event that was read.
    pub(super) fn take(&mut self, event: &NumberedEvent<'_>) -> Continuity {
        let continuity = match self.last {
            Some(last) if event.number == last.wrapping_add(1) => Continuity::Next,
            Some(last) if event.number > last => Continuity::Gap,
            Some(_) => Continuity::Restarted,
            None if event.number == 0 => Continuity::Next,
            None => Continuity::JoinedLate,
        };
        match continuity {
            Continuity::Next | Continuity::JoinedLate => {}
            Continuity::Gap => self.translator.forget(),
            Continuity::Restarted => self.begin_life(),
        }
        self.is_doubtful = false;
        self.last = Some(event.number);
        for (seq, payload) in self.translator.translate(self.lives.into(), event) {
            self.bytes += payload.len() + PAYLOAD_OVERHEAD;
            self.payloads.push_back((seq, payload));
        }
        while self.bytes > KEPT_BYTES_MAX && self.payloads.len() > 1 {
            self.drop_first(1);
        }
        continuity
    }

    fn drop_first(&mut self, count: usize) {
        for (_, payload) in self.payloads.drain(..count) {
            self.bytes -= payload.len() + PAYLOAD_OVERHEAD;
            self.dropped += 1;
        }
    }

    /// The position behind the last payload.
    pub(super) fn end(&self) -> u64 {
        self.dropped + self.payloads.len() as u64
    }

    /// The position of the first payload from a number on.
    pub(super) fn position_of(&self, from: EngineSeq) -> u64 {
        let before = self.payloads.partition_point(|(seq, _)| *seq < from);
        self.dropped + before as u64
    }

    /// The first payload at or behind a position, and the next position.
    pub(super) fn at(&self, position: u64) -> Option<(EngineSeq, &Bytes, u64)> {
        let position = position.max(self.dropped);
        let index = usize::try_from(position - self.dropped).ok()?;
        let (seq, payload) = self.payloads.get(index)?;
        Some((*seq, payload, position + 1))
    }
}
