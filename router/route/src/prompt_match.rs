//! What each source holds of one prompt.
//!
//! One walk along each cut of the prompt finds it for all sources ([`super::prompt_tree`]), instead
//! of one for each of them.

use warmroute_proto::BlockCut;
use warmroute_proto::query::SourceState;

use super::decide::DecisionInput;
use super::expectations::Expectations;
use super::index_view::TrustedSource;
use super::prompt::Prompt;
use super::prompt_tree::HeldBlocks;
use super::source_table::SourceId;

/// Blocks of one cut, from depth 0, by source.
pub(crate) struct CutMatch<'a> {
    pub(crate) prompt: &'a Prompt,
    /// Held by active requests.
    pub(crate) shared: HeldBlocks,
    pub(crate) predicted: HeldBlocks,
    /// Reported by the engine.
    pub(crate) reported: HeldBlocks,
    /// Sent before.
    pub(crate) sent: HeldBlocks,
    expected: &'a Expectations,
}

impl CutMatch<'_> {
    /// Blocks that the engine reported, where the index does not show all that the source holds.
    pub(crate) fn reported_beyond(&self, source: SourceId, known: Option<&TrustedSource>) -> u32 {
        let counts = known.is_none_or(|known| {
            let shows_gpu = known.state() == SourceState::Exact;
            !known.is_complete() && (!shows_gpu || self.expected.are_reports_beyond_gpu(source))
        });
        if counts { self.reported.of(source) } else { 0 }
    }

    /// Whether nothing of the prompt is predicted, reported or sent at the source.
    pub(crate) fn expects_nothing(&self, source: SourceId) -> bool {
        let expected = [&self.predicted, &self.reported, &self.sent];
        expected.iter().all(|held| held.of(source) == 0)
    }
}

/// All cuts, the prompt's first one first.
pub(crate) struct PromptMatch<'a>(Vec<CutMatch<'a>>);

impl<'a> PromptMatch<'a> {
    pub(crate) fn new(input: &DecisionInput<'a>) -> Self {
        let cut = |prompt: &'a Prompt| {
            let (sampled, expected) = (prompt.sampled(), input.expected);
            CutMatch {
                prompt,
                shared: input.slots.shared_blocks(sampled, input.except),
                predicted: (expected.predictions).predicted(sampled, input.except, input.now),
                reported: expected.reported.held(sampled),
                sent: expected.sent.held(sampled),
                expected,
            }
        };
        Self(input.prompt.cuts().map(cut).collect())
    }

    /// The prompt in blocks of this cut ([`Prompt::cut`]).
    pub(crate) fn cut(&self, wanted: Option<BlockCut>) -> &CutMatch<'a> {
        let (first, others) = (&self.0[0], &self.0[1..]);
        let is_cut = |cut: &&CutMatch<'_>| Some(cut.prompt.block_cut()) == wanted;
        others.iter().find(is_cut).unwrap_or(first)
    }
}
