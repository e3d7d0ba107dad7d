//! Removes one engine option from a body and keeps all other bytes.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::fields::JsonText;

const REPORT_MODE: &str = "kv_cache_report_mode";

/// The body without `kv_cache_report_mode` in `xargs`; `None` if the option is absent. `xargs` must
/// be a part of `body`.
pub(super) fn without_report_mode(body: &[u8], xargs: &RawValue) -> Option<Vec<u8>> {
    let mut json = serde_json::Deserializer::from_str(xargs.get());
    let mut members = json.deserialize_map(RawMembers).ok()?;
    let all = members.len();
    members.retain(|(key, _)| key != REPORT_MODE);
    if members.len() == all {
        return None;
    }
    let start = (xargs.get().as_ptr() as usize).checked_sub(body.as_ptr() as usize)?;
    let end = start.checked_add(xargs.get().len())?;
    let mut out = Vec::with_capacity(body.len());
    out.extend_from_slice(body.get(..start)?);
    out.push(b'{');
    for (at, (key, value)) in members.iter().enumerate() {
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

struct RawMembers;

impl<'de> Visitor<'de> for RawMembers {
    type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::new();
        while let Some((key, value)) = map.next_entry::<JsonText<'de>, &'de RawValue>()? {
            members.push((key.0, value));
        }
        Ok(members)
    }
}
