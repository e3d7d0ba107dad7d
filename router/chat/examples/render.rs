//! Renders request bodies as the router does: one JSON object a line in, one out.
//!
//! `render MODEL_DIRECTORY` reads `{"template": FILE, "route": ROUTE, "body": TEXT}`, where `ROUTE`
//! is `chat`, `responses` or `messages`, and writes `{"token_ids": […]}`, or `{"refused": REASON}`
//! where the router has no token ids. `tests/real-vllm.sh --templates` compares them with vLLM's.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a tool of a test fails, prints and reads the clock"
)]

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use serde_json::json;
use warmroute_chat::openai::{self, PromptRoute, PromptSource};
use warmroute_chat::tokenize::{CivilTime, ModelSource, Tokenizer};

#[derive(Deserialize)]
struct Job {
    template: PathBuf,
    route: String,
    body: String,
}

fn load(model: &Path, template: &Path) -> Result<Tokenizer, String> {
    let source = ModelSource {
        path: model.to_owned(),
        chat_template: Some(template.to_owned()),
        ..ModelSource::default()
    };
    Tokenizer::of_files(source.read().unwrap()).map_err(|error| error.to_string())
}

fn token_ids(tokenizer: &Tokenizer, route: PromptRoute, body: &[u8]) -> Result<Vec<u32>, String> {
    let parsed = openai::parse(route, body).map_err(|error| format!("unreadable: {error}"))?;
    if let Some(reason) = parsed.info.opaque {
        return Err(reason.as_str().to_owned());
    }
    let PromptSource::Chat(chat) = &parsed.prompt else {
        return Err("no chat".to_owned());
    };
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let now = CivilTime::from_unix(seconds.as_secs().try_into().unwrap());
    let ids = tokenizer.encode_chat(chat, now);
    ids.map_err(|error| error.to_string())
}

fn main() {
    let model = PathBuf::from(std::env::args().nth(1).unwrap());
    let mut tokenizers = BTreeMap::new();
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let job: Job = serde_json::from_str(&line.unwrap()).unwrap();
        let route = match job.route.as_str() {
            "chat" => PromptRoute::ChatCompletions,
            "responses" => PromptRoute::Responses,
            "messages" => PromptRoute::Messages,
            other => panic!("unknown route: {other}"),
        };
        let template = job.template.clone();
        let tokenizer = tokenizers
            .entry(template)
            .or_insert_with_key(|t| load(&model, t));
        let ids = tokenizer.as_ref().map_err(Clone::clone);
        let answer = match ids.and_then(|loaded| token_ids(loaded, route, job.body.as_bytes())) {
            Ok(ids) => json!({ "token_ids": ids }),
            Err(reason) => json!({ "refused": reason }),
        };
        writeln!(out, "{answer}").unwrap();
        out.flush().unwrap();
    }
}
