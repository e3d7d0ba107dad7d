//! vLLM's `/inference/v1/generate`: token ids in, token ids out.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::SpecialTokens;
use super::completion::{self, CompletionParts, PromptList};
use super::error::OpenAiError;
use super::fields::{BodyFields, body_error};
use super::pooling::unread;
use super::request::{
    FirstOpaque, MEMORY_OF_ID, OpaqueReason, ParsedRequest, PromptRoute, PromptSource, RequestInfo,
    transferred_tokens,
};
use super::rewrite;

const FIELDS: &[&str] = &[
    "model",
    "token_ids",
    "features",
    "content_parts",
    "sampling_params",
    "stream",
    "cache_salt",
    "kv_transfer_params",
];

const SAMPLING_FIELDS: &[&str] = &[
    "n",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "skip_reading_prefix_cache",
    "extra_args",
];

pub(super) fn parse<'b>(
    body: &'b [u8],
    admits: &mut dyn FnMut(usize) -> bool,
) -> Result<ParsedRequest<'b>, OpenAiError> {
    let fields = BodyFields::read(body, FIELDS).map_err(|error| body_error(&error))?;
    let sampling = fields.raw("sampling_params").map(RawValue::get);
    let sampling = sampling.and_then(|raw| BodyFields::read(raw.as_bytes(), SAMPLING_FIELDS).ok());
    let sampling = sampling.unwrap_or_else(|| BodyFields::none(SAMPLING_FIELDS));
    let mut opaque = FirstOpaque::default();
    if fields.has("features") || fields.has("content_parts") {
        opaque.set(OpaqueReason::OtherMedia);
    }
    if transferred_tokens(&fields) {
        opaque.set(OpaqueReason::TransferredTokens);
    }
    let ids = ids(&fields, &mut opaque, admits);
    let stream = opaque.flag(&fields, "stream").unwrap_or(false);
    let text = |name| fields.text(name).ok().flatten().map(Cow::into_owned);
    let skips = sampling.has("skip_reading_prefix_cache")
        && sampling.flag("skip_reading_prefix_cache") != Ok(Some(false));
    let logs = sampling.has("prompt_logprobs") || sampling.has("prompt_logprob_token_ids");
    let count = sampling.raw("n").map(RawValue::get);
    let extra = sampling.raw("extra_args");
    Ok(ParsedRequest {
        route: PromptRoute::TokenIds,
        info: RequestInfo {
            model: text("model").filter(|model| !model.is_empty()),
            cache_salt: fields.text("cache_salt")?.map(Cow::into_owned),
            stream,
            reads_cache: !skips && !logs,
            several_sequences: count.is_some_and(|count| count != "1"),
            opaque: opaque.reason(),
            ..RequestInfo::default()
        },
        prompt: PromptSource::Completion(CompletionParts {
            prompts: ids.unwrap_or_else(|| unread(body)),
            special_tokens: SpecialTokens::Omit,
        }),
        rewritten: extra.and_then(|extra| rewrite::without_report_mode(body, extra)),
    })
}

fn ids<'b>(
    fields: &BodyFields<'b>,
    opaque: &mut FirstOpaque,
    admits: &mut dyn FnMut(usize) -> bool,
) -> Option<PromptList<'b>> {
    let Some(raw) = fields.raw("token_ids") else {
        opaque.set(OpaqueReason::UnknownItem);
        return None;
    };
    if !admits(completion::ids_max(raw.get()).saturating_mul(MEMORY_OF_ID)) {
        opaque.set(OpaqueReason::PromptMemory);
        return None;
    }
    match completion::prompts(raw) {
        Ok(PromptList::Tokens(lists)) if lists.len() == 1 && !raw.get().starts_with("[[") => {
            Some(PromptList::Tokens(lists))
        }
        Ok(_) | Err(_) => {
            opaque.set(OpaqueReason::UnknownItem);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::request;
    use super::*;

    fn parsed(body: &str) -> ParsedRequest<'_> {
        request::parse(PromptRoute::TokenIds, body.as_bytes()).unwrap()
    }

    #[test]
    fn the_ids_are_the_prompt() {
        let parsed = parsed(
            r#"{"model":"m","token_ids":[3,1,2],"sampling_params":{"n":1},"stream":true,
            "cache_salt":"s"}"#,
        );
        let PromptSource::Completion(parts) = &parsed.prompt else {
            panic!("no completion");
        };
        assert_eq!(parts.prompts, PromptList::Tokens(vec![vec![3, 1, 2]]));
        let info = &parsed.info;
        assert!(info.stream && info.reads_cache && !info.several_sequences);
        assert_eq!((info.opaque, info.cache_salt.as_deref()), (None, Some("s")));
        assert_eq!(parsed.rewritten, None);
    }

    #[test]
    fn what_changes_the_prompt_or_its_reading_counts() {
        for (members, reason) in [
            (r#""token_ids":[[1]]"#, OpaqueReason::UnknownItem),
            (r#""token_ids":"a""#, OpaqueReason::UnknownItem),
            (r#""prompt":[1]"#, OpaqueReason::UnknownItem),
            (r#""token_ids":[1],"features":{}"#, OpaqueReason::OtherMedia),
            (
                r#""token_ids":[1],"content_parts":[{}]"#,
                OpaqueReason::OtherMedia,
            ),
        ] {
            let body = format!("{{{members}}}");
            assert_eq!(parsed(&body).info.opaque, Some(reason), "{members}");
        }
        for (sampling, reads, several) in [
            (r#"{"prompt_logprobs":1}"#, false, false),
            (r#"{"skip_reading_prefix_cache":true}"#, false, false),
            (r#"{"skip_reading_prefix_cache":false}"#, true, false),
            (r#"{"n":2}"#, true, true),
        ] {
            let body = format!("{{\"token_ids\":[1],\"sampling_params\":{sampling}}}");
            let info = parsed(&body).info;
            assert_eq!(info.reads_cache, reads, "{sampling}");
            assert_eq!(info.several_sequences, several, "{sampling}");
        }
    }

    /// It would make the engine announce blocks again.
    #[test]
    fn the_report_mode_is_removed() {
        let body = r#"{"token_ids":[1],"sampling_params":{"extra_args":
            {"kv_cache_report_mode":"full","a":1},"n":1}}"#;
        let rewritten = String::from_utf8(parsed(body).rewritten.unwrap()).unwrap();
        assert!(!rewritten.contains("report_mode"), "{rewritten}");
        assert!(rewritten.contains("\"a\":1") && rewritten.contains("\"n\":1"));
    }
}
