//! Answers and events of `/v1/responses`.

use axum::body::Bytes;
use serde_json::{Value, json};

use super::{Answer, Token, Usage, argument_piece, arguments};

/// Before the item's deltas: created, in progress, item added; of a message also its part.
pub(super) fn opening(answer: &Answer) -> Bytes {
    let response = object(answer, "in_progress", json!([]), Value::Null);
    let mut events = vec![
        json!({"type": "response.created", "response": response}),
        json!({"type": "response.in_progress", "response": response}),
        json!({"type": "response.output_item.added", "item": item(answer, None, "in_progress")}),
    ];
    if answer.called.is_none() {
        events.push(json!({"type": "response.content_part.added", "part": part("")}));
    }
    numbered(answer, 0, events)
}

/// `number`: of the token in the answer, from 1.
pub(super) fn token_event(answer: &Answer, text: &str, token: Token, number: usize) -> Bytes {
    let event = match answer.called {
        Some(_) => {
            let delta = argument_piece(text, token);
            json!({"type": "response.function_call_arguments.delta", "delta": delta})
        }
        None => json!({"type": "response.output_text.delta", "delta": text, "logprobs": []}),
    };
    numbered(answer, opening_events(answer) + number - 1, vec![event])
}

pub(super) fn closing(answer: &Answer, text: &str, usage: Usage) -> Bytes {
    let mut events = match &answer.called {
        Some(name) => vec![json!({
            "type": "response.function_call_arguments.done", "name": name,
            "arguments": arguments(text),
        })],
        None => vec![
            json!({"type": "response.output_text.done", "text": text, "logprobs": []}),
            json!({"type": "response.content_part.done", "part": part(text)}),
        ],
    };
    events.extend([
        json!({"type": "response.output_item.done", "item": item(answer, Some(text), "completed")}),
        json!({"type": "response.completed", "response": whole(answer, text, usage)}),
    ]);
    numbered(answer, opening_events(answer) + usage.completion, events)
}

pub(super) fn whole(answer: &Answer, text: &str, usage: Usage) -> Value {
    let output = json!([item(answer, Some(text), "completed")]);
    object(answer, "completed", output, usage.of_response())
}

/// An answer that is generated in the background.
pub(super) fn queued(answer: &Answer) -> Value {
    object(answer, "queued", json!([]), Value::Null)
}

fn object(answer: &Answer, status: &str, output: Value, usage: Value) -> Value {
    json!({
        "id": answer.id, "created_at": answer.created, "model": answer.model, "object": "response",
        "output": output, "status": status, "usage": usage, "parallel_tool_calls": true,
        "tool_choice": "auto", "tools": [],
    })
}

fn item_id(answer: &Answer) -> String {
    let kind = answer.called.as_ref().map_or("msg", |_| "fc");
    format!("{kind}_{}", answer.id)
}

/// `text`: `None` before its first token.
fn item(answer: &Answer, text: Option<&str>, status: &str) -> Value {
    let id = item_id(answer);
    match &answer.called {
        Some(name) => json!({
            "type": "function_call", "id": id, "call_id": format!("call_{}", answer.id),
            "name": name, "arguments": text.map_or_else(String::new, arguments), "status": status,
        }),
        None => json!({
            "type": "message", "id": id, "role": "assistant", "status": status,
            "content": text.map(part).as_slice(),
        }),
    }
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": null})
}

fn opening_events(answer: &Answer) -> usize {
    4 - usize::from(answer.called.is_some())
}

/// Every event has its number in the stream; those of an item name it.
fn numbered(answer: &Answer, first: usize, events: Vec<Value>) -> Bytes {
    let write = |(number, mut event): (usize, Value)| {
        event["sequence_number"] = json!(number);
        if event.get("response").is_none() {
            event["output_index"] = json!(0);
        }
        if event.get("response").is_none() && event.get("item").is_none() {
            event["item_id"] = json!(item_id(answer));
            event["content_index"] = json!(0);
        }
        super::named_event(&event)
    };
    (first..).zip(events).map(write).collect::<String>().into()
}
