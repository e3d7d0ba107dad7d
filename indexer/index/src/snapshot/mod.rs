//! Snapshots: the persistent form of the fold, from which an indexer starts without the whole log.
//!
//! [`mod@format`] is the bytes; [`policy`] decides when a snapshot is due, what the pointer names
//! and which snapshots are deleted. The content is the fold's ([`crate::fold::Fold::cut`],
//! [`crate::fold::Fold::adopt`]); the service transfers it through the plane.

pub mod format;
pub mod policy;

pub use format::{Restored, SnapshotReadError};
pub use policy::{Name, Schedule};
