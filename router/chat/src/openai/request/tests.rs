use proptest::prelude::*;

use super::super::{ChatEnding, PromptList, SpecialTokens};
use super::*;
use crate::openai::chat::VALUES_ALLOWED;

fn chat(body: &str) -> ParsedRequest<'_> {
    parse(PromptRoute::ChatCompletions, body.as_bytes()).unwrap()
}

fn completion(body: &str) -> ParsedRequest<'_> {
    parse(PromptRoute::Completions, body.as_bytes()).unwrap()
}

fn refusal(route: PromptRoute, body: &[u8]) -> (Option<&'static str>, Option<&'static str>) {
    let error = parse(route, body).unwrap_err();
    assert_eq!(error.status(), 400, "{error}");
    (error.param, error.code)
}

fn prompts<'a>(request: &'a ParsedRequest<'_>) -> &'a PromptList<'a> {
    match &request.prompt {
        PromptSource::Completion(parts) => &parts.prompts,
        PromptSource::Chat(_) => panic!("a completion"),
    }
}

#[test]
fn a_chat_with_everything_is_read_in_place() {
    let body = r#"{"model":"m/lora","messages":[{"role":"user","content":"hi"}],"tools":[{}],
        "tool_choice":"auto","chat_template_kwargs":{"a":1},"documents":[],"stream":true,
        "stream_options":{"include_usage":true},"max_tokens":5,"max_completion_tokens":7,"n":2,
        "cache_salt":"t","user":"u","add_generation_prompt":false,"continue_final_message":true,
        "add_special_tokens":true,"truncate_prompt_tokens":100,"temperature":0.5}"#;
    let request = chat(body);
    let info = &request.info;
    assert_eq!(info.model.as_deref(), Some("m/lora"));
    assert_eq!(info.cache_salt.as_deref(), Some("t"));
    assert!(info.stream && info.reads_cache);
    assert_eq!((info.truncate_prompt, info.opaque), (Some(100), None));
    let PromptSource::Chat(parts) = &request.prompt else {
        panic!("a chat")
    };
    assert_eq!(parts.messages.get(), r#"[{"role":"user","content":"hi"}]"#);
    assert_eq!(parts.ending, ChatEnding::InsideLastMessage);
    assert_eq!(parts.special_tokens, SpecialTokens::Add);
    assert_eq!(request.rewritten, None);
}

#[test]
fn defaults_are_the_engines() {
    let request = chat(r#"{"model":"m","messages":[],"tools":null,"stream":null}"#);
    let PromptSource::Chat(parts) = &request.prompt else {
        panic!("a chat")
    };
    assert_eq!(parts.ending, ChatEnding::GenerationPrompt);
    assert_eq!(parts.special_tokens, SpecialTokens::Omit);
    assert!(parts.tools.is_none() && !request.info.stream);
    let request = completion(r#"{"model":"m","prompt":"x"}"#);
    let PromptSource::Completion(parts) = &request.prompt else {
        panic!("a completion")
    };
    assert_eq!(parts.special_tokens, SpecialTokens::Add);
}

#[test]
fn every_form_of_a_prompt() {
    let texts =
        |list: &[&str]| PromptList::Texts(list.iter().map(|t| (*t).to_owned().into()).collect());
    for (json, expected) in [
        (r#""a\nb""#, texts(&["a\nb"])),
        (r#"["a","b\u00e9"]"#, texts(&["a", "bé"])),
        ("[1,2,3]", PromptList::Tokens(vec![vec![1, 2, 3]])),
        (
            "[[1,2],[],[4294967295]]",
            PromptList::Tokens(vec![vec![1, 2], vec![], vec![u32::MAX]]),
        ),
        ("[]", PromptList::Tokens(vec![vec![]])),
    ] {
        let body = format!(r#"{{"model":"m","prompt":{json}}}"#);
        assert_eq!(prompts(&completion(&body)), &expected);
    }
    for json in [
        "5",
        "{}",
        "[1,\"a\"]",
        "[\"a\",1]",
        "[[1],2]",
        "[-1]",
        "[4294967296]",
        "[1.5]",
    ] {
        let body = format!(r#"{{"model":"m","prompt":{json}}}"#);
        let (param, code) = refusal(PromptRoute::Completions, body.as_bytes());
        assert_eq!(
            (param, code),
            (Some("prompt"), Some("wrong_type")),
            "{json}"
        );
    }
}

#[test]
fn text_without_escapes_is_borrowed() {
    let body = r#"{"model":"m","prompt":"plain"}"#;
    let request = completion(body);
    let PromptList::Texts(texts) = prompts(&request) else {
        panic!("texts")
    };
    assert!(matches!(&texts[..], [Cow::Borrowed("plain")]));
}

#[test]
fn what_has_no_token_ids_is_opaque() {
    let image = r#"[{"role":"user","content":[{"type":"text","text":"a"},
        {"type":"image_url","image_url":{"url":"data:"}}]}]"#;
    let untyped = r#"[{"role":"user","content":[{"image_url":"x"}]}]"#;
    let text = r#"[{"role":"user","content":[{"type":"text","text":"a"},"b"]}]"#;
    let part = |part: &str| format!(r#"[{{"role":"user","content":[{part}]}}]"#);
    let sound = part(r#"{"type":"image_url"},{"type":"input_audio","input_audio":{}}"#);
    let embedded = part(r#"{"type":"image_embeds","image_embeds":"AAAA"}"#);
    let unknown = part(r#"{"type":"scent"},{"image_url":"x"}"#);
    for (messages, expected) in [
        (image, Some(OpaqueReason::Images)),
        (untyped, Some(OpaqueReason::Images)),
        (&sound, Some(OpaqueReason::OtherMedia)),
        (&embedded, Some(OpaqueReason::OtherMedia)),
        (&unknown, Some(OpaqueReason::OtherMedia)),
        (text, None),
    ] {
        let body = format!(r#"{{"model":"m","messages":{messages}}}"#);
        assert_eq!(chat(&body).info.opaque, expected);
    }
    // Images are rendered by an engine only if nothing else is in doubt.
    let body = format!(r#"{{"messages":{image},"kv_transfer_params":{{"prompt_token_ids":[1]}}}}"#);
    assert_eq!(
        chat(&body).info.opaque,
        Some(OpaqueReason::TransferredTokens)
    );
    for (field, expected) in [
        (r#""prompt_embeds":"AAAA""#, OpaqueReason::PromptEmbeds),
        (r#""prompt":"a","suffix":"b""#, OpaqueReason::Suffix),
        (
            r#""prompt":"a","kv_transfer_params":{"prompt_token_ids":[1]}"#,
            OpaqueReason::TransferredTokens,
        ),
        (
            r#""prompt":"a","add_special_tokens":"maybe""#,
            OpaqueReason::Unreadable("add_special_tokens"),
        ),
    ] {
        let body = format!(r#"{{"model":"m",{field}}}"#);
        assert_eq!(completion(&body).info.opaque, Some(expected), "{field}");
    }
}

#[test]
fn prompt_log_probabilities_stop_the_engine_from_reading_its_cache() {
    for (field, reads) in [
        (r#""logprobs":3"#, true),
        (r#""echo":true"#, true),
        (r#""echo":true,"logprobs":1"#, false),
        (r#""prompt_logprobs":0"#, false),
        (r#""prompt_logprobs":null"#, true),
    ] {
        let body = format!(r#"{{"model":"m","prompt":"a",{field}}}"#);
        assert_eq!(completion(&body).info.reads_cache, reads, "{field}");
    }
    assert!(
        !chat(r#"{"model":"m","messages":[],"echo":true}"#)
            .info
            .reads_cache
    );
}

/// The engine takes its only model.
#[test]
fn a_model_may_be_left_out() {
    for body in [
        r#"{"messages":[]}"#,
        r#"{"model":"","messages":[]}"#,
        r#"{"model":null,"messages":[]}"#,
    ] {
        assert_eq!(chat(body).info.model, None, "{body}");
    }
}

#[test]
fn truncation_is_only_known_for_prompts_below_it() {
    let keeps = |truncate_prompt, tokens, max| {
        RequestInfo {
            truncate_prompt,
            ..RequestInfo::default()
        }
        .keeps_whole(tokens, max)
    };
    assert!(keeps(None, 1 << 20, None));
    assert!(keeps(Some(10), 10, None) && !keeps(Some(10), 11, None));
    assert!(keeps(Some(-1), 99, Some(100)) && !keeps(Some(-1), 100, Some(100)));
    assert!(!keeps(Some(-1), 1, None));
}

#[test]
fn only_the_report_mode_is_cut_out_of_a_body() {
    let body =
        |xargs: &str| format!("{{ \"model\":\"m\",\"vllm_xargs\" : {xargs} , \"prompt\":\"é\"}}");
    let rewritten = |xargs| {
        let rewritten = completion(&body(xargs)).rewritten;
        rewritten.map(|bytes| String::from_utf8(bytes).unwrap())
    };
    for (xargs, expected) in [
        (r#"{"kv_cache_report_mode":"full"}"#, Some("{}")),
        (
            r#"{"a" : [1, 2],"kv_c\u0061che_report_mode":"full", "b":"\u00e9"}"#,
            Some(r#"{"a":[1, 2],"b":"\u00e9"}"#),
        ),
        (
            r#"{"\ud800":1,"kv_cache_report_mode":"full"}"#,
            Some(r#"{"\ud800":1}"#),
        ),
        (r#"{"a": 1}"#, None),
    ] {
        assert_eq!(rewritten(xargs), expected.map(body), "{xargs}");
    }
}

/// Python reads such bodies; forwarded, they could set the report mode.
#[test]
fn bodies_that_cannot_be_read_are_refused_on_every_route() {
    use PromptRoute::{ChatCompletions, Completions, Messages, Responses};
    const XARGS: &str = r#""vllm_xargs":{"kv_cache_report_mode":"full"}"#;
    for route in [ChatCompletions, Completions, Responses, Messages] {
        for (body, code) in [
            (
                format!("{{\"input\":\"x\",{XARGS},\"y\":NaN}}"),
                "invalid_json",
            ),
            (format!("[{{{XARGS}}}]"), "wrong_type"),
        ] {
            let error = parse(route, body.as_bytes()).unwrap_err();
            assert_eq!(error.code, Some(code), "{route:?}: {body}");
        }
    }
}

#[test]
fn a_byte_order_mark_is_skipped_and_kept() {
    let body = |xargs: &str| {
        format!("\u{feff}{{\"model\":\"m\",\"prompt\":\"x\",\"vllm_xargs\":{xargs}}}")
    };
    let sent = body(r#"{"kv_cache_report_mode":"full"}"#);
    let request = completion(&sent);
    assert_eq!(request.info.model.as_deref(), Some("m"));
    assert_eq!(request.rewritten, Some(body("{}").into_bytes()));
}

/// Python reads it as infinite.
#[test]
fn a_number_beyond_a_float_makes_a_chat_opaque() {
    for body in [
        r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a","n":1e400}]}]}"#,
        r#"{"messages":[],"tools":[{"n":1e400}]}"#,
        r#"{"messages":[],"chat_template_kwargs":{"n":-1e400}}"#,
    ] {
        assert_eq!(chat(body).info.opaque, Some(OpaqueReason::Number), "{body}");
    }
}

#[test]
fn what_no_engine_accepts_is_refused_with_the_field_at_fault() {
    use PromptRoute::{ChatCompletions as Chat, Completions};
    let deep = format!(
        r#"{{"model":"m","messages":{}{}}}"#,
        "[".repeat(9999),
        "]".repeat(9999)
    );
    let deep_tools = format!(
        r#"{{"model":"m","messages":[],"tools":{}{}}}"#,
        "[".repeat(200),
        "]".repeat(200)
    );
    for (route, body, param, code) in [
        (Chat, &b"{\"model\":\"m\""[..], None, "invalid_json"),
        (Chat, b"null", None, "wrong_type"),
        (
            Chat,
            b"{\"model\":5,\"messages\":[]}",
            Some("model"),
            "wrong_type",
        ),
        (
            Chat,
            b"{\"model\":\"m\"}",
            Some("messages"),
            "missing_messages",
        ),
        (
            Chat,
            b"{\"model\":\"m\",\"messages\":\"hi\"}",
            Some("messages"),
            "wrong_type",
        ),
        (
            Chat,
            b"{\"model\":\"m\",\"messages\":[1]}",
            Some("messages"),
            "wrong_type",
        ),
        (Chat, deep.as_bytes(), Some("messages"), "wrong_type"),
        (Chat, deep_tools.as_bytes(), Some("tools"), "too_deep"),
        (
            Completions,
            b"{\"model\":\"m\"}",
            Some("prompt"),
            "missing_prompt",
        ),
        (
            Completions,
            b"{\"model\":\"m\",\"prompt\":\"\xff\"}",
            None,
            "invalid_json",
        ),
    ] {
        assert_eq!(
            refusal(route, body),
            (param, Some(code)),
            "{}",
            body.escape_ascii()
        );
    }
}

#[test]
fn errors_never_quote_the_prompt() {
    use PromptRoute::{ChatCompletions, Completions};
    for (route, field) in [
        (ChatCompletions, r#""messages":"SECRET""#),
        (ChatCompletions, r#""messages":["SECRET, expected SECRET"]"#),
        (
            ChatCompletions,
            r#""messages":[{"content":[{"type":["SECRET"]}]}]"#,
        ),
        (
            ChatCompletions,
            r#""messages":[{"content":[{"type":7}]}],"x":"SECRET""#,
        ),
        (Completions, r#""prompt":[1,"SECRET"]"#),
        (Completions, r#""prompt":[[1],"SECRET recursion limit"]"#),
        (Completions, r#""prompt":{"SECRET":1}"#),
    ] {
        let body = format!(r#"{{"model":"m",{field}}}"#);
        let error = parse(route, body.as_bytes()).unwrap_err();
        assert_eq!(error.code, Some("wrong_type"), "{field}");
        assert!(error.message.contains("expected "), "{error}");
        let json = String::from_utf8(error.to_json()).unwrap();
        assert!(!json.contains("SECRET"), "{json}");
    }
}

/// JSON values of all kinds, and texts that are none.
const VALUE: &str = r#"\PC{0,12}|null|true|-1|1e9|\[\]|\{\}|"x"|\["a"\]"#;

proptest! {
    #[test]
    fn any_bytes_are_parsed_or_refused(body in prop::collection::vec(any::<u8>(), 0..200)) {
        for route in [PromptRoute::ChatCompletions, PromptRoute::Completions] {
            if let Err(error) = parse(route, &body) {
                prop_assert_eq!(error.status(), 400);
            }
        }
    }

    #[test]
    fn any_values_in_known_fields_are_parsed_or_refused(
        values in prop::collection::vec((0usize..17, VALUE), 0..6),
    ) {
        for (route, names) in [
            (PromptRoute::ChatCompletions, chat::FIELDS),
            (PromptRoute::Completions, completion::FIELDS),
        ] {
            let mut body = String::from("{\"model\":\"m\",\"messages\":[],\"prompt\":\"\"");
            for (name, value) in &values {
                body.push_str(&format!(",\"{}\":{value}", names[name % names.len()]));
            }
            body.push('}');
            if let Ok(ParsedRequest { rewritten: Some(body), .. }) = parse(route, body.as_bytes()) {
                prop_assert!(serde_json::from_slice::<serde_json::Value>(&body).is_ok());
            }
        }
    }
}

/// Small values take many times their text.
#[test]
fn bodies_of_many_small_values_are_not_read_as_a_whole() {
    let list = |item: &str, count: usize| format!("[{}]", vec![item; count].join(","));
    let few = VALUES_ALLOWED / 8;
    let message = r#"{"role":"user","content":"x"}"#;
    for (route, field, item, many) in [
        (PromptRoute::Completions, "prompt", "[1]", VALUES_ALLOWED),
        (PromptRoute::Completions, "prompt", "\"\"", VALUES_ALLOWED),
        (PromptRoute::Responses, "input", "{}", VALUES_ALLOWED),
        (PromptRoute::Responses, "input", message, VALUES_ALLOWED),
        (PromptRoute::Messages, "messages", message, VALUES_ALLOWED),
    ] {
        let reason = |count| {
            let body = format!(r#"{{"model":"m","{field}":{}}}"#, list(item, count));
            let parsed = parse(route, body.as_bytes()).unwrap();
            parsed.info.opaque
        };
        assert_eq!(
            reason(many),
            Some(OpaqueReason::PromptMemory),
            "{field} {item}"
        );
        assert_ne!(
            reason(few),
            Some(OpaqueReason::PromptMemory),
            "{field} {item}"
        );
    }
    let tokens = format!(r#"{{"prompt":{}}}"#, list("1", 2 * VALUES_ALLOWED));
    let parsed = parse(PromptRoute::Completions, tokens.as_bytes()).unwrap();
    assert_eq!(parsed.info.opaque, None);
}
