//! Methods of Python's str, dict and list that do not change their object. Those on which
//! minijinja-contrib agrees with Python come from there; it accepts a few arguments that Python
//! refuses, which is harmless: the engine then renders no prompt.

use minijinja::value::{Kwargs, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, State};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::bounds::text_bytes_max;
use super::views::View;
use super::{invalid, text, texts};

#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "the enum of kinds is not exhaustive"
)]
pub(super) fn call(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let own = match value.kind() {
        ValueKind::String if value.is_safe() => return safe_method(state, value, method, args),
        ValueKind::String if method == "format" => {
            let bytes_max = text_bytes_max(state)?;
            Some(texts::str_format(
                value.as_str().unwrap_or(""),
                args,
                bytes_max,
            ))
        }
        ValueKind::String => str_method(value.as_str().unwrap_or(""), method, args),
        ValueKind::Map => dict_method(value, method, args),
        ValueKind::Seq | ValueKind::Iterable => list_method(value, method, args),
        _ => None,
    };
    own.unwrap_or_else(|| unknown_method_callback(state, value, method, args))
}

/// A method of a text that is marked as safe: its texts are safe too. Those that escape their
/// arguments are not reproduced.
fn safe_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if matches!(method, "format" | "format_map" | "join" | "replace") {
        return Err(invalid("this method escapes its arguments"));
    }
    let plain = Value::from(value.as_str().unwrap_or(""));
    let result = call(state, &plain, method, args)?;
    let safe = |part: Value| match part.as_str() {
        Some(text) => Value::from_safe_string(text.to_owned()),
        None => part,
    };
    if result.kind() != ValueKind::Seq {
        return Ok(safe(result));
    }
    let parts: Vec<Value> = result.try_iter()?.map(safe).collect();
    Ok(match result.is_tuple() {
        true => Tuple::from(parts).into(),
        false => Value::from(parts),
    })
}

/// The result of a method without arguments.
fn nullary(args: &[Value], result: impl Into<Value>) -> Result<Value, Error> {
    let () = from_args(args)?;
    Ok(result.into())
}

fn text_arg(args: &[Value]) -> Result<&str, Error> {
    let (text,) = from_args(args)?;
    Ok(text)
}

/// `None` for a method that is not implemented here.
fn str_method(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let all = |test: fn(char) -> bool| !text.is_empty() && text.chars().all(test);
    Some(match method {
        "isspace" => nullary(args, all(text::is_space)),
        "isdecimal" => nullary(args, all(is_decimal)),
        "isdigit" => nullary(args, all(is_digit)),
        "casefold" => nullary(args, text.to_lowercase().replace('ß', "ss")),
        "title" => nullary(args, text::title(text)),
        "capitalize" => nullary(args, text::capitalize(text)),
        "swapcase" => nullary(args, text::swap_case(text)),
        "strip" | "lstrip" | "rstrip" => strip(text, method, args),
        "index" => text_arg(args).and_then(|part| position(text, text.find(part))),
        "rindex" => text_arg(args).and_then(|part| position(text, text.rfind(part))),
        "split" | "rsplit" => split(text, method, args),
        "splitlines" => split_lines(text, args),
        "partition" => text_arg(args).map(|by| match text.split_once(by) {
            Some((before, after)) => triple([before, by, after]),
            None => triple([text, "", ""]),
        }),
        "rpartition" => text_arg(args).map(|by| match text.rsplit_once(by) {
            Some((before, after)) => triple([before, by, after]),
            None => triple(["", "", text]),
        }),
        "removeprefix" => {
            text_arg(args).map(|affix| Value::from(text.strip_prefix(affix).unwrap_or(text)))
        }
        "removesuffix" => {
            text_arg(args).map(|affix| Value::from(text.strip_suffix(affix).unwrap_or(text)))
        }
        "zfill" => zero_fill(text, args),
        "center" | "ljust" | "rjust" => pad(text, method, args),
        _ => return None,
    })
}

/// Decimal digits of the scripts that have a block of ten of them at a round offset.
fn is_decimal(c: char) -> bool {
    const TENS: [u32; 6] = [0x30, 0x660, 0x6f0, 0x966, 0x9e6, 0xff10];
    TENS.iter()
        .any(|ten| (*ten..ten + 10).contains(&u32::from(c)))
}

fn is_digit(c: char) -> bool {
    is_decimal(c) || matches!(c, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉')
}

fn strip(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (chars,): (Option<&str>,) = from_args(args)?;
    let strips = |c: char| chars.map_or_else(|| text::is_space(c), |chars| chars.contains(c));
    Ok(Value::from(match method {
        "lstrip" => text.trim_start_matches(strips),
        "rstrip" => text.trim_end_matches(strips),
        _ => text.trim_matches(strips),
    }))
}

/// Python counts code points.
fn position(text: &str, byte: Option<usize>) -> Result<Value, Error> {
    let byte = byte.ok_or_else(|| invalid("substring not found"))?;
    Ok(Value::from(text[..byte].chars().count()))
}

fn triple(parts: [&str; 3]) -> Value {
    Value::from(Tuple::from(parts.map(Value::from)))
}

fn list(parts: Vec<&str>) -> Value {
    parts.into_iter().map(Value::from).collect()
}

fn split(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, limit, options): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = separator.or(options.get("sep")?);
    let limit: Option<i64> = limit.or(options.get("maxsplit")?);
    options.assert_all_used()?;
    let limit = limit.and_then(|limit| usize::try_from(limit).ok());
    let limit = limit.unwrap_or(usize::MAX);
    let from_end = method == "rsplit";
    let Some(separator) = separator.filter(|separator| !separator.is_none()) else {
        return Ok(list(if from_end {
            rsplit_space(text, limit)
        } else {
            split_space(text, limit)
        }));
    };
    let by = separator.as_str().filter(|by| !by.is_empty());
    let by = by.ok_or_else(|| invalid("separator must be a text"))?;
    let parts = limit.saturating_add(1);
    Ok(list(if from_end {
        let mut found: Vec<_> = text.rsplitn(parts, by).collect();
        found.reverse();
        found
    } else {
        text.splitn(parts, by).collect()
    }))
}

/// Splits at runs of white space. The part after the last allowed split keeps its spaces.
fn split_space(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start_matches(text::is_space);
    while let Some(cut) = rest.find(text::is_space).filter(|_| parts.len() < limit) {
        parts.push(&rest[..cut]);
        rest = rest[cut..].trim_start_matches(text::is_space);
    }
    if !rest.is_empty() {
        parts.push(rest);
    }
    parts
}

/// Like [`split_space`], from the end.
fn rsplit_space(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text::strip_end(text);
    while let Some(cut) = rest.rfind(text::is_space).filter(|_| parts.len() < limit) {
        parts.push(rest[cut..].trim_start_matches(text::is_space));
        rest = text::strip_end(&rest[..cut]);
    }
    if !rest.is_empty() {
        parts.push(rest);
    }
    parts.reverse();
    parts
}

fn split_lines(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (keep, options): (Option<bool>, Kwargs) = from_args(args)?;
    let keep = keep.or(options.get("keepends")?);
    options.assert_all_used()?;
    let mut lines = text::split_lines(text);
    if keep != Some(true) {
        for line in &mut lines {
            *line = text::without_line_end(line);
        }
    }
    Ok(list(lines))
}

/// Widths come from templates; the bound keeps a mistake from filling memory.
fn bounded(width: usize) -> Result<usize, Error> {
    const WIDTH_MAX: usize = 65_535;
    if width > WIDTH_MAX {
        Err(invalid("width is too large"))
    } else {
        Ok(width)
    }
}

fn zero_fill(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (width,): (usize,) = from_args(args)?;
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let sign = &text[..text.len() - digits.len()];
    let width = bounded(width)?.saturating_sub(sign.len());
    Ok(Value::from(format!("{sign}{digits:0>width$}")))
}

fn pad(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (usize, Option<char>) = from_args(args)?;
    let (width, fill) = (bounded(width)?, fill.unwrap_or(' '));
    let missing = width.saturating_sub(text.chars().count());
    let left = match method {
        "ljust" => 0,
        "rjust" => missing,
        _ => left_of_center(missing, width),
    };
    Ok(Value::from(padded(text, fill, left, missing - left)))
}

/// `str.center` with spaces.
pub(super) fn center(text: &str, width: usize) -> String {
    let missing = width.saturating_sub(text.chars().count());
    let left = left_of_center(missing, width);
    padded(text, ' ', left, missing - left)
}

/// The odd space goes left if the width is odd.
fn left_of_center(missing: usize, width: usize) -> usize {
    missing / 2 + (missing & width & 1)
}

fn padded(text: &str, fill: char, left: usize, right: usize) -> String {
    let filler = |n: usize| fill.to_string().repeat(n);
    format!("{}{text}{}", filler(left), filler(right))
}

/// Views where minijinja-contrib gives iterators, which have no length and print differently.
fn dict_method(value: &Value, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match method {
        "keys" => view(value, args, "dict_keys", |(key, _)| key),
        "values" => view(value, args, "dict_values", |(_, item)| item),
        "items" => view(value, args, "dict_items", |(key, item)| {
            Tuple::from([key, item]).into()
        }),
        "copy" => nullary(args, value.clone()),
        _ => return None,
    })
}

fn view(
    value: &Value,
    args: &[Value],
    name: &'static str,
    part: fn((Value, Value)) -> Value,
) -> Result<Value, Error> {
    let () = from_args(args)?;
    Ok(View::dict(name, collected(value, part)?))
}

fn collected(value: &Value, part: fn((Value, Value)) -> Value) -> Result<Vec<Value>, Error> {
    let keys = value.try_iter()?.checked();
    keys.map(|key| {
        let key = key?;
        let item = value.get_item(&key)?;
        Ok(part((key, item)))
    })
    .collect()
}

/// The pairs of a mapping, as a list of tuples.
pub(super) fn pairs(value: &Value) -> Result<Value, Error> {
    collected(value, |(key, item)| Tuple::from([key, item]).into()).map(Value::from)
}

fn list_method(value: &Value, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match method {
        "count" => positions(value, args).map(|found| Value::from(found.len())),
        "index" => positions(value, args).and_then(|found| {
            let first = found
                .first()
                .ok_or_else(|| invalid("the value is not in the list"));
            first.map(|at| Value::from(*at))
        }),
        "copy" => nullary(args, value.clone()),
        _ => return None,
    })
}

/// Where a list holds the argument.
fn positions(value: &Value, args: &[Value]) -> Result<Vec<usize>, Error> {
    let (what,): (&Value,) = from_args(args)?;
    let mut found = Vec::new();
    for (at, item) in value.try_iter()?.checked().enumerate() {
        if item? == *what {
            found.push(at);
        }
    }
    Ok(found)
}
