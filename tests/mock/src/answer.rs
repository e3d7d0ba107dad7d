//! Answers in vLLM's form: one JSON object, or server-sent events with one token each.

use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt as _};
use serde_json::{Value, json};

use crate::error::Error;
use crate::rank::{Generation, Output};
use crate::server::Server;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Completion,
    Chat,
    /// `/v1/responses`; not streamed.
    Response,
    /// `/v1/messages`; not streamed.
    Message,
}

pub(crate) struct Answer {
    pub(crate) shape: Shape,
    pub(crate) id: String,
    pub(crate) model: String,
    pub(crate) created: u64,
    pub(crate) include_usage: bool,
    /// Set if the client asked for token ids.
    pub(crate) prompt_token_ids: Option<Vec<Vec<u32>>>,
    pub(crate) text: Arc<Server>,
}

#[derive(Clone, Copy, Default)]
struct Usage {
    prompt: usize,
    completion: usize,
    cached: usize,
}

impl Usage {
    fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }

    /// In the form of `/v1/responses`.
    fn of_response(self) -> Value {
        json!({
            "input_tokens": self.prompt,
            "output_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "input_tokens_details": {"cached_tokens": self.cached},
        })
    }

    /// In the form of `/v1/messages`, whose input excludes what is read from the cache.
    fn of_message(self) -> Value {
        json!({
            "input_tokens": self.prompt - self.cached,
            "output_tokens": self.completion,
            "cache_read_input_tokens": self.cached,
        })
    }

    const fn count(&mut self, output: Output) {
        match output {
            Output::Admitted(cached) => self.cached += cached.total(),
            Output::Token(_) => self.completion += 1,
            Output::Finished => {}
        }
    }
}

impl Answer {
    /// Waits until every generation has ended.
    pub(crate) async fn whole(self, generations: Vec<Generation>) -> Result<Response, Error> {
        let mut usage = Usage::default();
        let (mut choices, mut text) = (Vec::new(), String::new());
        for (index, mut generation) in generations.into_iter().enumerate() {
            usage.prompt += generation.prompt_tokens;
            let mut tokens = Vec::new();
            loop {
                let output = generation.next().await.ok_or_else(Error::stopped)?;
                usage.count(output);
                match output {
                    Output::Admitted(_) => {}
                    Output::Token(token) => tokens.push(token),
                    Output::Finished => break,
                }
            }
            text.extend(tokens.iter().map(|&token| self.decode(token)));
            choices.push(self.choice(index, &tokens));
        }
        let object = match self.shape {
            Shape::Completion => "text_completion",
            Shape::Chat => "chat.completion",
            Shape::Response => return Ok(Json(self.response(&text, usage)).into_response()),
            Shape::Message => return Ok(Json(self.message(&text, usage)).into_response()),
        };
        let mut answer = json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "choices": choices, "usage": usage.json(),
        });
        if let (Shape::Chat, Some(prompts)) = (self.shape, &self.prompt_token_ids) {
            answer["prompt_token_ids"] = json!(prompts.first());
        }
        Ok(Json(answer).into_response())
    }

    fn response(&self, text: &str, usage: Usage) -> Value {
        let content = json!([{"type": "output_text", "text": text, "annotations": []}]);
        json!({
            "id": self.id, "created_at": self.created, "model": self.model, "object": "response",
            "output": [{"type": "message", "role": "assistant", "content": content}],
            "status": "incomplete", "usage": usage.of_response(),
        })
    }

    fn message(&self, text: &str, usage: Usage) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model,
            "content": [{"type": "text", "text": text}], "stop_reason": "max_tokens",
            "usage": usage.of_message(),
        })
    }

    pub(crate) fn stream(self, generations: Vec<Generation>) -> Response {
        let events = self.events(generations);
        let kind = [(CONTENT_TYPE, "text/event-stream; charset=utf-8")];
        (kind, Body::from_stream(events)).into_response()
    }

    fn choice(&self, index: usize, tokens: &[u32]) -> Value {
        let text: String = tokens.iter().map(|&token| self.decode(token)).collect();
        let mut choice = json!({
            "index": index, "logprobs": null, "finish_reason": "length", "stop_reason": null,
        });
        match self.shape {
            Shape::Completion => choice["text"] = json!(text),
            Shape::Chat | Shape::Response | Shape::Message => {
                choice["message"] = json!({"role": "assistant", "content": text});
            }
        }
        if let Some(prompts) = &self.prompt_token_ids {
            choice["token_ids"] = json!(tokens);
            if self.shape == Shape::Completion {
                choice["prompt_token_ids"] = json!(prompts.get(index));
            }
        }
        choice
    }

    fn events(self, generations: Vec<Generation>) -> impl Stream<Item = Result<Bytes, Cut>> {
        let prompt = generations.iter().map(|g| g.prompt_tokens).sum();
        let usage = Usage {
            prompt,
            ..Usage::default()
        };
        let outputs = stream::select_all(generations.into_iter().enumerate().map(outputs));
        let opening = self.opening();
        let state = Streaming {
            answer: self,
            outputs,
            usage,
            opening,
            held_back: None,
            done: false,
        };
        stream::unfold(state, |mut state| async move {
            let event = state.next().await?;
            Some((event, state))
        })
    }

    /// vLLM begins a chat with the role, but only when the first token is there.
    fn opening(&self) -> Option<Bytes> {
        let mut choice = match self.shape {
            Shape::Completion | Shape::Response | Shape::Message => return None,
            Shape::Chat => json!({
                "index": 0, "delta": {"role": "assistant", "content": ""},
                "logprobs": null, "finish_reason": null,
            }),
        };
        let mut chunk = self.chunk(json!([]));
        if let Some(prompts) = &self.prompt_token_ids {
            choice["token_ids"] = Value::Null;
            chunk["prompt_token_ids"] = json!(prompts.first());
        }
        chunk["choices"] = json!([choice]);
        Some(event(&chunk))
    }

    fn token_event(&self, index: usize, token: Token) -> Bytes {
        let text = self.decode(token.id);
        let reason = token.last.then_some("length");
        let mut choice = json!({
            "index": index, "logprobs": null, "finish_reason": reason, "stop_reason": null,
        });
        match self.shape {
            Shape::Completion => choice["text"] = json!(text),
            Shape::Chat | Shape::Response | Shape::Message => {
                choice["delta"] = json!({"content": text});
            }
        }
        if let Some(prompts) = &self.prompt_token_ids {
            choice["token_ids"] = json!([token.id]);
            if self.shape == Shape::Completion && token.first {
                choice["prompt_token_ids"] = json!(prompts.get(index));
            }
        }
        event(&self.chunk(json!([choice])))
    }

    fn chunk(&self, choices: Value) -> Value {
        let object = match self.shape {
            Shape::Completion => "text_completion",
            Shape::Chat | Shape::Response | Shape::Message => "chat.completion.chunk",
        };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "choices": choices,
        })
    }

    fn decode(&self, token: u32) -> String {
        self.text.text.decode(token)
    }
}

#[derive(Clone, Copy)]
struct Token {
    id: u32,
    first: bool,
    last: bool,
}

enum Part {
    Counted(Output),
    Token(Token),
    /// The stream ended, although the generation did not.
    Cut,
}

/// The engine stopped in mid-stream: the client sees a broken connection.
#[derive(Debug, thiserror::Error)]
#[error("the engine stopped")]
struct Cut;

struct Streaming<S> {
    answer: Answer,
    outputs: S,
    usage: Usage,
    opening: Option<Bytes>,
    held_back: Option<Bytes>,
    done: bool,
}

impl<S: Stream<Item = (usize, Part)> + Unpin> Streaming<S> {
    async fn next(&mut self) -> Option<Result<Bytes, Cut>> {
        if let Some(event) = self.held_back.take() {
            return Some(Ok(event));
        }
        while let Some((index, part)) = self.outputs.next().await {
            match part {
                Part::Counted(output) => self.usage.count(output),
                Part::Token(token) => {
                    self.usage.completion += 1;
                    let event = self.answer.token_event(index, token);
                    let Some(opening) = self.opening.take() else {
                        return Some(Ok(event));
                    };
                    self.held_back = Some(event);
                    return Some(Ok(opening));
                }
                Part::Cut => {
                    self.done = true;
                    return Some(Err(Cut));
                }
            }
        }
        if std::mem::replace(&mut self.done, true) {
            return None;
        }
        let end = Bytes::from_static(b"data: [DONE]\n\n");
        if !self.answer.include_usage {
            return Some(Ok(end));
        }
        self.held_back = Some(end);
        let mut chunk = self.answer.chunk(json!([]));
        chunk["usage"] = self.usage.json();
        Some(Ok(event(&chunk)))
    }
}

/// The outputs of one generation. The last token carries the end.
fn outputs(
    (index, generation): (usize, Generation),
) -> impl Stream<Item = (usize, Part)> + Unpin + Send {
    let state = Some((generation, 0_usize));
    Box::pin(stream::unfold(state, move |state| async move {
        let (mut generation, tokens) = state?;
        let Some(output) = generation.next().await else {
            return Some(((index, Part::Cut), None));
        };
        match output {
            Output::Finished => None,
            Output::Admitted(_) => {
                let part = Part::Counted(output);
                Some(((index, part), Some((generation, tokens))))
            }
            Output::Token(id) => {
                let part = Part::Token(Token {
                    id,
                    first: tokens == 0,
                    last: generation.ends_after(tokens + 1),
                });
                Some(((index, part), Some((generation, tokens + 1))))
            }
        }
    }))
}

fn event(chunk: &Value) -> Bytes {
    format!("data: {chunk}\n\n").into()
}
