//! Snapshots: what an indexer keeps of the log, so that the next one starts without all of it.
//!
//! Pure: [`mod@format`] is the bytes, [`policy`] decides when one is due, which the pointer names and which
//! may go. What goes in and what comes of it is the fold's ([`crate::fold::Fold::cut`] and
//! [`crate::fold::Fold::adopt`]); writing and reading them through a plane is the service's.

pub mod format;
pub mod policy;

pub use format::{Restored, SnapshotReadError};
pub use policy::{Name, Schedule};
