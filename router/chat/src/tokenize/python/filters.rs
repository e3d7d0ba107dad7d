//! Filters and tests of jinja2 that differ from minijinja's in output or in accepted values.

use std::borrow::Cow;
use std::fmt::{self, Write};

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};

use super::json::{JsonStyle, dumps};
use super::text;

pub(super) fn register(env: &mut Environment<'static>) {
    env.add_filter("tojson", to_json);
    env.add_filter("string", |value: &Value| str_of(value).into_owned());
    env.add_filter("trim", trim);
    env.add_filter("title", |value: &Value| filter_title(&str_of(value)));
    env.add_filter("capitalize", |value: &Value| {
        text::capitalize(&str_of(value))
    });
    env.add_filter("upper", |value: &Value| str_of(value).to_uppercase());
    env.add_filter("lower", |value: &Value| str_of(value).to_lowercase());
    env.add_filter("replace", replace);
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("indent", indent);
    env.add_filter("items", items);
    env.add_filter("wordcount", |value: &Value| word_count(&str_of(value)));
    env.add_filter("center", |value: &Value, width: Option<usize>| {
        super::methods::center(&str_of(value), width.unwrap_or(80))
    });
    env.add_filter("safe", |value: &Value| value.clone());
    env.add_filter("escape", |value: &Value| escape(&str_of(value)));
    env.add_filter("e", |value: &Value| escape(&str_of(value)));
    // Attributes, not items: the values of a request have none.
    env.add_filter("attr", |_value: &Value, _name: &str| Value::UNDEFINED);
    for name in ["joiner", "cycler", "lipsum"] {
        env.add_function(name, unavailable);
    }
    env.add_test("sequence", is_sequence);
    env.add_test("iterable", |value: &Value| {
        value.is_undefined() || !value.is_none() && value.try_iter().is_ok()
    });
    env.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
}

/// A function that is defined as in jinja2 and fails: prompts do not use it.
fn unavailable(_arguments: minijinja::value::Rest<Value>) -> Result<Value, Error> {
    Err(Error::new(
        ErrorKind::InvalidOperation,
        "this function is not available",
    ))
}

/// HTML escapes as markupsafe writes them.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(c),
        }
    }
    out
}

pub(super) fn is_float(value: &Value) -> bool {
    value.kind() == ValueKind::Number && !value.is_integer()
}

/// `repr(float)`: the shortest form that reads back, with an exponent outside 1e-4 to 1e16.
pub(super) fn float_repr(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let shortest = format!("{number:?}");
    match shortest.split_once('e') {
        None => shortest,
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

/// Writes `str(value)`.
pub(super) fn write_str_of(out: &mut dyn Write, value: &Value) -> fmt::Result {
    match value.as_str() {
        Some(text) => out.write_str(text),
        None if value.is_undefined() => Ok(()),
        None => write_repr(out, value, 0),
    }
}

#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "the enum of kinds is not exhaustive"
)]
fn write_repr(out: &mut dyn Write, value: &Value, depth: usize) -> fmt::Result {
    const DEPTH_MAX: usize = 256;
    if depth > DEPTH_MAX {
        return Err(fmt::Error);
    }
    match value.kind() {
        ValueKind::Number if is_float(value) => out.write_str(&float_repr(
            f64::try_from(value.clone()).unwrap_or(f64::NAN),
        )),
        ValueKind::String => write_str_repr(out, value.as_str().unwrap_or("")),
        ValueKind::Undefined => out.write_str("Undefined"),
        ValueKind::Seq | ValueKind::Iterable if value.len().is_some() => {
            let (open, close) = if value.is_tuple() {
                ('(', ')')
            } else {
                ('[', ']')
            };
            out.write_char(open)?;
            let mut items = 0;
            for item in value.try_iter().map_err(|_| fmt::Error)? {
                if items > 0 {
                    out.write_str(", ")?;
                }
                write_repr(out, &item, depth + 1)?;
                items += 1;
            }
            if value.is_tuple() && items == 1 {
                out.write_char(',')?;
            }
            out.write_char(close)
        }
        ValueKind::Map => {
            out.write_char('{')?;
            for (at, key) in value.try_iter().map_err(|_| fmt::Error)?.enumerate() {
                if at > 0 {
                    out.write_str(", ")?;
                }
                write_repr(out, &key, depth + 1)?;
                out.write_str(": ")?;
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1)?;
            }
            out.write_char('}')
        }
        _ => write!(out, "{value}"),
    }
}

/// `repr(str)`: in single quotes unless only they occur inside, with unprintable characters escaped.
fn write_str_repr(out: &mut dyn Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\\' => out.write_str("\\\\")?,
            c if c == quote => write!(out, "\\{c}")?,
            c if is_printable(c) => out.write_char(c)?,
            c if u32::from(c) <= 0xff => write!(out, "\\x{:02x}", u32::from(c))?,
            c if u32::from(c) <= 0xffff => write!(out, "\\u{:04x}", u32::from(c))?,
            c => write!(out, "\\U{:08x}", u32::from(c))?,
        }
    }
    out.write_char(quote)
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

/// `str(value)`, borrowed if it is one.
pub(super) fn str_of(value: &Value) -> Cow<'_, str> {
    match value.as_str() {
        Some(text) => Cow::Borrowed(text),
        None => {
            let mut out = String::new();
            // Only a value nested deeper than any request fails; its text is then incomplete.
            write_str_of(&mut out, value).unwrap_or_default();
            Cow::Owned(out)
        }
    }
}

fn to_json(value: &Value, indent: Option<&Value>, options: Kwargs) -> Result<String, Error> {
    // The first positional argument is `ensure_ascii`, as transformers declares the filter.
    let ensure_ascii = match indent {
        Some(flag) => flag.is_true(),
        None => options
            .get::<Option<Value>>("ensure_ascii")?
            .is_some_and(|flag| flag.is_true()),
    };
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(value) if value.is_none() => None,
        Some(value) => Some(indent_prefix(&value)?),
    };
    let separators = options
        .get::<Option<Value>>("separators")?
        .filter(|value| !value.is_none());
    let (item_separator, key_separator) = match separators {
        Some(pair) => (part(&pair, 0)?, part(&pair, 1)?),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let sort_keys = options
        .get::<Option<Value>>("sort_keys")?
        .is_some_and(|value| value.is_true());
    options.assert_all_used()?;
    if value.is_undefined() {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "undefined is not JSON serializable",
        ));
    }
    dumps(
        value,
        &JsonStyle {
            indent,
            item_separator,
            key_separator,
            ensure_ascii,
            sort_keys,
        },
    )
}

/// Widths come from templates; the bound keeps a mistake from filling memory.
fn indent_prefix(text_or_width: &Value) -> Result<String, Error> {
    const WIDTH_MAX: i64 = 256;
    if let Some(text) = text_or_width.as_str() {
        return Ok(text.to_owned());
    }
    let width = i64::try_from(text_or_width.clone())?.clamp(0, WIDTH_MAX);
    Ok(" ".repeat(usize::try_from(width).unwrap_or(0)))
}

fn part(pair: &Value, at: usize) -> Result<String, Error> {
    let item = pair.get_item_by_index(at)?;
    item.as_str().map(str::to_owned).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidOperation,
            "separators must be two strings",
        )
    })
}

fn trim(value: &Value, chars: Option<&str>) -> String {
    let text = str_of(value);
    match chars {
        Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
        None => text::strip(&text).to_owned(),
    }
}

/// Jinja2's title filter: a word starts after white space or one of `-({[<`.
fn filter_title(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    let mut first = true;
    for c in value.chars() {
        if matches!(c, '-' | '(' | '{' | '[' | '<') || text::is_space(c) {
            out.push(c);
            first = true;
        } else if std::mem::replace(&mut first, false) {
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
    }
    out
}

fn replace(value: &Value, from: &Value, to: &Value, count: Option<&Value>) -> String {
    let text = str_of(value);
    let limit = count.and_then(Value::as_usize);
    let (from, to) = (str_of(from), str_of(to));
    match limit {
        Some(limit) => text.replacen(from.as_ref(), &to, limit),
        None => text.replace(from.as_ref(), &to),
    }
}

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    value.len().ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("{} has no length", value.kind()),
        )
    })
}

fn int(value: &Value, default: Option<Value>, base: Option<u32>) -> Value {
    let number = match value.as_str() {
        Some(text) => {
            let text = text::strip(text).replace('_', "");
            i128::from_str_radix(&text, base.unwrap_or(10))
                .ok()
                .or_else(|| {
                    text.parse::<f64>()
                        .ok()
                        .filter(|n| n.is_finite())
                        .map(|n| n as i128)
                })
        }
        None if is_float(value) => f64::try_from(value.clone())
            .ok()
            .filter(|n| n.is_finite())
            .map(|n| n as i128),
        None => i128::try_from(value.clone()).ok(),
    };
    number.map_or_else(|| default.unwrap_or_else(|| Value::from(0)), small_int)
}

fn small_int(number: i128) -> Value {
    i64::try_from(number).map_or_else(|_| Value::from(number), Value::from)
}

fn float(value: &Value, default: Option<Value>) -> Value {
    let number = match value.as_str() {
        Some(text) => text::strip(text).parse::<f64>().ok(),
        None => f64::try_from(value.clone()).ok(),
    };
    number.map_or_else(|| default.unwrap_or_else(|| Value::from(0.0)), Value::from)
}

fn indent(
    value: &Value,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<String, Error> {
    let text = str_of(value);
    let prefix = match width.or(options.get("width")?) {
        Some(width) => indent_prefix(&width)?,
        None => " ".repeat(4),
    };
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let text = format!("{text}\n");
    let mut out = String::with_capacity(text.len());
    for (at, line) in text::split_lines(&text).into_iter().enumerate() {
        let line = text::without_line_end(line);
        if at > 0 {
            out.push('\n');
        }
        if (at > 0 || first) && (blank || !line.is_empty()) {
            out.push_str(&prefix);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// The pairs of a mapping; an empty list for an undefined value.
fn items(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    if value.kind() != ValueKind::Map {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "can only get item pairs of a map",
        ));
    }
    super::methods::pairs(value)
}

fn word_count(text: &str) -> usize {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_'))
        .filter(|w| !w.is_empty())
        .count()
}

/// Whether a value has a length and can be indexed: in Python also strings and mappings.
#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "the enum of kinds is not exhaustive"
)]
fn is_sequence(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map => true,
        // A slice of a list is lazy in minijinja and a list in Python.
        ValueKind::Iterable => value.len().is_some(),
        _ => false,
    }
}
