//! Python's and Jinja2's behaviour on top of minijinja, so that a template written for
//! transformers gives the same text here. Pure.
//!
//! Templates run in jinja2's sandbox with `trim_blocks` and `lstrip_blocks`, loop controls, the
//! `generation` tag, `tojson` as `json.dumps` writes it, `raise_exception`, and the methods of
//! Python's str, dict and list. Absent: methods that change a value (jinja2's sandbox forbids them
//! as well), and autoescaping.

mod attributes;
mod bounds;
mod filters;
mod generation;
mod methods;
mod operators;
mod print;
mod strftime;
mod sums;
mod text;
mod texts;
mod views;

use std::borrow::Cow;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior};

pub(super) use bounds::RenderBounds;
pub(super) use generation::without_generation_tags;
pub use strftime::CivilTime;
pub(super) use text::{is_space, strip_end};

/// Instructions that one rendering may execute. A chat of 10,000 messages needs about a million.
pub(super) const FUEL: u64 = 50_000_000;
/// Instructions of a short rendering: some milliseconds, unless they copy long texts. A chat of 500
/// messages needs 50,000.
pub(super) const SHORT_FUEL: u64 = 200_000;
/// Nested macro calls and includes.
const RECURSION_MAX: usize = 200;

/// An environment without templates that behaves like that of transformers.
pub(super) fn environment() -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(syntax()?);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_recursion_limit(RECURSION_MAX);
    env.set_debug(false);
    env.set_unknown_method_callback(methods::call);
    env.set_formatter(|out, _state, value| print::write_str_of(out, value));
    env.add_function("raise_exception", raise_exception);
    bounds::register(&mut env);
    filters::register(&mut env);
    sums::register(&mut env);
    texts::register(&mut env);
    attributes::register(&mut env);
    views::register(&mut env);
    Ok(env)
}

/// The source that minijinja renders as jinja2 renders a template without `generation` tags.
pub(super) fn prepared(plain: &str) -> String {
    // A sum with a text that is marked as safe is more than its parts.
    let sums = if operators::marks_texts_safe(plain) {
        Cow::Borrowed(plain)
    } else {
        sums::without_printed_sums(plain)
    };
    let sums = operators::with_python_operators(&sums);
    bounds::with_meters(&sums).into_owned()
}

/// Jinja's delimiters; a block tag consumes the line end after it and the blanks before it.
pub(super) fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
}

fn invalid(reason: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_string()))
}

/// `strftime_now` for one rendering.
pub(super) fn strftime_now(now: CivilTime) -> Value {
    Value::from_function(move |format: &str| now.format(format))
}

#[cfg(test)]
mod tests;
