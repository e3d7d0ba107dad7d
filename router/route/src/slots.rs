//! What every source bears: the requests of all routers that are on it.
//!
//! Fed by decoded load messages only, one's own included, so that every replica that took in the same
//! messages holds the same state, and [`Slots::digest`] proves it. Total: a change that makes no sense
//! (a slot freed twice, a slot that nobody opened, a prefill completed twice, a former owned of the
//! router) is counted and does nothing. No number ever goes below zero: what a slot adds is kept with
//! the slot, and exactly that is taken off again.
//!
//! Active blocks are counted once for all requests of a source that sum them, as exactly as the
//! prompts are sampled; what a prompt has beyond its last sample counts for each request alone.
//!
//! Whoever holds this behind a lock never holds it for long: a dead router's slots stop counting at once,
//! by their sums, and are taken apart step by step ([`Slots::release_step`]); blocks that they alone held
//! go with those steps. What a router has on each source is such a sum too.
//!
//! Deliberately absent: an age limit. A slot lives as long as its router says so.

use std::collections::BTreeMap;

use serde::Serialize;
use warmroute_proto::load::{
    LoadChange, LoadDigest, OpenSlot, SampledPrefix, SlotEnd, SlotIdentity, SlotMark,
};
use warmroute_proto::{DpRank, Generation, RouterId, WorkerId};

use super::prompt_tree::{PromptLeaf, PromptTree};
use super::source_table::{PerSource, SourceId, SourceTable};

#[derive(Clone, Debug, Default)]
pub struct Slots {
    sources: PerSource<ActiveLoad>,
    routers: BTreeMap<RouterId, RouterSlots>,
    /// Slots that count no more but for the blocks of their prompts, of any router.
    released: Vec<BTreeMap<u64, Slot>>,
    ignored: IgnoredChanges,
}

/// Slots that one step works on: bounds how long a cut or a release keeps decisions waiting.
pub const STEP: usize = 1_000;

/// What a change did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    Added(SourceId),
    PrefillCompleted(SourceId),
    Grown(SourceId),
    Freed(SourceId, SlotEnd),
    Nothing,
}

/// Changes that did nothing, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IgnoredChanges {
    /// A slot was opened that is open.
    pub opened_twice: u64,
    /// A change to a slot that is not open: never opened, or freed.
    pub unknown_slot: u64,
    pub prefilled_twice: u64,
    /// Said by a former owned of a router.
    pub old_incarnation: u64,
}

/// One source's row of `/v1/slots`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SourceLoad {
    pub worker: WorkerId,
    pub dp_rank: DpRank,
    pub active_requests: u32,
    pub prefill_tokens: u64,
    pub decode_blocks: u64,
}

/// What one router has on one source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RouterLoad {
    pub worker: WorkerId,
    pub dp_rank: DpRank,
    pub active_requests: u32,
    pub prefill_tokens: u64,
    pub generated_blocks: u64,
}

/// What one source bears.
#[derive(Clone, Debug, Default)]
pub struct ActiveLoad {
    requests: u32,
    prefill_tokens: u64,
    /// The sampled prompts of the requests here.
    prompts: PromptTree,
    /// Blocks that prompts have beyond their last sample, and generated ones.
    unshared_blocks: u64,
}

impl ActiveLoad {
    #[must_use]
    pub const fn active_requests(&self) -> u32 {
        self.requests
    }

    /// Prompt tokens of requests here that have no first token yet.
    #[must_use]
    pub const fn prefill_tokens(&self) -> u64 {
        self.prefill_tokens
    }

    /// Distinct blocks that the requests here hold.
    #[must_use]
    pub const fn decode_blocks(&self) -> u64 {
        self.prompts.blocks() + self.unshared_blocks
    }

    /// Blocks of this prompt that requests here hold already.
    #[must_use]
    pub fn shared_blocks(&self, prompt: &SampledPrefix) -> u32 {
        self.prompts.longest(&prompt.hashes)
    }

    fn is_idle(&self) -> bool {
        self.requests == 0
    }
}

/// One router's slots, of one owned of it.
#[derive(Clone, Debug, Default)]
struct RouterSlots {
    incarnation: Generation,
    slots: BTreeMap<u64, Slot>,
    /// The sums of the slots, of sources with at least one.
    totals: BTreeMap<SourceId, SlotTotals>,
    digest: LoadDigest,
}

/// What a router's slots on a source add up to.
#[derive(Clone, Copy, Debug, Default)]
struct SlotTotals {
    requests: u32,
    prefill_tokens: u64,
    tail_blocks: u64,
    generated_blocks: u64,
}

#[derive(Clone, Debug)]
struct Slot {
    source: SourceId,
    leaf: PromptLeaf,
    identity: SlotIdentity,
    prefill_tokens: u32,
    prefill: Prefill,
    /// Blocks of the prompt beyond its last sample.
    tail_blocks: u32,
    generated_blocks: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prefill {
    Outstanding,
    Done,
}

impl Slots {
    /// Takes in one change of a router's slots.
    pub fn apply(
        &mut self,
        table: &mut SourceTable,
        router: RouterId,
        incarnation: Generation,
        change: &LoadChange,
    ) -> Applied {
        if !self.enter(router, incarnation) {
            return Applied::Nothing;
        }
        let owned = self.routers.entry(router).or_default();
        let (sources, ignored) = (&mut self.sources, &mut self.ignored);
        match change {
            LoadChange::AddRequest { source, .. } => {
                let source = table.intern(source);
                owned.add(sources.get_mut(source), ignored, source, change)
            }
            LoadChange::MarkPrefillCompleted { counter } => {
                owned.complete_prefill(sources, ignored, *counter)
            }
            LoadChange::Grow { counter, blocks } => owned.grow(sources, ignored, *counter, *blocks),
            LoadChange::Free { counter, end } => owned.free(sources, ignored, *counter, *end),
        }
    }

    /// Takes in an open slot as its router states it, in the place of all changes that led to it.
    pub fn restore(
        &mut self,
        table: &mut SourceTable,
        router: RouterId,
        incarnation: Generation,
        slot: &OpenSlot,
    ) -> Applied {
        if !self.enter(router, incarnation) {
            return Applied::Nothing;
        }
        let OpenSlot {
            counter,
            source,
            prefill_tokens,
            blocks,
            generated_blocks,
            prompt,
        } = slot;
        let source = table.intern(source);
        let opening = LoadChange::AddRequest {
            counter: *counter,
            source: slot.source.clone(),
            prefill_tokens: *prefill_tokens,
            blocks: *blocks,
            prompt: prompt.clone(),
        };
        let owned = self.routers.entry(router).or_default();
        let load = self.sources.get_mut(source);
        let added = owned.add(load, &mut self.ignored, source, &opening);
        if matches!(added, Applied::Added(_)) && *generated_blocks > 0 {
            owned.grow(
                &mut self.sources,
                &mut self.ignored,
                *counter,
                *generated_blocks,
            );
        }
        added
    }

    /// A router's open slots, in the order of their counters, each such that [`Self::restore`] makes
    /// it again.
    #[must_use]
    pub fn stated(&self, table: &SourceTable, router: RouterId) -> Vec<OpenSlot> {
        self.open_slots_from(table, router, 0, usize::MAX)
    }

    /// The first so many of them from a counter on.
    #[must_use]
    pub fn open_slots_from(
        &self,
        table: &SourceTable,
        router: RouterId,
        from: u64,
        most: usize,
    ) -> Vec<OpenSlot> {
        let Some(owned) = self.routers.get(&router) else {
            return Vec::new();
        };
        let slots = owned.slots.range(from..).take(most);
        slots
            .filter_map(|(&counter, slot)| self.state(table, counter, slot))
            .collect()
    }

    /// One of them; `None` if it is not open.
    #[must_use]
    pub fn open_slot(
        &self,
        table: &SourceTable,
        router: RouterId,
        counter: u64,
    ) -> Option<OpenSlot> {
        let slot = self.routers.get(&router)?.slots.get(&counter)?;
        self.state(table, counter, slot)
    }

    fn state(&self, table: &SourceTable, counter: u64, slot: &Slot) -> Option<OpenSlot> {
        let load = self.sources.get(slot.source)?;
        let prompt = SampledPrefix {
            hashes: load.prompts.prompt(slot.leaf),
        };
        Some(OpenSlot {
            counter,
            source: table.source(slot.source)?.clone(),
            prefill_tokens: slot.prefill_tokens,
            blocks: prompt.covered().saturating_add(slot.tail_blocks),
            generated_blocks: slot.generated_blocks,
            prompt,
        })
    }

    /// The router goes on with its open slots under another incarnation.
    pub fn renew(&mut self, router: RouterId, incarnation: Generation) {
        self.routers.entry(router).or_default().incarnation = incarnation;
    }

    /// Forgets that a router ever was, its fence too.
    pub fn forget(&mut self, router: RouterId) {
        self.release(router);
        self.routers.remove(&router);
    }

    /// What this router has on each source.
    #[must_use]
    pub fn loads_of(&self, table: &SourceTable, router: RouterId) -> Vec<RouterLoad> {
        let row = |(&id, sum): (&SourceId, &SlotTotals)| {
            let source = table.source(id)?;
            Some(RouterLoad {
                worker: source.worker.clone(),
                dp_rank: source.dp_rank,
                active_requests: sum.requests,
                prefill_tokens: sum.prefill_tokens,
                generated_blocks: sum.generated_blocks,
            })
        };
        let loads = self.routers.get(&router).map(|owned| owned.totals.iter());
        let loads = loads.into_iter().flatten();
        let mut rows: Vec<RouterLoad> = loads.filter_map(row).collect();
        rows.sort_by(|a, b| (&a.worker, a.dp_rank).cmp(&(&b.worker, b.dp_rank)));
        rows
    }

    /// The fence: false for a former incarnation; a newer one frees what the one before it had.
    fn enter(&mut self, router: RouterId, incarnation: Generation) -> bool {
        let known = self.routers.get(&router).map(|known| known.incarnation);
        match known {
            Some(known) if incarnation < known => {
                self.ignored.old_incarnation += 1;
                return false;
            }
            Some(known) if incarnation > known => self.release(router),
            Some(_) | None => {}
        }
        self.routers.entry(router).or_default().incarnation = incarnation;
        true
    }

    /// Frees all slots of a router: it is dead, or says that it starts anew.
    pub fn release(&mut self, router: RouterId) {
        while self.release_step(router) {}
    }

    /// The first step takes all its slots out of every count but that of distinct blocks; each gives
    /// back the blocks of some. True: there is more to do.
    pub fn release_step(&mut self, router: RouterId) -> bool {
        if let Some(owned) = self.routers.get_mut(&router)
            && !owned.slots.is_empty()
        {
            let slots = std::mem::take(&mut owned.slots);
            for (id, sum) in std::mem::take(&mut owned.totals) {
                self.sources.get_mut(id).take_off_all(sum);
            }
            owned.digest = LoadDigest::default();
            self.released.push(slots);
        }
        for _ in 0..STEP {
            let Some(slots) = self.released.last_mut() else {
                return false;
            };
            match slots.pop_first() {
                Some((_, slot)) => self.sources.get_mut(slot.source).prompts.remove(slot.leaf),
                None => drop(self.released.pop()),
            }
        }
        !self.released.is_empty()
    }

    /// A router's open slots in one number: equal on two replicas that applied the same messages.
    #[must_use]
    pub fn digest(&self, router: RouterId) -> LoadDigest {
        self.routers
            .get(&router)
            .map_or_else(LoadDigest::default, |owned| owned.digest)
    }

    /// What this source bears; `None` for one that never bore anything.
    #[must_use]
    pub fn load(&self, source: SourceId) -> Option<&ActiveLoad> {
        self.sources.get(source)
    }

    #[must_use]
    pub fn is_idle(&self, source: SourceId) -> bool {
        self.load(source).is_none_or(ActiveLoad::is_idle)
    }

    #[must_use]
    pub const fn ignored(&self) -> IgnoredChanges {
        self.ignored
    }

    /// Open slots of all routers.
    #[must_use]
    pub fn open(&self) -> usize {
        self.routers.values().map(|owned| owned.slots.len()).sum()
    }
}

impl RouterSlots {
    fn add(
        &mut self,
        load: &mut ActiveLoad,
        ignored: &mut IgnoredChanges,
        id: SourceId,
        change: &LoadChange,
    ) -> Applied {
        let LoadChange::AddRequest {
            counter,
            source,
            prefill_tokens,
            blocks,
            prompt,
        } = change
        else {
            return Applied::Nothing;
        };
        if self.slots.contains_key(counter) {
            ignored.opened_twice += 1;
            return Applied::Nothing;
        }
        let slot = Slot {
            source: id,
            leaf: load.prompts.insert(&prompt.hashes),
            identity: SlotIdentity::of(*counter, source, *blocks, prompt),
            prefill_tokens: *prefill_tokens,
            prefill: Prefill::Outstanding,
            tail_blocks: blocks.saturating_sub(prompt.covered()),
            generated_blocks: 0,
        };
        load.requests += 1;
        load.prefill_tokens += u64::from(slot.prefill_tokens);
        load.unshared_blocks += u64::from(slot.tail_blocks);
        let sum = self.totals.entry(id).or_default();
        sum.requests += 1;
        sum.prefill_tokens += u64::from(slot.prefill_tokens);
        sum.tail_blocks += u64::from(slot.tail_blocks);
        self.digest.insert(slot.mark());
        self.slots.insert(*counter, slot);
        Applied::Added(id)
    }

    fn complete_prefill(
        &mut self,
        sources: &mut PerSource<ActiveLoad>,
        ignored: &mut IgnoredChanges,
        counter: u64,
    ) -> Applied {
        let Some(slot) = self.slots.get_mut(&counter) else {
            ignored.unknown_slot += 1;
            return Applied::Nothing;
        };
        if slot.prefill == Prefill::Done {
            ignored.prefilled_twice += 1;
            return Applied::Nothing;
        }
        self.digest.remove(slot.mark());
        let tokens = u64::from(slot.prefill_tokens);
        sources.get_mut(slot.source).prefill_tokens -= tokens;
        self.totals.entry(slot.source).or_default().prefill_tokens -= tokens;
        slot.prefill_tokens = 0;
        slot.prefill = Prefill::Done;
        self.digest.insert(slot.mark());
        Applied::PrefillCompleted(slot.source)
    }

    fn grow(
        &mut self,
        sources: &mut PerSource<ActiveLoad>,
        ignored: &mut IgnoredChanges,
        counter: u64,
        blocks: u32,
    ) -> Applied {
        let Some(slot) = self.slots.get_mut(&counter) else {
            ignored.unknown_slot += 1;
            return Applied::Nothing;
        };
        self.digest.remove(slot.mark());
        let grown = slot.generated_blocks.saturating_add(blocks);
        let more = u64::from(grown - slot.generated_blocks);
        slot.generated_blocks = grown;
        sources.get_mut(slot.source).unshared_blocks += more;
        self.totals.entry(slot.source).or_default().generated_blocks += more;
        self.digest.insert(slot.mark());
        Applied::Grown(slot.source)
    }

    fn free(
        &mut self,
        sources: &mut PerSource<ActiveLoad>,
        ignored: &mut IgnoredChanges,
        counter: u64,
        end: SlotEnd,
    ) -> Applied {
        let Some(slot) = self.slots.remove(&counter) else {
            ignored.unknown_slot += 1;
            return Applied::Nothing;
        };
        self.digest.remove(slot.mark());
        sources.get_mut(slot.source).take_off(&slot);
        self.leave(&slot);
        Applied::Freed(slot.source, end)
    }

    /// Takes a slot out of the sums.
    fn leave(&mut self, slot: &Slot) {
        let sum = self.totals.entry(slot.source).or_default();
        sum.requests -= 1;
        sum.prefill_tokens -= u64::from(slot.prefill_tokens);
        sum.tail_blocks -= u64::from(slot.tail_blocks);
        sum.generated_blocks -= u64::from(slot.generated_blocks);
        if sum.requests == 0 {
            self.totals.remove(&slot.source);
        }
    }
}

impl ActiveLoad {
    /// What slots add up to, but for the blocks that they may sum.
    fn take_off_all(&mut self, sum: SlotTotals) {
        self.requests -= sum.requests;
        self.prefill_tokens -= sum.prefill_tokens;
        self.unshared_blocks -= sum.tail_blocks + sum.generated_blocks;
    }

    fn take_off(&mut self, slot: &Slot) {
        self.requests -= 1;
        self.prefill_tokens -= u64::from(slot.prefill_tokens);
        self.unshared_blocks -= u64::from(slot.tail_blocks) + u64::from(slot.generated_blocks);
        self.prompts.remove(slot.leaf);
    }
}

impl Slot {
    fn mark(&self) -> SlotMark {
        self.identity
            .mark(self.prefill_tokens, self.generated_blocks)
    }
}

#[cfg(test)]
mod tests;
