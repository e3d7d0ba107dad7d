//! The simulated routers: N routing cores behind a simple balancer.
//!
//! Each message of a core is decoded from its bytes and reaches all others after the sync delay, or
//! never. No message is lost or reordered; the simulated world in `tests` covers that.

use std::time::{Duration, Instant};

use fastrand::Rng;
use warmroute_proto::codec;
use warmroute_proto::load::LoadMessage;
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::{BlockSize, Generation, RouterId, Source, WorkerId};

use super::SimulationError;
use warmroute_route::{
    AdmitError, Admitted, Core, CoreConfig, CoreCounts, Health, IndexReply, Knobs, Prompt,
    RouteRequest, SlotEvent,
};

/// Balancing of requests over routers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum BalancePolicy {
    RoundRobin,
    Random,
}

#[derive(Clone, Debug)]
pub(crate) struct RouterSetup {
    pub(crate) routers: usize,
    /// `None` if routers do not exchange load.
    pub(crate) sync_delay: Option<Duration>,
    pub(crate) balance: BalancePolicy,
    /// Seed of the cores' random choices.
    pub(crate) draw: u64,
    pub(crate) knobs: Knobs,
}

/// A load message of one router.
#[derive(Debug)]
pub(crate) struct LoadBroadcast {
    pub(crate) from: usize,
    message: LoadMessage,
}

/// A request's slot at a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SlotPlace {
    pub(crate) router: usize,
    pub(crate) slot: u64,
}

pub(crate) struct SimRouters {
    cores: Vec<Core>,
    balance: BalancePolicy,
    sync_delay: Option<Duration>,
    rng: Rng,
    turn: usize,
    sent_bytes: u64,
    sent: u64,
}

const MODEL: &str = "model";

const fn router_id(number: usize) -> RouterId {
    RouterId((number as u128).to_be_bytes())
}

impl SimRouters {
    #[must_use]
    pub(crate) fn new(setup: &RouterSetup, sources: &[Source], size: BlockSize, seed: u64) -> Self {
        // An odd factor, so that all draws of a seed differ.
        let chance = seed.wrapping_add(setup.draw.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut rng = Rng::with_seed(chance ^ 0x0072_6F75_7465_7273);
        let entries: Vec<WorkerEntry> = sources
            .iter()
            .map(|source| entry(&source.worker, size))
            .collect();
        let core = |number: usize| {
            let mut core = Core::new(CoreConfig {
                knobs: setup.knobs.clone(),
                router: router_id(number),
                incarnation: Generation(1),
                seed: rng.u64(..),
            });
            core.set_workers(&entries);
            for source in sources {
                core.set_health(&source.worker, Health::Healthy);
            }
            let others = (0..setup.routers).filter(|&other| other != number);
            for other in others {
                core.set_delay(router_id(other), setup.sync_delay);
            }
            core
        };
        Self {
            cores: (0..setup.routers).map(core).collect(),
            balance: setup.balance,
            sync_delay: setup.sync_delay,
            rng: Rng::with_seed(seed ^ 0x0062_616C_616E_6365),
            turn: 0,
            sent_bytes: 0,
            sent: 0,
        }
    }

    /// Router of the next request.
    pub(crate) fn next(&mut self) -> usize {
        match self.balance {
            BalancePolicy::Random => self.rng.usize(..self.cores.len()),
            BalancePolicy::RoundRobin => {
                let turn = self.turn;
                self.turn = (turn + 1) % self.cores.len();
                turn
            }
        }
    }

    /// Routes a request. Returns the message for the other routers too.
    pub(crate) fn admit(
        &mut self,
        router: usize,
        prompt: &Prompt,
        answer: &IndexReply,
        now: Instant,
    ) -> Result<(Admitted, Option<LoadBroadcast>), AdmissionFailed> {
        let ask = RouteRequest {
            model: MODEL,
            prompt,
            exclude: &[],
            leg: warmroute_route::Leg::Whole,
        };
        let admitted = self.cores[router].admit(&ask, Some(answer), now)?;
        let broadcast = self.broadcast(router, &admitted.message)?;
        Ok((admitted, broadcast))
    }

    /// Records an event of a request.
    pub(crate) fn note(
        &mut self,
        router: usize,
        event: SlotEvent,
        now: Instant,
    ) -> Result<Option<LoadBroadcast>, SimulationError> {
        let message = self.cores[router]
            .note(event, now)
            .map_err(SimulationError::Ledger)?;
        self.broadcast(router, &message)
    }

    /// Delivers a message to the other routers. Returns requests to decide again.
    pub(crate) fn deliver(&mut self, broadcast: &LoadBroadcast, now: Instant) -> Vec<SlotPlace> {
        let mut crossed = Vec::new();
        for (router, core) in self.cores.iter_mut().enumerate() {
            if router != broadcast.from {
                core.apply_remote(&broadcast.message, now);
                let slots = core.take_crossed();
                crossed.extend(slots.into_iter().map(|slot| SlotPlace { router, slot }));
            }
        }
        crossed
    }

    /// Decides again. Returns the new slot, if the request moves, and the message for the others.
    pub(crate) fn reconsider(
        &mut self,
        place: SlotPlace,
        prompt: &Prompt,
        answer: &IndexReply,
        now: Instant,
    ) -> Result<Option<(Admitted, Option<LoadBroadcast>)>, SimulationError> {
        let ask = RouteRequest {
            model: MODEL,
            prompt,
            exclude: &[],
            leg: warmroute_route::Leg::Whole,
        };
        let core = &mut self.cores[place.router];
        let moved = core.reconsider(place.slot, &ask, Some(answer), now);
        let Some(admitted) = moved.map_err(SimulationError::Ledger)? else {
            return Ok(None);
        };
        let broadcast = self.broadcast(place.router, &admitted.message)?;
        Ok(Some((admitted, broadcast)))
    }

    /// Delay of messages; `None` if routers do not exchange load.
    #[must_use]
    pub(crate) const fn sync_delay(&self) -> Option<Duration> {
        self.sync_delay
    }

    pub(crate) fn counts(&self) -> impl Iterator<Item = CoreCounts> {
        self.cores.iter().map(Core::counts)
    }

    /// Number of messages, and their bytes.
    #[must_use]
    pub(crate) const fn sent(&self) -> (u64, u64) {
        (self.sent, self.sent_bytes)
    }

    fn broadcast(
        &mut self,
        from: usize,
        bytes: &[u8],
    ) -> Result<Option<LoadBroadcast>, SimulationError> {
        if self.sync_delay.is_none() || self.cores.len() == 1 {
            return Ok(None);
        }
        self.sent += 1;
        self.sent_bytes += bytes.len() as u64;
        let message = codec::decode(bytes).map_err(SimulationError::Decode)?;
        Ok(Some(LoadBroadcast { from, message }))
    }
}

/// Reason why a request was not routed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdmissionFailed {
    #[error(transparent)]
    Router(#[from] AdmitError),
    #[error(transparent)]
    Simulation(#[from] SimulationError),
}

fn entry(worker: &WorkerId, size: BlockSize) -> WorkerEntry {
    WorkerEntry {
        models: vec![MODEL.to_owned()],
        block_size: Some(size),
        main_attention_only: true,
        ..WorkerEntry::new(worker.clone(), format!("http://{}", worker.as_str()))
    }
}
