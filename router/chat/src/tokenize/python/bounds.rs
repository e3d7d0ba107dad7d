//! What one rendering may do, where filters find it.

use std::sync::Arc;

use minijinja::value::{Object, Value};
use minijinja::{Environment, Error, State};

use super::invalid;

/// No name that a template can write.
const NAME: &str = "bounds of this rendering";

/// The bounds of one rendering.
#[derive(Debug)]
pub(super) struct RenderBounds {
    /// Bytes of a text that a filter makes of a value.
    pub(super) text_bytes_max: usize,
}

impl Object for RenderBounds {}

impl RenderBounds {
    /// A client's argument may have this name: it stops the rendering.
    pub(super) fn of(state: &State<'_, '_>) -> Result<Arc<Self>, Error> {
        let found = state.lookup(NAME);
        let found = found.and_then(|value| value.downcast_object::<Self>());
        found.ok_or_else(|| invalid("the rendering has no bounds"))
    }
}

pub(super) fn register(env: &mut Environment<'static>) {
    let bounds = RenderBounds {
        text_bytes_max: usize::MAX,
    };
    env.add_global(NAME, Value::from_object(bounds));
}

/// The environment for one rendering.
pub(in crate::tokenize) fn with_bounds(
    env: &Environment<'static>,
    fuel: u64,
    text_bytes_max: usize,
) -> Environment<'static> {
    let mut env = env.clone();
    env.set_fuel(Some(fuel));
    env.add_global(NAME, Value::from_object(RenderBounds { text_bytes_max }));
    env
}
