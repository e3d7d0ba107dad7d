//! The distributed plane: engines, shims, indexers and routers agree under load, and again after
//! any of them was killed.

mod agreement;
mod audit;
mod burst;
mod convergence;
mod cost;
mod credentials;
mod death;
mod differing_routers;
pub(crate) mod doctor;
mod drain;
mod engine_restart;
pub(crate) mod equality;
mod front;
mod indexer_restart;
mod leak;
mod least_privilege;
mod limits;
mod load;
mod monitoring;
mod moves;
mod permissions;
mod queue;
mod reset;
mod rolling;
mod router_restart;
mod server_restart;
mod shim_restart;
pub(crate) mod streams;
mod together;
mod views;
mod without_log;
