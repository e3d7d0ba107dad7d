//! `/v1/embeddings`, `/classify` and `/pooling`: one text or one list of token ids, whose blocks vLLM
//! caches as those of completions.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::SpecialTokens;
use super::completion::{self, CompletionParts, PromptList};
use super::error::OpenAiError;
use super::fields::{BodyFields, body_error, without_mark};
use super::request::{
    FirstOpaque, MEMORY_OF_ID, OpaqueReason, ParsedRequest, PromptRoute, PromptSource, RequestInfo,
};

const FIELDS: &[&str] = &[
    "model",
    "input",
    "messages",
    "task",
    "padding",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "cache_salt",
    "user",
];

/// Tasks that pool the last token. For others the engine computes the whole prompt.
const CACHED_TASKS: [&str; 2] = ["\"embed\"", "\"classify\""];

pub(super) fn parse<'b>(
    route: PromptRoute,
    body: &'b [u8],
    admits: &mut dyn FnMut(usize) -> bool,
) -> Result<ParsedRequest<'b>, OpenAiError> {
    let fields = BodyFields::read(body, FIELDS).map_err(|error| body_error(&error))?;
    let mut opaque = FirstOpaque::default();
    let input = fields.raw("input").filter(|_| !fields.has("messages"));
    let prompts = single_prompt(input, &mut opaque, admits);
    let truncate_prompt = opaque.readable(fields.integer("truncate_prompt_tokens"));
    let add = opaque.flag(&fields, "add_special_tokens");
    let padding = fields.raw("padding").map(|raw| raw.get());
    if padding.is_some_and(|padding| padding != "\"do_not_pad\"") {
        opaque.set(OpaqueReason::UnknownField);
    }
    let task = fields.raw("task").map(|raw| raw.get());
    let has_task = task.is_some_and(|task| CACHED_TASKS.contains(&task));
    let text = |name| fields.text(name).ok().flatten().map(Cow::into_owned);
    Ok(ParsedRequest {
        route,
        info: RequestInfo {
            model: text("model").filter(|model| !model.is_empty()),
            cache_salt: fields.text("cache_salt")?.map(Cow::into_owned),
            user: text("user"),
            truncate_prompt,
            reads_cache: route != PromptRoute::Pooling || has_task,
            opaque: opaque.reason(),
            ..RequestInfo::default()
        },
        prompt: PromptSource::Completion(CompletionParts {
            prompts: prompts.unwrap_or_else(|| unread(body)),
            special_tokens: SpecialTokens::from_flag(add, SpecialTokens::Add),
        }),
        rewritten: None,
    })
}

/// The prompt of a request that has a single one.
pub(super) fn single_prompt<'b>(
    input: Option<&'b RawValue>,
    opaque: &mut FirstOpaque,
    admits: &mut dyn FnMut(usize) -> bool,
) -> Option<PromptList<'b>> {
    let Some(input) = input else {
        opaque.set(OpaqueReason::UnknownItem);
        return None;
    };
    if !admits(completion::ids_max(input.get()).saturating_mul(MEMORY_OF_ID)) {
        opaque.set(OpaqueReason::PromptMemory);
        return None;
    }
    if completion::has_too_many(input.get()) {
        opaque.set(OpaqueReason::SeveralPrompts);
        return None;
    }
    let Ok(prompts) = completion::prompts(input) else {
        opaque.set(OpaqueReason::UnknownItem);
        return None;
    };
    let count = match &prompts {
        PromptList::Texts(texts) => texts.len(),
        PromptList::Tokens(lists) => lists.len(),
    };
    if count != 1 {
        opaque.set(OpaqueReason::SeveralPrompts);
        return None;
    }
    Some(prompts)
}

/// The body, by which equal beginnings are found where no tokens are known.
pub(super) fn unread(body: &[u8]) -> PromptList<'_> {
    let text = std::str::from_utf8(without_mark(body)).unwrap_or_default();
    PromptList::Texts(vec![Cow::Borrowed(text)])
}

#[cfg(test)]
mod tests {
    use super::super::request;
    use super::*;

    fn parsed(route: PromptRoute, body: &str) -> ParsedRequest<'_> {
        request::parse(route, body.as_bytes()).unwrap()
    }

    #[test]
    fn a_single_input_is_the_prompt() {
        let text = |text: &'static str| PromptList::Texts(vec![text.into()]);
        let ids = |ids: &[u32]| PromptList::Tokens(vec![ids.to_vec()]);
        for (input, wanted) in [
            ("\"a b\"", text("a b")),
            ("[\"a b\"]", text("a b")),
            ("[1, 2.0]", ids(&[1, 2])),
            ("[[1,2]]", ids(&[1, 2])),
        ] {
            let body = format!("{{\"model\":\"m\",\"input\":{input},\"dimensions\":8}}");
            let parsed = parsed(PromptRoute::Embeddings, &body);
            assert_eq!(parsed.info.opaque, None, "{input}");
            let PromptSource::Completion(parts) = parsed.prompt else {
                panic!("{input}");
            };
            assert_eq!(parts.prompts, wanted);
            assert_eq!(parts.special_tokens, SpecialTokens::Add);
            assert!(parsed.info.reads_cache);
        }
    }

    /// Engines may serve such requests, but the router does not know their tokens.
    #[test]
    fn other_inputs_are_routed_by_load() {
        use OpaqueReason::{SeveralPrompts, UnknownField, UnknownItem, Unreadable};
        for (members, reason) in [
            (r#""input":["a","b"]"#, SeveralPrompts),
            (r#""input":[[1],[2]]"#, SeveralPrompts),
            (r#""input":[{"role":"user","content":"a"}]"#, UnknownItem),
            (r#""input":{"a":1}"#, UnknownItem),
            (r#""input":null"#, UnknownItem),
            (r#""messages":[{"role":"user","content":"a"}]"#, UnknownItem),
            (r#""input":"a","messages":[]"#, UnknownItem),
            (r#""input":"a","padding":"max_length""#, UnknownField),
            (
                r#""input":"a","add_special_tokens":[]"#,
                Unreadable("add_special_tokens"),
            ),
        ] {
            let body = format!("{{\"model\":\"m\",{members}}}");
            let parsed = parsed(PromptRoute::Embeddings, &body);
            assert_eq!(parsed.info.opaque, Some(reason), "{members}");
            assert_eq!(parsed.info.model.as_deref(), Some("m"));
        }
    }

    /// Pooling of all tokens computes all of them.
    #[test]
    fn a_pooling_task_that_is_not_of_the_last_token_reads_no_cache() {
        for (task, reads) in [
            ("", false),
            (r#","task":null"#, false),
            (r#","task":"token_embed""#, false),
            (r#","task":"embed""#, true),
            (r#","task":"classify""#, true),
        ] {
            let body = format!("{{\"input\":\"a\"{task}}}");
            let info = parsed(PromptRoute::Pooling, &body).info;
            assert_eq!(info.reads_cache, reads, "{task}");
        }
    }

    #[test]
    fn a_salt_and_a_bound_of_the_prompt_count() {
        let body = r#"{"input":"a","cache_salt":"s","truncate_prompt_tokens":-1,"user":"u"}"#;
        let info = parsed(PromptRoute::Embeddings, body).info;
        assert_eq!(info.cache_salt.as_deref(), Some("s"));
        assert_eq!(info.truncate_prompt, Some(-1));
        assert_eq!(info.user.as_deref(), Some("u"));
    }
}
