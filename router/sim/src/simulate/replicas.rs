//! The routers: N decision cores behind a plain balancer, which tell each other of their load.
//!
//! A message that one core wrote is decoded from its bytes and comes to all others after the sync
//! delay, or never. Nothing is lost or reordered here: the failure world tests that.

use std::time::{Duration, Instant};

use fastrand::Rng;
use warmroute_proto::codec;
use warmroute_proto::load::LoadMessage;
use warmroute_proto::query::IndexAnswer;
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::{BlockSize, Generation, RouterId, Source, WorkerId};

use super::SimulationError;
use warmroute_route::{
    AdmitError, Admitted, Core, CoreConfig, CoreCounts, Health, Knobs, Prompt, RouteRequest,
    SlotEvent,
};

/// How requests come to routers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum BalancePolicy {
    RoundRobin,
    Random,
}

#[derive(Clone, Debug)]
pub(super) struct RouterSetup {
    pub(super) routers: usize,
    /// None: they do not tell each other.
    pub(super) sync_delay: Option<Duration>,
    pub(super) balance: BalancePolicy,
    /// Of what the cores leave to chance.
    pub(super) draw: u64,
    pub(super) knobs: Knobs,
}

/// What one router told the others.
#[derive(Debug)]
pub(super) struct LoadBroadcast {
    pub(super) from: usize,
    message: LoadMessage,
}

/// A request's place at a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SlotPlace {
    pub(super) router: usize,
    pub(super) slot: u64,
}

pub(super) struct SimRouters {
    cores: Vec<Core>,
    balance: BalancePolicy,
    sync_delay: Option<Duration>,
    rng: Rng,
    turn: usize,
    told_bytes: u64,
    told: u64,
}

const MODEL: &str = "model";

const fn router_id(number: usize) -> RouterId {
    RouterId((number as u128).to_be_bytes())
}

impl SimRouters {
    #[must_use]
    pub(super) fn new(setup: &RouterSetup, sources: &[Source], size: BlockSize, seed: u64) -> Self {
        // An odd factor: no two draws of one seed are the same.
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
            told_bytes: 0,
            told: 0,
        }
    }

    /// The router that gets the next request.
    pub(super) fn next(&mut self) -> usize {
        match self.balance {
            BalancePolicy::Random => self.rng.usize(..self.cores.len()),
            BalancePolicy::RoundRobin => {
                let turn = self.turn;
                self.turn = (turn + 1) % self.cores.len();
                turn
            }
        }
    }

    /// A router decides; what it tells the others comes beside it.
    pub(super) fn admit(
        &mut self,
        router: usize,
        prompt: &Prompt,
        answer: &IndexAnswer,
        now: Instant,
    ) -> Result<(Admitted, Option<LoadBroadcast>), AdmissionFailed> {
        let ask = RouteRequest {
            model: MODEL,
            prompt,
            exclude: &[],
        };
        let admitted = self.cores[router].admit(&ask, Some(answer), now)?;
        let told = self.tell(router, &admitted.message)?;
        Ok((admitted, told))
    }

    /// Something happened to a request of a router's.
    pub(super) fn note(
        &mut self,
        router: usize,
        event: SlotEvent,
        now: Instant,
    ) -> Result<Option<LoadBroadcast>, SimulationError> {
        let message = self.cores[router]
            .note(event, now)
            .map_err(SimulationError::Ledger)?;
        self.tell(router, &message)
    }

    /// The others hear of it: the requests of theirs that they have to think over.
    pub(super) fn hear(&mut self, told: &LoadBroadcast, now: Instant) -> Vec<SlotPlace> {
        let mut crossed = Vec::new();
        for (router, core) in self.cores.iter_mut().enumerate() {
            if router != told.from {
                core.apply_remote(&told.message, now);
                let slots = core.take_crossed();
                crossed.extend(slots.into_iter().map(|slot| SlotPlace { router, slot }));
            }
        }
        crossed
    }

    /// A router decides again. Some: another place; what it tells the others comes beside it.
    pub(super) fn reconsider(
        &mut self,
        place: SlotPlace,
        prompt: &Prompt,
        answer: &IndexAnswer,
        now: Instant,
    ) -> Result<Option<(Admitted, Option<LoadBroadcast>)>, SimulationError> {
        let ask = RouteRequest {
            model: MODEL,
            prompt,
            exclude: &[],
        };
        let core = &mut self.cores[place.router];
        let moved = core.reconsider(place.slot, &ask, Some(answer), now);
        let Some(admitted) = moved.map_err(SimulationError::Ledger)? else {
            return Ok(None);
        };
        let told = self.tell(place.router, &admitted.message)?;
        Ok(Some((admitted, told)))
    }

    /// How long they take to hear; none if they never do.
    #[must_use]
    pub(super) const fn sync_delay(&self) -> Option<Duration> {
        self.sync_delay
    }

    pub(super) fn counts(&self) -> impl Iterator<Item = CoreCounts> {
        self.cores.iter().map(Core::counts)
    }

    /// Messages that left a router, and their bytes.
    #[must_use]
    pub(super) const fn told(&self) -> (u64, u64) {
        (self.told, self.told_bytes)
    }

    fn tell(
        &mut self,
        from: usize,
        bytes: &[u8],
    ) -> Result<Option<LoadBroadcast>, SimulationError> {
        if self.sync_delay.is_none() || self.cores.len() == 1 {
            return Ok(None);
        }
        self.told += 1;
        self.told_bytes += bytes.len() as u64;
        let message = codec::decode(bytes).map_err(SimulationError::Decode)?;
        Ok(Some(LoadBroadcast { from, message }))
    }
}

/// Why a request has no place.
#[derive(Debug, thiserror::Error)]
pub(super) enum AdmissionFailed {
    #[error(transparent)]
    Router(#[from] AdmitError),
    #[error(transparent)]
    Simulation(#[from] SimulationError),
}

fn entry(worker: &WorkerId, size: BlockSize) -> WorkerEntry {
    WorkerEntry {
        worker: worker.clone(),
        url: format!("http://{}", worker.as_str()),
        models: vec![MODEL.to_owned()],
        loras: Vec::new(),
        ranks: 1,
        block_size: Some(size),
        blocks_per_rank: None,
        max_model_len: None,
        main_attention_only: true,
        version: String::new(),
    }
}
