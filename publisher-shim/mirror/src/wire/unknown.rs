//! What a decoder of this version does not understand, by its name, for the operator's log.

use std::fmt;

/// Bound of a name's length.
const NAME_CHARS_MAX: usize = 64;
/// Bound of the entries of one batch.
const NOT_UNDERSTOOD_MAX: usize = 4;

/// A name that the engine sent: printable, and at most 64 characters long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineName(Box<str>);

impl EngineName {
    pub(super) fn new(name: &str) -> Self {
        let chars = name.chars().take(NAME_CHARS_MAX);
        let printable = chars.map(|char| if char.is_control() { '?' } else { char });
        Self(printable.collect())
    }
}

/// A part of an engine's message that this version does not understand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotUnderstood {
    Payload,
    /// The type of an event that is unknown, or that does not decode. Empty: it has no type.
    Event(EngineName),
    /// The kind of a KV-cache group.
    GroupKind(EngineName),
}

impl fmt::Display for NotUnderstood {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Payload => f.write_str("payload that is no batch"),
            Self::Event(name) => write!(f, "event type {:?}", name.0),
            Self::GroupKind(name) => write!(f, "kv_cache_spec_kind {:?}", name.0),
        }
    }
}

/// Adds an entry, unless the bounded list has it or is full.
pub(super) fn note(list: &mut Vec<NotUnderstood>, entry: NotUnderstood) {
    if list.len() < NOT_UNDERSTOOD_MAX && !list.contains(&entry) {
        list.push(entry);
    }
}
