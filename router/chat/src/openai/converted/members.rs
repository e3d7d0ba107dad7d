//! The members of an object that are not null, each read once: what is left is unknown.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use super::{Conversion, unknown};
use crate::openai::request::OpaqueReason;

pub(super) struct Members<'a>(BTreeMap<String, &'a RawValue>);

impl<'a> Members<'a> {
    pub(super) fn read(object: &'a RawValue) -> Conversion<Self> {
        let mut members: BTreeMap<String, &RawValue> =
            serde_json::from_str(object.get()).map_err(unknown)?;
        members.retain(|_, value| value.get() != "null");
        Ok(Self(members))
    }

    /// A list of objects.
    pub(super) fn list(list: &'a RawValue) -> Conversion<Vec<Self>> {
        let objects: Vec<&RawValue> = serde_json::from_str(list.get()).map_err(unknown)?;
        objects.into_iter().map(Self::read).collect()
    }

    pub(super) fn raw(&mut self, name: &str) -> Option<&'a RawValue> {
        self.0.remove(name)
    }

    pub(super) fn text(&mut self, name: &str) -> Conversion<Option<String>> {
        let read = |raw: &RawValue| serde_json::from_str(raw.get()).map_err(unknown);
        self.raw(name).map(read).transpose()
    }

    pub(super) fn required_text(&mut self, name: &str) -> Conversion<String> {
        self.text(name)?.ok_or(OpaqueReason::UnknownItem)
    }

    pub(super) fn flag(&mut self, name: &str) -> Conversion<Option<bool>> {
        let read = |raw: &RawValue| serde_json::from_str(raw.get()).map_err(unknown);
        self.raw(name).map(read).transpose()
    }

    pub(super) fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.0.remove(*name);
        }
    }

    /// Fails if a member was not read.
    pub(super) fn end(self) -> Conversion<()> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(OpaqueReason::UnknownItem)
        }
    }
}
