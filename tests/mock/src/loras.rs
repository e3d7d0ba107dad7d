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
pub struct Loras(Arc<Mutex<KnownLoras>>);

#[derive(Debug, Default)]
struct KnownLoras {
    loras: Vec<KnownLora>,
    /// Loads so far.
    loads: usize,
}

#[derive(Debug)]
struct KnownLora {
    name: String,
    is_loaded: bool,
    /// The last load's number, from 1.
    id: usize,
    path: String,
    first_path: String,
}

impl From<Vec<String>> for Loras {
    fn from(names: Vec<String>) -> Self {
        let loras = Self::default();
        for name in names {
            loras.load(&name, "");
        }
        loras
    }
}

impl Loras {
    pub(crate) fn loaded(&self) -> Vec<String> {
        let known = self.known();
        let loaded = known.loras.iter().filter(|lora| lora.is_loaded);
        loaded.map(|lora| lora.name.clone()).collect()
    }

    pub(crate) fn is_loaded(&self, name: &str) -> bool {
        self.with(name, |lora| lora.is_loaded).unwrap_or(false)
    }

    /// The number by which events name it, which rises with each load.
    pub(crate) fn id(&self, name: &str) -> Option<usize> {
        self.with(name, |lora| lora.id)
    }

    /// The path that it is loaded from; empty if that is the first one.
    pub(crate) fn other_path(&self, name: &str) -> String {
        let path = self.with(name, |lora| {
            let is_other = lora.path != lora.first_path;
            is_other.then(|| lora.path.clone())
        });
        path.flatten().unwrap_or_default()
    }

    fn with<T>(&self, name: &str, read: impl FnOnce(&KnownLora) -> T) -> Option<T> {
        let known = self.known();
        known.loras.iter().find(|lora| lora.name == name).map(read)
    }

    fn load(&self, name: &str, path: &str) {
        let mut known = self.known();
        known.loads += 1;
        let id = known.loads;
        match known.loras.iter_mut().find(|lora| lora.name == name) {
            Some(lora) => {
                lora.is_loaded = true;
                lora.id = id;
                path.clone_into(&mut lora.path);
            }
            None => known.loras.push(KnownLora {
                name: name.to_owned(),
                is_loaded: true,
                id,
                path: path.to_owned(),
                first_path: path.to_owned(),
            }),
        }
    }

    fn unload(&self, name: &str) {
        let mut known = self.known();
        if let Some(lora) = known.loras.iter_mut().find(|lora| lora.name == name) {
            lora.is_loaded = false;
        }
    }

    fn known(&self) -> MutexGuard<'_, KnownLoras> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Unknown fields are ignored.
#[derive(Deserialize)]
struct Named {
    lora_name: String,
    #[serde(default)]
    lora_path: String,
}

fn named(body: &Bytes) -> Result<Named, Error> {
    let named = Named::deserialize(parse(body)?);
    named.map_err(|error| Error::bad_request(error.to_string()))
}

pub(crate) async fn load(State(server): State<Arc<Server>>, body: Bytes) -> Result<String, Error> {
    let Named {
        lora_name: name,
        lora_path: path,
    } = named(&body)?;
    if server.loras.is_loaded(&name) {
        let message = format!("The lora adapter '{name}' has already been loaded.");
        return Err(Error::bad_request(message));
    }
    server.loras.load(&name, &path);
    Ok(format!(
        "Success: LoRA adapter '{name}' added successfully."
    ))
}

pub(crate) async fn unload(
    State(server): State<Arc<Server>>,
    body: Bytes,
) -> Result<String, Error> {
    let name = named(&body)?.lora_name;
    if !server.loras.is_loaded(&name) {
        return Err(Error::unknown_model(&name));
    }
    server.loras.unload(&name);
    Ok(format!(
        "Success: LoRA adapter '{name}' removed successfully."
    ))
}
