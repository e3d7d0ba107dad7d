//! `warmroute-indexer credentials`: keys and users for nats-servers in operator mode.
//!
//! An account has one signing key for each of its roles of `deploy/nats/nats.conf`. A server takes
//! the permissions of a user from the scope of the key that signed the user. So a signature adds a
//! worker, offline and without a change at a server.

mod accounts;
mod claims;
mod roles;

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use nkeys::{KeyPair, KeyPairType};
use serde_json::{Value, json};
use warmroute_proto::Namespace;
use warmroute_proto::subject::encode_name;

use self::claims::Claims;
use crate::args::{CredentialsStep, RevokeArgs, SignArgs};

/// What the servers include: JWTs, no secrets.
const ACCOUNTS: &str = "accounts.conf";

/// What they include while `init --resize` runs: with it a reader can change the log.
const RESIZE: &str = "resize.conf";

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
    let keys = Keys::new();
    let (mut plane_scopes, mut shims_scopes) = (Vec::new(), Vec::new());
    for role in roles::ROLES {
        let (account, scopes) = match role {
            "shim" => (&keys.shims, &mut shims_scopes),
            _ => (&keys.plane, &mut plane_scopes),
        };
        let key = KeyPair::new_account();
        let file = format!("{}\n{}\n", key.seed()?, account.public_key());
        write_secret(&dir.join(format!("{role}.nk")), &file)?;
        scopes.push(json!({
            "kind": "user_scope", "key": key.public_key(), "role": role,
            "template": roles::template(role, namespace),
        }));
    }
    write_secret(&dir.join(OPERATOR), &format!("{}\n", keys.operator.seed()?))?;
    let system = keys.system.public_key();
    let plane = |calls: &[String]| {
        let nats = accounts::plane(&system, namespace, calls, plane_scopes.clone());
        keys.signed("warmroute", &keys.plane, nats, unix_secs)
    };
    let mut calls = roles::calls(namespace);
    let daily = plane(&calls)?;
    calls.push(roles::resize_call(namespace));
    let shims = keys.shims(namespace, shims_scopes, unix_secs)?;
    let text = keys.configuration(&daily, &shims, unix_secs)?;
    replace_file(&dir.join(ACCOUNTS), &text)?;
    // A reload changes nothing else.
    replace_file(&dir.join(RESIZE), &text.replace(&daily, &plane(&calls)?))?;
    let dir = dir.display();
    Ok(format!(
        "{dir}/{ACCOUNTS} is for the servers; keep the keys, {dir}/*.nk"
    ))
}

/// The keys of an operator and its accounts.
struct Keys {
    operator: KeyPair,
    plane: KeyPair,
    shims: KeyPair,
    system: KeyPair,
}

impl Keys {
    fn new() -> Self {
        Self {
            operator: KeyPair::new_operator(),
            plane: KeyPair::new_account(),
            shims: KeyPair::new_account(),
            system: KeyPair::new_account(),
        }
    }

    fn signed(
        &self,
        name: &str,
        subject: &KeyPair,
        nats: Value,
        unix_secs: u64,
    ) -> Result<String, nkeys::error::Error> {
        Claims::new(name, subject.public_key(), nats).sign(&self.operator, unix_secs)
    }

    /// The shims' account, with tokens by which it alone may import from the plane's.
    fn shims(
        &self,
        namespace: &str,
        scopes: Vec<Value>,
        unix_secs: u64,
    ) -> Result<String, nkeys::error::Error> {
        let token = |subject: &str, kind: &str| {
            let nats = claims::activation(subject, kind);
            Claims::new("shims", self.shims.public_key(), nats).sign(&self.plane, unix_secs)
        };
        let stream = token(&accounts::resync(namespace), "stream")?;
        let tokens = [token(">", "service")?, stream];
        let plane = self.plane.public_key();
        let nats = accounts::shims(&plane, namespace, &tokens, scopes);
        self.signed("shims", &self.shims, nats, unix_secs)
    }

    /// What the servers include.
    fn configuration(
        &self,
        plane: &str,
        shims: &str,
        unix_secs: u64,
    ) -> Result<String, nkeys::error::Error> {
        let signed =
            |name: &str, subject: &KeyPair, nats| self.signed(name, subject, nats, unix_secs);
        let system = self.system.public_key();
        Ok(format!(
            "# Written by `warmroute-indexer credentials`; the servers' configuration includes it.\n\
             # Holds no secrets.\n\
             operator: {operator}\n\
             system_account: {system}\n\
             resolver: MEMORY\n\
             resolver_preload {{\n  \
               {plane_key}: {plane}\n  \
               {shims_key}: {shims}\n  \
               {system}: {system_jwt}\n\
             }}\n",
            operator = signed("warmroute", &self.operator, claims::operator(&system))?,
            plane_key = self.plane.public_key(),
            shims_key = self.shims.public_key(),
            system_jwt = signed("system", &self.system, accounts::system())?,
        ))
    }
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
    for name in [ACCOUNTS, RESIZE] {
        let text = revoked(&read(name)?, &user.public_key(), &operator, unix_secs);
        replace_file(&args.dir.join(name), &text.context(name)?)?;
    }
    Ok(format!(
        "{} is revoked once the servers reload {ACCOUNTS}",
        user.public_key()
    ))
}

/// Revokes a user in all accounts that sign users.
fn revoked(text: &str, user: &str, operator: &KeyPair, unix_secs: u64) -> anyhow::Result<String> {
    let tokens = text.split_whitespace();
    let mut scoped = tokens
        .filter_map(|token| Some((token, claims::read(token)?)))
        .filter(|(_, claims)| claims["nats"]["signing_keys"].is_array())
        .peekable();
    ensure!(scoped.peek().is_some(), "no account signs users");
    scoped.try_fold(text.to_owned(), |text, (token, mut claims)| {
        claims["iat"] = unix_secs.into();
        claims["nats"]["revocations"][user] = unix_secs.into();
        Ok(text.replace(token, &claims::signed(&claims, operator)?))
    })
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
