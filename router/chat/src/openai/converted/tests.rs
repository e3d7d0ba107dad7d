use serde_json::{Value, json};

use super::*;

/// Written by `testdata/convert.py` with vLLM itself.
const GOLDEN: &str = include_str!("../../../testdata/conversions.json");

fn parse_freely(route: ConvertedRoute, body: &[u8]) -> ParsedRequest<'_> {
    parse(route, body, &mut |_| true).unwrap()
}

fn chat<'a>(request: &'a ParsedRequest<'_>) -> &'a ChatParts<'a> {
    match &request.prompt {
        PromptSource::Chat(chat) => chat,
        PromptSource::Completion(_) => panic!("a chat"),
    }
}

fn value(raw: &RawValue) -> Value {
    serde_json::from_str(raw.get()).unwrap()
}

/// Arguments of calls as objects: templates get them so, whatever their spacing.
fn normal(mut messages: Value) -> Value {
    for message in messages.as_array_mut().unwrap() {
        let message = message.as_object_mut().unwrap();
        message.remove("type");
        message.remove("status");
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            let arguments = call["function"]["arguments"].as_str().unwrap();
            call["function"]["arguments"] = serde_json::from_str(arguments).unwrap();
        }
    }
    messages
}

#[test]
fn bodies_become_the_engines_chats() {
    let golden: Value = serde_json::from_str(GOLDEN).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() > 30);
    for case in cases {
        let route = match case["route"].as_str().unwrap() {
            "responses" => ConvertedRoute::Responses,
            _ => ConvertedRoute::Messages,
        };
        let body = case["body"].to_string();
        let request = parse_freely(route, body.as_bytes());
        assert_eq!(request.info.opaque, None, "{body}");
        let parts = chat(&request);
        let expected = normal(case["messages"].clone());
        assert_eq!(normal(value(&parts.messages)), expected, "{body}");
        let system_first = parts.system_first.as_deref().map(value).map(normal);
        let expected = case.get("system_first").cloned().map(normal);
        assert_eq!(system_first, expected, "{body}");
        let tools = parts.tools.as_deref().map_or(Value::Null, value);
        assert_eq!(tools.to_string(), case["tools"].to_string(), "{body}");
        let effort = parts.reasoning_effort.as_deref();
        let expected = case.get("reasoning_effort").and_then(Value::as_str);
        assert_eq!(effort, expected, "{body}");
        let is_continued = parts.ending == ChatEnding::InsideLastMessage;
        assert_eq!(is_continued, case["continued"] == true, "{body}");
        let is_none =
            case["body"]["tool_choice"] == "none" || case["body"]["tool_choice"]["type"] == "none";
        assert_eq!(parts.tool_choice == ToolChoice::None, is_none, "{body}");
    }
}

/// Whatever may change the prompt in a way that is not reproduced makes it opaque.
#[test]
#[expect(clippy::too_many_lines, reason = "one line for each body")]
fn other_bodies_are_opaque_and_refused_only_if_unreadable() {
    use ConvertedRoute::{Messages, Responses};
    let user = json!({"role": "user", "content": "Q"});
    let image = json!({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]});
    let source = json!({"type": "base64", "data": "x"});
    let with_image = json!({"role": "user", "content": [{"type": "image", "source": source}]});
    let assistant = |block: Value| json!({"messages": [{"role": "assistant", "content": [block]}]});
    for (route, body, why) in [
        (
            Responses,
            json!({"input": "x", "conversation": "c"}),
            "unknown_field",
        ),
        (
            Responses,
            json!({"input": "x", "background": true}),
            "unknown_field",
        ),
        (
            Responses,
            json!({"input": "x", "previous_response_id": "r"}),
            "stored_history",
        ),
        (
            Responses,
            json!({"input": "x", "prompt": {"id": "p"}}),
            "stored_history",
        ),
        (Responses, json!({"input": [image]}), "multimodal"),
        (
            Responses,
            json!({"input": [{"type": "item_reference", "id": "i"}]}),
            "unknown_item",
        ),
        (
            Responses,
            json!({"input": [{"type": "reasoning", "encrypted_content": "e"}]}),
            "unknown_item",
        ),
        (
            Responses,
            json!({"input": [{"role": "user", "content": "Q", "status": "later"}]}),
            "unknown_item",
        ),
        (
            Responses,
            json!({"input": "x", "tools": [{"type": "tool_of_tomorrow"}]}),
            "unknown_item",
        ),
        (
            Responses,
            json!({"input": "x", "tools": [{"type": "custom", "name": "c",
                "format": {"type": "grammar"}}]}),
            "unknown_item",
        ),
        (
            Responses,
            json!({"input": [{"role": "user", "content": "Q", "new": 1}]}),
            "unknown_item",
        ),
        (
            Responses,
            json!({"input": "x", "tools": [{"type": "function", "name": "f", "new": 1}]}),
            "unknown_item",
        ),
        (
            Responses,
            json!({"input": "x", "a_field_of_tomorrow": 1}),
            "unknown_field",
        ),
        (Responses, json!({"input": 7}), "unknown_item"),
        (Responses, json!({}), "unknown_item"),
        (
            Responses,
            json!({"input": "x", "kv_transfer_params": {"prompt_token_ids": [1]}}),
            "transferred_tokens",
        ),
        (
            Messages,
            json!({"messages": [user], "a_field_of_tomorrow": {}}),
            "unknown_field",
        ),
        (Messages, json!({"messages": [with_image]}), "multimodal"),
        (
            Messages,
            assistant(json!({"type": "tool_use", "name": "f", "input": {}})),
            "unknown_item",
        ),
        (
            Messages,
            assistant(json!({"type": "tool_result", "content": "x"})),
            "unknown_item",
        ),
        (
            Messages,
            assistant(json!({"type": "text", "text": "x", "new": 1})),
            "unknown_item",
        ),
        (
            Messages,
            json!({"messages": [user], "tools": [{"type": "bash_20250124", "name": "bash"}]}),
            "unknown_item",
        ),
    ] {
        let body = body.to_string();
        let request = parse_freely(route, body.as_bytes());
        let reason = request.info.opaque.map(OpaqueReason::as_str);
        assert_eq!(reason, Some(why), "{body}");
    }
    for body in [&b""[..], b"{", b"\xff", b"\"x\"", b"[]"] {
        assert!(parse(Messages, body, &mut |_| true).is_err());
    }
}

#[test]
fn options_are_read() {
    let parse = |body: Value| {
        let body = body.to_string();
        let info = parse_freely(ConvertedRoute::Responses, body.as_bytes()).info;
        (
            info.model,
            info.cache_salt,
            info.stream,
            info.truncate_prompt,
        )
    };
    let body = json!({"model": "m", "input": "x", "cache_salt": "s", "stream": true});
    let expected = (Some("m".to_owned()), Some("s".to_owned()), true, None);
    assert_eq!(parse(body), expected);
    for (truncation, keep) in [
        (json!("disabled"), None),
        (json!("auto"), Some(-1)),
        (Value::Null, Some(-1)),
    ] {
        assert_eq!(
            parse(json!({"input": "x", "truncation": truncation})).3,
            keep
        );
    }
}
