//! The network of a plane without a log server: what processes publish goes from one to all others,
//! and requests to one of those that serve a subject.
//!
//! The product's `CorePlane` runs in each process over its simulated client. The world's server
//! stores nothing for it: log, registry and snapshots of [`super::plane`] stay empty.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use warmroute_plane::{
    Broadcast, Bus, Connection, CorePlane, CorePlaneConfig, Plane, PlaneFuture, PlaneStream,
    ServiceRequest,
};
use warmroute_proto::{Record, codec};

use super::World;
use super::host::Input;
use super::plane::{Impairment, Op};
use super::sim_plane::SimPlane;

/// The plane of a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum WorldPlane {
    /// A server with a log, a registry and snapshots.
    #[default]
    Log,
    /// A network that stores nothing. There are no routers.
    Core,
}

/// The times of day of two machines differ by as much.
const CLOCK_SKEW: Duration = Duration::from_secs(7);

impl World {
    /// What makes a process's plane of its client.
    pub(super) fn plane_of(
        &mut self,
        host: usize,
    ) -> impl FnOnce(SimPlane) -> Arc<dyn Plane> + use<> {
        let config = match self.plane.kind {
            WorldPlane::Log => None,
            WorldPlane::Core => {
                let skew = CLOCK_SKEW * u32::try_from(host).unwrap();
                Some(CorePlaneConfig {
                    namespace: super::namespace(),
                    id: self.dice.later.u64(..),
                    unix_ns: self.plane.clock(self.now + skew),
                    log_bytes_max: CorePlaneConfig::LOG_BYTES_MAX,
                })
            }
        };
        |plane| match config {
            None => Arc::new(plane),
            Some(config) => Arc::new(CorePlane::start(plane, config)),
        }
    }

    /// A message goes to all that subscribed. Those of one sender stay in their order.
    pub(super) fn publish_in_order(&mut self, from: usize, message: &Broadcast) {
        if self.hosts[from].is_cut {
            return;
        }
        let append = Op::Append {
            subject: message.subject.clone(),
            payload: message.payload.clone(),
        };
        let impairment = match codec::decode::<Record>(&message.payload) {
            Ok(record) => {
                let (now, source) = (self.now, &record.source);
                self.vouched
                    .said(now, source, &record.states, record.sent_at);
                self.checks.appended(&message.payload);
                self.report_append(&message.payload);
                self.plane.impairment(self.now, &append)
            }
            Err(_) => None,
        };
        for to in 0..self.hosts.len() {
            let running = self.hosts[to].running.as_ref();
            let listens = running.is_some_and(|it| it.streams.listens_to(&message.subject));
            let is_kept = match impairment {
                None => false,
                Some(Impairment::Refuses) => true,
                Some(Impairment::LosesAnswers) => to == from,
            };
            if listens && !is_kept && !self.strikes(self.rates.broadcast_lost) {
                let after = self.delay().max(self.stalled(from, to));
                let reached = self.plane.reached.entry((from, to)).or_default();
                *reached = (*reached).max(self.now + after);
                let after = reached.saturating_sub(self.now);
                self.send_host(to, after, Input::Broadcast(message.clone()));
            }
        }
    }
}

impl Bus for SimPlane {
    fn connection(&self) -> watch::Receiver<Connection> {
        Plane::connection(self)
    }

    fn payload_max(&self) -> usize {
        Plane::payload_max(self)
    }

    fn publish(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, ()> {
        Plane::publish(self, subject, payload)
    }

    fn subscribe(&self, subject: String) -> PlaneFuture<'_, PlaneStream<Broadcast>> {
        Plane::subscribe(self, subject)
    }

    fn request(
        &self,
        subject: String,
        payload: Bytes,
        deadline: Duration,
    ) -> PlaneFuture<'_, Option<Bytes>> {
        self.ask(subject, payload, deadline)
    }

    fn serve(&self, subject: String) -> PlaneFuture<'_, PlaneStream<ServiceRequest>> {
        Plane::serve(self, subject)
    }
}
