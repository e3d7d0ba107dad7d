//! Removes one engine option from a body and keeps all other bytes.

use std::fmt;
use std::ops::Range;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::chat::outside_strings;
use super::fields::JsonText;

const REPORT_MODE: &str = "kv_cache_report_mode";

/// The body without `kv_cache_report_mode` in `xargs`; `None` if the option is absent. `xargs` must
/// be a part of `body`.
pub(super) fn without_report_mode(body: &[u8], xargs: &RawValue) -> Option<Vec<u8>> {
    let mut json = serde_json::Deserializer::from_str(xargs.get());
    let kept = json.deserialize_map(KeptMembers::without(&[REPORT_MODE]));
    let kept = kept.ok().filter(|kept| kept.removed > 0)?;
    let range = part_of(body, xargs.get().as_bytes())?;
    let mut out = Vec::with_capacity(body.len());
    out.extend_from_slice(&body[..range.start]);
    out.push(b'{');
    out.extend_from_slice(&kept.text);
    out.push(b'}');
    out.extend_from_slice(&body[range.end..]);
    Some(out)
}

/// The body with a zero in place of each `NaN` and `Infinity`, which Python reads as numbers; `None` if
/// there is none. No length changes.
pub fn without_python_numbers(body: &[u8]) -> Option<Vec<u8>> {
    const NUMBERS: [(&str, &str); 2] = [("NaN", "0.0"), ("Infinity", "0.000000")];
    let text = std::str::from_utf8(body).ok()?;
    let mut out = Vec::with_capacity(body.len());
    for gap in outside_strings(text) {
        // The string before the gap.
        let start = part_of(body, gap)?.start;
        out.extend_from_slice(&body[out.len()..start]);
        out.extend_from_slice(gap);
        for (number, zero) in NUMBERS {
            let found: Vec<usize> = memchr::memmem::find_iter(gap, number).collect();
            for at in found {
                out[start + at..][..zero.len()].copy_from_slice(zero.as_bytes());
            }
        }
    }
    out.extend_from_slice(&body[out.len()..]);
    (out != body).then_some(out)
}

/// Where a part of these bytes is.
pub(super) fn part_of(bytes: &[u8], part: &[u8]) -> Option<Range<usize>> {
    let start = (part.as_ptr() as usize).checked_sub(bytes.as_ptr() as usize)?;
    let end = start.checked_add(part.len())?;
    (end <= bytes.len()).then_some(start..end)
}

/// The members of an object but those of some names, as JSON without braces. No list of members is
/// built: small ones would take many times the body's memory.
pub(super) struct KeptMembers<'n> {
    names: &'n [&'n str],
    pub text: Vec<u8>,
    pub removed: usize,
}

impl<'n> KeptMembers<'n> {
    pub(super) const fn without(names: &'n [&'n str]) -> Self {
        Self {
            names,
            text: Vec::new(),
            removed: 0,
        }
    }

    /// Appends a member, whose value is JSON.
    pub(super) fn push(&mut self, key: &str, value: &str) {
        self.push_raw(&serde_json::Value::from(key).to_string(), value);
    }

    fn push_raw(&mut self, key: &str, value: &str) {
        if !self.text.is_empty() {
            self.text.push(b',');
        }
        self.text.extend_from_slice(key.as_bytes());
        self.text.push(b':');
        self.text.extend_from_slice(value.as_bytes());
    }
}

impl<'de> Visitor<'de> for KeptMembers<'_> {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some((key, value)) = map.next_entry::<&'de RawValue, &'de RawValue>()? {
            // A key with half of a pair of surrogates is no text, and none of the names.
            let name = serde_json::from_str::<JsonText<'de>>(key.get());
            if name.is_ok_and(|name| self.names.contains(&&*name.0)) {
                self.removed += 1;
            } else {
                self.push_raw(key.get(), value.get());
            }
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_python_become_zeros_outside_strings() {
        let replaced = |body: &str| {
            let body = without_python_numbers(body.as_bytes());
            body.map(|body| String::from_utf8(body).unwrap())
        };
        for (body, expected) in [
            (
                r#"{"a":NaN,"NaN":"NaN","b":[-Infinity,1]}"#,
                Some(r#"{"a":0.0,"NaN":"NaN","b":[-0.000000,1]}"#),
            ),
            ("NaN", Some("0.0")),
            (r#"{"a":"Infinity \" NaN"}"#, None),
            (r#""open NaN"#, None),
            ("", None),
        ] {
            assert_eq!(replaced(body).as_deref(), expected, "{body}");
        }
        assert_eq!(without_python_numbers(b"{\xff:NaN}"), None);
    }
}
