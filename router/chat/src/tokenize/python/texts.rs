//! Texts made of several values: `~`, `+`, `%`, `join`, `format` and `str.format` print a value as
//! Python's `str` does, whatever the way.

use std::borrow::Cow;

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, from_args};
use minijinja::{Environment, Error, State};

use super::bounds::text_bytes_max;
use super::invalid;
use super::operators::{ADD, CONCAT, PRINTF};
use super::print::{str_of, text_of};

pub(super) fn register(env: &mut Environment<'static>) {
    env.add_filter(CONCAT, concat);
    env.add_filter(ADD, add);
    env.add_filter(
        PRINTF,
        |state: &State<'_, '_>, text: &Value, values: &Value| {
            // A tuple is a list of values, any other value is the only one.
            let values = if values.is_tuple() {
                values.try_iter()?.collect()
            } else {
                vec![values.clone()]
            };
            printf(text, &values, text_bytes_max(state)?)
        },
    );
    env.add_filter(
        "format",
        |state: &State<'_, '_>, text: &Value, values: Rest<Value>, named: Kwargs| {
            let bytes_max = text_bytes_max(state)?;
            let names: Vec<&str> = named.args().collect();
            if names.is_empty() {
                return printf(text, &values, bytes_max);
            }
            let members = names
                .into_iter()
                .map(|name| Ok((name, named.get::<Value>(name)?)));
            let members = members.collect::<Result<Vec<_>, Error>>()?;
            printf(text, &[Value::from_pairs(members)], bytes_max)
        },
    );
    env.add_filter("join", join);
}

/// A text that is marked as safe if the value is.
pub(super) fn like(value: &Value, text: String) -> Value {
    if value.is_safe() {
        Value::from_safe_string(text)
    } else {
        Value::from(text)
    }
}

/// HTML escapes as markupsafe writes them.
pub(super) fn html_escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&#34;")
        .replace('\'', "&#39;")
}

/// `first ~ others[0] ~ …`
fn concat(state: &State<'_, '_>, first: &Value, others: Rest<Value>) -> Result<String, Error> {
    let bytes_max = text_bytes_max(state)?;
    let mut out = text_of(first, bytes_max)?.into_owned();
    for value in others.iter() {
        out.push_str(&text_of(value, bytes_max)?);
    }
    Ok(out)
}

/// `left + right` in a template that marks texts as safe: a safe text escapes the other one.
fn add(left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        if !left.is_safe() && !right.is_safe() {
            return Ok(Value::from([a, b].concat()));
        }
        let escaped = |value: &Value, text| match value.is_safe() {
            true => Cow::Borrowed(text),
            false => Cow::Owned(html_escaped(text)),
        };
        let parts = [escaped(left, a), escaped(right, b)];
        return Ok(Value::from_safe_string(parts.concat()));
    }
    let is_list = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    if is_list(left) && is_list(right) && left.is_tuple() == right.is_tuple() {
        let items = left
            .try_iter()?
            .checked()
            .chain(right.try_iter()?.checked());
        let items = items.collect::<Result<Vec<_>, Error>>()?;
        return Ok(match left.is_tuple() {
            true => Tuple::from(items).into(),
            false => Value::from(items),
        });
    }
    if let (Some(a), Some(b)) = (whole(left), whole(right)) {
        let sum = a
            .checked_add(b)
            .ok_or_else(|| invalid("the sum is too large"))?;
        return Ok(i64::try_from(sum).map_or_else(|_| Value::from(sum), Value::from));
    }
    match (number(left), number(right)) {
        (Some(a), Some(b)) => Ok(Value::from(a + b)),
        _ => Err(invalid("these values have no sum")),
    }
}

/// An integer; `true` is 1.
fn whole(value: &Value) -> Option<i128> {
    if value.kind() == ValueKind::Bool {
        return Some(value.is_true().into());
    }
    let whole = value.is_integer().then(|| i128::try_from(value.clone()));
    whole?.ok()
}

fn number(value: &Value) -> Option<f64> {
    let whole = whole(value).map(|whole| whole as f64);
    whole.or_else(|| f64::try_from(value.clone()).ok())
}

/// Digits of the widths and precisions that are reproduced.
const WIDTH_DIGITS_MAX: usize = 4;

/// Refuses a format whose text may be longer than `bytes_max`. `fields` are its conversions without
/// their first sign, `longest` the bytes of the longest value. A width may have any size, and a
/// value may stand in every field.
fn check_size<'a>(
    text: &str,
    fields: impl Iterator<Item = &'a str>,
    longest: usize,
    bytes_max: usize,
) -> Result<(), Error> {
    let mut bytes = text.len();
    for field in fields {
        if field.contains(['*', '{']) {
            return Err(invalid("a width that an argument gives"));
        }
        bytes = bytes.saturating_add(longest);
        for width in field.split(|c: char| !c.is_ascii_digit()) {
            if width.len() > WIDTH_DIGITS_MAX {
                return Err(invalid("width is too large"));
            }
            bytes = bytes.saturating_add(width.parse().unwrap_or(0));
        }
    }
    if bytes > bytes_max {
        return Err(invalid("the formatted text is too long"));
    }
    Ok(())
}

/// The bytes of the longest of some printed values, and of those in a mapping of them.
fn longest(values: &[Value]) -> usize {
    // The longest number.
    const NUMBER: usize = 400;
    let text_len = |value: &Value| value.as_str().map_or(NUMBER, str::len);
    let member_len = |value: &Value| {
        if value.kind() != ValueKind::Map {
            return Some(text_len(value));
        }
        let keys = value.try_iter().ok().into_iter().flatten();
        let members = keys.filter_map(|key| value.get_item(&key).ok());
        members.map(|member| text_len(&member)).max()
    };
    let found = values.iter().filter_map(member_len);
    found.max().unwrap_or(0).max(NUMBER)
}

/// `text % values`, and jinja2's filter `format`.
pub(super) fn printf(text: &Value, values: &[Value], bytes_max: usize) -> Result<String, Error> {
    if text.is_safe() {
        return Err(invalid("a safe text escapes its arguments"));
    }
    let text = str_of(text)?;
    let values = match values {
        // The values by name.
        [only] if only.kind() == ValueKind::Map && text.contains("%(") => {
            let members = only.try_iter()?.checked().map(|key| {
                let key = key?;
                let value = printable(&only.get_item(&key)?)?;
                Ok((key, value))
            });
            vec![Value::from_pairs(
                members.collect::<Result<Vec<_>, Error>>()?,
            )]
        }
        values => values.iter().map(printable).collect::<Result<_, Error>>()?,
    };
    let fields = text.split('%').skip(1).map(|field| {
        let name_end = field.starts_with('(').then(|| field.find(')')).flatten();
        let field = name_end.map_or(field, |end| &field[end..]);
        let end = field.find(|c: char| c.is_ascii_alphabetic());
        end.map_or(field, |end| &field[..end])
    });
    check_size(&text, fields, longest(&values), bytes_max)?;
    format(FormatStyle::Printf, &text, &values)
}

/// `text.format(…)`
pub(super) fn str_format(text: &str, args: &[Value], bytes_max: usize) -> Result<Value, Error> {
    let (values, named): (&[Value], Kwargs) = from_args(args)?;
    let named_values = named
        .args()
        .filter_map(|name| named.peek::<Value>(name).ok());
    let all: Vec<Value> = values.iter().cloned().chain(named_values).collect();
    let mut rest = text;
    let fields = std::iter::from_fn(|| {
        loop {
            rest = rest.split_once('{')?.1;
            match rest.strip_prefix('{') {
                Some(literal) => rest = literal,
                None => break,
            }
        }
        let (field, behind) = rest.split_once('}').unwrap_or((rest, ""));
        rest = behind;
        Some(field.split_once(':').map_or("", |(_, spec)| spec))
    });
    check_size(text, fields, longest(&all), bytes_max)?;
    let names: Vec<&str> = named.args().collect();
    let is_named_plain = |name: &&str| {
        named
            .peek::<Value>(name)
            .is_ok_and(|value| is_plain(&value))
    };
    if values.iter().all(is_plain) && names.iter().all(is_named_plain) {
        return format(FormatStyle::StrFormat, text, args).map(Value::from);
    }
    // An item or attribute of an argument would need its value.
    if text.contains(['[', '.', '!']) {
        return Err(invalid("this use of format is not supported"));
    }
    let mut printed = values
        .iter()
        .map(printable)
        .collect::<Result<Vec<_>, Error>>()?;
    if !names.is_empty() {
        let named = names.into_iter().map(|name| {
            let value = printable(&named.peek::<Value>(name)?)?;
            Ok((name.to_owned(), value))
        });
        let named = named.collect::<Result<Vec<_>, Error>>()?;
        printed.push(Kwargs::from_iter(named).into());
    }
    format(FormatStyle::StrFormat, text, &printed).map(Value::from)
}

/// A value whose text minijinja's formats know: numbers stay, others become their text.
fn printable(value: &Value) -> Result<Value, Error> {
    if is_plain(value) {
        return Ok(value.clone());
    }
    Ok(Value::from(str_of(value)?.into_owned()))
}

fn is_plain(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::String | ValueKind::Number | ValueKind::Bool
    )
}

fn join(
    state: &State<'_, '_>,
    value: &Value,
    separator: Option<Value>,
    attribute: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let separator = separator
        .or(options.get("d")?)
        .filter(|d| !d.is_undefined());
    let attribute = attribute.or(options.get("attribute")?);
    options.assert_all_used()?;
    let attribute = attribute.filter(|attribute| !attribute.is_none());
    let separator = separator.as_ref().map(str_of).transpose()?;
    let bytes_max = text_bytes_max(state)?;
    let mut out = String::new();
    for (at, item) in value.try_iter()?.checked().enumerate() {
        if at > 0 {
            out.push_str(separator.as_deref().unwrap_or(""));
        }
        let item = match &attribute {
            None => item?,
            Some(path) => at_path(item?, path)?,
        };
        let left = bytes_max.saturating_sub(out.len());
        let text = text_of(&item, left)?;
        if text.len() > left {
            return Err(invalid("the text is too long"));
        }
        out.push_str(&text);
    }
    Ok(out)
}

/// The item at a path of names and indexes, separated by dots.
fn at_path(mut item: Value, path: &Value) -> Result<Value, Error> {
    let Some(names) = path.as_str() else {
        return item.get_item(path);
    };
    for name in names.split('.') {
        let key = match name.parse::<usize>() {
            Ok(index) => Value::from(index),
            Err(_) => Value::from(name),
        };
        item = item.get_item(&key)?;
    }
    Ok(item)
}
