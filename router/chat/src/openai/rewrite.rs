//! Cuts one engine option out of a body and leaves every other byte where it was.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::fields::Text;

const REPORT_MODE: &str = "kv_cache_report_mode";

/// The body without `kv_cache_report_mode` in `xargs`, or nothing if there is none to remove.
/// `xargs` must be a part of `body`.
pub(crate) fn without_report_mode(body: &[u8], xargs: &RawValue) -> Option<Vec<u8>> {
    let mut json = serde_json::Deserializer::from_str(xargs.get());
    let members = json.deserialize_map(Members).ok()?;
    if !members.iter().any(|(key, _)| key == REPORT_MODE) {
        return None;
    }
    let kept: Vec<_> = members
        .iter()
        .filter(|(key, _)| key != REPORT_MODE)
        .collect();
    let start = (xargs.get().as_ptr() as usize).checked_sub(body.as_ptr() as usize)?;
    let end = start.checked_add(xargs.get().len())?;
    let mut out = Vec::with_capacity(body.len());
    out.extend_from_slice(body.get(..start)?);
    out.push(b'{');
    for (at, (key, value)) in kept.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        serde_json::to_writer(&mut out, key).ok()?;
        out.push(b':');
        out.extend_from_slice(value.get().as_bytes());
    }
    out.push(b'}');
    out.extend_from_slice(body.get(end..)?);
    Some(out)
}

struct Members;

impl<'de> Visitor<'de> for Members {
    type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::new();
        while let Some(key) = map.next_key::<Text<'de>>()? {
            members.push((key.0, map.next_value::<&'de RawValue>()?));
        }
        Ok(members)
    }
}
