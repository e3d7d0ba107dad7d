//! The jobs of the prompt threads: plans of large requests, and comparisons of the two encoders.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::body::{BodyBudget, BufferedBody};
use super::plan::{self, Plan, PlanEncoding, PlanInputs, Planning, TextSample, WorkLimits};
use super::prompt_pool::{PromptJob, SHORT_BYTES_MAX};
use crate::error::ProxyError;
use crate::openai::PromptRoute;
use crate::tokenize::{ReferenceComparison, TaskState};

/// Bytes that are encoded in one step: about a millisecond.
const STEP_BYTES: usize = 64 << 10;

/// What is known of a prompt's chat template before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rendering {
    /// It takes about as long as reading the body.
    Usual,
    /// It takes longer than the bound of request threads, in one step.
    Long,
}

/// The plan of one request. It ends when its client has gone: that drops the receiver.
pub(super) struct PlanJob {
    route: PromptRoute,
    /// Keeps the body's share of the budget.
    body: BufferedBody,
    inputs: PlanInputs,
    budget: BodyBudget,
    encoding: Option<Box<PlanEncoding>>,
    rendering: Rendering,
    /// Shared with a rendering while it runs.
    planned: Option<Arc<oneshot::Sender<Result<Plan, ProxyError>>>>,
}

impl PlanJob {
    pub(super) fn new(
        route: PromptRoute,
        body: BufferedBody,
        inputs: PlanInputs,
        budget: BodyBudget,
        rendering: Rendering,
    ) -> (Self, oneshot::Receiver<Result<Plan, ProxyError>>) {
        let (planned, receiver) = oneshot::channel();
        let job = Self {
            route,
            body,
            inputs,
            budget,
            encoding: None,
            rendering,
            planned: Some(Arc::new(planned)),
        };
        (job, receiver)
    }

    fn next(&mut self) -> Option<Result<Plan, ProxyError>> {
        let planned = self.planned.as_ref()?;
        if let Some(encoding) = &mut self.encoding {
            return encoding.step(&self.inputs, STEP_BYTES);
        }
        let planned = Arc::clone(planned);
        let limits = WorkLimits {
            budget: Some(&self.budget),
            is_cancelled: Arc::new(move || planned.is_closed()),
        };
        match plan::begin(self.route, &self.body.bytes, &self.inputs, &limits) {
            Ok(Planning::Ready(plan)) => Some(Ok(*plan)),
            Ok(Planning::Encoding(encoding)) => {
                self.encoding = Some(encoding);
                None
            }
            Err(error) => Some(Err(error)),
        }
    }
}

impl PromptJob for PlanJob {
    fn step(&mut self) -> TaskState {
        if self
            .planned
            .as_ref()
            .is_none_or(|planned| planned.is_closed())
        {
            return TaskState::Done;
        }
        match (self.next(), self.planned.take()) {
            (None, planned) => {
                self.planned = planned;
                TaskState::More
            }
            (Some(result), planned) => {
                // A client that has gone in between needs no plan.
                let planned = planned.and_then(Arc::into_inner);
                planned.map(|planned| planned.send(result).ok());
                TaskState::Done
            }
        }
    }

    fn bytes_left(&self) -> usize {
        match (&self.encoding, self.rendering) {
            (Some(encoding), _) => encoding.bytes_left(),
            (None, Rendering::Usual) => self.body.bytes.len(),
            // The thread of short jobs is not for it.
            (None, Rendering::Long) => self.body.bytes.len() + SHORT_BYTES_MAX,
        }
    }
}

/// Encodes a prompt by the reference, after all other work.
pub(super) struct CompareJob {
    sample: TextSample,
}

impl CompareJob {
    pub(super) const fn new(sample: TextSample) -> Self {
        Self { sample }
    }
}

impl PromptJob for CompareJob {
    fn step(&mut self) -> TaskState {
        let TextSample {
            loaded,
            text,
            special,
            ids,
        } = &self.sample;
        let tokenizer = &loaded.tokenizer;
        let compared = tokenizer.compare_with_reference(text, *special, ids);
        if compared == ReferenceComparison::Different {
            tracing::error!(
                bytes = text.len(),
                "token ids differ from the reference's: the reference is used from now on"
            );
        }
        TaskState::Done
    }

    /// As of a long prompt, so that it is due late and short prompts do not wait for it.
    fn bytes_left(&self) -> usize {
        16 << 20
    }
}
