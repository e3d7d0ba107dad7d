use serde_json::{Value, json};

use super::super::request::{PromptRoute, parse};
use super::*;

const MODEL_LEN: u32 = 100;

fn terms(route: PromptRoute, body: &Value) -> Option<ResumeTerms> {
    let body = body.to_string();
    let parsed = parse(route, body.as_bytes()).unwrap();
    ResumeTerms::of(&parsed, body.as_bytes(), Some(MODEL_LEN))
}

fn completion(fields: Value) -> Option<ResumeTerms> {
    let mut body = json!({"model": "m", "prompt": "p", "max_tokens": 9, "stream": true});
    body.as_object_mut()
        .unwrap()
        .extend(fields.as_object().unwrap().clone());
    terms(PromptRoute::Completions, &body)
}

fn chat(fields: Value) -> Option<ResumeTerms> {
    let message = json!({"role": "user", "content": "p"});
    let mut body = json!({"model": "m", "messages": [message], "stream": true});
    body.as_object_mut()
        .unwrap()
        .extend(fields.as_object().unwrap().clone());
    terms(PromptRoute::ChatCompletions, &body)
}

/// A chunk of a text completion as vLLM writes it.
fn text_chunk(id: &str, text: &str, prompt: Option<&[u32]>, ids: Option<&[u32]>) -> String {
    let choice = json!({
        "index": 0, "text": text, "logprobs": null, "finish_reason": null, "stop_reason": null,
        "prompt_token_ids": prompt, "token_ids": ids,
    });
    let chunk = json!({
        "id": id, "object": "text_completion", "created": 7, "model": "m", "choices": [choice],
    });
    format!("data: {chunk}\n\n")
}

fn chat_chunk(delta: Value, ids: Option<&[u32]>) -> String {
    let choice = json!({
        "index": 0, "delta": delta, "logprobs": null, "finish_reason": null, "token_ids": ids,
    });
    let chunk = json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m",
        "choices": [choice],
    });
    format!("data: {chunk}\n\n")
}

fn pushed(stream: &mut ResumableStream, bytes: &str) -> String {
    match stream.push(bytes.as_bytes()) {
        StreamBytes::Ready(out) => String::from_utf8(out).unwrap(),
        StreamBytes::Pending => String::new(),
        StreamBytes::TooLarge => panic!("too large"),
    }
}

fn request(stream: &mut ResumableStream) -> Option<Value> {
    let body = stream.resume()?;
    Some(serde_json::from_slice(&body).unwrap())
}

/// After a beginning of two tokens.
fn begun() -> ResumableStream {
    let mut stream = ResumableStream::new(completion(json!({})).unwrap());
    pushed(
        &mut stream,
        &text_chunk("c", "a", Some(&[5, 6]), Some(&[1])),
    );
    pushed(&mut stream, &text_chunk("c", "b", None, Some(&[2])));
    stream
}

#[test]
fn fields_that_leave_the_rest_the_same_admit_a_request() {
    for fields in [
        json!({}),
        json!({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "user": "u"}),
        json!({"repetition_penalty": 1.05, "logit_bias": {"5": 1}, "ignore_eos": true}),
        json!({"stream_options": {"include_usage": true}, "stop_token_ids": [3]}),
        json!({"n": 1, "logprobs": null, "echo": false, "presence_penalty": 0.0}),
        json!({"stop": [], "seed": null, "response_format": {"type": "text"}}),
    ] {
        assert!(completion(fields.clone()).is_some(), "{fields}");
    }
    for fields in [
        json!({"max_tokens": 5, "max_completion_tokens": 7, "tools": []}),
        json!({"chat_template_kwargs": {"a": 1}, "continue_final_message": true,
            "add_generation_prompt": false}),
    ] {
        assert!(chat(fields.clone()).is_some(), "{fields}");
    }
}

/// Each could make the rest of the answer another one.
#[test]
fn fields_that_count_or_match_the_whole_answer_exclude_a_request() {
    for fields in [
        json!({"stream": false}),
        json!({"n": 2}),
        json!({"echo": true}),
        json!({"logprobs": 0}),
        json!({"stop": "x"}),
        json!({"stop": ["x"]}),
        json!({"seed": 1}),
        json!({"presence_penalty": 0.5}),
        json!({"frequency_penalty": 0.5}),
        json!({"min_tokens": 1}),
        json!({"response_format": {"type": "json_object"}}),
        json!({"structured_outputs": {"regex": "a"}}),
        json!({"bad_words": ["x"]}),
        json!({"use_beam_search": true}),
        json!({"truncate_prompt_tokens": 4}),
        json!({"kv_transfer_params": {}}),
        json!({"vllm_xargs": {}}),
        json!({"return_token_ids": true}),
        json!({"a_field_of_tomorrow": 1}),
        json!({"max_tokens": null}),
        json!({"max_tokens": "9"}),
        json!({"prompt": ["a", "b"]}),
    ] {
        assert_eq!(completion(fields.clone()), None, "{fields}");
    }
    for fields in [
        json!({"tools": [{"type": "function", "function": {"name": "f"}}]}),
        json!({"tool_choice": "required"}),
        json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 1}]}]}),
        json!({"include_reasoning": false}),
    ] {
        assert_eq!(chat(fields.clone()), None, "{fields}");
    }
    let body = br#"{"prompt":"p","stream":true}"#;
    let parsed = parse(PromptRoute::Completions, body).unwrap();
    for model_len in [None, Some(MODEL_LEN_MAX + 1)] {
        assert_eq!(ResumeTerms::of(&parsed, body, model_len), None);
    }
}

#[test]
fn the_request_for_the_rest_has_all_tokens_and_what_is_left() {
    let fields = json!({"temperature": 0.5, "stream_options": {"include_usage": true}});
    let terms = completion(fields).unwrap();
    let body = terms.continuation(&[5, 6], &[1, 2]).unwrap();
    let expected = json!({
        "model": "m", "stream": true, "temperature": 0.5, "stream_options": {"include_usage": true},
        "prompt": [5, 6, 1, 2], "max_tokens": 7, "return_token_ids": true,
    });
    assert_eq!(serde_json::from_slice::<Value>(&body).unwrap(), expected);
    assert_eq!(terms.continuation(&[5, 6], &[1; 9]), None);
    let left = |terms: ResumeTerms| {
        let body = terms.continuation(&[5, 6], &[1, 2])?;
        serde_json::from_slice::<Value>(&body).unwrap()["max_tokens"].as_u64()
    };
    let body = json!({"prompt": "p", "stream": true});
    assert_eq!(
        left(self::terms(PromptRoute::Completions, &body).unwrap()),
        Some(14)
    );
    assert_eq!(left(chat(json!({})).unwrap()), Some(96), "the model's room");
    let both = json!({"max_tokens": 5, "max_completion_tokens": 8});
    assert_eq!(left(chat(both).unwrap()), Some(6));
}

#[test]
fn a_body_asks_for_token_ids() {
    let asked = with_token_ids(b" {\"a\": 1}");
    assert_eq!(asked, b" {\"return_token_ids\":true,\"a\": 1}");
}

/// In chunks of any size, with the bytes of a stream that was not asked for ids.
#[test]
fn a_client_gets_no_token_ids() {
    let comment = ": keep-alive\n\n";
    let ids = [
        comment.to_owned(),
        text_chunk("c", "a\u{e9}\"token_ids\":[1]", Some(&[5, 6]), Some(&[1])),
        text_chunk("c", "", None, Some(&[2, 3])),
        "data: {\"choices\":[],\"usage\":{\"completion_tokens\":3}}\r\n\r\n".to_owned(),
        "data: [DONE]\n\n".to_owned(),
    ];
    let mut plain = ids.clone();
    plain[1] = text_chunk("c", "a\u{e9}\"token_ids\":[1]", None, None);
    plain[2] = text_chunk("c", "", None, None);
    let (with_ids, plain) = (ids.concat(), plain.concat());
    for size in [1, 2, 7, 100, with_ids.len()] {
        let mut stream = ResumableStream::new(completion(json!({})).unwrap());
        let mut out = Vec::new();
        for chunk in with_ids.as_bytes().chunks(size) {
            if let StreamBytes::Ready(bytes) = stream.push(chunk) {
                out.extend(bytes);
            }
        }
        assert_eq!(String::from_utf8(out).unwrap(), plain, "{size}");
        assert!(stream.has_ended());
        assert_eq!(stream.finish(), b"");
    }
    let mut stream = ResumableStream::new(chat(json!({})).unwrap());
    let role = json!({"role": "assistant", "content": ""});
    let named =
        chat_chunk(role.clone(), None).replace("{\"id\"", "{\"prompt_token_ids\":[5],\"id\"");
    let out = pushed(&mut stream, &named);
    assert_eq!(out, named.replace("[5]", "null"));
    assert_eq!(
        pushed(
            &mut stream,
            &chat_chunk(json!({"content": "a"}), Some(&[1]))
        ),
        chat_chunk(json!({"content": "a"}), None)
    );
}

#[test]
fn the_rest_continues_a_text() {
    let mut stream = begun();
    let body = request(&mut stream).unwrap();
    assert_eq!(body["prompt"], json!([5, 6, 1, 2]));
    assert_eq!(body["max_tokens"], 7);
    // The first engine's half of an event is gone with it.
    let mut stream = begun();
    assert_eq!(pushed(&mut stream, "data: {\"id"), "");
    request(&mut stream).unwrap();
    let rest = text_chunk("other", "c", Some(&[5, 6, 1, 2]), Some(&[3]));
    assert_eq!(pushed(&mut stream, &rest), text_chunk("c", "c", None, None));
    let usage = "data: {\"id\":\"other\",\"choices\":[],\"usage\":{\"prompt_tokens\":4,\
        \"total_tokens\":5,\"completion_tokens\":1,\
        \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n";
    let out = pushed(&mut stream, usage);
    let chunk: Value = serde_json::from_str(out.trim().strip_prefix("data: ").unwrap()).unwrap();
    let expected = json!({
        "prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3,
        "prompt_tokens_details": null,
    });
    assert_eq!((&chunk["usage"], &chunk["id"]), (&expected, &json!("c")));
    // Whatever is kept of the tokens.
    let mut given_up = begun();
    request(&mut given_up).unwrap();
    given_up.give_up();
    assert_eq!(pushed(&mut given_up, usage), out);
    // A second time, with all tokens so far.
    let body = request(&mut stream).unwrap();
    assert_eq!(body["prompt"], json!([5, 6, 1, 2, 3]));
    assert_eq!(body["max_tokens"], 6);
}

#[test]
fn the_rest_of_a_chat_has_the_form_of_a_chat() {
    let mut stream = ResumableStream::new(chat(json!({})).unwrap());
    let role = chat_chunk(json!({"role": "assistant", "content": ""}), None);
    pushed(
        &mut stream,
        &role.replace("{\"id\"", "{\"prompt_token_ids\":[5],\"id\""),
    );
    pushed(
        &mut stream,
        &chat_chunk(json!({"content": "a"}), Some(&[1])),
    );
    assert_eq!(request(&mut stream).unwrap()["prompt"], json!([5, 1]));
    let rest = text_chunk("other", "b", Some(&[5, 1]), Some(&[2]));
    let expected = chat_chunk(json!({"content": "b"}), None);
    assert_eq!(pushed(&mut stream, &rest), expected);
}

/// An engine sends no text of an incomplete character, and of several tokens it is not known which.
#[test]
fn tokens_without_text_are_generated_again() {
    let mut stream = begun();
    pushed(&mut stream, &text_chunk("c", "", None, Some(&[3])));
    assert_eq!(request(&mut stream).unwrap()["prompt"], json!([5, 6, 1, 2]));
    let mut stream = begun();
    pushed(&mut stream, &text_chunk("c", "xy", None, Some(&[3, 4])));
    assert_eq!(request(&mut stream), None);
    pushed(&mut stream, &text_chunk("c", "z", None, Some(&[5])));
    let body = request(&mut stream).unwrap();
    assert_eq!(body["prompt"], json!([5, 6, 1, 2, 3, 4, 5]));
}

#[test]
fn streams_of_another_form_are_not_resumed() {
    let named = |delta| {
        let mut stream = ResumableStream::new(chat(json!({})).unwrap());
        let first = chat_chunk(json!({"role": "assistant", "content": ""}), None);
        let first = first.replace("{\"id\"", "{\"prompt_token_ids\":[5],\"id\"");
        pushed(&mut stream, &first);
        pushed(&mut stream, &chat_chunk(delta, Some(&[1])));
        request(&mut stream)
    };
    assert!(named(json!({"content": "a"})).is_some());
    for delta in [
        json!({"reasoning": "a"}),
        json!({"reasoning_content": "a"}),
        json!({"tool_calls": []}),
        json!({}),
    ] {
        assert_eq!(named(delta.clone()), None, "{delta}");
    }
    // Without any chunk, and of an engine that knows no token ids.
    let mut stream = ResumableStream::new(completion(json!({})).unwrap());
    assert_eq!(request(&mut stream), None);
    pushed(&mut stream, &text_chunk("c", "a", None, None));
    assert_eq!(request(&mut stream), None);
    // After the answer's end, or when the memory for tokens is denied.
    let mut stream = begun();
    let last = text_chunk("c", "c", None, Some(&[3]));
    pushed(
        &mut stream,
        &last.replace("\"finish_reason\":null", "\"finish_reason\":\"stop\""),
    );
    assert_eq!(request(&mut stream), None);
    let mut stream = begun();
    stream.give_up();
    assert_eq!(request(&mut stream), None);
    let out = pushed(&mut stream, &text_chunk("c", "c", None, Some(&[3])));
    assert_eq!(out, text_chunk("c", "c", None, None));
}

#[test]
fn an_event_has_a_bound() {
    let mut stream = begun();
    let chunk = vec![b'x'; 1 << 20];
    let mut pushes = (0..17).map(|_| stream.push(&chunk));
    assert!(pushes.any(|pushed| pushed == StreamBytes::TooLarge));
}

#[test]
fn a_stream_that_reported_an_error_is_not_resumed() {
    let mut stream = begun();
    let error = "data: {\"error\": {\"message\": \"it failed\", \"code\": 500}}\n\n";
    assert_eq!(pushed(&mut stream, error), error);
    assert_eq!(request(&mut stream), None);
    assert_eq!(stream.held_bytes(), 0);
    let mut stream = begun();
    pushed(&mut stream, ": a comment\n\n");
    assert!(request(&mut stream).is_some());
}
