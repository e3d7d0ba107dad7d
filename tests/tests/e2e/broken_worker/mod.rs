//! A worker that swallows requests: hung, frozen, asleep, failing or slow, with a hot prefix.

mod fault;
mod load;
mod peers;
mod stage;
mod table;
