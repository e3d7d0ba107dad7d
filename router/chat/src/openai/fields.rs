//! The top level of a request body, read in one pass without copying: the fields that a route cares
//! about stay as raw JSON inside the body's own bytes, everything else is skipped.
//!
//! Depth is bounded everywhere: what is not kept is walked here with the parser's recursion limit
//! (128), what is kept meets the same limit when it is read. A repeated key counts with its last
//! value, as in Python's parser, which the engine uses.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::error::{ApiError, ErrorType};

/// A JSON string, borrowed from the body unless it contains escapes.
#[derive(serde::Deserialize)]
pub(crate) struct Text<'a>(#[serde(borrow)] pub(crate) Cow<'a, str>);

/// Any JSON value, looked at and forgotten. Unlike `IgnoredAny` it obeys the recursion limit.
pub(crate) struct Skipped;

impl<'de> Deserialize<'de> for Skipped {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Skipped {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

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

/// The wanted fields of a JSON object, null counting as absent.
#[derive(Debug)]
pub(crate) struct Fields<'a> {
    names: &'static [&'static str],
    values: Vec<Option<&'a RawValue>>,
}

struct FieldsSeed(&'static [&'static str]);

impl<'de> DeserializeSeed<'de> for FieldsSeed {
    type Value = Fields<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Fields<'de>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FieldsSeed {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
        let mut values = vec![None; self.0.len()];
        while let Some(key) = map.next_key::<Text<'de>>()? {
            match self.0.iter().position(|name| *name == key.0) {
                Some(at) => values[at] = Some(map.next_value::<&'de RawValue>()?),
                None => {
                    map.next_value::<Skipped>()?;
                }
            }
        }
        Ok(Fields {
            names: self.0,
            values,
        })
    }
}

impl<'a> Fields<'a> {
    /// Reads a body that must be one JSON object.
    pub(crate) fn read(
        body: &'a [u8],
        names: &'static [&'static str],
    ) -> Result<Self, serde_json::Error> {
        let mut json = serde_json::Deserializer::from_slice(body);
        let fields = FieldsSeed(names).deserialize(&mut json)?;
        json.end()?;
        Ok(fields)
    }

    /// The raw value of a wanted field; null is absent.
    pub(crate) fn raw(&self, name: &'static str) -> Option<&'a RawValue> {
        let at = self.names.iter().position(|known| *known == name)?;
        self.values[at].filter(|raw| raw.get() != "null")
    }

    pub(crate) fn has(&self, name: &'static str) -> bool {
        self.raw(name).is_some()
    }

    /// A field that must be a string.
    pub(crate) fn text(&self, name: &'static str) -> Result<Option<Cow<'a, str>>, ApiError> {
        let Some(raw) = self.raw(name) else {
            return Ok(None);
        };
        match serde_json::from_str::<Text<'a>>(raw.get()) {
            Ok(text) => Ok(Some(text.0)),
            Err(_) => Err(
                ApiError::invalid(name, format!("`{name}` must be a string."))
                    .with_code("wrong_type"),
            ),
        }
    }

    /// A boolean as the engine reads one: also 0, 1 and a few words. `Err` is any other value.
    pub(crate) fn flag(&self, name: &'static str) -> Result<Option<bool>, Unreadable> {
        let Some(raw) = self.raw(name) else {
            return Ok(None);
        };
        let word = raw.get().trim_matches('"').to_ascii_lowercase();
        match word.as_str() {
            "true" | "1" | "1.0" | "yes" | "y" | "on" | "t" => Ok(Some(true)),
            "false" | "0" | "0.0" | "no" | "n" | "off" | "f" => Ok(Some(false)),
            _ => Err(Unreadable(name)),
        }
    }

    /// A whole number as the engine reads one: also `"5"` and `5.0`.
    pub(crate) fn integer(&self, name: &'static str) -> Result<Option<i64>, Unreadable> {
        let Some(raw) = self.raw(name) else {
            return Ok(None);
        };
        let word = raw.get().trim_matches('"');
        let word = word.strip_suffix(".0").unwrap_or(word);
        word.parse().map(Some).map_err(|_| Unreadable(name))
    }
}

/// A field whose value this router does not understand. The engine decides whether it is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreadable(pub &'static str);

/// Says what is wrong with a body that is not an acceptable JSON object.
pub(crate) fn body_error(error: &serde_json::Error) -> ApiError {
    let text = error.to_string();
    if text.contains("recursion limit") {
        return ApiError::new(
            ErrorType::InvalidRequest,
            "The request is nested too deeply.",
        )
        .with_code("too_deep");
    }
    let code = match error.classify() {
        serde_json::error::Category::Data => "wrong_type",
        serde_json::error::Category::Io
        | serde_json::error::Category::Syntax
        | serde_json::error::Category::Eof => "invalid_json",
    };
    // serde's text names types and positions, never the body's content beyond a short token.
    let shown: String = text.chars().take(200).collect();
    ApiError::new(
        ErrorType::InvalidRequest,
        format!("The body is not a JSON request: {shown}."),
    )
    .with_code(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: &[&str] = &["model", "flag", "n"];

    #[test]
    fn last_of_repeated_keys_wins_and_escaped_keys_count() {
        let body = br#"{"model":"a","m\u006fdel":"b","x":{"model":"c"},"flag":null,"n":"7"}"#;
        let fields = Fields::read(body, NAMES).unwrap();
        assert_eq!(fields.text("model").unwrap().as_deref(), Some("b"));
        assert!(!fields.has("flag"));
        assert_eq!(fields.integer("n"), Ok(Some(7)));
    }

    #[test]
    fn depth_is_bounded_in_fields_that_nobody_reads() {
        let deep = format!("{{\"x\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        let error = Fields::read(deep.as_bytes(), NAMES).unwrap_err();
        assert_eq!(body_error(&error).code, Some("too_deep"));
    }

    #[test]
    fn errors_tell_broken_json_from_other_values() {
        for (body, code) in [
            (&b""[..], "invalid_json"),
            (b"{", "invalid_json"),
            (b"{} x", "invalid_json"),
            (b"[]", "wrong_type"),
            (b"\"x\"", "wrong_type"),
            (b"{\"a\":\"\xff\"}", "invalid_json"),
            (b"{\"a\":NaN}", "invalid_json"),
        ] {
            let error = Fields::read(body, NAMES).unwrap_err();
            assert_eq!(body_error(&error).code, Some(code), "{body:?}");
        }
    }

    #[test]
    fn flags_follow_the_engines_reading() {
        for (json, expected) in [
            ("true", Ok(Some(true))),
            ("0", Ok(Some(false))),
            ("\"Yes\"", Ok(Some(true))),
            ("null", Ok(None)),
            ("2", Err(Unreadable("flag"))),
            ("{}", Err(Unreadable("flag"))),
        ] {
            let body = format!("{{\"flag\":{json}}}");
            assert_eq!(
                Fields::read(body.as_bytes(), NAMES).unwrap().flag("flag"),
                expected
            );
        }
    }
}
