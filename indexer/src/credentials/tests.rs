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

    fn tokens(&self, file: &str) -> Vec<String> {
        let text = fs::read_to_string(self.path().join(file)).unwrap();
        let tokens = text
            .split_whitespace()
            .filter(|word| word.starts_with("ey"));
        tokens.map(str::to_owned).collect()
    }

    /// The claims about the operator and the accounts of the plane, the shims and the system.
    fn claims(&self, file: &str) -> [Value; 4] {
        let claims = self
            .tokens(file)
            .iter()
            .map(|token| verified(token))
            .collect();
        Vec::try_into(claims).unwrap()
    }
}

/// The guide's scope for operators that exist is that of `credentials init`.
#[test]
fn the_guide_names_every_permission_of_a_shim() {
    let guide = include_str!("../../../deploy/nats/README.md");
    let (_, section) = guide.split_once("### In an operator that exists").unwrap();
    let block = section.split("```").nth(3).unwrap();
    let (publish, subscribe) = block.split_once("subscribe").unwrap();
    let template = roles::template("shim", "prod");
    for (side, listed) in [("pub", publish), ("sub", subscribe)] {
        assert_eq!(json!(quoted(listed)), template[side]["allow"], "{side}");
    }
}

#[test]
fn the_guide_names_all_that_crosses_accounts() {
    let guide = include_str!("../../../deploy/nats/README.md");
    let (_, section) = guide.split_once("### In an operator that exists").unwrap();
    let block = section.split("```").nth(1).unwrap();
    let [_, plane, shims, system] = Operator::new().claims(ACCOUNTS);
    let mut crossing = Vec::new();
    for account in [system, plane, shims] {
        let list = |name: &str| {
            account["nats"][name]
                .as_array()
                .cloned()
                .unwrap_or_default()
        };
        for import in list("imports") {
            let [subject, local] = ["subject", "local_subject"].map(|field| import[field].clone());
            let renamed = Some(local).filter(|local| *local != subject && local.is_string());
            crossing.push(subject);
            crossing.extend(renamed);
        }
        for (from, to) in account["nats"]["mappings"]
            .as_object()
            .into_iter()
            .flatten()
        {
            crossing.extend([json!(from), to[0]["subject"].clone()]);
        }
        crossing.extend(
            list("exports")
                .iter()
                .map(|export| export["subject"].clone()),
        );
    }
    assert_eq!(json!(quoted(block)), json!(crossing));
}

fn quoted(text: &str) -> Vec<&str> {
    text.split('"').skip(1).step_by(2).collect()
}

/// The server refuses others, and without the first import it imports the whole API.
#[test]
fn no_imports_overlap_and_the_api_is_replaced() {
    let [_, plane, shims, _] = Operator::new().claims(ACCOUNTS);
    for account in [plane, shims] {
        let imports = account["nats"]["imports"].as_array().unwrap();
        let services = imports.iter().filter(|import| import["type"] == "service");
        let local: Vec<&str> = services
            .map(|import| import["local_subject"].as_str().unwrap())
            .collect();
        assert_eq!(local[0], "$JS.API.>");
        for (index, subject) in local.iter().enumerate() {
            for other in &local[index + 1..] {
                let mut tokens = subject.split('.').zip(other.split('.'));
                let apart = tokens.any(|(one, other)| ![one, other].contains(&"*") && one != other);
                let lengths = [subject, other].map(|subject| subject.split('.').count());
                assert!(apart || lengths[0] != lengths[1], "{subject} {other}");
            }
        }
    }
}

#[test]
fn only_shims_may_import_from_the_plane_and_only_resize_imports_a_change() {
    let operator = Operator::new();
    let [_, plane, shims, _] = operator.claims(ACCOUNTS);
    let exports = plane["nats"]["exports"].as_array().unwrap();
    assert!(exports.iter().all(|export| export["token_req"] == true));
    for import in shims["nats"]["imports"].as_array().unwrap() {
        let token = verified(import["token"].as_str().unwrap());
        assert_eq!(
            (&token["iss"], &token["sub"]),
            (&plane["sub"], &shims["sub"])
        );
        assert_eq!(token["nats"]["kind"], import["type"]);
    }
    assert!(shims["nats"]["limits"]["disk_storage"].is_null());
    let [_, mut changes, ..] = operator.claims(RESIZE);
    let imports = changes["nats"]["imports"].as_array_mut().unwrap();
    let change = imports.pop().unwrap();
    assert_eq!(change["subject"], "$JS.API.STREAM.UPDATE.wr_prod");
    assert_eq!(changes["nats"], plane["nats"]);
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
    let [_, _, account, _] = operator.claims(ACCOUNTS);
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
    let user = KeyPair::new_user().public_key();
    let before = [ACCOUNTS, RESIZE].map(|file| operator.claims(file));
    operator.revoke(&user).unwrap();
    for (file, before) in [ACCOUNTS, RESIZE].into_iter().zip(before) {
        let mut after = operator.claims(file);
        for account in &mut after[1..3] {
            let revoked = json!({ user.as_str(): NOW + 1 });
            assert_eq!(account["nats"]["revocations"], revoked);
            account["nats"]["revocations"] = json!({});
            account["iat"] = NOW.into();
        }
        assert_eq!(after, before);
    }
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
        let is_secret = ![ACCOUNTS, RESIZE]
            .map(Into::into)
            .contains(&entry.file_name());
        assert_eq!(mode & 0o77 == 0, is_secret, "{}", entry.path().display());
    }
}
