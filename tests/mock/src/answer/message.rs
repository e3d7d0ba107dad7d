//! Answers and events of `/v1/messages`.

use axum::body::Bytes;
use serde_json::{Value, json};

use super::{Answer, Token, Usage, argument_piece, named_event};

pub(super) fn opening(answer: &Answer, usage: Usage) -> Bytes {
    let message = object(answer, json!([]), Value::Null, usage);
    let block = match &answer.called {
        Some(name) => {
            json!({"type": "tool_use", "id": call_id(answer), "name": name, "input": {}})
        }
        None => json!({"type": "text", "text": ""}),
    };
    events(&[
        json!({"type": "message_start", "message": message}),
        json!({"type": "content_block_start", "index": 0, "content_block": block}),
    ])
}

pub(super) fn token_event(answer: &Answer, text: &str, token: Token) -> Bytes {
    let delta = match answer.called {
        Some(_) => json!({
            "type": "input_json_delta", "partial_json": argument_piece(text, token),
        }),
        None => json!({"type": "text_delta", "text": text}),
    };
    events(&[json!({"type": "content_block_delta", "index": 0, "delta": delta})])
}

/// vLLM ends this stream too with the event of OpenAI's.
pub(super) fn closing(answer: &Answer, usage: Usage) -> Bytes {
    let ended = events(&[
        json!({"type": "content_block_stop", "index": 0}),
        json!({
            "type": "message_delta", "usage": usage.of_message(),
            "delta": {"stop_reason": stop_reason(answer), "stop_sequence": null},
        }),
        json!({"type": "message_stop"}),
    ]);
    [&*ended, super::DONE].concat().into()
}

pub(super) fn whole(answer: &Answer, text: &str, usage: Usage) -> Value {
    let block = match &answer.called {
        Some(name) => json!({
            "type": "tool_use", "id": call_id(answer), "name": name, "input": {"text": text},
        }),
        None => json!({"type": "text", "text": text}),
    };
    object(answer, json!([block]), json!(stop_reason(answer)), usage)
}

fn object(answer: &Answer, content: Value, stop_reason: Value, usage: Usage) -> Value {
    json!({
        "id": answer.id, "type": "message", "role": "assistant", "model": answer.model,
        "content": content, "stop_reason": stop_reason, "stop_sequence": null,
        "usage": usage.of_message(),
    })
}

const fn stop_reason(answer: &Answer) -> &'static str {
    match answer.called {
        Some(_) => "tool_use",
        None => "max_tokens",
    }
}

fn call_id(answer: &Answer) -> String {
    format!("toolu_{}", answer.id)
}

fn events(events: &[Value]) -> Bytes {
    events.iter().map(named_event).collect::<String>().into()
}
