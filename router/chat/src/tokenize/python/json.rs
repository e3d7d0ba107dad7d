//! `json.dumps` of template values.

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::filters::{float_repr, is_float};

/// Only a template can build a value nested deeper than this; a request cannot.
const DEPTH_MAX: usize = 256;

pub(super) struct JsonStyle {
    /// The indentation of one level; `None` writes one line.
    pub(super) indent: Option<String>,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    pub(super) ensure_ascii: bool,
    pub(super) sort_keys: bool,
}

pub(super) fn dumps(value: &Value, style: &JsonStyle) -> Result<String, Error> {
    let mut out = String::new();
    write_value(&mut out, value, style, 0)?;
    Ok(out)
}

#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "the enum of kinds is not exhaustive"
)]
fn write_value(
    out: &mut String,
    value: &Value,
    style: &JsonStyle,
    depth: usize,
) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "value is nested too deeply",
        ));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(out, value)?,
        ValueKind::String => write_string(out, value.as_str().unwrap_or(""), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => write_list(out, value, style, depth)?,
        ValueKind::Map => write_map(out, value, style, depth)?,
        kind => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("a value of type {kind} is not JSON serializable"),
            ));
        }
    }
    Ok(())
}

fn write_number(out: &mut String, value: &Value) -> Result<(), Error> {
    if is_float(value) {
        let number = f64::try_from(value.clone())?;
        out.push_str(&match number {
            n if n.is_nan() => "NaN".to_owned(),
            n if n.is_infinite() && n > 0.0 => "Infinity".to_owned(),
            n if n.is_infinite() => "-Infinity".to_owned(),
            n => float_repr(n),
        });
    } else {
        write!(out, "{value}").map_err(Error::from)?;
    }
    Ok(())
}

fn write_list(
    out: &mut String,
    value: &Value,
    style: &JsonStyle,
    depth: usize,
) -> Result<(), Error> {
    let mut empty = true;
    out.push('[');
    for item in value.try_iter()?.checked() {
        if !std::mem::replace(&mut empty, false) {
            out.push_str(&style.item_separator);
        }
        new_line(out, style, depth + 1);
        write_value(out, &item?, style, depth + 1)?;
    }
    if !empty {
        new_line(out, style, depth);
    }
    out.push(']');
    Ok(())
}

fn write_map(
    out: &mut String,
    value: &Value,
    style: &JsonStyle,
    depth: usize,
) -> Result<(), Error> {
    let mut keys = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
    if style.sort_keys {
        keys.sort();
    }
    out.push('{');
    for (at, key) in keys.iter().enumerate() {
        if at > 0 {
            out.push_str(&style.item_separator);
        }
        new_line(out, style, depth + 1);
        match key.as_str() {
            Some(text) => write_string(out, text, style.ensure_ascii),
            None => {
                let mut text = String::new();
                write_value(&mut text, key, style, depth + 1)?;
                write_string(out, &text, style.ensure_ascii);
            }
        }
        out.push_str(&style.key_separator);
        write_value(out, &value.get_item(key)?, style, depth + 1)?;
    }
    if !keys.is_empty() {
        new_line(out, style, depth);
    }
    out.push('}');
    Ok(())
}

fn new_line(out: &mut String, style: &JsonStyle, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        for _ in 0..depth {
            out.push_str(indent);
        }
    }
}

fn write_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    let mut plain_from = 0;
    for (at, c) in text.char_indices() {
        let plain = c >= ' ' && c != '"' && c != '\\' && (c.is_ascii() || !ensure_ascii);
        if plain {
            continue;
        }
        out.push_str(&text[plain_from..at]);
        plain_from = at + c.len_utf8();
        write_escape(out, c);
    }
    out.push_str(&text[plain_from..]);
    out.push('"');
}

fn write_escape(out: &mut String, c: char) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\u{8}' => out.push_str("\\b"),
        '\u{c}' => out.push_str("\\f"),
        _ => {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                // Writing to a String cannot fail.
                write!(out, "\\u{unit:04x}").unwrap_or_default();
            }
        }
    }
}
