//! From a body's bytes to a prompt: its length, and its block hashes where the router knows the
//! token ids that the engine will have. Synchronous; the caller chooses the thread. Large prompts are
//! encoded in steps, and their memory is charged before anything is rendered.

mod form;

use std::sync::Arc;

use bytes::Bytes;
use warmroute_proto::hash::local_hashes;
use warmroute_proto::{BlockCut, BlockSize, Seed, WorkerId};

use super::body::{BodyBudget, BudgetShare};
use super::images::ImagePrompt;
use crate::error::ProxyError;
use crate::fleet::{CatalogModel, ModelCatalog, PromptTrust};
use crate::metrics::ModelSeries;
use crate::openai::{
    self, OpaqueReason, OpenAiError, ParsedRequest, PromptList, PromptRoute, PromptSlot,
    RequestInfo, ResumeTerms, SpecialTokens,
};
use crate::route::prompt::BYTES_PER_TOKEN;
use crate::route::{CacheReads, Policy, Prompt, PromptForm, SessionKey};
use crate::settings::{CompletionPrompts, MultimodalRule, ResumeRule};
use crate::tenants::TenantVisit;
use crate::tokenize::{
    CacheScope, CivilTime, IsCancelled, RenderBound, RenderError, RenderLimits, TaskState,
    TextEncodeError, TextTask, Tokenizer,
};
use crate::tokenizers::{LoadedTokenizer, TokenizerTable};

/// vLLM's default. Counts blocks until an engine reports its block size.
pub(super) const ASSUMED_BLOCK_SIZE: BlockSize = match BlockSize::new(16) {
    Some(size) => size,
    None => unreachable!(),
};

/// Memory for each byte of a prompt while it is rendered and encoded: the template's values, its
/// output and the ids. `router/chat/examples/prompt_bench.rs` measures it.
const MEMORY_OF_BYTE: usize = 8;
/// Memory for each JSON value that a template may read.
const MEMORY_OF_VALUE: usize = 96;
/// Charged for each byte. Prompts of so many small values that they take more are not rendered, ...
const MEMORY_OF_BYTE_MAX: usize = 12;
/// ... unless they are small.
const MEMORY_ALLOWED: usize = 8 << 20;

/// More than this for one request must leave a quarter of the budget to others.
const SPARE_BYTES_MIN: usize = 16 << 20;

/// Largest text that is compared with the reference encoder.
const SAMPLE_BYTES_MAX: usize = 64 << 10;

/// Bound of a prompt's tokens where no engine reports one.
const TOKENS_MAX: usize = 4 << 20;

/// The model by which an engine continues the stored answer of an id; `None` if it is not known.
pub(super) type AnswerModels = Arc<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// What a plan depends on, besides the body.
#[derive(Clone)]
pub(super) struct PlanInputs {
    pub catalog: Arc<ModelCatalog>,
    pub tokenizers: Arc<TokenizerTable>,
    pub policy: Policy,
    /// A recording without blocks cannot be replayed.
    pub is_recorded: bool,
    /// For requests that name an earlier answer and no model.
    pub answer_models: AnswerModels,
    /// The client's, if there are tenants.
    pub tenant: Option<Arc<TenantVisit>>,
    /// For chat templates with a date.
    pub now: CivilTime,
    pub work: PromptWork,
    /// Larger prompts are not tokenized.
    pub prompt_bytes_max: usize,
    pub sampling: TextSampling,
    pub resume: ResumeRule,
    pub completion_prompts: CompletionPrompts,
    pub multimodal: MultimodalRule,
}

/// What a plan does with the prompt of a policy that reads the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PromptWork {
    Tokenize,
    /// The prompt took too long: it is known by its text only, and token ids are not read.
    Skip,
}

/// Whether a plan keeps a text for a comparison of the two encoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextSampling {
    Keep,
    Discard,
}

/// A text and the ids that the prompt was routed by.
pub(super) struct TextSample {
    pub loaded: Arc<LoadedTokenizer>,
    pub text: String,
    pub special: SpecialTokens,
    pub ids: Vec<u32>,
}

/// What prompt work may use.
pub(super) struct WorkLimits<'w> {
    /// `None`: the prompt is small, and the thread is one of requests.
    pub budget: Option<&'w BodyBudget>,
    pub is_cancelled: IsCancelled,
}

impl WorkLimits<'_> {
    fn of_rendering(&self) -> RenderLimits {
        let bound = match self.budget {
            Some(_) => RenderBound::Long,
            None => RenderBound::Short,
        };
        RenderLimits {
            bound,
            is_cancelled: Arc::clone(&self.is_cancelled),
        }
    }
}

/// A request as far as routing needs it.
pub(super) struct Plan {
    pub model: String,
    pub series: Arc<ModelSeries>,
    pub prompt: Prompt,
    pub streaming: bool,
    /// It has one prompt, so that the reported usage is that of `prompt`.
    pub single: bool,
    /// Why the prompt has no blocks, if so.
    pub unhashed: Option<&'static str>,
    /// A prompt that has none because of its images, where an engine may render it.
    pub images: Option<ImagePrompt>,
    /// The body for the engine, if it differs from the client's.
    pub rewritten: Option<Bytes>,
    /// An earlier answer that only its worker has.
    pub previous: Option<String>,
    pub sample: Option<TextSample>,
    /// With what the rest of the stream is requested, if its worker dies. `rewritten` asks for token
    /// ids.
    pub resume: Option<ResumeTerms>,
}

/// A prompt whose tokens cannot be known here, and why.
pub(super) type Unhashed = &'static str;

const TOO_LARGE: Unhashed = "prompt_too_large";
const TOO_SLOW: Unhashed = "prompt_timeout";
/// The chat template takes longer than a request's thread may.
pub(super) const SLOW_TEMPLATE: Unhashed = "template_slow";
pub(super) const NO_MEMORY: Unhashed = "prompt_memory";
pub(super) const TRUNCATED: Unhashed = "truncated";
pub(super) const NO_BLOCK_SIZE: Unhashed = "no_block_size";

/// A plan, or the work that is left for it.
pub(super) enum Planning {
    Ready(Box<Plan>),
    Encoding(Box<PlanEncoding>),
}

/// Texts of a request to be encoded, step by step.
pub(super) struct PlanEncoding {
    draft: PlanDraft,
    loaded: Arc<LoadedTokenizer>,
    special: SpecialTokens,
    current: Option<TextTask<String>>,
    texts: std::vec::IntoIter<String>,
    lists: Vec<Vec<u32>>,
    tokens_max: usize,
    /// Present for prompts of the prompt threads, with what is charged for the whole encoding.
    memory: Option<(BodyBudget, BudgetShare)>,
}

/// The parts of a plan that are known before its tokens.
#[derive(Default)]
struct PlanDraft {
    info: RequestInfo,
    /// Length of the prompt, if it is not hashed.
    tokens: u32,
    mismatched: Vec<WorkerId>,
    rewritten: Option<Bytes>,
    sample: Option<TextSample>,
    resume: Option<ResumeTerms>,
    /// Where the prompt's token ids go.
    slot: Option<PromptSlot>,
    /// Stands for a prompt whose tokens are not known.
    by_text: Option<Prompt>,
    images: Option<ImagePrompt>,
    form: Option<Arc<PromptForm>>,
}

/// Where a prompt's token ids come from.
enum TokenSource {
    Ids(Vec<Vec<u32>>),
    Texts {
        loaded: Arc<LoadedTokenizer>,
        texts: Vec<String>,
        special: SpecialTokens,
        memory: Option<BudgetShare>,
    },
}

/// Plans a request in one step, unless its chat template is slow.
pub(super) fn plan(
    route: PromptRoute,
    body: &[u8],
    inputs: &PlanInputs,
) -> Result<Plan, ProxyError> {
    let limits = WorkLimits {
        budget: None,
        is_cancelled: Arc::new(|| false),
    };
    match begin(route, body, inputs, &limits)? {
        Planning::Ready(plan) => Ok(*plan),
        Planning::Encoding(mut encoding) => loop {
            if let Some(planned) = encoding.step(inputs, usize::MAX) {
                return planned;
            }
        },
    }
}

/// Gives a request without a model that of the answer which it continues.
fn take_model_of_answer(
    parsed: &mut ParsedRequest<'_>,
    inputs: &PlanInputs,
) -> Result<(), ProxyError> {
    let previous = parsed.info.previous_response.as_deref();
    parsed.info.model = previous.and_then(|id| (inputs.answer_models)(id));
    let is_open = parsed.info.model.is_none() && !inputs.catalog.models.is_empty();
    match previous.filter(|_| is_open && inputs.catalog.only_model().is_none()) {
        Some(id) => Err(ProxyError::ModelOfAnswer(id.to_owned())),
        None => Ok(()),
    }
}

/// Memory for work on a prompt, which is routed by load without it.
fn charge_large(budget: &BodyBudget, bytes: usize) -> Option<BudgetShare> {
    if bytes > SPARE_BYTES_MIN {
        budget.charge_spare(bytes)
    } else {
        budget.charge(bytes)
    }
}

/// Parses a body. One with numbers that only Python reads has an opaque prompt; `copy` takes it with
/// other numbers.
fn read<'b>(
    route: PromptRoute,
    body: &'b [u8],
    copy: &'b mut Option<Vec<u8>>,
    admits: &mut dyn FnMut(usize) -> bool,
) -> Result<ParsedRequest<'b>, OpenAiError> {
    let error = match openai::parse_admitted(route, body, admits) {
        Ok(parsed) => return Ok(parsed),
        Err(error) => error,
    };
    // At most one copy for each thread that plans.
    let is_no_json = error.code == Some("invalid_json");
    *copy = is_no_json
        .then(|| openai::without_python_numbers(body))
        .flatten();
    let Some(readable) = copy else {
        return Err(error);
    };
    let mut parsed = openai::parse_admitted(route, readable, admits)?;
    // The engine would get the other numbers.
    if parsed.rewritten.is_some() {
        return Err(error);
    }
    parsed.info.opaque = Some(OpaqueReason::Number);
    Ok(parsed)
}

/// Reads and renders a request.
pub(super) fn begin(
    route: PromptRoute,
    body: &[u8],
    inputs: &PlanInputs,
    limits: &WorkLimits<'_>,
) -> Result<Planning, ProxyError> {
    let mut parse_memory = None;
    let mut copy = None;
    let mut parsed = read(route, body, &mut copy, &mut |bytes| match limits.budget {
        _ if inputs.work == PromptWork::Skip => bytes == 0,
        Some(budget) if bytes > 0 => {
            parse_memory = charge_large(budget, bytes);
            parse_memory.is_some()
        }
        Some(_) | None => true,
    })?;
    if parsed.info.model.is_none() {
        take_model_of_answer(&mut parsed, inputs)?;
    }
    let (name, model) = known(&inputs.catalog, parsed.info.model.as_deref())?;
    // Before the prompt is read: the time would show that the model exists.
    if let Some(tenant) = &inputs.tenant {
        tenant.check_model(name)?;
    }
    let trust = prompt_trust(&parsed, model);
    let source = token_source(&parsed, trust, model, inputs, limits);
    let ready = |plan: Result<Plan, _>| plan.map(|plan| Planning::Ready(Box::new(plan)));
    let tokens = unhashed_tokens(&parsed, body.len(), model);
    let by_text = match source {
        Ok(_) => None,
        Err(_) => by_text(&parsed, tokens, model, inputs),
    };
    let images = match source {
        Err(why) if why == OpaqueReason::Images.as_str() => {
            image_prompt(&parsed, trust, (name, model), inputs)
        }
        Ok(_) | Err(_) => None,
    };
    let resume = inputs.resume.terms(&parsed, body, model.max_model_len);
    let asked = resume.as_ref().map(|_| openai::with_token_ids(body));
    let all_have_ids = trust.is_some_and(|trust| trust.all_passed);
    let sends_ids = inputs.completion_prompts == CompletionPrompts::TokenIds && all_have_ids;
    let slot = sends_ids.then(|| PromptSlot::of(&parsed, body, model.max_model_len));
    let form = form::form_of(&parsed, name, model);
    let draft = PlanDraft {
        slot: slot.flatten(),
        tokens,
        resume,
        mismatched: trust.map_or_else(Vec::new, |trust| trust.mismatched.clone()),
        rewritten: asked.or(parsed.rewritten).map(Bytes::from),
        by_text,
        form,
        images,
        info: parsed.info,
        sample: None,
    };
    match source {
        Ok(TokenSource::Texts {
            loaded,
            texts,
            special,
            memory,
        }) => Ok(Planning::Encoding(Box::new(PlanEncoding {
            draft,
            loaded,
            special,
            current: None,
            lists: Vec::with_capacity(texts.len()),
            texts: texts.into_iter(),
            tokens_max: model.max_model_len.map_or(TOKENS_MAX, |max| max as usize),
            memory: limits.budget.cloned().zip(memory),
        }))),
        Ok(TokenSource::Ids(lists)) => ready(draft.finish(Ok(lists), inputs)),
        Err(why) => ready(draft.finish(Err(why), inputs)),
    }
}

impl PlanEncoding {
    /// Encodes about `bytes` more. Returns the plan after the last text.
    pub(super) fn step(
        &mut self,
        inputs: &PlanInputs,
        bytes: usize,
    ) -> Option<Result<Plan, ProxyError>> {
        let loaded = Arc::clone(&self.loaded);
        let tokenizer = &loaded.tokenizer;
        let mut task = match self.current.take() {
            Some(task) => task,
            None => match self.texts.next() {
                Some(text) => tokenizer
                    .task(text, self.special)
                    .with_tokens_max(self.tokens_max)
                    .with_cache_scope(CacheScope::of_salt(self.draft.info.cache_salt.as_deref())),
                None => {
                    let lists = std::mem::take(&mut self.lists);
                    return Some(self.end(inputs, Ok(lists)));
                }
            },
        };
        let Ok(_step_memory) = self.step_memory(tokenizer, task.text()) else {
            return Some(self.end(inputs, Err(NO_MEMORY)));
        };
        match task.step(tokenizer, bytes) {
            Ok(TaskState::More) => self.current = Some(task),
            Ok(TaskState::Done) => self.encoded(task, inputs.sampling),
            Err(TextEncodeError::TooManyTokens | TextEncodeError::LongText) => {
                return Some(self.end(inputs, Err(TOO_LARGE)));
            }
            Err(
                TextEncodeError::Failed(_) | TextEncodeError::LongWord | TextEncodeError::LongPart,
            ) => {
                return Some(self.end(inputs, Err("tokenizer_failed")));
            }
        }
        None
    }

    /// Charges what one step takes, and no job that only waits for its turn.
    fn step_memory(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
    ) -> Result<Option<BudgetShare>, Unhashed> {
        match (&self.memory, tokenizer.step_memory(text.len())) {
            (Some((budget, _)), bytes) if bytes > 0 => {
                budget.charge_spare(bytes).map(Some).ok_or(NO_MEMORY)
            }
            (Some(_) | None, _) => Ok(None),
        }
    }

    /// Bytes that are not encoded yet.
    pub(super) fn bytes_left(&self) -> usize {
        let current = self.current.as_ref().map_or(0, TextTask::bytes_left);
        let later = self.texts.as_slice().iter().map(String::len);
        current + later.sum::<usize>()
    }

    fn encoded(&mut self, task: TextTask<String>, sampling: TextSampling) {
        if sampling == TextSampling::Keep && task.text().len() <= SAMPLE_BYTES_MAX {
            self.draft.sample = Some(TextSample {
                loaded: Arc::clone(&self.loaded),
                text: task.text().to_owned(),
                special: self.special,
                ids: task.ids().to_vec(),
            });
        }
        self.lists.push(task.into_ids());
    }

    fn end(
        &mut self,
        inputs: &PlanInputs,
        lists: Result<Vec<Vec<u32>>, Unhashed>,
    ) -> Result<Plan, ProxyError> {
        std::mem::take(&mut self.draft).finish(lists, inputs)
    }
}

impl PlanDraft {
    /// Puts the token ids into the body for the engine, if it gets them.
    fn fill_slot(&mut self, lists: &[Vec<u32>]) {
        if let (Some(slot), [ids]) = (self.slot.take(), lists)
            && let Some(body) = slot.filled(ids)
        {
            let asks = self.resume.is_some();
            let body = if asks {
                openai::with_token_ids(&body)
            } else {
                body
            };
            self.rewritten = Some(body.into());
        }
    }

    fn finish(
        mut self,
        lists: Result<Vec<Vec<u32>>, Unhashed>,
        inputs: &PlanInputs,
    ) -> Result<Plan, ProxyError> {
        if let Ok(lists) = &lists {
            self.fill_slot(lists);
        }
        let info = self.info;
        let (name, model) = known(&inputs.catalog, info.model.as_deref())?;
        let size = block_size(model);
        let lora = model.adapter.then_some(name);
        let model_max = model.max_model_len.map(|tokens| tokens as usize);
        let whole = |tokens: &Vec<u32>| info.keeps_whole(tokens.len(), model_max);
        let lists = lists.and_then(|lists| {
            let is_whole = lists.iter().all(whole);
            is_whole.then_some(lists).ok_or(TRUNCATED)
        });
        let (prompt, single, unhashed) = match lists {
            // Its length is known, and its blocks are not.
            Ok(lists) if model.cuts.is_empty() => {
                let tokens = lists.iter().map(Vec::len).sum::<usize>();
                let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
                let bytes = token_bytes(&lists).unwrap_or_default();
                let seed = Seed::new(lora, info.cache_salt.as_deref());
                let prompt = Prompt::of_text(&[&bytes], tokens, size, seed);
                (prompt, true, Some(NO_BLOCK_SIZE))
            }
            Ok(lists) => {
                let cut = |cut: &BlockCut| hashed(&lists, &info, lora, *cut);
                let others = model.cuts.iter().skip(1).map(cut).collect();
                let first = model.cuts.first().copied();
                let first = first.unwrap_or_else(|| size.into());
                let prompt = cut(&first).with_other_cuts(others);
                (prompt, lists.len() == 1, None)
            }
            Err(why) => {
                let by_text = self.by_text;
                let prompt = by_text.unwrap_or_else(|| Prompt::opaque(self.tokens, size));
                (prompt, true, Some(why))
            }
        };
        let mismatched = self.mismatched;
        Ok(Plan {
            images: self.images,
            prompt: prompt
                .with_form(self.form.filter(|_| unhashed.is_none()))
                .with_reads(cache_reads(&info))
                .with_mismatched(mismatched)
                .with_shown(info.stream && self.resume.is_none())
                .with_session(info.user.as_deref().and_then(SessionKey::named)),
            model: name.to_owned(),
            series: Arc::clone(inputs.catalog.series.of(name)),
            streaming: info.stream,
            single,
            unhashed,
            rewritten: self.rewritten,
            previous: info.previous_response,
            sample: self.sample,
            resume: self.resume,
        })
    }
}

const fn cache_reads(info: &RequestInfo) -> CacheReads {
    if info.reads_cache {
        CacheReads::Allowed
    } else {
        CacheReads::Bypassed
    }
}

/// A prompt whose only unknown is its images, for an engine to render.
fn image_prompt(
    parsed: &ParsedRequest<'_>,
    trust: Option<&PromptTrust>,
    (name, model): (&str, &CatalogModel),
    inputs: &PlanInputs,
) -> Option<ImagePrompt> {
    let renders = inputs.multimodal == MultimodalRule::Render;
    renders.then(|| ImagePrompt {
        route: parsed.route,
        info: parsed.info.clone(),
        base: model.base.clone(),
        is_adapter: model.adapter,
        cuts: model.cuts.clone(),
        form: form::with_images(form::form_of(parsed, name, model)),
        model_max: model.max_model_len.map(|tokens| tokens as usize),
        reads: cache_reads(&parsed.info),
        mismatched: trust.map_or_else(Vec::new, |trust| trust.mismatched.clone()),
    })
}

/// The model with its name. Without a name it is the only base model.
fn known<'a>(
    catalog: &'a ModelCatalog,
    name: Option<&str>,
) -> Result<(&'a str, &'a CatalogModel), ProxyError> {
    if catalog.models.is_empty() {
        return Err(ProxyError::NoWorker);
    }
    let name = name.or_else(|| catalog.only_model());
    let name = name.ok_or_else(OpenAiError::missing_model)?;
    let known = catalog.models.get_key_value(name);
    let (name, model) = known.ok_or_else(|| ProxyError::UnknownModel(name.to_owned()))?;
    Ok((name, model))
}

pub(super) fn block_size(model: &CatalogModel) -> BlockSize {
    let first = model.cuts.first();
    first.map_or(ASSUMED_BLOCK_SIZE, |cut| cut.size)
}

/// The trust in the router's tokens of such a prompt; `None` where the client sent the token ids.
fn prompt_trust<'a>(
    parsed: &ParsedRequest<'_>,
    model: &'a CatalogModel,
) -> Option<&'a PromptTrust> {
    let parity = &model.parity;
    match &parsed.prompt {
        openai::PromptSource::Completion(parts) => match &parts.prompts {
            PromptList::Tokens(_) => None,
            PromptList::Texts(_) => Some(&parity.text),
        },
        openai::PromptSource::Chat(parts) => Some(match (parsed.route, parts.tools.is_some()) {
            (PromptRoute::Responses, _) => &parity.responses,
            (PromptRoute::Messages, true) => &parity.messages_with_tools,
            (PromptRoute::Messages, false) => &parity.messages,
            (_, true) => &parity.chat_with_tools,
            (_, false) => &parity.chat,
        }),
    }
}

/// Why a chat that its template does not render is not hashed.
fn not_rendered(error: &RenderError, limits: &WorkLimits<'_>) -> Unhashed {
    if *error == RenderError::TooLong && limits.budget.is_none() {
        SLOW_TEMPLATE
    } else if matches!(error, RenderError::Number(_)) {
        OpaqueReason::Number.as_str()
    } else {
        "template_failed"
    }
}

/// The token ids of each prompt, or the texts that have those of the engines that are not
/// mismatched.
fn token_source(
    parsed: &ParsedRequest<'_>,
    trust: Option<&PromptTrust>,
    model: &CatalogModel,
    inputs: &PlanInputs,
    limits: &WorkLimits<'_>,
) -> Result<TokenSource, Unhashed> {
    let tokenizer = || {
        let loaded = inputs.tokenizers.of(&model.base).ok_or("no_tokenizer")?;
        // Checks of another tokenizer prove nothing about this one.
        let is_checked = model.parity.tokenizer == Some(loaded.version);
        match trust {
            Some(trust) if !trust.proven || !is_checked => Err("parity"),
            Some(_) | None => Ok(loaded),
        }
    };
    // Other policies' hashes of texts must be those of the other routers.
    let is_hashed_for_record = inputs.is_recorded && inputs.policy.is_blind();
    if !inputs.policy.reads_index() && !is_hashed_for_record {
        return Err("policy");
    }
    if inputs.work == PromptWork::Skip {
        return Err(TOO_SLOW);
    }
    if let Some(opaque) = parsed.info.opaque {
        return Err(opaque.as_str());
    }
    let bytes_max = |tokenizer: &Tokenizer| {
        let by_model = model.max_model_len.zip(tokenizer.token_bytes_max());
        let by_model = by_model.map(|(tokens, bytes)| (tokens as usize).saturating_mul(bytes));
        by_model.unwrap_or(usize::MAX).min(inputs.prompt_bytes_max)
    };
    match &parsed.prompt {
        openai::PromptSource::Completion(parts) => match &parts.prompts {
            PromptList::Tokens(lists) => Ok(TokenSource::Ids(lists.clone())),
            PromptList::Texts(texts) => {
                let bytes: usize = texts.iter().map(|text| text.len()).sum();
                let loaded = Arc::clone(tokenizer()?);
                let size = PromptSize { bytes, values: 0 };
                let memory = size.admit(bytes_max(&loaded.tokenizer), limits)?;
                Ok(TokenSource::Texts {
                    loaded,
                    texts: texts.iter().map(|text| text.clone().into_owned()).collect(),
                    special: parts.special_tokens,
                    memory,
                })
            }
        },
        openai::PromptSource::Chat(parts) => {
            let known = inputs.tokenizers.of(&model.base);
            let templates = known.map(|known| known.tokenizer.templates());
            if let Some(Err(RenderError::OwnRenderer(_))) = templates {
                return Err("own_renderer");
            }
            let loaded = Arc::clone(tokenizer()?);
            let size = PromptSize {
                bytes: parts.bytes(),
                values: parts.values_max(),
            };
            let memory = size.admit(bytes_max(&loaded.tokenizer), limits)?;
            let text = loaded.tokenizer.templates().and_then(|templates| {
                templates.render_within(parts, inputs.now, limits.of_rendering())
            });
            let text = text.map_err(|error| not_rendered(&error, limits))?;
            Ok(TokenSource::Texts {
                loaded,
                texts: vec![text],
                special: parts.special_tokens,
                memory,
            })
        }
    }
}

/// What a prompt may cost.
struct PromptSize {
    bytes: usize,
    /// JSON values that a template reads.
    values: usize,
}

impl PromptSize {
    /// Charges the memory that the prompt takes until its tokens are hashed.
    fn admit(
        &self,
        bytes_max: usize,
        limits: &WorkLimits<'_>,
    ) -> Result<Option<BudgetShare>, Unhashed> {
        if self.bytes > bytes_max {
            return Err(TOO_LARGE);
        }
        let memory = self.bytes.saturating_mul(MEMORY_OF_BYTE);
        let memory = memory.saturating_add(self.values.saturating_mul(MEMORY_OF_VALUE));
        let memory_max = self.bytes.saturating_mul(MEMORY_OF_BYTE_MAX);
        if memory > memory_max.max(MEMORY_ALLOWED) {
            return Err(NO_MEMORY);
        }
        let charged = memory.max(memory_max);
        let charge = |budget| charge_large(budget, charged).ok_or(NO_MEMORY);
        limits.budget.map(charge).transpose()
    }
}

/// Several prompts go to one worker together: the longest decides the overlap, all of them count as
/// load. The longest loses its last token, as an engine computes that always and the total length
/// does not show where the prompt ends; where names cover the tokens behind a block, they show it.
fn hashed(lists: &[Vec<u32>], info: &RequestInfo, lora: Option<&str>, cut: BlockCut) -> Prompt {
    let seed = Seed::new(lora, info.cache_salt.as_deref());
    // The first one of the longest.
    let Some(longest) = lists.iter().rev().max_by_key(|list| list.len()) else {
        return Prompt::new(&[], cut, seed);
    };
    if lists.len() == 1 {
        return Prompt::new(longest, cut, seed);
    }
    let total = lists.iter().map(Vec::len).sum::<usize>();
    let lost = usize::from(cut.lookahead == 0);
    let blocks = local_hashes(&longest[..longest.len().saturating_sub(lost)], cut, seed);
    Prompt::of_blocks(u32::try_from(total).unwrap_or(u32::MAX), cut, seed, blocks)
}

/// The prompt by its text: where its tokens are not known, equal beginnings still are.
fn by_text(
    parsed: &ParsedRequest<'_>,
    length: u32,
    model: &CatalogModel,
    inputs: &PlanInputs,
) -> Option<Prompt> {
    if inputs.policy.is_blind() {
        return None;
    }
    let mut parts: Vec<&[u8]> = Vec::new();
    let tokens: Vec<u8>;
    match &parsed.prompt {
        openai::PromptSource::Completion(completion) => match &completion.prompts {
            PromptList::Texts(texts) => {
                let [only] = texts.as_slice() else {
                    return None;
                };
                parts.push(only.as_bytes());
            }
            PromptList::Tokens(lists) => {
                tokens = token_bytes(lists)?;
                parts.push(&tokens);
            }
        },
        openai::PromptSource::Chat(chat) => {
            // Templates render tools before messages.
            let inputs = [chat.tools.as_deref(), chat.documents, chat.template_kwargs];
            let inputs = inputs.into_iter().flatten().chain([&*chat.messages]);
            parts.extend(inputs.map(|raw| raw.get().as_bytes()));
        }
    }
    let adapter = parsed.info.model.as_deref().filter(|_| model.adapter);
    let seed = Seed::new(adapter, parsed.info.cache_salt.as_deref());
    let size = block_size(model);
    Some(Prompt::of_text(&parts, length, size, seed))
}

/// The tokens of a single prompt as bytes.
fn token_bytes(lists: &[Vec<u32>]) -> Option<Vec<u8>> {
    let [only] = lists else {
        return None;
    };
    Some(only.iter().flat_map(|token| token.to_le_bytes()).collect())
}

/// The length of a prompt that is not hashed. Token ids are counted; other fields may add to them.
fn unhashed_tokens(parsed: &ParsedRequest<'_>, body_bytes: usize, model: &CatalogModel) -> u32 {
    let guess = match parsed.info.opaque {
        // Each of them may be as long as the model allows.
        Some(OpaqueReason::SeveralPrompts) => text_tokens(body_bytes),
        Some(_) | None => tokens_guess(body_bytes, model),
    };
    let openai::PromptSource::Completion(completion) = &parsed.prompt else {
        return guess;
    };
    let PromptList::Tokens(lists) = &completion.prompts else {
        return guess;
    };
    let count = lists.iter().map(Vec::len).sum::<usize>();
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    match parsed.info.opaque {
        None => count,
        Some(_) => count.max(guess),
    }
}

fn tokens_guess(body_bytes: usize, model: &CatalogModel) -> u32 {
    text_tokens(body_bytes).min(model.max_model_len.unwrap_or(u32::MAX))
}

fn text_tokens(bytes: usize) -> u32 {
    u32::try_from(bytes / BYTES_PER_TOKEN).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
