//! Keys as the settings file has them.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use clap::CommandFactory as _;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use time::{Date, Month, PrimitiveDateTime, Time, UtcOffset};
use toml::value::{Datetime, Offset};
use warmroute_process::access::keys::{KEY_PREFIX, KeyHash, KeyId, StoredKey};
use warmroute_process::access::{OperatorKey, Role};

use super::tls::PortTls;
use crate::config::RouterArgs;

/// `[admin]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct AdminSettings {
    #[serde(deserialize_with = "operator_keys")]
    pub keys: Arc<[OperatorKey]>,
    /// Without keys the port admits no client, since it had keys that were removed.
    #[serde(skip)]
    pub is_locked: bool,
    pub explain_headers: ExplainRule,
    pub tls: PortTls,
}

/// The clients that get headers about routing decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ExplainRule {
    #[default]
    Off,
    AdminKey,
    All,
}

impl Default for AdminSettings {
    fn default() -> Self {
        Self {
            keys: [].into(),
            is_locked: false,
            explain_headers: ExplainRule::Off,
            tls: PortTls::default(),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OperatorKeyRow {
    #[serde(deserialize_with = "parsed")]
    id: KeyId,
    #[serde(deserialize_with = "parsed")]
    sha256: KeyHash,
    role: RoleName,
    #[serde(default, deserialize_with = "expiry")]
    expires: Option<i64>,
}

/// [`Role`] as the file names it.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RoleName {
    Read,
    Operate,
}

/// Why keys are refused together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum KeyError {
    #[error("two keys have the id or the hash of {0}")]
    Twice(KeyId),
}

fn operator_keys<'de, D>(deserializer: D) -> Result<Arc<[OperatorKey]>, D::Error>
where
    D: Deserializer<'de>,
{
    let rows = Vec::<OperatorKeyRow>::deserialize(deserializer)?;
    let keys = rows.into_iter().map(|row| OperatorKey {
        key: StoredKey {
            id: row.id,
            hash: row.sha256,
            expires_unix_s: row.expires,
        },
        role: match row.role {
            RoleName::Read => Role::Read,
            RoleName::Operate => Role::Operate,
        },
    });
    let keys: Vec<_> = keys.collect();
    distinct(keys.iter().map(|one| &one.key)).map_err(D::Error::custom)?;
    Ok(keys.into())
}

/// A field that is parsed where it stands, so that an error has its line.
pub(super) fn parsed<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: Display>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(D::Error::custom)
}

/// The second, since the Unix epoch, from which on a key is refused.
pub(super) fn expiry<'de, D>(deserializer: D) -> Result<Option<i64>, D::Error>
where
    D: Deserializer<'de>,
{
    let second = unix_s(Datetime::deserialize(deserializer)?);
    let fault = "expires is no date, and no date with time and offset";
    second.map(Some).ok_or_else(|| D::Error::custom(fault))
}

/// Fails if two keys have one name in logs, or if one key has two owners.
pub(super) fn distinct<'k>(keys: impl Iterator<Item = &'k StoredKey>) -> Result<(), KeyError> {
    let (mut ids, mut hashes) = (BTreeSet::new(), BTreeSet::new());
    for key in keys {
        if !ids.insert(key.id.clone()) || !hashes.insert(key.hash.to_hex()) {
            return Err(KeyError::Twice(key.id.clone()));
        }
    }
    Ok(())
}

/// Why the parser refuses a text: place and message. Quotes neither lines nor values of the text,
/// which may be keys, since the error is logged.
#[derive(Debug, thiserror::Error)]
#[error("the settings are invalid: {0}")]
pub struct InvalidSettings(String);

impl From<toml::de::Error> for InvalidSettings {
    fn from(error: toml::de::Error) -> Self {
        let shown = error.to_string();
        let first = shown.lines().next().unwrap_or_default();
        let place = first.strip_prefix("TOML parse error at ");
        let message = without_keys(&without_values(error.message()));
        let message = in_plain_words(flag_named(&message).unwrap_or(message));
        Self(match place {
            Some(place) => format!("{place}: {message}"),
            None => message,
        })
    }
}

/// The message for a flag that stands in the file.
fn flag_named(message: &str) -> Option<String> {
    let (_, rest) = message.split_once("unknown field `")?;
    let (field, _) = rest.split_once('`')?;
    let flag = field.replace('_', "-");
    let command = RouterArgs::command();
    let mut flags = command.get_arguments().filter_map(clap::Arg::get_long);
    let is_flag = flags.any(|known| known == flag);
    is_flag.then(|| format!("`{field}` is no setting here, but there is a flag --{flag}"))
}

/// Without the names of types, which only the source has.
fn in_plain_words(message: String) -> String {
    match message.split_once("expected struct ") {
        Some((before, _)) => format!("{before}expected a table"),
        None => message,
    }
}

/// A parser's message without the values that it quotes: texts, and the values of a wrong type.
fn without_values(message: &str) -> String {
    let mut shown = String::new();
    let mut rest = message;
    while let Some(at) = rest.find('"') {
        let (before, quoted) = rest.split_at(at);
        shown.push_str(before);
        shown.push('"');
        rest = &quoted[1..];
        // The parser expects a quotation mark.
        if before.ends_with('`') {
            continue;
        }
        shown.push_str("…\"");
        rest = &rest[end_of_text(rest)..];
    }
    shown.push_str(rest);
    if let Some((before, rest)) = shown.split_once("unknown variant `") {
        let expected = rest
            .rsplit_once("`, expected ")
            .map_or("", |(_, last)| last);
        return format!("{before}unknown variant, expected {expected}");
    }
    let Some((before, rest)) = shown.split_once("invalid type: ") else {
        return shown;
    };
    let (found, expected) = rest.split_once(", expected").unwrap_or((rest, ""));
    let kind = found.split('`').next().unwrap_or_default().trim_end();
    format!("{before}invalid type: {kind}, expected{expected}")
}

/// Length of a quoted text behind its first quotation mark, the last one included.
fn end_of_text(text: &str) -> usize {
    let mut escaped = false;
    let end = text.char_indices().find(|&(_, char)| {
        let is_end = char == '"' && !escaped;
        escaped = char == '\\' && !escaped;
        is_end
    });
    end.map_or(text.len(), |(at, _)| at + 1)
}

/// A text whose keys are made unreadable: a field's name may be one.
fn without_keys(text: &str) -> String {
    let mut parts = text.split(KEY_PREFIX);
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digits = part.bytes().take_while(u8::is_ascii_hexdigit).count();
        shown.push_str(KEY_PREFIX);
        shown.push_str(&"*".repeat(digits));
        shown.push_str(&part[digits..]);
    }
    shown
}

/// A date is its first second in UTC. A time needs its offset.
fn unix_s(at: Datetime) -> Option<i64> {
    let date = at.date?;
    let month = Month::try_from(date.month).ok()?;
    let date = Date::from_calendar_date(date.year.into(), month, date.day).ok()?;
    let (time, offset) = match (at.time, at.offset) {
        (None, None) => (Time::MIDNIGHT, UtcOffset::UTC),
        (Some(time), Some(offset)) => {
            let minutes = match offset {
                Offset::Z => 0,
                Offset::Custom { minutes } => i32::from(minutes),
            };
            let offset = UtcOffset::from_whole_seconds(minutes * 60).ok()?;
            let time = Time::from_hms(time.hour, time.minute, time.second).ok()?;
            (time, offset)
        }
        (Some(_), None) | (None, Some(_)) => return None,
    };
    let moment = PrimitiveDateTime::new(date, time).assume_offset(offset);
    Some(moment.unix_timestamp())
}

#[cfg(test)]
mod tests {
    use super::super::Settings;
    use super::*;

    const HASH: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    fn parsed(rest: &str) -> Result<Arc<[OperatorKey]>, String> {
        let text = format!(
            "[admin]\nkeys = [{{ id = \"a\", sha256 = \"{HASH}\", role = \"read\"{rest} }}]"
        );
        let settings = Settings::parse(&text).map_err(|error| error.to_string())?;
        Ok(settings.admin_keys().unwrap_or_default())
    }

    #[test]
    fn keys_have_an_id_a_hash_a_role_and_an_end() {
        for (expires, unix_s) in [
            ("", None),
            (", expires = 2027-01-01", Some(1_798_761_600)),
            (", expires = 2027-01-01T01:00:00+01:00", Some(1_798_761_600)),
            (", expires = 2027-01-01T00:00:01Z", Some(1_798_761_601)),
        ] {
            let keys = parsed(expires).unwrap();
            assert_eq!(keys[0].role, Role::Read);
            assert_eq!(keys[0].key.hash.to_hex(), HASH);
            assert_eq!(keys[0].key.expires_unix_s, unix_s, "{expires}");
        }
        // Neither a key nor its hash is logged.
        let shown = format!(
            "{:?}",
            Settings::parse(&format!(
                "[admin]\nkeys = [{{ id = \"a\", sha256 = \"{HASH}\", role = \"operate\" }}]"
            ))
            .unwrap()
        );
        assert!(
            !shown.contains(HASH) && shown.contains("Operate"),
            "{shown}"
        );
    }

    #[test]
    fn errors_name_flags_and_no_types() {
        for (text, error) in [
            (
                "port = 8080",
                "line 1, column 1: `port` is no setting here, but there is a flag --port",
            ),
            (
                "[[tenants]]\nname = \"a\"\nkeys = [\"x\"]",
                "line 3, column 9: invalid type: string \"…\", expected a table",
            ),
            (
                "[[tenants]]\nname = \"a\"\n\n[[tenants]]\nname = \"b\"\nkeys = [\n\
                 { id = \"k\", sha256 = \"0\" },\n]",
                "line 7, column 22: sha256 is not a SHA-256 of 64 hexadecimal digits",
            ),
            (
                "[[tenants]]\nname = \"a\"\n\n[[tenants]]\nname = \"b c\"",
                "line 5, column 8: \"…\" is not a name of 1 to 64 letters, digits, '.', '_' and \
                 '-'",
            ),
        ] {
            let shown = Settings::parse(text).unwrap_err().to_string();
            assert!(shown.ends_with(error), "{shown}");
        }
    }

    #[test]
    fn an_error_quotes_no_key() {
        let (key, _) = warmroute_process::access::keys::generate().unwrap();
        for text in [
            format!("[admin]\nkeys = [{{ id = \"a\", sha256 = \"{key}\", role = \"read\" }}]"),
            format!("[admin]\nkeys = [\"{key}\"]"),
        ] {
            let error = Settings::parse(&text).unwrap_err().to_string();
            assert!(error.contains("line 2"), "{error}");
            assert!(!error.contains(&key[3..20]), "{error}");
        }
    }

    /// Whatever else is wrong with its line, and whatever form the key has.
    #[test]
    fn an_error_quotes_no_plain_text() {
        for text in [
            "[[workers]]\nurl = \"http://h:1\"\nkey = \"s3cret\" ranks = 1",
            "[[workers]]\nurl = \"http://h:1\"\nkey = s3cret",
            "[[workers]]\nurl = \"http://h:1\"\nkey = \"s3cret",
            "[[workers]]\nurl = \"http://h:1\"\nkey = \"s3cret\\u0001\"",
            "workers = [{ url = \"http://h:1\", key = \"s3cret\", x = 1 }]",
            "workers = [{ url = \"http://h:1\", key = \"s3cret\", ranks = \"x\" }]",
            "workers = [\"http://h:1,key=s3cret\"]",
            "workers = [[\"a \\\" s3cret\"]]\nworkers = 1",
            "[admin]\nkeys = [{ id = \"a\", sha256 = \"s3cret\", role = \"read\", x = 1 }]",
            "[admin]\nkeys = [{ id = \"s3cret \\\" s3cret\", sha256 = \"\", role = \"read\" }]",
            "[admin]\nkeys = \"s3cret\"",
            "[[tenants]]\nname = \"t\"\nkeys = [\"s3cret\"]",
            "[[tenants]]\nname = \"t\"\nkeys = [{ id = \"a\", sha256 = \"s3cret\" } x = 1",
            "[engines]\nauthorization = \"Bearer s3cret\"",
            "[engines]\nauthorization = \"`, expected s3cret`, expected s3cret\"",
            "[admin]\nkeys = [{ id = \"a\", sha256 = \"\", role = \"s3cret\" }]",
        ] {
            let error = Settings::parse(text).unwrap_err();
            let shown = format!("{error} {error:?}");
            let shown = format!("{shown} {:#}", anyhow::Error::new(error));
            assert!(
                !shown.contains("s3cret") && shown.contains("line "),
                "{shown}"
            );
        }
        let number = "workers = [{ url = \"http://h:1\", key = 4711 }]";
        let error = Settings::parse(number).unwrap_err().to_string();
        assert!(
            !error.contains("4711") && error.contains("expected"),
            "{error}"
        );
    }

    #[test]
    fn a_bad_key_is_refused_with_its_line() {
        let whole = format!(r#"id = "a", sha256 = "{HASH}", role = "read""#);
        for (row, fault) in [
            (
                r#"id = "a b", sha256 = "x", role = "read""#.to_owned(),
                "not a name of 1 to 64",
            ),
            (
                r#"id = "a", sha256 = "x", role = "read""#.to_owned(),
                "64 hexadecimal digits",
            ),
            (
                format!(r#"id = "a", sha256 = "{HASH}", role = "root""#),
                "unknown variant, expected `read` or `operate`",
            ),
            (
                format!(r#"id = "a", sha256 = "{HASH}""#),
                "missing field `role`",
            ),
            (format!(r#"{whole}, key = "x""#), "unknown field"),
            (
                format!("{whole}, expires = 2027-01-01T00:00:00"),
                "expires is no date",
            ),
            (
                format!("{whole} }}, {{ {}", whole.replace("\"a\"", "\"b\"")),
                "two keys",
            ),
        ] {
            let text = format!("[admin]\nkeys = [{{ {row} }}]\n");
            let error = Settings::parse(&text).unwrap_err().to_string();
            assert!(error.contains("line 2"), "{row}: {error}");
            assert!(error.contains(fault), "{row}: {error}");
        }
    }
}
