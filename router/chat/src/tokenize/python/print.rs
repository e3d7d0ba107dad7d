//! Template values as text: Python's `str`, `repr` and `json.dumps`.

use std::borrow::Cow;
use std::fmt::{self, Write};

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::invalid;
use super::views::view;

/// Only a template can build a value nested deeper than this; a request cannot.
const DEPTH_MAX: usize = 256;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Notation {
    Repr,
    Json,
    /// JSON with escapes for all other characters than ASCII.
    AsciiJson,
}

pub(super) struct PrintStyle {
    pub(super) notation: Notation,
    /// The indentation of one level; `None` writes one line.
    pub(super) indent: Option<String>,
    pub(super) item_separator: Cow<'static, str>,
    pub(super) key_separator: Cow<'static, str>,
    pub(super) sort_keys: bool,
}

const REPR: PrintStyle = PrintStyle {
    notation: Notation::Repr,
    indent: None,
    item_separator: Cow::Borrowed(", "),
    key_separator: Cow::Borrowed(": "),
    sort_keys: false,
};

/// Writes `str(value)`.
pub(super) fn write_str_of(out: &mut dyn Write, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text)?,
        None if value.is_undefined() => {}
        None => write_value(out, value, &REPR, 0)?,
    }
    Ok(())
}

/// `str(value)`, borrowed if the value is a string.
pub(super) fn str_of(value: &Value) -> Result<Cow<'_, str>, Error> {
    text_of(value, usize::MAX)
}

/// `str(value)`, which fails beyond so many bytes and for a value without a text.
pub(super) fn text_of(value: &Value, bytes_max: usize) -> Result<Cow<'_, str>, Error> {
    if let Some(text) = value.as_str() {
        return Ok(Cow::Borrowed(text));
    }
    let mut out = BoundedString {
        text: String::new(),
        bytes_max,
    };
    write_str_of(&mut out, value)?;
    Ok(Cow::Owned(out.text))
}

/// `json.dumps(value)`, which fails beyond so many bytes: indentation makes many of few.
pub(super) fn dumps(value: &Value, style: &PrintStyle, bytes_max: usize) -> Result<String, Error> {
    let mut out = BoundedString {
        text: String::new(),
        bytes_max,
    };
    write_value(&mut out, value, style, 0)?;
    Ok(out.text)
}

struct BoundedString {
    text: String,
    bytes_max: usize,
}

impl Write for BoundedString {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        if part.len() > self.bytes_max - self.text.len() {
            return Err(fmt::Error);
        }
        self.text.push_str(part);
        Ok(())
    }
}

#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "the enum of kinds is not exhaustive"
)]
fn write_value(
    out: &mut dyn Write,
    value: &Value,
    style: &PrintStyle,
    depth: usize,
) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        let reason = "value is nested too deeply";
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    let is_repr = style.notation == Notation::Repr;
    if let Some(view) = view(value) {
        return match is_repr {
            true => view.write(out, |out, items| write_value(out, items, style, depth)),
            false => Err(invalid("a view of a dict is not JSON serializable")),
        };
    }
    match value.kind() {
        ValueKind::Iterable if is_repr && value.len().is_none() => write!(out, "{value}")?,
        ValueKind::Seq | ValueKind::Iterable => write_list(out, value, style, depth)?,
        ValueKind::Map => write_map(out, value, style, depth)?,
        ValueKind::Number if is_float(value) => {
            let number = f64::try_from(value.clone())?;
            out.write_str(&match style.notation {
                Notation::Json | Notation::AsciiJson if number.is_nan() => "NaN".to_owned(),
                Notation::Json | Notation::AsciiJson if number.is_infinite() => {
                    format!("{number}").replace("inf", "Infinity")
                }
                Notation::Repr | Notation::Json | Notation::AsciiJson => float_repr(number),
            })?;
        }
        ValueKind::Number => write!(out, "{value}")?,
        ValueKind::String if is_repr && value.is_safe() => {
            out.write_str("Markup(")?;
            write_string(out, value.as_str().unwrap_or(""), style)?;
            out.write_char(')')?;
        }
        ValueKind::String => write_string(out, value.as_str().unwrap_or(""), style)?,
        ValueKind::Undefined if is_repr => out.write_str("Undefined")?,
        // Python prints its address.
        ValueKind::Plain if is_repr => return Err(invalid("a function has no text")),
        _ if is_repr => write!(out, "{value}")?,
        ValueKind::None => out.write_str("null")?,
        ValueKind::Bool => out.write_str(if value.is_true() { "true" } else { "false" })?,
        kind => {
            let reason = format!("a value of type {kind} is not JSON serializable");
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
    }
    Ok(())
}

fn write_list(
    out: &mut dyn Write,
    value: &Value,
    style: &PrintStyle,
    depth: usize,
) -> Result<(), Error> {
    let (open, close) = if style.notation == Notation::Repr && value.is_tuple() {
        ('(', ')')
    } else {
        ('[', ']')
    };
    out.write_char(open)?;
    let mut items = 0;
    for item in value.try_iter()?.checked() {
        style.separate(out, items, depth + 1)?;
        write_value(out, &item?, style, depth + 1)?;
        items += 1;
    }
    if open == '(' && items == 1 {
        out.write_char(',')?;
    }
    if items > 0 {
        style.new_line(out, depth)?;
    }
    Ok(out.write_char(close)?)
}

fn write_map(
    out: &mut dyn Write,
    value: &Value,
    style: &PrintStyle,
    depth: usize,
) -> Result<(), Error> {
    let mut keys = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
    if style.sort_keys {
        keys.sort();
    }
    out.write_char('{')?;
    for (at, key) in keys.iter().enumerate() {
        style.separate(out, at, depth + 1)?;
        if style.notation == Notation::Repr || key.as_str().is_some() {
            write_value(out, key, style, depth + 1)?;
        } else {
            let mut text = String::new();
            write_value(&mut text, key, style, depth + 1)?;
            write_string(out, &text, style)?;
        }
        out.write_str(&style.key_separator)?;
        write_value(out, &value.get_item(key)?, style, depth + 1)?;
    }
    if !keys.is_empty() {
        style.new_line(out, depth)?;
    }
    Ok(out.write_char('}')?)
}

impl PrintStyle {
    fn separate(&self, out: &mut dyn Write, at: usize, depth: usize) -> fmt::Result {
        if at > 0 {
            out.write_str(&self.item_separator)?;
        }
        self.new_line(out, depth)
    }

    fn new_line(&self, out: &mut dyn Write, depth: usize) -> fmt::Result {
        if let Some(indent) = &self.indent {
            out.write_char('\n')?;
            for _ in 0..depth {
                out.write_str(indent)?;
            }
        }
        Ok(())
    }
}

pub(super) fn is_float(value: &Value) -> bool {
    value.kind() == ValueKind::Number && !value.is_integer()
}

/// `repr(float)`: the shortest form that reads back, with an exponent outside 1e-4 to 1e16.
fn float_repr(number: f64) -> String {
    let shortest = format!("{number:?}");
    match shortest.split_once('e') {
        None => shortest.to_lowercase(),
        Some((mantissa, exponent)) => {
            let mantissa = mantissa.strip_suffix(".0").unwrap_or(mantissa);
            let (sign, digits) = match exponent.strip_prefix('-') {
                Some(digits) => ('-', digits),
                None => ('+', exponent),
            };
            format!("{mantissa}e{sign}{digits:0>2}")
        }
    }
}

/// A quoted string. `repr` uses single quotes unless only they occur inside.
fn write_string(out: &mut dyn Write, text: &str, style: &PrintStyle) -> fmt::Result {
    let quote = match style.notation {
        Notation::Repr if text.contains('"') || !text.contains('\'') => '\'',
        Notation::Repr | Notation::Json | Notation::AsciiJson => '"',
    };
    out.write_char(quote)?;
    let mut plain_from = 0;
    for (at, c) in text.char_indices() {
        let is_plain = match style.notation {
            Notation::Repr => is_printable(c),
            Notation::Json => c >= ' ',
            Notation::AsciiJson => c >= ' ' && c.is_ascii(),
        };
        if !is_plain || c == quote || c == '\\' {
            out.write_str(&text[plain_from..at])?;
            plain_from = at + c.len_utf8();
            write_escape(out, c, style.notation)?;
        }
    }
    out.write_str(&text[plain_from..])?;
    out.write_char(quote)
}

fn write_escape(out: &mut dyn Write, c: char, notation: Notation) -> fmt::Result {
    let is_repr = notation == Notation::Repr;
    match c {
        '"' | '\'' | '\\' => write!(out, "\\{c}"),
        '\n' => out.write_str("\\n"),
        '\r' => out.write_str("\\r"),
        '\t' => out.write_str("\\t"),
        '\u{8}' if !is_repr => out.write_str("\\b"),
        '\u{c}' if !is_repr => out.write_str("\\f"),
        '\0'..='\u{ff}' if is_repr => write!(out, "\\x{:02x}", u32::from(c)),
        '\u{10000}'.. if is_repr => write!(out, "\\U{:08x}", u32::from(c)),
        _ => {
            let mut units = [0; 2];
            let mut units = c.encode_utf16(&mut units).iter();
            units.try_for_each(|unit| write!(out, "\\u{unit:04x}"))
        }
    }
}

/// Rust's debug output escapes the characters that Python escapes: other, format and separator
/// characters. Neither escapes a combining mark after another character.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return (' '..='~').contains(&c);
    }
    let mut pair = String::from("a");
    pair.push(c);
    pair.escape_debug().nth(1) == Some(c)
}
