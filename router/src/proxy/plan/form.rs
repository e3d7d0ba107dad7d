//! The form of a request's prompt: what it has in common with others that are rendered and tokenized
//! in one way ([`crate::route::evidence`]).

use std::sync::Arc;

use memchr::memmem;

use crate::fleet::CatalogModel;
use crate::openai::{ChatParts, ParsedRequest, PromptList, PromptSource, ThinkingRequest};
use crate::route::{PromptFeatures, PromptForm};

/// Bytes of a chat's messages that are searched: a conversation's form shows at its beginning.
const SEARCHED_MAX: usize = 32 << 10;

/// The form of the request's prompt. `None` if the engine computes several sequences for it: it
/// reports the cached tokens of any of them.
pub(super) fn form_of(
    parsed: &ParsedRequest<'_>,
    name: &str,
    model: &CatalogModel,
) -> Option<Arc<PromptForm>> {
    if parsed.info.several_sequences {
        return None;
    }
    let (features, is_tokenized) = match &parsed.prompt {
        PromptSource::Chat(chat) => (features(chat), true),
        PromptSource::Completion(parts) => match parts.prompts {
            PromptList::Texts(_) => (PromptFeatures::default(), true),
            PromptList::Tokens(_) => (PromptFeatures::TOKEN_IDS, false),
        },
    };
    let tokenizer = model.parity.tokenizer.filter(|_| is_tokenized);
    Some(Arc::new(PromptForm {
        model: Arc::from(name),
        tokenizer: tokenizer.map_or(0, |version| version.number()),
        route: parsed.route.path(),
        features,
    }))
}

/// The form of a prompt with images, whose token ids an engine gives.
pub(super) fn with_images(form: Option<Arc<PromptForm>>) -> Option<Arc<PromptForm>> {
    let form = form?;
    Some(Arc::new(PromptForm {
        tokenizer: 0,
        features: form.features.with(PromptFeatures::IMAGES, true),
        ..PromptForm::clone(&form)
    }))
}

fn features(chat: &ChatParts<'_>) -> PromptFeatures {
    let messages = chat.messages.get().as_bytes();
    let messages = &messages[..messages.len().min(SEARCHED_MAX)];
    // One pass for keys with one beginning.
    let has_key = |beginning: &[u8], ends: &[&[u8]]| {
        let mut found = memmem::find_iter(messages, beginning);
        found.any(|at| {
            let rest = &messages[at + beginning.len()..];
            ends.iter().any(|end| rest.starts_with(end))
        })
    };
    let has_options = chat.documents.is_some()
        || chat.template.is_some()
        || chat.template_kwargs.is_some()
        || chat.reasoning_effort.is_some()
        || chat.thinking != ThinkingRequest::Default;
    PromptFeatures::default()
        .with(PromptFeatures::TOOLS, chat.tools.is_some())
        .with(
            PromptFeatures::TOOL_CALLS,
            has_key(b"\"tool_call", &[b"s\"", b"_id\""]),
        )
        .with(PromptFeatures::CONTENT_PARTS, has_key(b"\"text", &[b"\""]))
        .with(
            PromptFeatures::REASONING,
            has_key(b"\"reasoning", &[b"\"", b"_content\""]),
        )
        .with(PromptFeatures::TEMPLATE_OPTIONS, has_options)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::{self, PromptRoute};

    fn form(route: PromptRoute, body: &str) -> Option<String> {
        let parsed = openai::parse(route, body.as_bytes()).unwrap();
        let form = form_of(&parsed, "m", &CatalogModel::default());
        form.map(|form| form.to_string())
    }

    #[test]
    fn what_templates_branch_on_distinguishes_forms() {
        let chat = |rest: &str, message: &str| {
            let body = format!(r#"{{"model":"m",{rest}"messages":[{message}]}}"#);
            form(PromptRoute::ChatCompletions, &body).unwrap()
        };
        let plain = r#"{"role":"user","content":"the \"text\" of \"tool_calls\""}"#;
        let at = "/v1/chat/completions of model m";
        assert_eq!(chat("", plain), at);
        let tools = r#""tools":[{"type":"function","function":{"name":"f"}}],"#;
        assert_eq!(chat(tools, plain), format!("{at} with tools"));
        let parts = r#"{"role":"user","content":[{"type":"text","text":"a"}]}"#;
        assert_eq!(chat("", parts), format!("{at} with content parts"));
        let called = r#"{"role":"tool","tool_call_id":"1","content":"a"}"#;
        assert_eq!(chat(tools, called), format!("{at} with tools, tool calls"));
        let options = r#""chat_template_kwargs":{"enable_thinking":false},"#;
        assert_eq!(chat(options, plain), format!("{at} with template options"));
        let ids = form(PromptRoute::Completions, r#"{"model":"m","prompt":[1,2]}"#);
        assert_eq!(ids.unwrap(), "/v1/completions of model m with token ids");
    }

    #[test]
    fn several_sequences_have_no_form() {
        for (field, has_form) in [
            ("\"n\":1", true),
            ("\"n\":null", true),
            ("\"n\":2", false),
            ("\"best_of\":2", false),
            ("\"use_beam_search\":true", false),
            ("\"use_beam_search\":false", true),
        ] {
            let body = format!(r#"{{"model":"m","prompt":"a",{field}}}"#);
            let form = form(PromptRoute::Completions, &body);
            assert_eq!(form.is_some(), has_form, "{field}");
        }
    }
}
