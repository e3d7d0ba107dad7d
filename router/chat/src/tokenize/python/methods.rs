//! Methods of Python's str, dict and list that do not change their object.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};

use super::filters::str_of;
use super::text;

#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "the enum of kinds is not exhaustive"
)]
pub(crate) fn call(
    _state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or("");
            if let Some(result) = predicate(text, method) {
                let () = from_args(args)?;
                return Ok(Value::from(result));
            }
            case(text, method, args)
                .or_else(|| strip(text, method, args))
                .or_else(|| search(text, method, args))
                .or_else(|| split(text, method, args))
                .or_else(|| build(text, method, args))
                .unwrap_or_else(|| Err(unknown()))
        }
        ValueKind::Map => map_method(value, method, args),
        ValueKind::Seq | ValueKind::Iterable => list_method(value, method, args),
        _ => Err(unknown()),
    }
}

fn unknown() -> Error {
    Error::from(ErrorKind::UnknownMethod)
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// `is…` methods: false for an empty text, except `isascii`.
fn predicate(text: &str, method: &str) -> Option<bool> {
    let all = |test: fn(char) -> bool| !text.is_empty() && text.chars().all(test);
    Some(match method {
        "isspace" => all(text::is_space),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isnumeric" => all(char::is_numeric),
        "isdecimal" => all(is_decimal),
        "isdigit" => {
            all(|c| is_decimal(c) || matches!(c, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉'))
        }
        "isascii" => text.is_ascii(),
        "islower" => text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase),
        "isupper" => text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase),
        _ => return None,
    })
}

/// Decimal digits of the scripts that have a block of ten of them at a round offset.
fn is_decimal(c: char) -> bool {
    const TENS: [u32; 6] = [0x30, 0x660, 0x6f0, 0x966, 0x9e6, 0xff10];
    TENS.iter()
        .any(|ten| (*ten..ten + 10).contains(&u32::from(c)))
}

type Outcome = Option<Result<Value, Error>>;

fn case(text: &str, method: &str, args: &[Value]) -> Outcome {
    let changed = match method {
        "upper" => text.to_uppercase(),
        "lower" => text.to_lowercase(),
        "casefold" => text.to_lowercase().replace('ß', "ss"),
        "title" => text::title(text),
        "capitalize" => text::capitalize(text),
        "swapcase" => text::swap_case(text),
        _ => return None,
    };
    Some(from_args::<()>(args).map(|()| Value::from(changed)))
}

fn strip(text: &str, method: &str, args: &[Value]) -> Outcome {
    if !matches!(method, "strip" | "lstrip" | "rstrip") {
        return None;
    }
    let run = || {
        let (chars,): (Option<&Value>,) = from_args(args)?;
        let chars = chars.filter(|chars| !chars.is_none());
        let stripped = match chars {
            None => match method {
                "lstrip" => text::strip_start(text),
                "rstrip" => text::strip_end(text),
                _ => text::strip(text),
            },
            Some(chars) => {
                let chars = chars
                    .as_str()
                    .ok_or_else(|| invalid("strip takes a string"))?;
                let within = |c: char| chars.contains(c);
                match method {
                    "lstrip" => text.trim_start_matches(within),
                    "rstrip" => text.trim_end_matches(within),
                    _ => text.trim_matches(within),
                }
            }
        };
        Ok(Value::from(stripped))
    };
    Some(run())
}

fn search(text: &str, method: &str, args: &[Value]) -> Outcome {
    let position = |found: Option<usize>| match found {
        Some(byte) => text::chars_before(text, byte) as i64,
        None => -1,
    };
    let run = || -> Result<Value, Error> {
        if matches!(method, "startswith" | "endswith") {
            let (affix,): (&Value,) = from_args(args)?;
            return affixed(text, affix, method).map(Value::from);
        }
        let (what,): (&str,) = from_args(args)?;
        let at = match method {
            "find" => position(text.find(what)),
            "rfind" => position(text.rfind(what)),
            "index" | "rindex" => {
                let found = if method == "index" {
                    text.find(what)
                } else {
                    text.rfind(what)
                };
                position(Some(found.ok_or_else(|| invalid("substring not found"))?))
            }
            _ => text.matches(what).count() as i64,
        };
        Ok(Value::from(at))
    };
    matches!(
        method,
        "find" | "rfind" | "index" | "rindex" | "count" | "startswith" | "endswith"
    )
    .then(run)
}

fn affixed(text: &str, affix: &Value, method: &str) -> Result<bool, Error> {
    let matches_one = |affix: &str| match method {
        "startswith" => text.starts_with(affix),
        _ => text.ends_with(affix),
    };
    if let Some(affix) = affix.as_str() {
        return Ok(matches_one(affix));
    }
    if !affix.is_tuple() {
        return Err(invalid("an affix must be a string or a tuple of strings"));
    }
    for one in affix.try_iter()?.checked() {
        if matches_one(
            one?.as_str()
                .ok_or_else(|| invalid("an affix must be a string"))?,
        ) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn split(text: &str, method: &str, args: &[Value]) -> Outcome {
    let list = |parts: Vec<&str>| Value::from_iter(parts.into_iter().map(Value::from));
    let run = || -> Result<Value, Error> {
        match method {
            "split" | "rsplit" => {
                let (separator, limit, options): (Option<Value>, Option<i64>, Kwargs) =
                    from_args(args)?;
                let separator = match separator {
                    Some(separator) => Some(separator),
                    None => options.get::<Option<Value>>("sep")?,
                };
                let limit = limit.or(options.get("maxsplit")?).unwrap_or(-1);
                options.assert_all_used()?;
                let limit = usize::try_from(limit).unwrap_or(usize::MAX);
                let separator = separator.filter(|separator| !separator.is_none());
                let parts = match &separator {
                    None => split_space(text, limit, method == "rsplit"),
                    Some(separator) => {
                        let by = separator.as_str().filter(|by| !by.is_empty());
                        let by = by.ok_or_else(|| invalid("separator must be a text"))?;
                        split_by(text, by, limit, method == "rsplit")
                    }
                };
                Ok(list(parts))
            }
            "splitlines" => {
                let (keep, options): (Option<bool>, Kwargs) = from_args(args)?;
                let keep = keep.or(options.get("keepends")?).unwrap_or(false);
                Ok(list(text::split_lines(text, keep)))
            }
            _ => {
                let (by,): (&str,) = from_args(args)?;
                let parts = if method == "partition" {
                    text.split_once(by)
                        .map_or([text, "", ""], |(a, b)| [a, by, b])
                } else {
                    text.rsplit_once(by)
                        .map_or(["", "", text], |(a, b)| [a, by, b])
                };
                Ok(Value::from(Tuple::from(parts.map(Value::from))))
            }
        }
    };
    matches!(
        method,
        "split" | "rsplit" | "splitlines" | "partition" | "rpartition"
    )
    .then(run)
}

fn split_by<'t>(text: &'t str, by: &str, limit: usize, from_end: bool) -> Vec<&'t str> {
    let parts = limit.saturating_add(1);
    if from_end {
        let mut found: Vec<_> = text.rsplitn(parts, by).collect();
        found.reverse();
        found
    } else {
        text.splitn(parts, by).collect()
    }
}

/// Splits at runs of white space; what is left after the last allowed split keeps its inner spaces.
fn split_space(text: &str, limit: usize, from_end: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text::strip(text);
    while !rest.is_empty() {
        let cut = if from_end {
            rest.rfind(text::is_space)
        } else {
            rest.find(text::is_space)
        };
        let Some(cut) = cut.filter(|_| parts.len() < limit) else {
            parts.push(rest);
            break;
        };
        if from_end {
            let space = rest[cut..].chars().next().map_or(1, char::len_utf8);
            parts.push(&rest[cut + space..]);
            rest = text::strip_end(&rest[..cut]);
        } else {
            parts.push(&rest[..cut]);
            rest = text::strip_start(&rest[cut..]);
        }
    }
    if from_end {
        parts.reverse();
    } else if limit < usize::MAX && parts.len() > limit {
        // With a limit the tail keeps its trailing white space.
        let tail_start = parts
            .last()
            .map_or(0, |tail| tail.as_ptr() as usize - text.as_ptr() as usize);
        if let Some(last) = parts.last_mut() {
            *last = &text[tail_start..];
        }
    }
    parts
}

fn build(text: &str, method: &str, args: &[Value]) -> Outcome {
    Some(match method {
        "join" => join(text, args),
        "replace" => replace_method(text, args),
        "removeprefix" => from_args::<(&str,)>(args)
            .map(|(affix,)| Value::from(text.strip_prefix(affix).unwrap_or(text))),
        "removesuffix" => from_args::<(&str,)>(args)
            .map(|(affix,)| Value::from(text.strip_suffix(affix).unwrap_or(text))),
        "format" => format(FormatStyle::StrFormat, text, args).map(Value::from),
        "zfill" => from_args::<(usize,)>(args)
            .and_then(|(width,)| bounded(width))
            .map(|width| {
                let (sign, digits) = match text.strip_prefix(['-', '+']) {
                    Some(digits) => text.split_at(text.len() - digits.len()),
                    None => ("", text),
                };
                let width = width.saturating_sub(sign.len());
                Value::from(format!("{sign}{digits:0>width$}"))
            }),
        "center" | "ljust" | "rjust" => pad(text, method, args),
        "expandtabs" => from_args::<()>(args).and(Err(unknown())),
        _ => return None,
    })
}

/// Widths come from templates; the bound only keeps a mistake from filling memory.
fn bounded(width: usize) -> Result<usize, Error> {
    const WIDTH_MAX: usize = 65_535;
    if width > WIDTH_MAX {
        Err(invalid("width is too large"))
    } else {
        Ok(width)
    }
}

fn pad(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (usize, Option<char>) = from_args(args)?;
    let (width, fill) = (bounded(width)?, fill.unwrap_or(' '));
    let missing = width.saturating_sub(text.chars().count());
    let filler = |n: usize| fill.to_string().repeat(n);
    Ok(Value::from(match method {
        "ljust" => format!("{text}{}", filler(missing)),
        "rjust" => format!("{}{text}", filler(missing)),
        _ => center(text, width, fill),
    }))
}

/// `str.center`: the odd space goes left if the width is odd.
pub(crate) fn center(text: &str, width: usize, fill: char) -> String {
    let missing = width.saturating_sub(text.chars().count());
    let left = missing / 2 + (missing & width & 1);
    let filler = |n: usize| fill.to_string().repeat(n);
    format!("{}{text}{}", filler(left), filler(missing - left))
}

fn join(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (values,): (&Value,) = from_args(args)?;
    let mut out = String::new();
    for (at, value) in values.try_iter()?.checked().enumerate() {
        let value = value?;
        if at > 0 {
            out.push_str(text);
        }
        out.push_str(
            value
                .as_str()
                .ok_or_else(|| invalid("join needs strings"))?,
        );
    }
    Ok(Value::from(out))
}

fn replace_method(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (from, to, count): (&str, &str, Option<i64>) = from_args(args)?;
    let limit = count.and_then(|count| usize::try_from(count).ok());
    Ok(Value::from(replace(text, from, to, limit)))
}

pub(crate) fn replace(text: &str, from: &str, to: &str, limit: Option<usize>) -> String {
    match limit {
        Some(limit) => text.replacen(from, to, limit),
        None => text.replace(from, to),
    }
}

fn map_method(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match method {
        "get" => {
            let (key, default): (&Value, Option<Value>) = from_args(args)?;
            let found = value.get_item(key).unwrap_or_default();
            let default = || default.unwrap_or_else(|| Value::from(()));
            Ok(if found.is_undefined() {
                default()
            } else {
                found
            })
        }
        "keys" => {
            let () = from_args(args)?;
            value
                .try_iter()?
                .checked()
                .collect::<Result<Vec<_>, _>>()
                .map(Value::from)
        }
        "values" => {
            let () = from_args(args)?;
            let mut values = Vec::new();
            for key in value.try_iter()?.checked() {
                values.push(value.get_item(&key?)?);
            }
            Ok(Value::from(values))
        }
        "items" => {
            let () = from_args(args)?;
            pairs(value)
        }
        "copy" => {
            let () = from_args(args)?;
            Ok(value.clone())
        }
        _ => Err(unknown()),
    }
}

/// The pairs of a mapping, as a list of tuples.
pub(crate) fn pairs(value: &Value) -> Result<Value, Error> {
    let mut pairs = Vec::new();
    for key in value.try_iter()?.checked() {
        let key = key?;
        let item = value.get_item(&key)?;
        pairs.push(Value::from(Tuple::from([key, item])));
    }
    Ok(Value::from(pairs))
}

fn list_method(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match method {
        "count" | "index" => {
            let (what,): (&Value,) = from_args(args)?;
            let mut count = 0_usize;
            for (at, item) in value.try_iter()?.checked().enumerate() {
                if item? == *what {
                    if method == "index" {
                        return Ok(Value::from(at));
                    }
                    count += 1;
                }
            }
            if method == "index" {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("{} is not in list", str_of(what)),
                ));
            }
            Ok(Value::from(count))
        }
        "copy" => {
            let () = from_args(args)?;
            Ok(value.clone())
        }
        _ => Err(unknown()),
    }
}
