//! A worker without KV events: nobody mirrors its cache, so that no shim stands beside it. It is
//! registered all the same, with what its `/v1/models` says, and routed by load.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use warmroute_proto::bus::{Plane, PutIf};
use warmroute_proto::codec;
use warmroute_proto::registry::{Lora, WorkerEntry};
use warmroute_proto::subject::Subjects;

use crate::config::WorkerSpec;

/// How often models and adapters are looked up again.
const PERIOD: Duration = Duration::from_secs(2);

const DEADLINE: Duration = Duration::from_secs(5);

#[derive(Deserialize)]
struct Models {
    data: Vec<Card>,
}

#[derive(Deserialize)]
struct Card {
    id: String,
    #[serde(default)]
    parent: Option<String>,
    #[serde(default)]
    max_model_len: Option<u32>,
}

/// Keeps a worker registered until stopped. One that never answers is never registered.
pub(super) async fn register(
    spec: WorkerSpec,
    client: reqwest::Client,
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    stop: CancellationToken,
) {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last = None;
    loop {
        let looked = async {
            ticks.tick().await;
            models(&client, &spec).await
        };
        let models = tokio::select! {
            () = stop.cancelled() => return,
            models = looked => models,
        };
        let Some(entry) = models.map(|models| entry(&spec, models)) else {
            continue;
        };
        if last.as_ref() == Some(&entry) {
            continue;
        }
        let key = subjects.worker_key(&spec.id);
        match codec::encode(&entry) {
            Ok(value) => {
                let put = plane.put(key, Bytes::from(value), PutIf::Always, None);
                match put.await {
                    Ok(_) => last = Some(entry),
                    Err(error) => tracing::warn!(%error, "a worker cannot be registered"),
                }
            }
            Err(error) => tracing::error!(%error, "a worker's entry cannot be written"),
        }
    }
}

/// What the worker serves; `None` if it does not say.
async fn models(client: &reqwest::Client, spec: &WorkerSpec) -> Option<Models> {
    let url = format!("{}/v1/models", spec.url);
    let response = client.get(url).timeout(DEADLINE).send().await.ok()?;
    response.error_for_status().ok()?.json().await.ok()
}

fn entry(spec: &WorkerSpec, models: Models) -> WorkerEntry {
    let max_model_len = models.data.iter().find_map(|card| card.max_model_len);
    let (adapters, bases): (Vec<Card>, Vec<Card>) = models
        .data
        .into_iter()
        .partition(|card| card.parent.is_some());
    let lora = |card: Card| Lora {
        name: card.id,
        parent: card.parent,
    };
    WorkerEntry {
        worker: spec.id.clone(),
        url: spec.url.clone(),
        models: bases.into_iter().map(|card| card.id).collect(),
        loras: adapters.into_iter().map(lora).collect(),
        ranks: spec.ranks.get(),
        block_size: None,
        blocks_per_rank: None,
        max_model_len,
        main_attention_only: false,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_told_from_base_models_by_their_parent() {
        let models: Models = serde_json::from_str(
            r#"{"object":"list","data":[
                {"id":"m","root":"/m","parent":null,"max_model_len":4096},
                {"id":"a","root":"/a","parent":"m"}]}"#,
        )
        .unwrap();
        let spec: WorkerSpec = "http://h:1,id=w,ranks=2".parse().unwrap();
        let entry = entry(&spec, models);
        assert_eq!(entry.models, ["m"]);
        assert_eq!(entry.loras[0].name, "a");
        assert_eq!(entry.loras[0].parent.as_deref(), Some("m"));
        assert_eq!((entry.ranks, entry.max_model_len), (2, Some(4096)));
    }
}
