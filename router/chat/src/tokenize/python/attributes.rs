//! Attributes as jinja2 finds them on Python's values: the methods of a value come before the keys of
//! a mapping, and behind them where a template asks for an item.

use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};

use super::methods;
use super::operators::{ATTRIBUTE, ITEM};

/// Methods that jinja2's sandbox hides, since they change their object: an undefined value.
const DICT_MUTATING: &[&str] = &["clear", "pop", "popitem", "setdefault", "update"];
const DICT: &[&str] = &["copy", "fromkeys", "get", "items", "keys", "values"];
const LIST_MUTATING: &[&str] = &[
    "append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort",
];
const LIST: &[&str] = &["copy", "count", "index"];
const TUPLE: &[&str] = &["count", "index"];
const STR: &[&str] = &[
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];

const NUMBER: &[&str] = &["real", "imag", "numerator", "denominator"];

/// Whether a value of some type has an attribute of this name.
pub(super) fn is_method_name(name: &str) -> bool {
    [DICT_MUTATING, DICT, LIST_MUTATING, LIST, STR, NUMBER]
        .iter()
        .any(|names| names.contains(&name))
}

pub(super) fn register(env: &mut Environment<'static>) {
    env.add_filter(ATTRIBUTE, attribute);
    env.add_filter(ITEM, item);
    env.add_filter("attr", |value: &Value, name: &str| {
        method(value, name).unwrap_or_default()
    });
}

/// `value.name`
fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    match method(value, name) {
        Some(method) => Ok(method),
        None => value.get_attr(name),
    }
}

/// `value['name']`
fn item(value: &Value, name: &Value) -> Result<Value, Error> {
    let item = value.get_item(name)?;
    let method = name
        .as_str()
        .filter(|_| item.is_undefined())
        .and_then(|name| method(value, name));
    Ok(method.unwrap_or(item))
}

/// An attribute of a number.
fn part_of_number(value: &Value, name: &str) -> Option<Value> {
    let is_whole = value.kind() == ValueKind::Bool || value.is_integer();
    match name {
        "real" if value.kind() == ValueKind::Bool => Some(Value::from(i64::from(value.is_true()))),
        "real" => Some(value.clone()),
        "imag" if is_whole => Some(Value::from(0)),
        "imag" => Some(Value::from(0.0)),
        "numerator" if is_whole => part_of_number(value, "real"),
        "denominator" if is_whole => Some(Value::from(1)),
        _ => None,
    }
}

/// The method of a value; undefined if it changes the value.
#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "the enum of kinds is not exhaustive"
)]
fn method(value: &Value, name: &str) -> Option<Value> {
    let (mutating, others): (&[&str], &[&str]) = match value.kind() {
        ValueKind::Number | ValueKind::Bool => return part_of_number(value, name),
        ValueKind::String => (&[], STR),
        ValueKind::Map if is_dict(value) => (DICT_MUTATING, DICT),
        ValueKind::Seq | ValueKind::Iterable if value.is_tuple() => (&[], TUPLE),
        ValueKind::Seq | ValueKind::Iterable => (LIST_MUTATING, LIST),
        _ => return None,
    };
    if mutating.contains(&name) {
        return Some(Value::UNDEFINED);
    }
    others.contains(&name).then(|| {
        Value::from_object(BoundMethod {
            value: value.clone(),
            name: name.to_owned(),
        })
    })
}

/// Whether a mapping is a dict in Python. Namespaces, loops and macros are not.
fn is_dict(value: &Value) -> bool {
    value.as_object().is_some_and(|object| {
        let name = object.type_name();
        !name.contains("namespace_object") && !name.starts_with("minijinja::vm::")
    })
}

/// A method and its object. It can be called and tested, but has no text: Python's has an address.
#[derive(Debug)]
struct BoundMethod {
    value: Value,
    name: String,
}

impl Object for BoundMethod {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        methods::call(state, &self.value, &self.name, args)
    }

    fn call_method(
        self: &Arc<Self>,
        _state: &mut State<'_, '_>,
        _method: &str,
        _args: &[Value],
    ) -> Result<Value, Error> {
        Err(Error::from(ErrorKind::UnknownMethod))
    }
}
