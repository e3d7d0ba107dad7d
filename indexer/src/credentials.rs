//! `warmroute-indexer credentials`: keys and users for nats-servers in operator mode.
//!
//! The account has one signing key for each role of `deploy/nats/nats.conf`. A server takes the
//! permissions of a user from the scope of the key that signed the user. So a signature adds a
//! worker, offline and without a change at a server.

mod claims;
mod roles;

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use anyhow::{Context as _, bail};
use nkeys::{KeyPair, KeyPairType};
use serde_json::{Value, json};
use warmroute_proto::Namespace;
use warmroute_proto::subject::encode_name;

use self::claims::Claims;
use crate::args::{CredentialsStep, RevokeArgs, SignArgs};

/// What the servers include: JWTs, no secrets.
const ACCOUNTS: &str = "accounts.conf";

/// The operator's seed, which only `revoke` needs.
const OPERATOR: &str = "operator.nk";

/// Runs one step. Returns what is to be printed.
pub fn run(
    step: &CredentialsStep,
    namespace: &Namespace,
    unix_secs: u64,
) -> anyhow::Result<String> {
    match step {
        CredentialsStep::Init(args) => create(&args.dir, namespace, unix_secs),
        CredentialsStep::Sign(args) => sign(args, unix_secs),
        CredentialsStep::Revoke(args) => revoke(args, unix_secs),
    }
}

fn create(dir: &Path, namespace: &Namespace, unix_secs: u64) -> anyhow::Result<String> {
    let namespace = namespace.as_str();
    if namespace.is_empty() || encode_name(namespace) != namespace {
        bail!("--namespace {namespace:?}: use letters, digits, - and _");
    }
    let made = DirBuilder::new().mode(0o700).create(dir);
    made.with_context(|| format!("--dir {}", dir.display()))?;
    let (operator, account, system) = (
        KeyPair::new_operator(),
        KeyPair::new_account(),
        KeyPair::new_account(),
    );
    let mut scopes = Vec::new();
    for role in roles::ROLES {
        let key = KeyPair::new_account();
        let file = format!("{}\n{}\n", key.seed()?, account.public_key());
        write_secret(&dir.join(format!("{role}.nk")), &file)?;
        scopes.push(json!({
            "kind": "user_scope", "key": key.public_key(), "role": role,
            "template": roles::template(role, namespace),
        }));
    }
    write_secret(&dir.join(OPERATOR), &format!("{}\n", operator.seed()?))?;
    let signed = |name: &str, subject: &KeyPair, nats: Value| {
        let subject = subject.public_key();
        Claims::new(name, subject, nats).sign(&operator, unix_secs)
    };
    let nats = claims::operator(&system.public_key());
    let operator_jwt = signed("warmroute", &operator, nats)?;
    let account_jwt = signed("warmroute", &account, claims::account(scopes))?;
    let system_jwt = signed("system", &system, claims::system_account())?;
    let text = format!(
        "# Written by `warmroute-indexer credentials`; the servers' configuration includes it.\n\
         # Holds no secrets.\n\
         operator: {operator_jwt}\n\
         system_account: {system}\n\
         resolver: MEMORY\n\
         resolver_preload {{\n  {account}: {account_jwt}\n  {system}: {system_jwt}\n}}\n",
        system = system.public_key(),
        account = account.public_key(),
    );
    replace_file(&dir.join(ACCOUNTS), &text)?;
    let dir = dir.display();
    Ok(format!(
        "{dir}/{ACCOUNTS} is for the servers; keep the keys, {dir}/*.nk"
    ))
}

fn sign(args: &SignArgs, unix_secs: u64) -> anyhow::Result<String> {
    let path = args.key.display();
    let text = fs::read_to_string(&args.key).with_context(|| format!("--key {path}"))?;
    let mut words = text.split_whitespace();
    let (Some(seed), Some(account)) = (words.next(), words.next()) else {
        bail!("--key {path} is not a signing key and its account");
    };
    let key = key_of(seed, &KeyPairType::Account).with_context(|| format!("--key {path}"))?;
    let account = KeyPair::from_public_key(account)?.public_key();
    if args.name.is_empty() {
        bail!("--name is empty");
    }
    let user = KeyPair::new_user();
    // As in subjects: a dot or wildcard would open more of them.
    let name = encode_name(&args.name);
    let mut claims = Claims::new(&name, user.public_key(), claims::user(&account));
    claims.expires_unix_secs = args.valid_secs.map(|secs| unix_secs.saturating_add(secs));
    Ok(format!(
        "-----BEGIN NATS USER JWT-----\n{}\n------END NATS USER JWT------\n\n\
         {name} is user {}\n\n\
         -----BEGIN USER NKEY SEED-----\n{}\n------END USER NKEY SEED------\n",
        claims.sign(&key, unix_secs)?,
        user.public_key(),
        user.seed()?,
    ))
}

fn revoke(args: &RevokeArgs, unix_secs: u64) -> anyhow::Result<String> {
    let user = KeyPair::from_public_key(&args.user).ok();
    let user = user.filter(|user| user.key_pair_type() == KeyPairType::User);
    let user = user.with_context(|| format!("--user {}: not a user's key, U…", args.user))?;
    let read = |name: &str| {
        let file = args.dir.join(name);
        fs::read_to_string(&file).with_context(|| file.display().to_string())
    };
    let operator = key_of(read(OPERATOR)?.trim(), &KeyPairType::Operator).context(OPERATOR)?;
    let accounts = read(ACCOUNTS)?;
    let scoped = accounts.split_whitespace().find_map(|word| {
        let claims = claims::read(word)?;
        claims["nats"]["signing_keys"]
            .is_array()
            .then_some((word, claims))
    });
    let (old, mut claims) = scoped.with_context(|| format!("{ACCOUNTS} has no such account"))?;
    claims["iat"] = unix_secs.into();
    claims["nats"]["revocations"][user.public_key()] = unix_secs.into();
    let new = claims::signed(&claims, &operator)?;
    replace_file(&args.dir.join(ACCOUNTS), &accounts.replace(old, &new))?;
    Ok(format!(
        "{} is revoked once the servers reload {ACCOUNTS}",
        user.public_key()
    ))
}

fn key_of(seed: &str, kind: &KeyPairType) -> anyhow::Result<KeyPair> {
    let key = KeyPair::from_seed(seed).ok();
    let key = key.filter(|key| key.key_pair_type() == *kind);
    key.with_context(|| format!("no seed of type {kind:?}"))
}

fn write_secret(path: &Path, text: &str) -> anyhow::Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.with_context(|| path.display().to_string())
}

/// A server that reloads in between reads the old or the new file.
fn replace_file(path: &Path, text: &str) -> anyhow::Result<()> {
    let new = path.with_extension("new");
    let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
    written.with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests;
