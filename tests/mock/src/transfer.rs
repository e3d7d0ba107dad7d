//! Roles of engines, with vLLM's NIXL connector in pull mode: a prefill engine holds a prompt's blocks
//! for a lease and names them in `kv_transfer_params`, a decode engine fetches them with these.
//!
//! Stricter than vLLM: whatever a router may not do is refused and counted. A decode engine asks the
//! prefill engine by one line of JSON over TCP whether the parameters are good, in place of the
//! transfer. It still computes the prompt, so that answers and events are those of any engine.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::http::HeaderMap;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warmroute_proto::registry::WorkerRole;

use crate::error::Error;

const REQUEST_ID: &str = "x-request-id";

/// The members of `kv_transfer_params` that name another engine.
const REMOTE: [&str; 4] = [
    "remote_engine_id",
    "remote_block_ids",
    "remote_host",
    "remote_port",
];

pub(crate) struct Transfers {
    role: WorkerRole,
    lease: Duration,
    /// Where decode engines ask for blocks.
    address: (IpAddr, u16),
    engine_id: String,
    /// By `remote_request_id`.
    held: Mutex<BTreeMap<String, HeldPrompt>>,
    offered: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
    refused: AtomicU64,
    whole: AtomicU64,
}

/// A prompt whose blocks a decode engine may fetch once.
struct HeldPrompt {
    request_id: String,
    params: Value,
    until: Instant,
    is_used: bool,
}

impl Transfers {
    /// Also returns the socket at which decode engines ask.
    pub(crate) async fn bind(
        role: WorkerRole,
        host: IpAddr,
        lease: Duration,
    ) -> std::io::Result<(Arc<Self>, TcpListener)> {
        let listener = TcpListener::bind((host, 0)).await?;
        let transfers = Self {
            role,
            lease,
            address: (host, listener.local_addr()?.port()),
            engine_id: format!("{:016x}", fastrand::u64(..)),
            held: Mutex::default(),
            offered: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            whole: AtomicU64::new(0),
        };
        Ok((Arc::new(transfers), listener))
    }

    /// Checks a request, and fetches the blocks that it names.
    pub(crate) async fn admit(&self, headers: &HeaderMap, body: &Value) -> Result<(), Error> {
        let params = &body["kv_transfer_params"];
        match self.role {
            WorkerRole::Both => Ok(()),
            WorkerRole::Prefill => check_prefill(body).map_err(|why| self.refuse(why)),
            WorkerRole::Decode if params.is_null() => {
                self.whole.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            WorkerRole::Decode => self.fetch(id_of(headers), params).await,
        }
    }

    fn refuse(&self, why: &str) -> Error {
        self.refused.fetch_add(1, Ordering::Relaxed);
        Error::bad_request(why)
    }

    /// The parameters of a computed prompt; `None` on engines that have no others fetch it.
    pub(crate) fn offer(&self, headers: &HeaderMap, tokens: usize) -> Option<Value> {
        if self.role != WorkerRole::Prefill {
            return None;
        }
        let number = self.offered.fetch_add(1, Ordering::Relaxed);
        let name = format!("cmpl-{}-{number}", id_of(headers));
        let (host, port) = self.address;
        let params = json!({
            "do_remote_prefill": true, "do_remote_decode": false, "tp_size": 1,
            "remote_engine_id": self.engine_id, "remote_request_id": name,
            "remote_block_ids": [(0..tokens.div_ceil(16)).collect::<Vec<usize>>()],
            "remote_host": host, "remote_port": port,
        });
        let prompt = HeldPrompt {
            request_id: id_of(headers).to_owned(),
            params: params.clone(),
            until: Instant::now() + self.lease,
            is_used: false,
        };
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.insert(name, prompt);
        Some(params)
    }

    pub(crate) fn counters(&self) -> Value {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        json!({
            "offered": count(&self.offered), "sent": count(&self.sent),
            "received": count(&self.received), "refused": count(&self.refused),
            "whole": count(&self.whole),
        })
    }

    async fn fetch(&self, request_id: &str, params: &Value) -> Result<(), Error> {
        if params["do_remote_prefill"] != true || params["do_remote_decode"] != false {
            return Err(self.refuse("a decode engine must fetch blocks"));
        }
        let host = params["remote_host"].as_str();
        let port = params["remote_port"].as_u64();
        let port = port.and_then(|port| u16::try_from(port).ok());
        let Some(address) = host.zip(port) else {
            return Err(self.refuse("no remote engine"));
        };
        let line = json!({"request_id": request_id, "params": params});
        let refusal = ask(address, &line.to_string()).await;
        match refusal.as_deref() {
            Ok("") => {
                self.received.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            Ok(refusal) => Err(self.refuse(refusal)),
            Err(error) => Err(Error::failed(format!("blocks cannot be loaded: {error}"))),
        }
    }

    /// Why blocks are not sent; empty if they are.
    fn send(&self, line: &str) -> &'static str {
        let asked: Value = serde_json::from_str(line).unwrap_or_default();
        let name = asked["params"]["remote_request_id"].as_str();
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let prompt = name.and_then(|name| held.get_mut(name));
        match prompt {
            None => "unknown parameters",
            Some(prompt) if prompt.params != asked["params"] => "changed parameters",
            Some(prompt) if asked["request_id"] != prompt.request_id.as_str() => {
                "unequal request ids"
            }
            Some(prompt) if prompt.is_used => "the parameters were used before",
            Some(prompt) if prompt.until < Instant::now() => "the lease has expired",
            Some(prompt) => {
                prompt.is_used = true;
                self.sent.fetch_add(1, Ordering::Relaxed);
                ""
            }
        }
    }

    async fn answer(self: Arc<Self>, stream: TcpStream) -> std::io::Result<()> {
        let (reader, mut writer) = stream.into_split();
        let mut line = String::new();
        BufReader::new(reader).read_line(&mut line).await?;
        // A caller that ended early gets no blocks.
        let refusal = match line.ends_with('\n') {
            true => self.send(&line),
            false => return Ok(()),
        };
        writer.write_all(format!("{refusal}\n").as_bytes()).await
    }

    /// Answers decode engines until stopped.
    pub(crate) async fn run(self: Arc<Self>, listener: TcpListener, stop: CancellationToken) {
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            if let Ok((stream, _)) = accepted {
                tokio::select! {
                    () = stop.cancelled() => return,
                    answered = Arc::clone(&self).answer(stream) => {
                        if let Err(error) = answered {
                            tracing::warn!(%error, "a transfer broke off");
                        }
                    }
                }
            }
        }
    }
}

/// What a prefill leg must have.
fn check_prefill(body: &Value) -> Result<(), &'static str> {
    let params = &body["kv_transfer_params"];
    let asks = params["do_remote_decode"] == true && params["do_remote_prefill"] == false;
    if !asks || REMOTE.iter().any(|name| !params[name].is_null()) {
        return Err("a prefill engine must be asked for its blocks");
    }
    let is_one = |name: &str| body[name] == 1;
    if !is_one("max_tokens")
        || body.get("max_completion_tokens").is_some() && !is_one("max_completion_tokens")
    {
        return Err("a prefill engine generates one token");
    }
    let others = ["stream_options", "min_tokens", "min_completion_tokens"];
    if body["stream"] != false || others.iter().any(|name| body.get(name).is_some()) {
        return Err("a prefill engine does not stream");
    }
    Ok(())
}

fn id_of(headers: &HeaderMap) -> &str {
    let id = headers.get(REQUEST_ID);
    id.and_then(|id| id.to_str().ok()).unwrap_or_default()
}

/// Sends a line, and returns the line that answers it.
async fn ask((host, port): (&str, u16), line: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect((host, port)).await?;
    stream.write_all(format!("{line}\n").as_bytes()).await?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).await?;
    let answer = answer.strip_suffix('\n');
    answer
        .map(str::to_owned)
        .ok_or_else(|| std::io::ErrorKind::UnexpectedEof.into())
}
