//! What a tenant's rules change in the body of its requests.

use axum::http::Method;
use ring::digest::{Context, SHA256};

use super::TenantVisit;
use crate::openai::{
    ErrorType, ImposedFields, OpenAiError, OutputBound, PriorityRule, RefusedField, impose,
};
use crate::settings::SeparateCaches;

/// Begins each salt that the router makes. Clients must not send one that begins so.
pub(crate) const SALT_PREFIX: &str = "warmroute-";

const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

/// Routes whose bodies are forms or files.
const FORM_ROUTES: [&str; 3] = [
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/edits",
];

/// Routes of JSON that compute no prompt's cache entries.
const CACHELESS_ROUTES: [&str; 6] = [
    "/tokenize",
    "/detokenize",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/audio/speech",
    "/v1/images/generations",
];

/// Whether engines read a form on this route.
pub(crate) fn is_form_route(path: &str) -> bool {
    FORM_ROUTES.contains(&path)
}

/// Whether a JSON body on this route may have a prompt, whose blocks the engine caches.
pub(crate) fn has_prompt(path: &str) -> bool {
    !is_form_route(path) && !CACHELESS_ROUTES.contains(&path)
}

impl TenantVisit {
    /// Whether a body on this route, which has no further reader, must be checked. The readers of
    /// `/v1/chat/completions` and `/v1/completions` check it too.
    pub(crate) fn changes_body(&self, method: &Method, path: &str) -> bool {
        let has_rules = self.adds_members() || self.caches != SeparateCaches::None;
        let is_read_elsewhere = ["/v1/chat/completions", "/v1/completions"].contains(&path);
        *method == Method::POST && !is_form_route(path) && (has_rules || !is_read_elsewhere)
    }

    /// Whether a body may get further members, for which it is copied.
    pub(crate) fn adds_members(&self) -> bool {
        let rules = &self.tenant.rules;
        let is_bounded = rules.limits.output_tokens.is_some();
        let is_ranked = self.tenant.priority != PriorityRule::Client;
        rules.salt_group.is_some() || is_ranked || is_bounded
    }

    /// The body for the engine; `None` if it is the client's.
    pub(crate) fn imposed(&self, path: &str, body: &[u8]) -> Result<Option<Vec<u8>>, OpenAiError> {
        let rules = &self.tenant.rules;
        let mut imposed = ImposedFields::default();
        let unsalted = rules.salt_group.is_some() && self.caches != SeparateCaches::WithMessages;
        if unsalted && path == MESSAGES {
            let message = "The engines are not known to separate the caches of this route.";
            let error = OpenAiError::new(ErrorType::InvalidRequest, message);
            return Err(error.with_code("separate_caches"));
        }
        if path == RESPONSES {
            imposed.refused.push(RefusedField::REQUEST_ID);
            if rules.limits.tokens_per_minute.is_some()
                || rules.limits.concurrent_requests.is_some()
            {
                imposed.refused.push(RefusedField::BACKGROUND);
            }
        }
        if has_prompt(path) {
            if self.caches != SeparateCaches::None {
                imposed.reserved_salt = SALT_PREFIX;
                imposed.refused.extend(RefusedField::TRANSFERS);
            }
            imposed.priority = self.tenant.priority;
            if let Some(group) = &rules.salt_group {
                let group = group.as_str();
                imposed.salt = Some(Box::new(move |own| group_salt(group, own)));
            }
            let max = rules.limits.output_tokens;
            imposed.output = max.and_then(|max| output_bound(path, max.get()));
        }
        impose(body, &imposed)
    }
}

/// The salt of a group's prompts. Prompts with different salts of their own stay apart.
pub(crate) fn group_salt(group: &str, own: Option<&str>) -> String {
    let mut hash = Context::new(&SHA256);
    hash.update(&(group.len() as u64).to_le_bytes());
    hash.update(group.as_bytes());
    if let Some(own) = own {
        // No salt and the empty one are two salts.
        hash.update(&[0]);
        hash.update(own.as_bytes());
    }
    let bytes = hash.finish();
    let digits = bytes.as_ref().iter().map(|byte| format!("{byte:02x}"));
    format!("{SALT_PREFIX}{}", digits.collect::<String>())
}

/// The fields that bound the output of a route; `None` if it has no output of tokens.
fn output_bound(path: &str, max: u32) -> Option<OutputBound> {
    let (names, default): (&'static [&'static str], _) = match path {
        "/v1/chat/completions" => (&["max_completion_tokens", "max_tokens"], None),
        // vLLM's default.
        "/v1/completions" => (&["max_tokens"], Some(16)),
        MESSAGES => (&["max_tokens"], None),
        RESPONSES => (&["max_output_tokens"], None),
        _ => return None,
    };
    Some(OutputBound {
        max,
        names,
        default,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salts_differ_by_group_and_by_own_salt() {
        let salts = [
            group_salt("a", None),
            group_salt("b", None),
            group_salt("a", Some("")),
            group_salt("a", Some("b")),
            group_salt("ab", None),
            group_salt("ab", Some("")),
        ];
        for (at, salt) in salts.iter().enumerate() {
            assert_eq!(salts.iter().position(|other| other == salt), Some(at));
            // vLLM's bounds.
            assert!(salt.len() <= 128 && !salt.contains(['@', '/', '\\', '\0']));
        }
        assert_eq!(group_salt("a", Some("x")), group_salt("a", Some("x")));
    }
}
