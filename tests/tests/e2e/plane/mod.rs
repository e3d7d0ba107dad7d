//! The distributed plane: engines, shims, indexers and routers agree under load, and again after any of
//! them was killed.

mod agreement;
mod burst;
mod engine_restart;
mod equality;
mod indexer_restart;
mod least_privilege;
mod load;
mod router_restart;
mod server_restart;
mod shim_restart;
mod together;
