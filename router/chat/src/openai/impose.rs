//! Fields of a request that the router sets or bounds for a tenant. All other members keep their
//! bytes.

use serde::de::Deserializer as _;

use super::error::OpenAiError;
use super::fields::{BodyFields, body_error};
use super::rewrite::KeptMembers;

const SALT: &str = "cache_salt";
const PRIORITY: &str = "priority";

/// The salt of a tenant's prompts, from the client's own salt.
pub type SaltFn<'r> = dyn Fn(Option<&str>) -> String + Send + Sync + 'r;

/// What is imposed.
#[derive(Default)]
pub struct ImposedFields<'r> {
    pub salt: Option<Box<SaltFn<'r>>>,
    /// Clients must not send a salt that begins with it, nor name cache blocks. Empty: they may.
    pub reserved_salt: &'static str,
    pub output: Option<OutputBound>,
    pub priority: Option<i64>,
}

/// The bound of a request's generated tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputBound {
    pub max: u32,
    /// Fields that set the number. The first is added to a request that has none of them.
    pub names: &'static [&'static str],
    /// What the engine takes for a request without one of them.
    pub default: Option<u32>,
}

/// They name cache blocks by ids, without a proof of their owner.
const TRANSFERS: [&str; 2] = ["kv_transfer_params", "ec_transfer_params"];

const FIELDS: &[&str] = &[
    SALT,
    TRANSFERS[0],
    TRANSFERS[1],
    "max_completion_tokens",
    "max_tokens",
    "max_output_tokens",
];

/// The body for the engine; `None` if it is the client's. Fails for a body that is no JSON object in
/// UTF-8, which an engine might read otherwise, and for a field beyond its bound.
pub fn impose(body: &[u8], imposed: &ImposedFields<'_>) -> Result<Option<Vec<u8>>, OpenAiError> {
    let fields = BodyFields::read(body, FIELDS).map_err(|error| body_error(&error))?;
    let own_salt = fields.text(SALT)?;
    let reserved = imposed.reserved_salt;
    if !reserved.is_empty()
        && own_salt
            .as_ref()
            .is_some_and(|salt| salt.starts_with(reserved))
    {
        let message = format!("`{SALT}` must not begin with {reserved:?}.");
        return Err(OpenAiError::invalid(SALT, message).with_code("reserved_salt"));
    }
    let transfer = TRANSFERS.into_iter().find(|name| fields.has(name));
    if let Some(name) = transfer.filter(|_| !reserved.is_empty()) {
        let message = format!("`{name}` is not permitted where caches are separate.");
        return Err(OpenAiError::invalid(name, message).with_code("separate_caches"));
    }
    let mut added: Vec<(&str, String)> = Vec::new();
    if let Some(salt) = &imposed.salt {
        let salt = salt(own_salt.as_deref());
        added.push((SALT, serde_json::Value::from(salt).to_string()));
    }
    if let Some(bound) = imposed.output
        && let Some(tokens) = missing_output(&fields, bound)?
    {
        added.push((bound.names[0], tokens.to_string()));
    }
    if let Some(priority) = imposed.priority {
        added.push((PRIORITY, priority.to_string()));
    }
    if added.is_empty() {
        return Ok(None);
    }
    with_members(body, &added).map(Some)
}

/// The number of tokens that must be added; fails if the client asks for too many.
fn missing_output(fields: &BodyFields<'_>, bound: OutputBound) -> Result<Option<u32>, OpenAiError> {
    let mut is_set = false;
    for name in bound.names {
        let tokens = fields.integer(name).map_err(|_| {
            let message = format!("`{name}` must be a whole number.");
            OpenAiError::invalid(name, message).with_code("wrong_type")
        })?;
        if tokens.is_some_and(|tokens| tokens > bound.max.into()) {
            let message = format!("`{name}` is more than the limit of {}.", bound.max);
            return Err(OpenAiError::invalid(name, message).with_code("too_many_output_tokens"));
        }
        is_set |= tokens.is_some();
    }
    let enough = is_set || bound.default.is_some_and(|default| default <= bound.max);
    Ok((!enough).then_some(bound.max))
}

/// The object with members added, in place of those with the same names.
fn with_members(body: &[u8], added: &[(&str, String)]) -> Result<Vec<u8>, OpenAiError> {
    let names: Vec<&str> = added.iter().map(|(name, _)| *name).collect();
    let mut json = serde_json::Deserializer::from_slice(body);
    let kept = json.deserialize_map(KeptMembers::without(&names));
    let mut members = kept.map_err(|error| body_error(&error))?;
    for (name, value) in added {
        members.push(name, value);
    }
    Ok([b"{", members.text.as_slice(), b"}"].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn salted() -> ImposedFields<'static> {
        ImposedFields {
            salt: Some(Box::new(|own| format!("t:{}", own.unwrap_or("-")))),
            ..ImposedFields::default()
        }
    }

    fn bounded(default: Option<u32>) -> ImposedFields<'static> {
        let output = OutputBound {
            max: 100,
            names: &["max_completion_tokens", "max_tokens"],
            default,
        };
        ImposedFields {
            output: Some(output),
            ..ImposedFields::default()
        }
    }

    fn imposed(body: &str, fields: &ImposedFields<'_>) -> Option<String> {
        let edited = impose(body.as_bytes(), fields).unwrap();
        edited.map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn a_salt_replaces_every_one_that_the_client_sent() {
        for (body, expected) in [
            ("{}", r#"{"cache_salt":"t:-"}"#),
            (r#"{"a" : 1.50 }"#, r#"{"a":1.50,"cache_salt":"t:-"}"#),
            (
                r#"{"cache_salt":"x","a":[1, 2]}"#,
                r#"{"a":[1, 2],"cache_salt":"t:x"}"#,
            ),
            (
                r#"{"cache_salt":"x","cache_salt":"y"}"#,
                r#"{"cache_salt":"t:y"}"#,
            ),
            (r#"{"cache\u005fsalt":"x"}"#, r#"{"cache_salt":"t:x"}"#),
            (r#"{"cache_salt":null}"#, r#"{"cache_salt":"t:-"}"#),
        ] {
            assert_eq!(imposed(body, &salted()).as_deref(), Some(expected));
        }
    }

    #[test]
    fn a_body_that_an_engine_might_read_otherwise_is_refused() {
        let utf16: Vec<u8> = "{\"a\":1}"
            .encode_utf16()
            .flat_map(u16::to_le_bytes)
            .collect();
        for body in [
            &b""[..],
            b"[]",
            b"{\"a\":NaN}",
            b"\xef\xbb\xbf{}",
            b"{} {}",
            &utf16,
        ] {
            assert!(impose(body, &salted()).is_err(), "{body:?}");
        }
        assert!(impose(br#"{"cache_salt":7}"#, &salted()).is_err());
    }

    #[test]
    fn a_reserved_salt_is_refused() {
        let fields = ImposedFields {
            reserved_salt: "wr:",
            ..ImposedFields::default()
        };
        assert_eq!(imposed(r#"{"cache_salt":"x"}"#, &fields), None);
        let error = impose(br#"{"cache_salt":"wr:x"}"#, &fields).unwrap_err();
        assert_eq!(error.code, Some("reserved_salt"));
        for name in TRANSFERS {
            let body = format!(r#"{{"{name}":{{"do_remote_prefill":true}}}}"#);
            let error = impose(body.as_bytes(), &fields).unwrap_err();
            assert_eq!(error.code, Some("separate_caches"), "{name}");
            assert_eq!(imposed(&body, &ImposedFields::default()), None);
        }
        assert_eq!(imposed(r#"{"kv_transfer_params":null}"#, &fields), None);
    }

    #[test]
    fn output_is_bounded_and_a_request_without_a_bound_gets_one() {
        for (body, default, expected) in [
            (r#"{"max_tokens":100}"#, None, None),
            (r#"{"max_tokens":"5"}"#, None, None),
            (
                r#"{"a":1}"#,
                None,
                Some(r#"{"a":1,"max_completion_tokens":100}"#),
            ),
            (
                r#"{"max_tokens":null}"#,
                None,
                Some(r#"{"max_tokens":null,"max_completion_tokens":100}"#),
            ),
            (r#"{"a":1}"#, Some(16), None),
            (
                r#"{"a":1}"#,
                Some(160),
                Some(r#"{"a":1,"max_completion_tokens":100}"#),
            ),
        ] {
            let edited = imposed(body, &bounded(default));
            assert_eq!(edited.as_deref(), expected, "{body}");
        }
        for body in [
            r#"{"max_tokens":101}"#,
            r#"{"max_tokens":1,"max_completion_tokens":101}"#,
            r#"{"max_tokens":1,"max_tokens":101}"#,
            r#"{"max_tokens":1e9}"#,
            r#"{"max_tokens":101.0}"#,
        ] {
            assert!(impose(body.as_bytes(), &bounded(None)).is_err(), "{body}");
        }
    }

    #[test]
    fn a_priority_replaces_the_clients() {
        let fields = ImposedFields {
            priority: Some(5),
            ..ImposedFields::default()
        };
        let edited = imposed(r#"{"priority":-9,"a":1}"#, &fields);
        assert_eq!(edited.as_deref(), Some(r#"{"a":1,"priority":5}"#));
    }
}
