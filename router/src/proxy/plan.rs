//! From a body's bytes to a prompt: its length, and its block hashes where the router knows the
//! token ids that the engine will have. Synchronous; the caller chooses the thread.

use std::sync::Arc;

use bytes::Bytes;
use warmroute_proto::hash::local_hashes;
use warmroute_proto::{BlockSize, Seed, WorkerId};

use crate::error::ProxyError;
use crate::fleet::{CatalogModel, ModelCatalog, PromptTrust};
use crate::openai::{self, OpenAiError, ParsedRequest, PromptList, PromptRoute, RequestInfo};
use crate::route::{CacheReads, Policy, Prompt};
use crate::tokenize::{CivilTime, Tokenizer};

/// A rough size of text that is not tokenized, for load only.
pub(super) const BYTES_PER_TOKEN: usize = 4;

/// vLLM's default. Counts blocks until an engine reports its block size.
pub(super) const ASSUMED_BLOCK_SIZE: BlockSize = match BlockSize::new(16) {
    Some(size) => size,
    None => unreachable!(),
};

/// What a plan depends on, besides the body.
#[derive(Clone)]
pub(super) struct PlanInputs {
    pub catalog: Arc<ModelCatalog>,
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub policy: Policy,
    /// For chat templates with a date.
    pub now: CivilTime,
}

/// A request as far as routing needs it.
pub(super) struct Plan {
    pub model: String,
    pub prompt: Prompt,
    pub streaming: bool,
    /// It has one prompt, so that the reported usage is that of `prompt`.
    pub single: bool,
    /// Why the prompt has no blocks, if so.
    pub unhashed: Option<&'static str>,
    /// Workers that tokenize such a prompt differently: their caches do not count.
    pub mismatched: Vec<WorkerId>,
    /// The body for the engine, if it differs from the client's.
    pub rewritten: Option<Bytes>,
}

/// A prompt whose tokens cannot be known here, and why.
type Unhashed = &'static str;

pub(super) fn plan(
    route: PromptRoute,
    body: &[u8],
    inputs: &PlanInputs,
) -> Result<Plan, ProxyError> {
    let parsed = openai::parse(route, body)?;
    let (name, model) = known(&inputs.catalog, parsed.info.model.as_deref())?;
    let size = block_size(model);
    let lora = model.adapter.then_some(name);
    let trust = prompt_trust(&parsed, model);
    let lists = token_lists(&parsed, trust, model, inputs);
    let (prompt, single, unhashed) = match lists {
        // Its length is known, and its blocks are not.
        Ok(lists) if model.block_size.is_none() => {
            let tokens = lists.iter().map(Vec::len).sum::<usize>();
            let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
            (Prompt::opaque(tokens, size), true, Some("no_block_size"))
        }
        Ok(lists) => (
            hashed(&lists, &parsed.info, lora, size),
            lists.len() == 1,
            None,
        ),
        Err(why) => (opaque(body, model, size), true, Some(why)),
    };
    let mismatched = trust.map_or_else(Vec::new, |trust| trust.mismatched.clone());
    let reads = if parsed.info.reads_cache {
        CacheReads::Allowed
    } else {
        CacheReads::Bypassed
    };
    Ok(Plan {
        model: name.to_owned(),
        prompt: prompt.with_reads(reads).with_mismatched(mismatched.clone()),
        streaming: parsed.info.stream,
        single,
        unhashed,
        mismatched,
        rewritten: parsed.rewritten.map(Bytes::from),
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
    model.block_size.unwrap_or(ASSUMED_BLOCK_SIZE)
}

/// The trust in the router's tokens of such a prompt; `None` where the client sent the token ids.
fn prompt_trust<'a>(
    parsed: &ParsedRequest<'_>,
    model: &'a CatalogModel,
) -> Option<&'a PromptTrust> {
    match &parsed.prompt {
        openai::PromptSource::Completion(parts) => match &parts.prompts {
            PromptList::Tokens(_) => None,
            PromptList::Texts(_) => Some(&model.parity.text),
        },
        openai::PromptSource::Chat(parts) if parts.tools.is_some() => {
            Some(&model.parity.chat_with_tools)
        }
        openai::PromptSource::Chat(_) => Some(&model.parity.chat),
    }
}

/// The token ids of each prompt, equal to those of the engines that are not mismatched.
fn token_lists(
    parsed: &ParsedRequest<'_>,
    trust: Option<&PromptTrust>,
    model: &CatalogModel,
    inputs: &PlanInputs,
) -> Result<Vec<Vec<u32>>, Unhashed> {
    let tokenizer = || {
        let tokenizer = inputs.tokenizer.as_deref().ok_or("no_tokenizer")?;
        match trust {
            Some(trust) if !trust.proven => Err("parity"),
            Some(_) | None => Ok(tokenizer),
        }
    };
    match inputs.policy {
        Policy::Time | Policy::Kv | Policy::KvOnce => {}
        Policy::RoundRobin | Policy::LeastLoad | Policy::Random => return Err("policy"),
    }
    if let Some(opaque) = parsed.info.opaque {
        return Err(opaque.as_str());
    }
    let lists = match &parsed.prompt {
        openai::PromptSource::Completion(parts) => match &parts.prompts {
            PromptList::Tokens(lists) => lists.clone(),
            PromptList::Texts(texts) => {
                let tokenizer = tokenizer()?;
                texts
                    .iter()
                    .map(|text| tokenizer.encode(text, parts.special_tokens))
                    .collect::<Result<_, _>>()
                    .map_err(|_| "tokenizer_failed")?
            }
        },
        openai::PromptSource::Chat(parts) => {
            let tokens = tokenizer()?.encode_chat(parts, inputs.now);
            vec![tokens.map_err(|_| "template_failed")?]
        }
    };
    let model_max = model.max_model_len.map(|tokens| tokens as usize);
    let whole = |tokens: &Vec<u32>| parsed.info.keeps_whole(tokens.len(), model_max);
    if lists.iter().all(whole) {
        Ok(lists)
    } else {
        Err("truncated")
    }
}

/// Several prompts go to one worker together: the longest decides the overlap, all of them count as
/// load. The longest loses its last token, as an engine computes that always and the total length
/// does not show where the prompt ends.
fn hashed(lists: &[Vec<u32>], info: &RequestInfo, lora: Option<&str>, size: BlockSize) -> Prompt {
    let seed = Seed::new(lora, info.cache_salt.as_deref());
    // The first one of the longest.
    let Some(longest) = lists.iter().rev().max_by_key(|list| list.len()) else {
        return Prompt::new(&[], size, seed);
    };
    if lists.len() == 1 {
        return Prompt::new(longest, size, seed);
    }
    let total = lists.iter().map(Vec::len).sum::<usize>();
    let blocks = local_hashes(&longest[..longest.len().saturating_sub(1)], size, seed);
    Prompt::of_blocks(u32::try_from(total).unwrap_or(u32::MAX), size, seed, blocks)
}

fn opaque(body: &[u8], model: &CatalogModel, size: BlockSize) -> Prompt {
    let guess = u32::try_from(body.len() / BYTES_PER_TOKEN).unwrap_or(u32::MAX);
    Prompt::opaque(guess.min(model.max_model_len.unwrap_or(u32::MAX)), size)
}

#[cfg(test)]
mod tests;
