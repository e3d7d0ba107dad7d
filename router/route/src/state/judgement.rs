//! What a decision takes from the index's answers.

use std::time::Instant;

use warmroute_proto::BlockCut;

use super::{Core, RouteRequest};
use crate::candidates::RouteRefusal;
use crate::cost::overlap_blocks;
use crate::index_view::{TrustedAnswer, TrustedSource};
use crate::prompt::Prompt;
use crate::replica_roster::IndexReply;
use crate::source_table::SourceId;
use crate::terms::{ComparedCandidate, IndexKnowledge};

impl Core {
    /// Takes from each answer the sources that have blocks of its cut.
    pub(super) fn judge_cuts(
        &mut self,
        request: &RouteRequest<'_>,
        cuts: &[(BlockCut, IndexReply)],
        now: Instant,
    ) -> Result<TrustedAnswer, RouteRefusal> {
        let mut trusted = TrustedAnswer::default();
        let first = request.prompt.block_cut();
        for (cut, answer) in cuts {
            let judged = self.judge(answer, now);
            for candidate in self.fleet.candidates(request.model, request.leg)? {
                if candidate.cut.unwrap_or(first) == *cut {
                    trusted.take(candidate.id, &judged);
                }
            }
            trusted.restarted.extend(judged.restarted);
        }
        Ok(trusted)
    }

    /// Reduces an answer to what is trusted.
    pub(super) fn judge(&mut self, answer: &IndexReply, now: Instant) -> TrustedAnswer {
        let trusted = self.view.judge(&mut self.table, answer, now);
        for &source in &trusted.restarted {
            self.expected.restarted(source);
            self.slowness.restarted(source);
            self.speed.restarted(source);
            self.stalls.restarted(source);
        }
        trusted
    }

    /// Takes from the answer what it says of expectations at the compared sources.
    pub(super) fn account_compared(
        &mut self,
        prompt: &Prompt,
        compared: &[ComparedCandidate],
        trusted: &TrustedAnswer,
        now: Instant,
    ) {
        let countable = |cut: &Prompt| {
            let sources = self.expected.predictions.countable(cut.sampled());
            (cut.block_cut(), sources)
        };
        let countable: Vec<_> = prompt.cuts().map(countable).collect();
        let has_reports = !self.expected.reported.is_empty();
        for one in compared {
            match one.knowledge {
                IndexKnowledge::Silent => self.expected.sent.needed(one.source, now),
                IndexKnowledge::Answered => self.expected.sent.not_needed(one.source, now),
            }
            let is_countable = one.expected_blocks > 0
                && (countable.iter())
                    .any(|(cut, sources)| *cut == one.cut && sources.of(one.source));
            if is_countable || has_reports {
                let cut = prompt.cut(Some(one.cut));
                self.end_counted(one.source, cut, one.expected_blocks, trusted);
            }
        }
    }

    /// Ends predictions and reports of a prompt at a source whose credited blocks cover all of them.
    /// Uncapped: the index holds a prompt's last whole block, which is never credited.
    fn end_counted(
        &mut self,
        source: SourceId,
        prompt: &Prompt,
        expected_blocks: u32,
        trusted: &TrustedAnswer,
    ) {
        let known = trusted.of(source);
        let held = known.map_or(0, |known| overlap_blocks(known.run));
        // Reports stand in for the index where credit of some forms is doubted.
        let is_complete = known.is_some_and(TrustedSource::is_complete);
        if is_complete && !self.doubts.evidence.has_doubts() {
            self.expected.reported.void(source);
        } else if held > 0 {
            self.expected
                .reported
                .counted(source, prompt.sampled(), held);
        }
        if expected_blocks > 0 && held >= expected_blocks {
            self.expected
                .predictions
                .counted(source, prompt.sampled(), held);
        }
    }
}
