//! The distributed plane: engines, shims, indexers and routers agree under load, and again after any of
//! them was killed.

mod death;
mod engine_restart;
mod equality;
mod front;
mod indexer_restart;
mod leak;
mod load;
mod rolling;
mod server_restart;
mod shim_restart;
mod streams;
mod views;
