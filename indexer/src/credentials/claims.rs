//! JWTs of NATS: claims about an operator, an account or a user, signed with the issuer's nkey.
//! Pure but for the random id.

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use nkeys::KeyPair;
use serde_json::{Value, json};
use uuid::Uuid;

pub(super) struct Claims<'a> {
    name: &'a str,
    /// Public key of what is described.
    subject: String,
    nats: Value,
    pub(super) expires_unix_secs: Option<u64>,
}

impl<'a> Claims<'a> {
    pub(super) const fn new(name: &'a str, subject: String, nats: Value) -> Self {
        Self {
            name,
            subject,
            nats,
            expires_unix_secs: None,
        }
    }

    pub(super) fn sign(
        &self,
        issuer: &KeyPair,
        unix_secs: u64,
    ) -> Result<String, nkeys::error::Error> {
        let mut claims = json!({
            "jti": Uuid::new_v4().simple().to_string(),
            "iat": unix_secs,
            "iss": issuer.public_key(),
            "name": self.name,
            "sub": self.subject,
            "nats": self.nats,
        });
        if let Some(expires) = self.expires_unix_secs {
            claims["exp"] = expires.into();
        }
        signed(&claims, issuer)
    }
}

pub(super) fn signed(claims: &Value, issuer: &KeyPair) -> Result<String, nkeys::error::Error> {
    let head = BASE64.encode(r#"{"typ":"JWT","alg":"ed25519-nkey"}"#);
    let text = format!("{head}.{}", BASE64.encode(claims.to_string()));
    let signature = BASE64.encode(issuer.sign(text.as_bytes())?);
    Ok(format!("{text}.{signature}"))
}

/// The claims of a JWT, whose signature is not verified. `None` if the text is none.
pub(super) fn read(token: &str) -> Option<Value> {
    let (_, rest) = token.split_once('.')?;
    let (claims, _) = rest.split_once('.')?;
    serde_json::from_slice(&BASE64.decode(claims).ok()?).ok()
}

pub(super) fn operator(system_account: &str) -> Value {
    json!({"type": "operator", "version": 2, "system_account": system_account})
}

/// An account's permission for another to import its private exports.
pub(super) fn activation(subject: &str, kind: &str) -> Value {
    json!({"type": "activation", "version": 2, "subject": subject, "kind": kind})
}

/// A user without permissions of its own: a scoped key signs no other.
pub(super) fn user(account: &str) -> Value {
    json!({"type": "user", "version": 2, "issuer_account": account})
}
