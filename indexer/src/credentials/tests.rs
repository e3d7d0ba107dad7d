use std::path::PathBuf;

use tempfile::TempDir;

use super::*;
use crate::args::OperatorArgs;

const NOW: u64 = 1_700_000_000;

struct Operator {
    dir: TempDir,
}

impl Operator {
    fn new() -> Self {
        let operator = Self {
            dir: TempDir::new().unwrap(),
        };
        operator.init("prod").unwrap();
        operator
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("nats")
    }

    fn init(&self, namespace: &str) -> anyhow::Result<String> {
        let step = CredentialsStep::Init(OperatorArgs { dir: self.path() });
        run(&step, &Namespace::from(namespace), NOW)
    }

    fn sign(&self, file: &str, name: &str) -> anyhow::Result<String> {
        let step = CredentialsStep::Sign(SignArgs {
            key: self.path().join(file),
            name: name.to_owned(),
            valid_secs: Some(60),
        });
        run(&step, &Namespace::from("prod"), NOW)
    }

    fn revoke(&self, user: &str) -> anyhow::Result<String> {
        let step = CredentialsStep::Revoke(RevokeArgs {
            dir: self.path(),
            user: user.to_owned(),
        });
        run(&step, &Namespace::from("prod"), NOW + 1)
    }

    fn tokens(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path().join(ACCOUNTS)).unwrap();
        let tokens = text
            .split_whitespace()
            .filter(|word| word.starts_with("ey"));
        tokens.map(str::to_owned).collect()
    }

    fn account(&self) -> Value {
        let mut claims = self.tokens().into_iter().map(|token| verified(&token));
        claims
            .find(|claims| claims["nats"]["signing_keys"].is_array())
            .unwrap()
    }
}

/// The guide's scope for operators that exist is that of `credentials init`.
#[test]
fn the_guide_names_every_permission_of_a_shim() {
    let guide = include_str!("../../../deploy/nats/README.md");
    let (_, section) = guide.split_once("### In an operator that exists").unwrap();
    let block = section.split("```").nth(1).unwrap();
    let (publish, subscribe) = block.split_once("subscribe").unwrap();
    let template = roles::template("shim", "prod");
    for (side, listed) in [("pub", publish), ("sub", subscribe)] {
        let listed: Vec<&str> = listed.split('"').skip(1).step_by(2).collect();
        assert_eq!(json!(listed), template[side]["allow"], "{side}");
    }
}

#[test]
fn a_seed_and_an_account_are_a_key_file() {
    let operator = Operator::new();
    let (signer, account) = (KeyPair::new_account(), KeyPair::new_account().public_key());
    let file = format!("{}\n{account}\n", signer.seed().unwrap());
    fs::write(operator.path().join("foreign.nk"), file).unwrap();
    let printed = operator.sign("foreign.nk", "worker-3").unwrap();
    let user = verified(printed.lines().nth(1).unwrap());
    assert_eq!(user["iss"], signer.public_key());
    assert_eq!(user["nats"]["issuer_account"], account);
}

/// The claims of a token whose signature is its issuer's.
fn verified(token: &str) -> Value {
    let claims = claims::read(token).unwrap();
    let (text, signature) = token.rsplit_once('.').unwrap();
    let signature = base64::Engine::decode(&base64::prelude::BASE64_URL_SAFE_NO_PAD, signature);
    let issuer = KeyPair::from_public_key(claims["iss"].as_str().unwrap()).unwrap();
    issuer.verify(text.as_bytes(), &signature.unwrap()).unwrap();
    claims
}

#[test]
fn a_user_is_signed_by_the_key_of_its_role_and_has_no_permissions_of_its_own() {
    let operator = Operator::new();
    let account = operator.account();
    let printed = operator.sign("shim.nk", "w.0").unwrap();
    let token = printed.lines().nth(1).unwrap();
    let user = verified(token);
    assert_eq!(user["name"], "w=2E0", "one token of a subject");
    assert_eq!(user["exp"], NOW + 60);
    let nats = json!({"type": "user", "version": 2, "issuer_account": account["sub"]});
    assert_eq!(user["nats"], nats);
    let scopes = account["nats"]["signing_keys"].as_array().unwrap();
    let scope = scopes
        .iter()
        .find(|scope| scope["key"] == user["iss"])
        .unwrap();
    assert_eq!(scope["role"], "shim");
    let seed = printed.lines().find(|line| line.starts_with("SU")).unwrap();
    let key = KeyPair::from_seed(seed).unwrap().public_key();
    assert_eq!(user["sub"], key);
    assert!(
        printed.contains(&format!("w=2E0 is user {key}\n")),
        "{printed}"
    );
}

#[test]
fn a_shim_may_write_in_its_own_name_only() {
    let template = roles::template("shim", "ns");
    let list = |side: &str| -> Vec<String> {
        let list = template[side]["allow"].as_array().unwrap();
        list.iter()
            .map(|subject| subject.as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(
        list("sub"),
        ["_INBOX.{{subject()}}.>", "wr.ns.resync.{{name()}}"]
    );
    let (own, shared): (Vec<_>, Vec<_>) = list("pub")
        .into_iter()
        .partition(|subject| subject.split('.').any(|token| token == "{{name()}}"));
    assert_eq!(own.len(), 8, "{own:?}");
    assert!(own.contains(&"wr.ns.kv.{{name()}}.*".to_owned()), "{own:?}");
    let infos =
        ["wr_ns", "KV_wr_ns", "OBJ_wr_ns"].map(|stream| format!("$JS.API.STREAM.INFO.{stream}"));
    assert_eq!(shared, infos);
}

#[test]
fn every_role_has_what_its_user_of_the_shipped_file_has() {
    for role in roles::ROLES {
        let template = roles::template(role, "prod");
        let answers = ["indexer", "router"].contains(&role);
        assert_eq!(template["resp"].is_object(), answers, "{role}");
        for side in ["pub", "sub"] {
            let list = template[side]["allow"].as_array().unwrap();
            assert!(!list.is_empty(), "{role} {side}");
            assert!(
                !format!("{list:?}").contains("_INBOX.{role}"),
                "{role}: {list:?}"
            );
        }
        let may_resize = template.to_string().contains("STREAM.UPDATE");
        assert_eq!(may_resize, role == "resize", "{role}");
    }
}

#[test]
fn a_revocation_is_signed_by_the_operator_and_changes_nothing_else() {
    let operator = Operator::new();
    let (before, tokens) = (operator.account(), operator.tokens());
    let user = KeyPair::new_user().public_key();
    operator.revoke(&user).unwrap();
    let mut after = operator.account();
    assert_eq!(
        after["nats"]["revocations"],
        json!({ user.as_str(): NOW + 1 })
    );
    after["nats"]["revocations"] = json!({});
    after["iat"] = NOW.into();
    assert_eq!(after, before);
    let kept = operator
        .tokens()
        .into_iter()
        .filter(|token| tokens.contains(token));
    assert_eq!((kept.count(), tokens.len()), (2, 3));
    assert!(
        operator
            .revoke(&KeyPair::new_account().public_key())
            .is_err()
    );
}

#[test]
fn keys_are_not_overwritten_or_confused() {
    let operator = Operator::new();
    assert!(operator.init("prod").is_err(), "the directory exists");
    assert!(
        Operator {
            dir: TempDir::new().unwrap()
        }
        .init("a.b")
        .is_err()
    );
    assert!(operator.sign(OPERATOR, "w").is_err());
    assert!(operator.sign("shim.nk", "").is_err());
    for entry in fs::read_dir(operator.path()).unwrap() {
        let entry = entry.unwrap();
        let mode =
            std::os::unix::fs::PermissionsExt::mode(&entry.metadata().unwrap().permissions());
        let is_secret = entry.file_name() != ACCOUNTS;
        assert_eq!(mode & 0o77 == 0, is_secret, "{}", entry.path().display());
    }
}
