//! Cohere's `/v2/embed`: texts, each of which vLLM encodes and caches like an input of embeddings.

use std::borrow::Cow;

use super::SpecialTokens;
use super::completion::{CompletionParts, PromptList};
use super::error::OpenAiError;
use super::fields::{BodyFields, body_error};
use super::pooling::{single_prompt, unread};
use super::request::{
    FirstOpaque, OpaqueReason, ParsedRequest, PromptRoute, PromptSource, RequestInfo,
};

const FIELDS: &[&str] = &[
    "model",
    "texts",
    "images",
    "inputs",
    "input_type",
    "truncate",
    "max_tokens",
    "cache_salt",
];

pub(super) fn parse<'b>(
    body: &'b [u8],
    admits: &mut dyn FnMut(usize) -> bool,
) -> Result<ParsedRequest<'b>, OpenAiError> {
    let fields = BodyFields::read(body, FIELDS).map_err(|error| body_error(&error))?;
    let mut opaque = FirstOpaque::default();
    if fields.has("images") {
        opaque.set(OpaqueReason::OtherMedia);
    }
    // The model has a text for each type, which the engine puts before the prompt. It ignores a
    // salt, by which tenants are kept apart.
    if fields.has("input_type") || fields.has("cache_salt") {
        opaque.set(OpaqueReason::UnknownField);
    }
    let texts = fields.raw("texts").filter(|_| !fields.has("inputs"));
    let prompts = single_prompt(texts, &mut opaque, admits);
    if matches!(prompts, Some(PromptList::Tokens(_))) {
        opaque.set(OpaqueReason::UnknownItem);
    }
    let keeps = opaque.readable(fields.integer("max_tokens")).unwrap_or(-1);
    let truncate = fields.raw("truncate").map(|raw| raw.get());
    let model = fields.text("model").ok().flatten().map(Cow::into_owned);
    Ok(ParsedRequest {
        route: PromptRoute::Embed,
        info: RequestInfo {
            model: model.filter(|model| !model.is_empty()),
            truncate_prompt: (truncate != Some("\"NONE\"")).then_some(keeps),
            reads_cache: true,
            opaque: opaque.reason(),
            ..RequestInfo::default()
        },
        prompt: PromptSource::Completion(CompletionParts {
            prompts: prompts.unwrap_or_else(|| unread(body)),
            special_tokens: SpecialTokens::Add,
        }),
        rewritten: None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::request;
    use super::*;

    fn parsed(members: &str) -> ParsedRequest<'static> {
        let body: &'static str = format!("{{\"model\":\"m\",{members}}}").leak();
        request::parse(PromptRoute::Embed, body.as_bytes()).unwrap()
    }

    #[test]
    fn a_single_text_is_the_prompt() {
        let parsed = parsed(r#""texts":["a b"],"embedding_types":["float"],"priority":1"#);
        assert_eq!(parsed.info.opaque, None);
        assert_eq!(parsed.info.model.as_deref(), Some("m"));
        assert!(parsed.info.reads_cache);
        let PromptSource::Completion(parts) = parsed.prompt else {
            panic!("it has no chat");
        };
        assert_eq!(parts.prompts, PromptList::Texts(vec!["a b".into()]));
        assert_eq!(parts.special_tokens, SpecialTokens::Add);
    }

    #[test]
    fn what_else_is_embedded_is_routed_by_load() {
        use OpaqueReason::{OtherMedia, SeveralPrompts, UnknownField, UnknownItem, Unreadable};
        for (members, reason) in [
            (r#""texts":["a","b"]"#, SeveralPrompts),
            (r#""texts":[]"#, UnknownItem),
            (r#""texts":[1,2]"#, UnknownItem),
            (r#""images":["data:,"]"#, OtherMedia),
            (r#""inputs":[{"content":[]}]"#, UnknownItem),
            (r#""texts":["a"],"inputs":[]"#, UnknownItem),
            (r#""texts":["a"],"input_type":"search_query""#, UnknownField),
            (r#""texts":["a"],"cache_salt":"s""#, UnknownField),
            (r#""texts":["a"],"max_tokens":[]"#, Unreadable("max_tokens")),
        ] {
            assert_eq!(parsed(members).info.opaque, Some(reason), "{members}");
        }
    }

    /// It keeps as many tokens as the model takes, or as are asked for, unless that is refused.
    #[test]
    fn a_text_is_cut_as_the_engine_cuts_it() {
        for (members, wanted) in [
            ("", Some(-1)),
            (r#","truncate":"END""#, Some(-1)),
            (r#","truncate":"START","max_tokens":7"#, Some(7)),
            (r#","max_tokens":7"#, Some(7)),
            (r#","truncate":"NONE","max_tokens":7"#, None),
        ] {
            let members = [r#""texts":["a"]"#, members].concat();
            assert_eq!(parsed(&members).info.truncate_prompt, wanted, "{members}");
        }
    }
}
