//! The workers' addresses as gateways name them: an IP address and a port.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use warmroute_proto::{DpRank, Source, WorkerId};

use super::state::FleetWorker;

/// The endpoint of each worker.
#[derive(Clone, Debug, Default)]
pub(crate) struct EndpointTable {
    workers: BTreeMap<WorkerId, Endpoint>,
    /// Sources of the workers whose URL has a name in place of an address.
    unaddressed: Vec<Source>,
}

#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    pub address: Arc<str>,
    pub url: String,
    pub ranks: u32,
}

impl EndpointTable {
    pub(super) fn of<'a>(workers: impl Iterator<Item = &'a FleetWorker>) -> Self {
        let mut table = Self::default();
        for FleetWorker { entry, .. } in workers {
            match address_of(&entry.url) {
                Some(address) => {
                    let endpoint = Endpoint {
                        address: address.to_string().into(),
                        url: entry.url.clone(),
                        ranks: entry.ranks,
                    };
                    table.workers.insert(entry.worker.clone(), endpoint);
                }
                None => table
                    .unaddressed
                    .extend(sources(&entry.worker, entry.ranks)),
            }
        }
        table
    }

    pub(crate) fn get(&self, worker: &WorkerId) -> Option<&Endpoint> {
        self.workers.get(worker)
    }

    /// A source that gateways cannot send to, if there is one.
    pub(crate) fn unaddressed(&self) -> Option<&Source> {
        self.unaddressed.first()
    }

    /// The worker at an address.
    pub(crate) fn worker_at(&self, address: &str) -> Option<(&WorkerId, &Endpoint)> {
        let mut workers = self.workers.iter();
        workers.find(|(_, endpoint)| *endpoint.address == *address)
    }

    /// The sources that a gateway cannot send to, and those outside of the subset that it allows.
    /// `by_address`: it needs addresses.
    pub(crate) fn excluded(
        &self,
        by_address: bool,
        subset: Option<&BTreeSet<SocketAddr>>,
    ) -> Vec<Source> {
        let needs_address = by_address || subset.is_some();
        let mut excluded = match needs_address {
            true => self.unaddressed.clone(),
            false => Vec::new(),
        };
        if let Some(subset) = subset {
            let allowed: BTreeSet<String> = subset.iter().map(ToString::to_string).collect();
            let outside =
                |(_, endpoint): &(&WorkerId, &Endpoint)| !allowed.contains(&*endpoint.address);
            let outside = self.workers.iter().filter(outside);
            excluded.extend(outside.flat_map(|(worker, endpoint)| sources(worker, endpoint.ranks)));
        }
        excluded
    }
}

fn sources(worker: &WorkerId, ranks: u32) -> impl Iterator<Item = Source> {
    (0..ranks).map(move |rank| Source {
        worker: worker.clone(),
        dp_rank: DpRank(rank),
    })
}

/// The address in an engine's URL; `None`: it has a name, or is no TCP address.
fn address_of(url: &str) -> Option<SocketAddr> {
    let (scheme, rest) = url.split_once("://")?;
    let port = match scheme {
        "http" => 80,
        "https" => 443,
        _ => return None,
    };
    let authority = rest.split('/').next()?;
    let bare = authority.trim_start_matches('[').trim_end_matches(']');
    let with_default = || bare.parse::<IpAddr>().ok().map(|ip| (ip, port).into());
    authority.parse().ok().or_else(with_default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_an_ip_address_and_a_port() {
        for (url, address) in [
            ("http://10.0.0.7:8000", Some("10.0.0.7:8000")),
            ("http://10.0.0.7:8000/", Some("10.0.0.7:8000")),
            ("http://10.0.0.7", Some("10.0.0.7:80")),
            ("https://[fd00::7]", Some("[fd00::7]:443")),
            ("https://[fd00::7]:8443", Some("[fd00::7]:8443")),
            ("http://vllm-0:8000", None),
            ("unix:///run/engine.sock", None),
            ("10.0.0.7:8000", None),
        ] {
            let found = address_of(url).map(|address| address.to_string());
            assert_eq!(found.as_deref(), address, "{url}");
        }
    }
}
