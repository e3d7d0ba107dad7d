//! `chat_template_kwargs`: arguments that a request or an engine's rules give a template.

use std::collections::BTreeMap;
use std::fmt;

use minijinja::value::Value;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, Visitor};

use super::messages::{check_numbers, unreadable};
use super::template::RenderError;

/// The field, as errors name it.
const NAME: &str = "chat_template_kwargs";
/// Templates read a handful; the values still have to be copied.
const MEMBERS_MAX: usize = 1024;

/// The arguments by name. The last one of a repeated name counts, as in Python.
pub(super) type TemplateKwargs = BTreeMap<String, Value>;

/// Reading ends at the first member above the bound.
pub(super) fn read(json: &str) -> Result<TemplateKwargs, RenderError> {
    check_numbers(NAME, json)?;
    let mut read = KwargsSeed {
        members: TemplateKwargs::new(),
        is_full: false,
    };
    let mut reader = serde_json::Deserializer::from_str(json);
    let result = read.deserialize(&mut reader).and_then(|()| reader.end());
    match result {
        _ if read.is_full => Err(RenderError::TooManyMembers {
            name: NAME,
            max: MEMBERS_MAX,
        }),
        Ok(()) => Ok(read.members),
        Err(error) => Err(unreadable(NAME, &error)),
    }
}

/// The members so far.
struct KwargsSeed {
    members: TemplateKwargs,
    /// There is a member more than the bound.
    is_full: bool,
}

impl<'de> DeserializeSeed<'de> for &mut KwargsSeed {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut KwargsSeed {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            if self.members.len() == MEMBERS_MAX && !self.members.contains_key(&name) {
                self.is_full = true;
                return Err(A::Error::custom("too many members"));
            }
            let value = map.next_value()?;
            self.members.insert(name, value);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOO_MANY: RenderError = RenderError::TooManyMembers {
        name: NAME,
        max: MEMBERS_MAX,
    };

    fn members(count: usize) -> String {
        let members: Vec<String> = (0..count).map(|i| format!("\"k{i}\":{i}")).collect();
        members.join(",")
    }

    #[test]
    fn reading_ends_at_the_first_member_above_the_bound() {
        assert_eq!(read(&format!("{{{}}}", members(1024))).unwrap().len(), 1024);
        let full = members(1025);
        assert_eq!(read(&format!("{{{full}}}")), Err(TOO_MANY));
        // An error that follows does not replace this one.
        for rest in ["", ",", ",\"k0\":", ",[]}}", ",\"again\":tru"] {
            assert_eq!(read(&format!("{{{full}{rest}")), Err(TOO_MANY), "{rest}");
        }
        let invalid = RenderError::Invalid(NAME);
        assert_eq!(read(&format!("{{{},", members(1024))), Err(invalid));
    }

    #[test]
    fn repeated_members_count_once_and_the_last_one_is_kept() {
        let json = format!("{{{},\"k7\":\"last\"}}", members(1024));
        let read = read(&json).unwrap();
        assert_eq!(read.len(), 1024);
        assert_eq!(read["k7"].as_str(), Some("last"));
    }

    #[test]
    fn other_values_than_objects_are_invalid() {
        for json in [
            "[]",
            "[[\"a\",1]]",
            "1",
            "\"a\"",
            "true",
            "null",
            "{",
            "{}x",
        ] {
            assert_eq!(read(json), Err(RenderError::Invalid(NAME)), "{json}");
        }
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(500), "]".repeat(500));
        assert_eq!(read(&deep), Err(RenderError::Invalid(NAME)));
    }
}
