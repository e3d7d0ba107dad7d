//! Answers in vLLM's form: one JSON object, or server-sent events with one token each.

mod message;
mod response;

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt as _};
use serde_json::{Value, json};

use crate::error::Error;
use crate::fault::FaultKind;
use crate::rank::{Generation, Output};
use crate::server::Server;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Completion,
    Chat,
    /// `/v1/responses`.
    Response,
    /// `/v1/messages`.
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
    /// The tool that the answer calls, with its text as the only argument.
    pub(crate) called: Option<String>,
    /// Whether clients can read the answer again.
    pub(crate) stored: bool,
    pub(crate) server: Arc<Server>,
}

#[derive(Clone, Copy, Default)]
struct Usage {
    prompt: usize,
    completion: usize,
    /// `None`: not reported.
    cached: Option<usize>,
}

impl Usage {
    fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": self.details(),
        })
    }

    /// In the form of `/v1/responses`.
    fn of_response(self) -> Value {
        json!({
            "input_tokens": self.prompt,
            "output_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "input_tokens_details": self.details(),
        })
    }

    /// In the form of `/v1/messages`, whose input excludes what is read from the cache.
    fn of_message(self) -> Value {
        json!({
            "input_tokens": self.prompt - self.cached.unwrap_or(0),
            "output_tokens": self.completion,
            "cache_read_input_tokens": self.cached,
        })
    }

    fn details(self) -> Value {
        json!(self.cached.map(|cached| json!({"cached_tokens": cached})))
    }

    fn count(&mut self, output: Output) {
        match output {
            Output::Admitted(cached) => {
                self.cached = self.cached.map(|sum| sum + cached.total());
            }
            Output::Token(_) => self.completion += 1,
            Output::Finished => {}
        }
    }
}

impl Answer {
    /// Waits until every generation has ended.
    pub(crate) async fn whole(self, generations: Vec<Generation>) -> Result<Value, Error> {
        let mut usage = self.usage();
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
            Shape::Response => {
                let response = response::whole(&self, &text, usage);
                self.store(&response);
                return Ok(response);
            }
            Shape::Message => return Ok(message::whole(&self, &text, usage)),
        };
        let mut answer = json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "choices": choices, "usage": usage.json(),
        });
        if let (Shape::Chat, Some(prompts)) = (self.shape, &self.prompt_token_ids) {
            answer["prompt_token_ids"] = json!(prompts.first());
        }
        Ok(answer)
    }

    fn usage(&self) -> Usage {
        Usage {
            cached: (!self.server.args.no_prompt_tokens_details).then_some(0),
            ..Usage::default()
        }
    }

    /// Returns the answer as queued, and generates it.
    pub(crate) fn in_background(self, generations: Vec<Generation>) -> Value {
        let queued = response::queued(&self);
        self.store(&queued);
        let (id, server) = (self.id.clone(), Arc::clone(&self.server));
        let task = server.tasks.spawn(async move {
            if let Err(error) = self.whole(generations).await {
                tracing::warn!(?error, "an answer in the background ended");
            }
        });
        server.stored.generated_by(&id, task.abort_handle());
        queued
    }

    fn store(&self, response: &Value) {
        if self.stored {
            self.server.stored.put(&self.id, response.clone());
        }
    }

    pub(crate) fn stream(self, generations: Vec<Generation>, fault: FaultKind) -> Response {
        let events = fault.disturb(self.events(generations));
        let kind = [(CONTENT_TYPE, "text/event-stream; charset=utf-8")];
        (kind, Body::from_stream(events)).into_response()
    }

    fn choice(&self, index: usize, tokens: &[u32]) -> Value {
        let text: String = tokens.iter().map(|&token| self.decode(token)).collect();
        let mut choice = json!({
            "index": index, "logprobs": null, "finish_reason": self.finish_reason(),
            "stop_reason": null,
        });
        match (self.shape, &self.called) {
            (Shape::Completion, _) => choice["text"] = json!(text),
            (Shape::Chat | Shape::Response | Shape::Message, None) => {
                choice["message"] = json!({"role": "assistant", "content": text});
            }
            (Shape::Chat | Shape::Response | Shape::Message, Some(name)) => {
                let function = json!({"name": name, "arguments": arguments(&text)});
                let call = json!({"id": self.call_id(), "type": "function", "function": function});
                choice["message"] =
                    json!({"role": "assistant", "content": null, "tool_calls": [call]});
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
            ..self.usage()
        };
        let outputs = stream::select_all(generations.into_iter().enumerate().map(outputs));
        let state = Streaming {
            answer: self,
            outputs,
            usage,
            text: String::new(),
            held_back: None,
            done: false,
        };
        stream::unfold(state, |mut state| async move {
            let event = state.next().await?;
            Some((event, state))
        })
    }

    /// vLLM begins a chat with the role, but only when the first token is there.
    fn opening(&self, usage: Usage) -> Option<Bytes> {
        let choice = match self.shape {
            Shape::Completion => return None,
            Shape::Response => return Some(response::opening(self)),
            Shape::Message => return Some(message::opening(self, usage)),
            Shape::Chat => json!({
                "index": 0, "delta": {"role": "assistant", "content": ""},
                "logprobs": null, "finish_reason": null,
            }),
        };
        let mut chunk = self.chunk(json!([]));
        let prompts = self.prompt_token_ids.as_ref();
        chunk["prompt_token_ids"] = json!(prompts.and_then(|prompts| prompts.first()));
        chunk["choices"] = json!([choice]);
        Some(event(&chunk))
    }

    /// `number`: of the token in the answer, from 1.
    fn token_event(&self, index: usize, token: Token, number: usize) -> Bytes {
        let text = self.decode(token.id);
        let reason = token.last.then(|| self.finish_reason());
        let mut choice = json!({
            "index": index, "logprobs": null, "finish_reason": reason, "stop_reason": null,
        });
        match (self.shape, &self.called) {
            (Shape::Completion, _) => choice["text"] = json!(text),
            (Shape::Response, _) => return response::token_event(self, &text, token, number),
            (Shape::Message, _) => return message::token_event(self, &text, token),
            (Shape::Chat, None) => choice["delta"] = json!({"content": text}),
            (Shape::Chat, Some(name)) => {
                let mut call = json!({
                    "index": 0, "function": {"arguments": argument_piece(&text, token)},
                });
                if token.first {
                    call["id"] = json!(self.call_id());
                    call["type"] = json!("function");
                    call["function"]["name"] = json!(name);
                }
                choice["delta"] = json!({"tool_calls": [call]});
            }
        }
        // vLLM writes null where the client does not ask.
        let prompts = self.prompt_token_ids.as_ref();
        if self.shape == Shape::Completion {
            let prompt = prompts.filter(|_| token.first);
            choice["prompt_token_ids"] = json!(prompt.and_then(|prompts| prompts.get(index)));
        }
        choice["token_ids"] = json!(prompts.map(|_| [token.id]));
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

    fn finish_reason(&self) -> &'static str {
        match (self.shape, &self.called) {
            (Shape::Chat, Some(_)) => "tool_calls",
            (Shape::Chat | Shape::Completion | Shape::Response | Shape::Message, _) => "length",
        }
    }

    fn call_id(&self) -> String {
        format!("chatcmpl-tool-{}", self.id)
    }

    /// What follows the last token.
    fn closing(&self, text: &str, usage: Usage) -> Bytes {
        match self.shape {
            Shape::Response => {
                self.store(&response::whole(self, text, usage));
                response::closing(self, text, usage)
            }
            Shape::Message => message::closing(self, usage),
            Shape::Completion | Shape::Chat if self.include_usage => {
                let mut chunk = self.chunk(json!([]));
                chunk["usage"] = usage.json();
                [&*event(&chunk), DONE].concat().into()
            }
            Shape::Completion | Shape::Chat => Bytes::from_static(DONE),
        }
    }

    fn decode(&self, token: u32) -> String {
        self.server.text.decode(token)
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
    /// Generated so far.
    text: String,
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
                    let number = self.usage.completion;
                    let event = self.answer.token_event(index, token, number);
                    self.text.push_str(&self.answer.decode(token.id));
                    let is_first = number == 1;
                    let opening = is_first.then(|| self.answer.opening(self.usage)).flatten();
                    let Some(opening) = opening else {
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
        Some(Ok(self.answer.closing(&self.text, self.usage)))
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

/// The last event of OpenAI's streams.
const DONE: &[u8] = b"data: [DONE]\n\n";

/// An event that has its type as name.
fn named_event(event: &Value) -> String {
    let name = event["type"].as_str().unwrap_or_default();
    format!("event: {name}\ndata: {event}\n\n")
}

/// The JSON of a call's arguments.
fn arguments(text: &str) -> String {
    json!({"text": text}).to_string()
}

/// What one token adds to the JSON of [`arguments`].
fn argument_piece(text: &str, token: Token) -> String {
    let quoted = json!(text).to_string();
    let escaped = quoted.get(1..quoted.len() - 1).unwrap_or_default();
    let begin = if token.first { r#"{"text":""# } else { "" };
    let end = if token.last { r#""}"# } else { "" };
    format!("{begin}{escaped}{end}")
}

fn event(chunk: &Value) -> Bytes {
    format!("data: {chunk}\n\n").into()
}
