//! The stream of a request that asks for token ids, on its way to a client that did not.

use std::mem;
use std::ops::Range;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::super::fields::JsonText;
use super::super::rewrite::part_of;
use super::super::sse::{EventEnds, SseEvent, trim_line_ends};
use super::{ChunkForm, ResumeTerms};

/// Room for the prompt ids of the longest model, of up to ten digits each, in one event.
const EVENT_BYTES_MAX: usize = 16 << 20;

/// The client's bytes of a chunk.
#[derive(Debug, PartialEq, Eq)]
pub enum StreamBytes {
    /// Whole events.
    Ready(Vec<u8>),
    /// An event is not complete.
    Pending,
    /// An event exceeds the buffer.
    TooLarge,
}

/// Reads a stream along: passes on each event as soon as it is whole, without token ids.
#[derive(Debug)]
pub struct ResumableStream {
    terms: ResumeTerms,
    ends: EventEnds,
    /// The beginning of the unfinished event.
    pending: Vec<u8>,
    prompt: Vec<u32>,
    generated: Vec<u32>,
    progress: StreamProgress,
    /// From the first chunk; a continuation's chunks get it too.
    name: Option<StreamName>,
    /// `None`: the stream was not resumed.
    earlier: Option<EarlierTokens>,
}

/// The tokens of earlier engines.
#[derive(Clone, Copy, Debug)]
struct EarlierTokens {
    prompt: u64,
    generated: u64,
}

/// Whether the stream can be resumed where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamProgress {
    /// The client has exactly the text of so many generated tokens.
    Text(usize),
    /// The text of the last tokens may be held back: an engine holds back incomplete characters.
    Unclear,
    /// The answer has ended.
    Ended,
    /// It never can, as it has chunks of another form.
    Foreign,
}

#[derive(Debug)]
struct StreamName {
    id: Value,
    created: Value,
    model: Value,
}

#[derive(Deserialize)]
struct ChunkFields<'a> {
    #[serde(default)]
    id: Value,
    #[serde(default)]
    created: Value,
    #[serde(default)]
    model: Value,
    #[serde(borrow)]
    prompt_token_ids: Option<&'a RawValue>,
    #[serde(borrow)]
    choices: Vec<ChoiceFields<'a>>,
}

#[derive(Deserialize)]
struct ChoiceFields<'a> {
    #[serde(borrow)]
    text: Option<JsonText<'a>>,
    delta: Option<Map<String, Value>>,
    #[serde(borrow)]
    finish_reason: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt_token_ids: Option<&'a RawValue>,
    #[serde(borrow)]
    token_ids: Option<&'a RawValue>,
}

impl ResumableStream {
    pub fn new(terms: ResumeTerms) -> Self {
        Self {
            terms,
            ends: EventEnds::default(),
            pending: Vec::new(),
            prompt: Vec::new(),
            generated: Vec::new(),
            progress: StreamProgress::Text(0),
            name: None,
            earlier: None,
        }
    }

    /// Takes the next bytes of the engine.
    pub fn push(&mut self, chunk: &[u8]) -> StreamBytes {
        let (mut out, mut rest) = (Vec::with_capacity(chunk.len()), chunk);
        while let Some(end) = self.ends.next_end(rest) {
            let (head, tail) = rest.split_at(end);
            if self.pending.is_empty() {
                self.event(head, &mut out);
            } else {
                let mut event = mem::take(&mut self.pending);
                event.extend_from_slice(head);
                self.event(&event, &mut out);
            }
            rest = tail;
        }
        if self.pending.len() + rest.len() > EVENT_BYTES_MAX {
            return StreamBytes::TooLarge;
        }
        self.pending.extend_from_slice(rest);
        if out.is_empty() {
            StreamBytes::Pending
        } else {
            StreamBytes::Ready(out)
        }
    }

    /// Takes the end of the stream; the last event may lack its empty line.
    pub fn finish(&mut self) -> Vec<u8> {
        mem::take(&mut self.pending)
    }

    /// Whether the client has the whole answer.
    pub fn has_ended(&self) -> bool {
        self.progress == StreamProgress::Ended
    }

    /// Bytes of memory.
    pub fn held_bytes(&self) -> usize {
        (self.prompt.capacity() + self.generated.capacity()) * size_of::<u32>()
            + self.pending.capacity()
    }

    /// Forgets the tokens. The stream can no longer be resumed.
    pub fn give_up(&mut self) {
        self.progress = StreamProgress::Foreign;
        self.prompt = Vec::new();
        self.generated = Vec::new();
    }

    /// The request for the rest, on `/v1/completions`. What is pushed next is its answer. `None` if
    /// the rest cannot be generated elsewhere.
    pub fn resume(&mut self) -> Option<Vec<u8>> {
        let StreamProgress::Text(tokens) = self.progress else {
            return None;
        };
        if self.name.is_none() || self.prompt.is_empty() {
            return None;
        }
        // The client has no text of the tokens behind: they are generated again.
        self.generated.truncate(tokens);
        let body = self.terms.continuation(&self.prompt, &self.generated)?;
        self.earlier = Some(EarlierTokens {
            prompt: self.prompt.len() as u64,
            generated: tokens as u64,
        });
        self.pending.clear();
        self.ends = EventEnds::default();
        Some(body)
    }

    fn event(&mut self, event: &[u8], out: &mut Vec<u8>) {
        let whole = SseEvent::Whole(trim_line_ends(event));
        let data = whole.data();
        let data = data.as_deref();
        if data == Some(b"[DONE]") {
            self.progress = StreamProgress::Ended;
        }
        let read = |data| serde_json::from_slice::<ChunkFields<'_>>(data).ok();
        // Comments have no data, and errors no choices.
        let Some((data, chunk)) = data.and_then(|data| Some((data, read(data)?))) else {
            if data.is_some() && !self.has_ended() {
                self.give_up();
            }
            return out.extend_from_slice(event);
        };
        if let Some(earlier) = self.earlier {
            self.note(&chunk);
            let rewritten = self.rewritten(data, earlier);
            return match rewritten {
                Some(chunk) => out.extend_from_slice(format!("data: {chunk}\n\n").as_bytes()),
                None => out.extend_from_slice(event),
            };
        }
        if self.name.is_none() {
            self.name = Some(StreamName {
                id: chunk.id.clone(),
                created: chunk.created.clone(),
                model: chunk.model.clone(),
            });
        }
        self.note(&chunk);
        without_ids(event, &chunk, out);
    }

    /// Keeps the tokens of a chunk.
    fn note(&mut self, chunk: &ChunkFields<'_>) {
        if let StreamProgress::Ended | StreamProgress::Foreign = self.progress {
            return;
        }
        let choice = match chunk.choices.as_slice() {
            [choice] => choice,
            // The closing usage.
            [] => return,
            _ => return self.give_up(),
        };
        let (Some(text_len), Some(ids)) = (choice.text_len(), token_list(choice.token_ids)) else {
            return self.give_up();
        };
        let prompt = chunk.prompt_token_ids.or(choice.prompt_token_ids);
        if let (None, Some(mut prompt)) = (self.earlier, token_list(prompt))
            && self.prompt.is_empty()
        {
            prompt.shrink_to_fit();
            self.prompt = prompt;
        }
        self.generated.extend_from_slice(&ids);
        self.progress = match (text_len, ids.as_slice()) {
            _ if choice.finish_reason.is_some() => StreamProgress::Ended,
            (0, _) => self.progress,
            (_, [_]) => StreamProgress::Text(self.generated.len()),
            (_, _) => StreamProgress::Unclear,
        };
    }

    /// A continuation's chunk as one of the first engine's.
    fn rewritten(&self, data: &[u8], earlier: EarlierTokens) -> Option<String> {
        let mut chunk: Map<String, Value> = serde_json::from_slice(data).ok()?;
        let name = self.name.as_ref()?;
        for (key, value) in [
            ("id", &name.id),
            ("created", &name.created),
            ("model", &name.model),
        ] {
            chunk.insert(key.to_owned(), value.clone());
        }
        if self.terms.form == ChunkForm::Chat {
            chunk.insert("object".to_owned(), json!("chat.completion.chunk"));
        }
        // They are those of the rest alone.
        chunk.remove("metrics");
        for choice in chunk.get_mut("choices")?.as_array_mut()? {
            let fields = mem::take(choice.as_object_mut()?);
            *choice = self.choice(fields).into();
        }
        if let Some(usage) = chunk.get_mut("usage").and_then(Value::as_object_mut) {
            let generated = usage.get("completion_tokens").and_then(Value::as_u64);
            let generated = generated.unwrap_or_default();
            let prompt = earlier.prompt;
            let generated = earlier.generated.saturating_add(generated);
            usage.insert("prompt_tokens".to_owned(), json!(prompt));
            usage.insert("completion_tokens".to_owned(), json!(generated));
            usage.insert(
                "total_tokens".to_owned(),
                json!(prompt.saturating_add(generated)),
            );
            // What the first engine found cached is not known.
            if let Some(details) = usage.get_mut("prompt_tokens_details") {
                *details = Value::Null;
            }
        }
        serde_json::to_string(&chunk).ok()
    }

    /// Without token ids, and in the client's form.
    fn choice(&self, fields: Map<String, Value>) -> Map<String, Value> {
        let is_last = fields
            .get("finish_reason")
            .is_some_and(|one| !one.is_null());
        let mut choice = Map::new();
        for (key, value) in fields {
            let is_chat = self.terms.form == ChunkForm::Chat;
            let (key, value) = match key.as_str() {
                "text" if is_chat => ("delta".to_owned(), json!({"content": value})),
                "prompt_token_ids" if is_chat => continue,
                "stop_reason" if is_chat && !is_last => continue,
                "prompt_token_ids" | "token_ids" => (key, Value::Null),
                _ => (key, value),
            };
            choice.insert(key, value);
        }
        choice
    }
}

impl ChoiceFields<'_> {
    /// Bytes of text; `None` for a chunk that carries something else.
    fn text_len(&self) -> Option<usize> {
        match (&self.text, &self.delta) {
            (Some(text), None) => Some(text.0.len()),
            (None, Some(delta)) => {
                let is_text = |(key, value): (&String, &Value)| {
                    matches!(key.as_str(), "role" | "content") || value.is_null()
                };
                let content = delta.get("content").and_then(Value::as_str);
                // A parser sends a delta without content.
                delta.iter().all(is_text).then_some(content?.len())
            }
            _ => None,
        }
    }
}

/// An absent list is empty.
fn token_list(raw: Option<&RawValue>) -> Option<Vec<u32>> {
    match raw {
        Some(raw) => serde_json::from_str(raw.get()).ok(),
        None => Some(Vec::new()),
    }
}

/// Appends an event with null in place of its lists of ids, as an engine writes it that is not asked
/// for them.
fn without_ids(event: &[u8], chunk: &ChunkFields<'_>, out: &mut Vec<u8>) {
    let of_choices = chunk.choices.iter();
    let of_choices = of_choices.flat_map(|choice| [choice.prompt_token_ids, choice.token_ids]);
    let lists = of_choices.chain([chunk.prompt_token_ids]).flatten();
    let mut ranges: Vec<Range<usize>> = lists
        .filter_map(|list| part_of(event, list.get().as_bytes()))
        .collect();
    ranges.sort_by_key(|range| range.start);
    let mut from = 0;
    for range in ranges {
        out.extend_from_slice(&event[from..range.start]);
        out.extend_from_slice(b"null");
        from = range.end;
    }
    out.extend_from_slice(&event[from..]);
}
