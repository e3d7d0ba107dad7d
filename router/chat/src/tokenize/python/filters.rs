//! Filters and tests of jinja2 that differ from minijinja's in output or in accepted values.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, State};

use super::bounds::text_bytes_max;
use super::print::{Notation, PrintStyle, dumps, is_float, str_of};
use super::texts::{html_escaped, like};
use super::views::is_dict_view;
use super::{invalid, text};

pub(super) fn register(env: &mut Environment<'static>) {
    env.add_filter("tojson", to_json);
    env.add_filter("string", |value: &Value| changed(value, str::to_owned));
    env.add_filter("trim", trim);
    env.add_filter("title", |value: &Value| {
        str_of(value).map(|text| filter_title(&text))
    });
    env.add_filter("capitalize", |value: &Value| {
        changed(value, text::capitalize)
    });
    env.add_filter("upper", |value: &Value| changed(value, str::to_uppercase));
    env.add_filter("lower", |value: &Value| changed(value, str::to_lowercase));
    env.add_filter("replace", replace);
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("indent", indent);
    env.add_filter("items", items);
    env.add_filter("wordcount", |value: &Value| {
        str_of(value).map(|text| word_count(&text))
    });
    env.add_filter("center", |value: &Value, width: Option<usize>| {
        changed(value, |text| {
            super::methods::center(text, width.unwrap_or(80))
        })
    });
    env.add_filter("safe", |value: &Value| {
        str_of(value).map(|text| Value::from_safe_string(text.into_owned()))
    });
    env.add_filter("escape", escape);
    env.add_filter("e", escape);
    for name in ["joiner", "cycler", "lipsum"] {
        env.add_function(name, unavailable);
    }
    env.add_test("sequence", is_sequence);
    env.add_test("iterable", |value: &Value| {
        value.is_undefined() || !value.is_none() && value.try_iter().is_ok()
    });
    env.add_test("callable", |value: &Value| {
        value.is_undefined() || value.kind() == ValueKind::Plain
    });
}

/// A function that is defined as in jinja2 and fails: prompts do not use it.
fn unavailable(_arguments: minijinja::value::Rest<Value>) -> Result<Value, Error> {
    Err(invalid("this function is not available"))
}

/// A changed text, which stays marked as safe.
fn changed(value: &Value, change: impl FnOnce(&str) -> String) -> Result<Value, Error> {
    Ok(like(value, change(&str_of(value)?)))
}

fn escape(value: &Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    let text = str_of(value)?;
    Ok(Value::from_safe_string(html_escaped(&text)))
}

/// The first positional argument is `ensure_ascii`, as transformers declares the filter.
fn to_json(
    state: &State<'_, '_>,
    value: &Value,
    ascii: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    if value.is_undefined() {
        return Err(invalid("undefined is not JSON serializable"));
    }
    let option = |name: &str| options.get::<Option<Value>>(name);
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let indent = option("indent")?.filter(|indent| !indent.is_none());
    let indent = indent.as_ref().map(indent_prefix).transpose()?;
    let separators = option("separators")?.filter(|pair| !pair.is_none());
    let (item_separator, key_separator) = match separators {
        Some(pair) => (part(&pair, 0)?.into(), part(&pair, 1)?.into()),
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let ascii = match ascii {
        Some(flag) => flag.is_true(),
        None => is_true(option("ensure_ascii")?),
    };
    let style = PrintStyle {
        notation: if ascii {
            Notation::AsciiJson
        } else {
            Notation::Json
        },
        indent,
        item_separator,
        key_separator,
        sort_keys: is_true(option("sort_keys")?),
    };
    options.assert_all_used()?;
    dumps(value, &style, text_bytes_max(state)?)
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
    let text = item.as_str().map(str::to_owned);
    text.ok_or_else(|| invalid("separators must be two strings"))
}

fn trim(value: &Value, chars: Option<&str>) -> Result<Value, Error> {
    changed(value, |text| match chars {
        Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
        None => text::strip(text).to_owned(),
    })
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

fn replace(
    value: &Value,
    from: &Value,
    to: &Value,
    count: Option<&Value>,
) -> Result<String, Error> {
    let text = str_of(value)?;
    let limit = count.and_then(Value::as_usize);
    let (from, to) = (str_of(from)?, str_of(to)?);
    Ok(match limit {
        Some(limit) => text.replacen(from.as_ref(), &to, limit),
        None => text.replace(from.as_ref(), &to),
    })
}

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    let len = value.len();
    len.ok_or_else(|| invalid("the value has no length"))
}

fn int(value: &Value, default: Option<Value>, base: Option<u32>) -> Value {
    let whole = |number: f64| number.is_finite().then_some(number as i128);
    let number = match value.as_str() {
        Some(text) => {
            let text = text::strip(text).replace('_', "");
            let number = i128::from_str_radix(&text, base.unwrap_or(10)).ok();
            number.or_else(|| whole(text.parse().ok()?))
        }
        None if is_float(value) => f64::try_from(value.clone()).ok().and_then(whole),
        None => i128::try_from(value.clone()).ok(),
    };
    let small = |number| i64::try_from(number).map_or_else(|_| Value::from(number), Value::from);
    number.map_or_else(|| default.unwrap_or_else(|| Value::from(0)), small)
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
) -> Result<Value, Error> {
    let text = str_of(value)?;
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
    Ok(like(value, out))
}

/// The pairs of a mapping; an empty list for an undefined value.
fn items(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    if value.kind() != ValueKind::Map {
        return Err(invalid("can only get item pairs of a map"));
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
        ValueKind::Iterable => value.len().is_some() && !is_dict_view(value),
        _ => false,
    }
}
