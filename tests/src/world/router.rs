//! Routers.

use warmroute_proto::bus::RegistryEvent;

use super::World;
use super::host::Input;

#[derive(Clone, Debug)]
pub(super) enum RouterThen {}

pub(super) struct Router {
    pub(super) host: usize,
}

impl Router {
    pub(super) const fn new(host: usize) -> Self {
        Self { host }
    }
}

impl World {
    pub(super) fn start_router(&mut self, _at: usize) {}
    pub(super) fn stop_router(&mut self, _at: usize) {}
    pub(super) fn router_input(&mut self, _at: usize, _input: Input) {}
    pub(super) fn router_link_up(&mut self, _host: usize) {}
    pub(super) fn tell_routers(&mut self, _event: &RegistryEvent) {}
    pub(super) fn answer_query(&mut self, _router: usize, _life: u64, _ask: u64, _indexer: usize) {}
}
