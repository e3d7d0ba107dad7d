//! The members of an object that are not null, each read once: what is left is unknown.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use super::{Conversion, unknown};
use crate::openai::request::OpaqueReason;

pub(super) struct Members<'a>(BTreeMap<String, &'a RawValue>);

impl<'a> Members<'a> {
    pub(super) fn read(object: &'a RawValue) -> Conversion<Self> {
        serde_json::from_str(object.get())
            .map(Self::given)
            .map_err(unknown)
    }

    /// A list of objects, read in one pass: most of a body is in them.
    pub(super) fn list(list: &'a RawValue) -> Conversion<Vec<Self>> {
        let objects: Vec<BTreeMap<String, &RawValue>> =
            serde_json::from_str(list.get()).map_err(unknown)?;
        Ok(objects.into_iter().map(Self::given).collect())
    }

    fn given(mut members: BTreeMap<String, &'a RawValue>) -> Self {
        members.retain(|_, value| value.get() != "null");
        Self(members)
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
