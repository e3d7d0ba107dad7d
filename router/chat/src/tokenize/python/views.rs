//! Iterables that Python does not print as lists: the views of a dict, and ranges.

use std::fmt::Write;
use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Environment, Error};

use super::invalid;

/// Items of a range, at most, as jinja2's sandbox has it.
const RANGE_MAX: usize = 100_000;

#[derive(Debug)]
pub(super) enum View {
    /// What a method of a dict returns, by the name of its type.
    Dict {
        name: &'static str,
        items: Vec<Value>,
    },
    Range {
        from: i64,
        to: i64,
        step: i64,
        len: usize,
    },
}

pub(super) fn register(env: &mut Environment<'static>) {
    env.add_function("range", range);
}

/// Whether a value can be iterated, but not indexed.
pub(super) fn is_dict_view(value: &Value) -> bool {
    matches!(view(value), Some(View::Dict { .. }))
}

pub(super) fn view(value: &Value) -> Option<&View> {
    if value.kind() != ValueKind::Iterable {
        return None;
    }
    value.downcast_object_ref::<View>()
}

impl View {
    pub(super) fn dict(name: &'static str, items: Vec<Value>) -> Value {
        Value::from_object(Self::Dict { name, items })
    }

    /// What Python prints before and behind the items of a view, or the whole text of a range.
    pub(super) fn write(
        &self,
        out: &mut dyn Write,
        list: impl FnOnce(&mut dyn Write, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match self {
            Self::Dict { name, items } => {
                write!(out, "{name}(")?;
                list(out, &Value::from(items.clone()))?;
                out.write_char(')')?;
            }
            Self::Range {
                from, to, step: 1, ..
            } => write!(out, "range({from}, {to})")?,
            Self::Range { from, to, step, .. } => write!(out, "range({from}, {to}, {step})")?,
        }
        Ok(())
    }

    fn len(&self) -> usize {
        match self {
            Self::Dict { items, .. } => items.len(),
            Self::Range { len, .. } => *len,
        }
    }
}

impl Object for View {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let at = key.as_usize().filter(|at| *at < self.len())?;
        match &**self {
            Self::Dict { items, .. } => items.get(at).cloned(),
            Self::Range { from, step, .. } => {
                let steps = i64::try_from(at).ok()?.checked_mul(*step)?;
                from.checked_add(steps).map(Value::from)
            }
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.len())
    }
}

fn range(first: i64, second: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
    let (from, to) = second.map_or((0, first), |to| (first, to));
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(invalid("a range has no step of 0"));
    }
    let span = match step > 0 {
        true => i128::from(to) - i128::from(from),
        false => i128::from(from) - i128::from(to),
    };
    let stride = i128::from(step.unsigned_abs());
    let len = usize::try_from((span + stride - 1) / stride).unwrap_or(0);
    if len > RANGE_MAX {
        return Err(invalid("the range is too long"));
    }
    Ok(Value::from_object(View::Range {
        from,
        to,
        step,
        len,
    }))
}
