//! The publisher library: an engine of one's own publishes the blocks that it caches, in vLLM's wire
//! format, so that a shim or an embedded router follows it like a vLLM rank.
//!
//! [`Publisher`] is safe Rust; `c_api` is the same for C, and the only unsafe code of this workspace
//! (docs/adr/0024-publisher-library.md). `include/warmroute_publisher.h` describes it to users.
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

mod c_api;
mod payload;
mod publisher;

pub use c_api::{
    WarmrouteOptions, WarmrouteStored, warmroute_error_text, warmroute_publisher_cleared,
    warmroute_publisher_free, warmroute_publisher_new, warmroute_publisher_removed,
    warmroute_publisher_stored,
};
pub use payload::{CacheChange, PAYLOAD_BYTES_MAX, StoredRun};
pub use publisher::{PublishError, Publisher, PublisherOptions};
