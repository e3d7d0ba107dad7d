//! Fields of a request that the router sets or bounds for a tenant. All other members keep their
//! bytes.

use std::fmt;

use serde::de::{Deserialize, Deserializer, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::error::OpenAiError;
use super::fields::{BodyFields, body_error, without_mark};
use super::rewrite::KeptMembers;

const SALT: &str = "cache_salt";
const PRIORITY: &str = "priority";

/// The salt of a tenant's prompts, from the client's own salt.
pub type SaltFn<'r> = dyn Fn(Option<&str>) -> String + Send + Sync + 'r;

/// What is imposed.
#[derive(Default)]
pub struct ImposedFields<'r> {
    pub salt: Option<Box<SaltFn<'r>>>,
    /// Clients must not send a salt that begins with it. Empty: they may.
    pub reserved_salt: &'static str,
    /// Fields that clients must not set, except to `null` or `false`.
    pub refused: Vec<RefusedField>,
    pub output: Option<OutputBound>,
    pub priority: PriorityRule,
}

/// Which `priority` an engine gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PriorityRule {
    /// The client's, if it sends one.
    #[default]
    Client,
    Fixed(i64),
    /// The engine's default, 0: others have a fixed one, which a client must not undercut.
    Unranked,
}

impl PriorityRule {
    fn added(self, fields: &BodyFields<'_>) -> Option<i64> {
        match self {
            Self::Fixed(level) => Some(level),
            Self::Unranked if fields.has(PRIORITY) => Some(0),
            Self::Client | Self::Unranked => None,
        }
    }
}

/// A field that a client must not set, with the code of the error and its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedField {
    pub name: &'static str,
    pub code: &'static str,
    pub reason: &'static str,
}

impl RefusedField {
    /// They name cache blocks by ids, without a proof of their owner.
    pub const TRANSFERS: [Self; 2] = [
        Self::transfer("kv_transfer_params"),
        Self::transfer("ec_transfer_params"),
    ];
    /// Its answer comes before its tokens.
    pub const BACKGROUND: Self = Self {
        name: "background",
        code: "background_not_permitted",
        reason: "with limits of tokens or of concurrent requests",
    };
    /// Another client's stored answer may have this id.
    pub const REQUEST_ID: Self = Self {
        name: "request_id",
        code: "request_id_not_permitted",
        reason: "for answers that are stored",
    };

    const fn transfer(name: &'static str) -> Self {
        Self {
            name,
            code: "separate_caches",
            reason: "where caches are separate",
        }
    }

    fn error(self) -> OpenAiError {
        let Self { name, code, reason } = self;
        let message = format!("`{name}` is not permitted {reason}.");
        OpenAiError::invalid(name, message).with_code(code)
    }
}

/// The bound of a request's generated tokens, those of all its choices and prompts together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputBound {
    pub max: u32,
    /// Fields that set the number. The first is added to a request that has none of them.
    pub names: &'static [&'static str],
    /// What the engine takes for a request without one of them.
    pub default: Option<u32>,
}

/// Fields that set the number of choices. An engine generates the largest.
const CHOICES: [&str; 2] = ["n", "best_of"];

const FIELDS: &[&str] = &[
    SALT,
    RefusedField::TRANSFERS[0].name,
    RefusedField::TRANSFERS[1].name,
    RefusedField::BACKGROUND.name,
    RefusedField::REQUEST_ID.name,
    CHOICES[0],
    CHOICES[1],
    "prompt",
    PRIORITY,
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
    let is_set = |field: &&RefusedField| {
        let value = fields.raw(field.name);
        value.is_some_and(|value| value.get() != "false")
    };
    if let Some(field) = imposed.refused.iter().find(is_set) {
        return Err(field.error());
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
    if let Some(priority) = imposed.priority.added(&fields) {
        added.push((PRIORITY, priority.to_string()));
    }
    if added.is_empty() {
        return Ok(None);
    }
    with_members(body, &added).map(Some)
}

/// The number of tokens that must be added; fails if the client asks for too many.
fn missing_output(fields: &BodyFields<'_>, bound: OutputBound) -> Result<Option<u32>, OpenAiError> {
    let answers = answers(fields)?;
    let each_max = i64::from(bound.max) / answers;
    if each_max == 0 {
        return Err(too_many_tokens(CHOICES[0], bound.max));
    }
    // Where the default is all that fits, an engine may take 0 for no number.
    let each_min = i64::from(bound.default.is_none());
    let mut is_set = false;
    for name in bound.names {
        let tokens = whole_number(fields, name)?;
        if tokens.is_some_and(|tokens| tokens > each_max) {
            return Err(too_many_tokens(name, bound.max));
        }
        if tokens.is_some_and(|tokens| tokens < each_min) {
            let message = format!("`{name}` must be at least {each_min}.");
            return Err(OpenAiError::invalid(name, message).with_code("too_few_output_tokens"));
        }
        is_set |= tokens.is_some();
    }
    // A null is not the default, but all that fits.
    let is_given = bound.names.iter().any(|name| fields.given(name).is_some());
    let default = bound.default.filter(|_| !is_given).map(i64::from);
    let enough = is_set || default.is_some_and(|default| default <= each_max);
    Ok(u32::try_from(each_max).ok().filter(|_| !enough))
}

/// The texts that a request generates: one for each choice and prompt.
fn answers(fields: &BodyFields<'_>) -> Result<i64, OpenAiError> {
    let mut choices = 1;
    for name in CHOICES {
        choices = choices.max(whole_number(fields, name)?.unwrap_or(1));
    }
    let list = fields.raw("prompt").map(|prompt| prompt.get());
    let list = list.and_then(|prompt| serde_json::from_str::<PromptCount>(prompt).ok());
    let PromptCount(prompts) = list.unwrap_or_default();
    Ok(prompts.max(1).saturating_mul(choices))
}

/// The prompts of a list, in which numbers are tokens of one prompt. Counted without a list of the
/// items, which would take many times their bytes.
#[derive(Default)]
struct PromptCount(i64);

impl<'de> Deserialize<'de> for PromptCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Self(0))
    }
}

impl<'de> Visitor<'de> for PromptCount {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of prompts")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<Self, A::Error> {
        while let Some(item) = items.next_element::<&RawValue>()? {
            self.0 += i64::from(item.get().starts_with(['"', '[', '{']));
        }
        Ok(self)
    }
}

fn whole_number(fields: &BodyFields<'_>, name: &'static str) -> Result<Option<i64>, OpenAiError> {
    fields.integer(name).map_err(|_| {
        let message = format!("`{name}` must be a whole number.");
        OpenAiError::invalid(name, message).with_code("wrong_type")
    })
}

fn too_many_tokens(name: &'static str, max: u32) -> OpenAiError {
    let message = format!("`{name}` is more than the limit of {max} generated tokens permits.");
    OpenAiError::invalid(name, message).with_code("too_many_output_tokens")
}

/// The object with members added, in place of those with the same names.
fn with_members(body: &[u8], added: &[(&str, String)]) -> Result<Vec<u8>, OpenAiError> {
    let names: Vec<&str> = added.iter().map(|(name, _)| *name).collect();
    let mut json = serde_json::Deserializer::from_slice(without_mark(body));
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
            ("\u{feff}{}", r#"{"cache_salt":"t:-"}"#),
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
            b"\xff\xfe{\0}\0",
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
            refused: RefusedField::TRANSFERS.to_vec(),
            ..ImposedFields::default()
        };
        assert_eq!(imposed(r#"{"cache_salt":"x"}"#, &fields), None);
        let error = impose(br#"{"cache_salt":"wr:x"}"#, &fields).unwrap_err();
        assert_eq!(error.code, Some("reserved_salt"));
        for RefusedField { name, .. } in RefusedField::TRANSFERS {
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
            (r#"{"max_tokens":0}"#, Some(16), None),
            (
                r#"{"max_tokens":null}"#,
                Some(16),
                Some(r#"{"max_tokens":null,"max_completion_tokens":100}"#),
            ),
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
            r#"{"max_tokens":50,"max_completion_tokens":0}"#,
            r#"{"max_tokens":-1}"#,
        ] {
            assert!(impose(body.as_bytes(), &bounded(None)).is_err(), "{body}");
        }
        assert!(impose(br#"{"max_tokens":-1}"#, &bounded(Some(16))).is_err());
    }

    #[test]
    fn the_bound_of_the_output_holds_for_all_choices_and_prompts() {
        for (body, expected) in [
            (r#"{"n":4,"max_tokens":25}"#, None),
            (r#"{"n":4}"#, Some(r#"{"n":4,"max_completion_tokens":25}"#)),
            (r#"{"prompt":[1,2,3],"max_tokens":100}"#, None),
            (r#"{"prompt":["a","b"],"max_tokens":50}"#, None),
            (r#"{"n":null,"best_of":1,"max_tokens":100}"#, None),
        ] {
            let edited = imposed(body, &bounded(None));
            assert_eq!(edited.as_deref(), expected, "{body}");
        }
        for body in [
            r#"{"n":4,"max_tokens":26}"#,
            r#"{"best_of":2,"max_tokens":51}"#,
            r#"{"prompt":["a","b"],"max_tokens":51}"#,
            r#"{"prompt":[[1],[2]],"n":"2","max_tokens":26}"#,
            r#"{"n":101,"max_tokens":1}"#,
            r#"{"n":101}"#,
            r#"{"n":1e2,"max_tokens":1}"#,
            r#"{"n":9223372036854775807,"prompt":["a","b"],"max_tokens":1}"#,
        ] {
            assert!(impose(body.as_bytes(), &bounded(None)).is_err(), "{body}");
        }
    }

    #[test]
    fn a_field_is_refused_unless_it_is_null_or_false() {
        let fields = ImposedFields {
            refused: vec![RefusedField::BACKGROUND, RefusedField::REQUEST_ID],
            ..ImposedFields::default()
        };
        for body in ["{}", r#"{"background":false}"#, r#"{"request_id":null}"#] {
            assert_eq!(imposed(body, &fields), None);
        }
        for (body, code) in [
            (r#"{"background":true}"#, "background_not_permitted"),
            (r#"{"background":"yes"}"#, "background_not_permitted"),
            (r#"{"request_id":"resp_1"}"#, "request_id_not_permitted"),
        ] {
            let error = impose(body.as_bytes(), &fields).unwrap_err();
            assert_eq!(error.code, Some(code), "{body}");
        }
    }

    #[test]
    fn a_priority_replaces_the_clients() {
        let fields = ImposedFields {
            priority: PriorityRule::Fixed(5),
            ..ImposedFields::default()
        };
        let edited = imposed(r#"{"priority":-9,"a":1}"#, &fields);
        assert_eq!(edited.as_deref(), Some(r#"{"a":1,"priority":5}"#));
        let fields = ImposedFields {
            priority: PriorityRule::Unranked,
            ..ImposedFields::default()
        };
        let edited = imposed(r#"{"priority":-9,"a":1}"#, &fields);
        assert_eq!(edited.as_deref(), Some(r#"{"a":1,"priority":0}"#));
        assert_eq!(imposed(r#"{"a":1}"#, &fields), None);
    }
}
