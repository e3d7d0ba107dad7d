//! `[[tenants]]`: the clients of the public port, their keys and limits.

use std::collections::BTreeSet;
use std::num::{NonZeroU32, NonZeroU64};
use std::sync::Arc;

use serde::Deserialize;
use serde::de::Error as _;
use warmroute_process::access::keys::{KeyHash, KeyId, StoredKey};

use super::keys::{KeyError, distinct, expiry, parsed};

/// One tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TenantRules {
    pub name: KeyId,
    pub keys: Vec<StoredKey>,
    models: Vec<String>,
    pub limits: TenantLimits,
    /// Level of its requests in the queue, and vLLM's `priority`; lower is served first.
    pub priority: Option<i64>,
    /// Its clients may name the level of each request in the queue.
    pub client_priority: bool,
    /// The prompts of one group share cache entries. `None`: no salt is set.
    pub salt_group: Option<KeyId>,
}

/// `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TenantLimits {
    pub requests_per_second: Option<NonZeroU32>,
    pub requests_per_minute: Option<NonZeroU32>,
    pub concurrent_requests: Option<NonZeroU32>,
    pub tokens_per_minute: Option<NonZeroU64>,
    pub prompt_tokens: Option<NonZeroU32>,
    pub output_tokens: Option<NonZeroU32>,
}

impl TenantRules {
    pub(super) fn without_keys(&self) -> Self {
        Self {
            keys: Vec::new(),
            ..self.clone()
        }
    }

    pub(crate) fn permits(&self, model: &str) -> bool {
        self.models.iter().any(|pattern| is_match(pattern, model))
    }
}

/// Whether a name has the form of a pattern, whose `*` stands for any characters.
fn is_match(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut left) = name.strip_prefix(start) else {
        return false;
    };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let end = parts.pop().unwrap_or_default();
    for part in parts {
        // The first occurrence leaves most for the parts behind it.
        match left.find(part) {
            Some(at) => left = &left[at + part.len()..],
            None => return false,
        }
    }
    left.ends_with(end)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantRow {
    #[serde(deserialize_with = "parsed")]
    name: KeyId,
    #[serde(default)]
    keys: Vec<KeyRow>,
    #[serde(default = "all_models")]
    models: Vec<String>,
    requests_per_second: Option<NonZeroU32>,
    requests_per_minute: Option<NonZeroU32>,
    max_concurrent_requests: Option<NonZeroU32>,
    tokens_per_minute: Option<NonZeroU64>,
    max_prompt_tokens: Option<NonZeroU32>,
    max_output_tokens: Option<NonZeroU32>,
    priority: Option<i64>,
    #[serde(default)]
    client_priority: bool,
    #[serde(default)]
    salt: SaltRule,
    salt_group: Option<GroupName>,
}

#[derive(Deserialize)]
#[serde(transparent)]
struct GroupName(#[serde(deserialize_with = "parsed")] KeyId);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyRow {
    #[serde(deserialize_with = "parsed")]
    id: KeyId,
    #[serde(deserialize_with = "parsed")]
    sha256: KeyHash,
    #[serde(default, deserialize_with = "expiry")]
    expires: Option<i64>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SaltRule {
    #[default]
    None,
    Tenant,
}

/// Why tenants are refused whose fields are in order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum TenantError {
    #[error("two tenants are named {0}")]
    Twice(KeyId),
    #[error("tenant {0}: salt_group has no effect without salt = \"tenant\"")]
    Group(KeyId),
    #[error("two tenants share a key: {0}")]
    SharedKey(KeyError),
}

fn all_models() -> Vec<String> {
    vec!["*".to_owned()]
}

pub(super) fn tenants<'de, D>(deserializer: D) -> Result<Arc<[TenantRules]>, D::Error>
where
    D: serde::Deserializer<'de>,
{
    let rows = Vec::<TenantRow>::deserialize(deserializer)?;
    let tenants: Result<Vec<_>, TenantError> = rows.into_iter().map(rules).collect();
    let tenants = tenants.map_err(D::Error::custom)?;
    let mut names = BTreeSet::new();
    if let Some(again) = tenants.iter().find(|one| !names.insert(&one.name)) {
        return Err(D::Error::custom(TenantError::Twice(again.name.clone())));
    }
    let keys = tenants.iter().flat_map(|tenant| &tenant.keys);
    distinct(keys).map_err(|error| D::Error::custom(TenantError::SharedKey(error)))?;
    Ok(tenants.into())
}

fn rules(row: TenantRow) -> Result<TenantRules, TenantError> {
    let name = row.name;
    let keys = row.keys.into_iter().map(|key| StoredKey {
        id: key.id,
        hash: key.sha256,
        expires_unix_s: key.expires,
    });
    let salt_group = match (row.salt, row.salt_group) {
        (SaltRule::None, Some(_)) => return Err(TenantError::Group(name)),
        (SaltRule::None, None) => None,
        (SaltRule::Tenant, None) => Some(name.clone()),
        (SaltRule::Tenant, Some(GroupName(group))) => Some(group),
    };
    Ok(TenantRules {
        name,
        keys: keys.collect(),
        models: row.models,
        limits: TenantLimits {
            requests_per_second: row.requests_per_second,
            requests_per_minute: row.requests_per_minute,
            concurrent_requests: row.max_concurrent_requests,
            tokens_per_minute: row.tokens_per_minute,
            prompt_tokens: row.max_prompt_tokens,
            output_tokens: row.max_output_tokens,
        },
        priority: row.priority,
        client_priority: row.client_priority,
        salt_group,
    })
}

#[cfg(test)]
mod tests {
    use super::super::Settings;
    use super::*;

    const HASH: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_tenant_has_keys_models_and_limits() {
        let text = format!(
            "[[tenants]]\nname = \"search\"\nmodels = [\"llama-*\"]\ntokens_per_minute = 5\n\
             salt = \"tenant\"\nkeys = [{{ id = \"s1\", sha256 = \"{HASH}\" }}]\n\
             [[tenants]]\nname = \"batch\"\nsalt = \"tenant\"\nsalt_group = \"search\"\n"
        );
        let settings = Settings::parse(&text).unwrap();
        let [search, batch] = &settings.tenants[..] else {
            panic!("two tenants");
        };
        assert!(search.permits("llama-3") && !search.permits("qwen"));
        assert!(batch.permits("qwen"));
        assert_eq!(search.salt_group, batch.salt_group);
        assert_eq!(search.limits.tokens_per_minute, NonZeroU64::new(5));
        assert_eq!(search.keys[0].id.as_str(), "s1");
        assert_eq!(batch.limits, TenantLimits::default());
    }

    #[test]
    fn a_star_stands_for_any_characters() {
        for (pattern, name, matches) in [
            ("*", "", true),
            ("*", "a/b", true),
            ("llama", "llama", true),
            ("llama", "llama-3", false),
            ("llama-*", "llama-3", true),
            ("llama-*", "xllama-3", false),
            ("*-chat", "a-chat", true),
            ("*-chat", "a-chat-b", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("ab*ba", "aba", false),
            ("a**b", "ab", true),
        ] {
            assert_eq!(is_match(pattern, name), matches, "{pattern} {name}");
        }
    }

    #[test]
    fn a_bad_tenant_is_refused_with_its_line() {
        let key = format!("keys = [{{ id = \"k\", sha256 = \"{HASH}\" }}]");
        for (rest, fault) in [
            ("requests_per_minute = 0", "nonzero"),
            ("request_per_minute = 1", "unknown field"),
            ("salt = \"mine\"", "unknown variant"),
            ("salt_group = \"g\"", "salt_group has no effect"),
            (
                "keys = [{ id = \"a\", sha256 = \"b\" }]",
                "64 hexadecimal digits",
            ),
            ("\n[[tenants]]\nname = \"t\"", "two tenants are named t"),
            (
                &format!("{key}\n[[tenants]]\nname = \"u\"\n{key}"),
                "two tenants share a key",
            ),
        ] {
            let text = format!("\n[[tenants]]\nname = \"t\"\n{rest}\n");
            let error = Settings::parse(&text).unwrap_err().to_string();
            assert!(error.contains("line "), "{rest}: {error}");
            assert!(error.contains(fault), "{rest}: {error}");
        }
    }
}
