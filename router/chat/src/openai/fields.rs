//! The top-level fields of a request body, read in one pass without copying: the wanted fields stay
//! raw JSON inside the body's bytes, all others are skipped.
//!
//! Nesting is bounded: a skipped value is walked with serde_json's recursion limit (128), a kept
//! one meets that limit when it is read. The last of repeated keys wins, as in the engine's parser.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::error::Category;
use serde_json::value::RawValue;

use super::error::{ErrorType, OpenAiError};

/// A JSON string, borrowed from the body unless it contains escapes.
#[derive(serde::Deserialize)]
pub(super) struct JsonText<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

/// Any JSON value, skipped. Unlike `IgnoredAny` it obeys the recursion limit.
pub(super) struct SkippedValue;

impl<'de> Deserialize<'de> for SkippedValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

macro_rules! skip_scalars {
    ($($visit:ident($scalar:ty)),*) => {
        $(fn $visit<E>(self, _: $scalar) -> Result<Self, E> {
            Ok(self)
        })*
    };
}

impl<'de> Visitor<'de> for SkippedValue {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    skip_scalars!(
        visit_bool(bool),
        visit_i64(i64),
        visit_u64(u64),
        visit_f64(f64),
        visit_str(&str)
    );

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self, A::Error> {
        while seq.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        while map.next_key::<Self>()?.is_some() {
            map.next_value::<Self>()?;
        }
        Ok(self)
    }
}

/// A body without the byte order mark of UTF-8, which engines skip.
pub(super) fn without_mark(body: &[u8]) -> &[u8] {
    body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body)
}

/// The wanted fields of a JSON object. A null field counts as absent.
#[derive(Debug)]
pub(super) struct BodyFields<'a> {
    names: &'static [&'static str],
    values: Vec<Option<&'a RawValue>>,
    has_unknown: bool,
}

struct BodyFieldsSeed(&'static [&'static str]);

impl<'de> DeserializeSeed<'de> for BodyFieldsSeed {
    type Value = BodyFields<'de>;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> Result<BodyFields<'de>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for BodyFieldsSeed {
    type Value = BodyFields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<BodyFields<'de>, A::Error> {
        let mut fields = BodyFields::none(self.0);
        while let Some(key) = map.next_key::<JsonText<'de>>()? {
            if let Some(at) = self.0.iter().position(|name| *name == key.0) {
                fields.values[at] = Some(map.next_value::<&'de RawValue>()?);
            } else {
                let value = map.next_value::<Option<SkippedValue>>()?;
                fields.has_unknown |= value.is_some();
            }
        }
        Ok(fields)
    }
}

impl<'a> BodyFields<'a> {
    /// Reads a body that must be one JSON object.
    pub(super) fn read(
        body: &'a [u8],
        names: &'static [&'static str],
    ) -> Result<Self, serde_json::Error> {
        let mut json = serde_json::Deserializer::from_slice(without_mark(body));
        let fields = BodyFieldsSeed(names).deserialize(&mut json)?;
        json.end()?;
        Ok(fields)
    }

    /// No field is there.
    pub(super) fn none(names: &'static [&'static str]) -> Self {
        Self {
            names,
            values: vec![None; names.len()],
            has_unknown: false,
        }
    }

    /// The body has fields that are not wanted, and not null.
    pub(super) const fn has_unknown(&self) -> bool {
        self.has_unknown
    }

    /// The raw value of a wanted field, `null` too.
    pub(super) fn given(&self, name: &'static str) -> Option<&'a RawValue> {
        let at = self.names.iter().position(|known| *known == name)?;
        self.values[at]
    }

    /// The raw value of a wanted field.
    pub(super) fn raw(&self, name: &'static str) -> Option<&'a RawValue> {
        self.given(name).filter(|raw| raw.get() != "null")
    }

    pub(super) fn has(&self, name: &'static str) -> bool {
        self.raw(name).is_some()
    }

    /// A wanted field that must be a string.
    pub(super) fn text(&self, name: &'static str) -> Result<Option<Cow<'a, str>>, OpenAiError> {
        let Some(raw) = self.raw(name) else {
            return Ok(None);
        };
        match serde_json::from_str::<JsonText<'a>>(raw.get()) {
            Ok(text) => Ok(Some(text.0)),
            Err(_) => {
                let message = format!("`{name}` must be a string.");
                Err(OpenAiError::invalid(name, message).with_code("wrong_type"))
            }
        }
    }

    /// A boolean as the engine reads one: also 0, 1 and a few words.
    pub(super) fn flag(&self, name: &'static str) -> Result<Option<bool>, UnreadableField> {
        let Some(raw) = self.raw(name) else {
            return Ok(None);
        };
        let word = raw.get().trim_matches('"').to_ascii_lowercase();
        match word.as_str() {
            "true" | "1" | "1.0" | "yes" | "y" | "on" | "t" => Ok(Some(true)),
            "false" | "0" | "0.0" | "no" | "n" | "off" | "f" => Ok(Some(false)),
            _ => Err(UnreadableField(name)),
        }
    }

    /// A whole number as the engine reads one: also `"5"` and `5.0`.
    pub(super) fn integer(&self, name: &'static str) -> Result<Option<i64>, UnreadableField> {
        let Some(raw) = self.raw(name) else {
            return Ok(None);
        };
        let word = raw.get().trim_matches('"');
        let word = word.strip_suffix(".0").unwrap_or(word);
        word.parse().map(Some).map_err(|_| UnreadableField(name))
    }
}

/// The name of a field whose value the router cannot read. The engine judges that value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnreadableField(pub(super) &'static str);

/// The error for a body that is no acceptable JSON object. It names the position and the expected
/// form, never the value found: that may be prompt text, and errors are logged.
pub(super) fn body_error(error: &serde_json::Error) -> OpenAiError {
    let text = error.to_string();
    let (code, reason) = match error.classify() {
        Category::Data => {
            // serde quotes the value before the last "expected", the visitor's own words follow.
            let expected = text.rsplit_once(", expected ").map(|(_, form)| form);
            let other = || {
                format!(
                    "another value at line {} column {}",
                    error.line(),
                    error.column()
                )
            };
            let form = expected.map_or_else(other, str::to_owned);
            ("wrong_type", format!("expected {form}"))
        }
        Category::Syntax if text.starts_with("recursion limit") => {
            let message = "The request is nested too deeply.";
            return OpenAiError::new(ErrorType::InvalidRequest, message).with_code("too_deep");
        }
        Category::Io | Category::Syntax | Category::Eof => ("invalid_json", text),
    };
    let message = format!("The body is not a JSON request: {reason}.");
    OpenAiError::new(ErrorType::InvalidRequest, message).with_code(code)
}

#[cfg(test)]
mod tests;
