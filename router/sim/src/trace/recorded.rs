//! From a recording to a trace.

use std::collections::BTreeSet;

use super::{TOKENS_MAX, Trace, TraceError, TraceRequest};
use crate::recording::{BlockNode, RecordedOutcome, Recording, RequestFacts};

impl Trace {
    /// The requests of these models, or of all if none is named, as far as engines served them. A
    /// piece is a block.
    pub fn of_recording(recording: &Recording, models: &[String]) -> Result<Self, TraceError> {
        let requests = recording.requests.iter();
        let known: BTreeSet<&str> = requests.clone().map(|(facts, _)| &*facts.model).collect();
        if let Some(model) = models.iter().find(|model| !known.contains(model.as_str())) {
            return Err(TraceError::UnknownModel {
                model: model.clone(),
                known: known.into_iter().collect::<Vec<_>>().join(", "),
            });
        }
        let is_chosen =
            |facts: &RequestFacts| models.is_empty() || models.iter().any(|m| **m == *facts.model);
        let mut trace = Self {
            piece_tokens: 0,
            requests: Vec::new(),
            sessions: Vec::new(),
        };
        let mut pieces = recording.blocks();
        for (facts, last) in requests.filter(|(facts, _)| is_served(facts) && is_chosen(facts)) {
            let size = facts.block_tokens;
            if trace.piece_tokens == 0 {
                trace.piece_tokens = size;
            }
            if trace.piece_tokens != size {
                let (one, other) = (trace.piece_tokens, size);
                return Err(TraceError::BlockSizes { one, other });
            }
            let request = request(facts, recording.path(*last), pieces);
            pieces += request.own;
            trace.requests.push(request);
        }
        let time = |request: &TraceRequest| request.millis;
        trace
            .requests
            .sort_by(|one, other| time(one).total_cmp(&time(other)));
        trace.checked(pieces)
    }
}

/// Whether an engine worked on it.
fn is_served(facts: &RequestFacts) -> bool {
    let is_run = match facts.outcome {
        RecordedOutcome::Completed | RecordedOutcome::Cancelled => true,
        RecordedOutcome::Failed | RecordedOutcome::Unplaced => false,
    };
    is_run && (1..=TOKENS_MAX).contains(&facts.prompt_tokens)
}

/// `pieces` so far; tokens after the last whole block are the request's own.
fn request(facts: &RequestFacts, path: Vec<BlockNode>, pieces: usize) -> TraceRequest {
    let all = facts.prompt_tokens.div_ceil(facts.block_tokens) as usize;
    let own = all.saturating_sub(path.len());
    let fresh = (pieces..pieces + own).map(|piece| u32::try_from(piece).unwrap_or(u32::MAX));
    TraceRequest {
        millis: facts.arrived.as_secs_f64() * 1000.0,
        input_tokens: facts.prompt_tokens,
        output_tokens: facts.output_tokens.clamp(1, TOKENS_MAX),
        pieces: path.iter().map(|node| node.0).chain(fresh).collect(),
        own,
    }
}
