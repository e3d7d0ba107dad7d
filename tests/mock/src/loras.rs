//! The adapters that the engine serves, loaded and unloaded at run time as by vLLM with
//! `VLLM_ALLOW_RUNTIME_LORA_UPDATING`. An unloaded adapter's blocks stay cached.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Bytes;
use axum::extract::State;
use serde::Deserialize;

use crate::error::Error;
use crate::generate::parse;
use crate::server::Server;

/// Clones share the adapters.
#[derive(Clone, Debug, Default)]
pub struct Loras(Arc<Mutex<Vec<KnownLora>>>);

/// An adapter keeps its place, and so its id.
#[derive(Debug)]
struct KnownLora {
    name: String,
    is_loaded: bool,
}

impl From<Vec<String>> for Loras {
    fn from(names: Vec<String>) -> Self {
        let loras = Self::default();
        for name in names {
            loras.set(&name, true);
        }
        loras
    }
}

impl Loras {
    pub(crate) fn loaded(&self) -> Vec<String> {
        let known = self.known();
        let loaded = known.iter().filter(|lora| lora.is_loaded);
        loaded.map(|lora| lora.name.clone()).collect()
    }

    pub(crate) fn is_loaded(&self, name: &str) -> bool {
        let known = self.known();
        known.iter().any(|lora| lora.is_loaded && lora.name == name)
    }

    /// The number by which events name it, from 1.
    pub(crate) fn id(&self, name: &str) -> Option<usize> {
        let known = self.known();
        let at = known.iter().position(|lora| lora.name == name);
        at.map(|at| at + 1)
    }

    fn set(&self, name: &str, is_loaded: bool) {
        let mut known = self.known();
        match known.iter_mut().find(|lora| lora.name == name) {
            Some(lora) => lora.is_loaded = is_loaded,
            None => known.push(KnownLora {
                name: name.to_owned(),
                is_loaded,
            }),
        }
    }

    fn known(&self) -> MutexGuard<'_, Vec<KnownLora>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Unknown fields, such as `lora_path`, are ignored.
#[derive(Deserialize)]
struct Named {
    lora_name: String,
}

fn named(body: &Bytes) -> Result<String, Error> {
    let named = Named::deserialize(parse(body)?);
    let named = named.map_err(|error| Error::bad_request(error.to_string()))?;
    Ok(named.lora_name)
}

pub(crate) async fn load(State(server): State<Arc<Server>>, body: Bytes) -> Result<String, Error> {
    let name = named(&body)?;
    if server.loras.is_loaded(&name) {
        let message = format!("The lora adapter '{name}' has already been loaded.");
        return Err(Error::bad_request(message));
    }
    server.loras.set(&name, true);
    Ok(format!(
        "Success: LoRA adapter '{name}' added successfully."
    ))
}

pub(crate) async fn unload(
    State(server): State<Arc<Server>>,
    body: Bytes,
) -> Result<String, Error> {
    let name = named(&body)?;
    if !server.loras.is_loaded(&name) {
        return Err(Error::unknown_model(&name));
    }
    server.loras.set(&name, false);
    Ok(format!(
        "Success: LoRA adapter '{name}' removed successfully."
    ))
}
