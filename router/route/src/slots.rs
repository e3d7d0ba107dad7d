//! Active load of every source: the open slots of all routers.
//!
//! Load messages are the only input, those of this router included. Replicas that applied the same
//! messages hold the same state; [`Slots::digest`] proves it. Every change is accepted: one that
//! makes no sense (a slot freed twice, an unknown slot, a second end of prefill, a former
//! incarnation) is counted and ignored.
//!
//! Invariant: a total is the sum of its open slots. A slot keeps what it added, and exactly that is
//! subtracted when it closes. A total that would go below zero is counted ([`Slots::underflows`]).
//!
//! Active blocks are counted once for all requests of a source that share them, to the precision of
//! the prompts' samples. Blocks beyond a prompt's last sample count for each request.
//!
//! Calls are short: the slots of a dead router leave the totals in one step and free their prompts'
//! blocks in bounded steps ([`Slots::release_step`]).
//!
//! Deliberately absent: an age limit. A slot lives until its router closes it or dies.

use std::collections::BTreeMap;

use serde::Serialize;
use warmroute_proto::load::{
    LoadChange, LoadDigest, OpenSlot, SampledPrefix, SlotEnd, SlotIdentity, SlotMark,
};
use warmroute_proto::{DpRank, Generation, RouterId, Source, WorkerId};

use super::prompt_tree::{HeldBlocks, PromptLeaf, PromptTree};
use super::source_table::{PerSource, SourceId, SourceTable};

/// Slots that one step processes. Bounds the time that a step keeps decisions waiting.
pub const STEP_SLOTS: usize = 1_000;

#[derive(Clone, Debug, Default)]
pub struct Slots {
    sources: PerSource<SlotTotals>,
    /// The sampled prompts of the requests.
    prompts: PromptTree,
    routers: BTreeMap<RouterId, RouterSlots>,
    /// Closed slots of any router whose prompts are still in their source's tree.
    released: Vec<BTreeMap<u64, Slot>>,
    ignored: IgnoredChanges,
    underflows: u64,
}

/// Effect of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    Added(SourceId),
    PrefillCompleted(SourceId),
    Grown(SourceId),
    Freed(SourceId, SlotEnd),
    Nothing,
}

/// Changes without effect, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IgnoredChanges {
    /// The slot was open already.
    pub opened_twice: u64,
    /// The slot was never opened, or is freed.
    pub unknown_slot: u64,
    pub prefilled_twice: u64,
    /// The change is of a former incarnation of its router.
    pub old_incarnation: u64,
}

/// A slot of any router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SlotKey {
    pub router: RouterId,
    pub counter: u64,
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

/// Load of one router on one source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RouterLoad {
    pub worker: WorkerId,
    pub dp_rank: DpRank,
    pub active_requests: u32,
    pub prefill_tokens: u64,
    pub generated_blocks: u64,
}

/// The load of one source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActiveLoad {
    pub active_requests: u32,
    /// Prompt tokens of requests without a first token.
    pub prefill_tokens: u64,
    /// Distinct blocks that the requests hold.
    pub decode_blocks: u64,
}

/// The slots of one incarnation of a router.
#[derive(Clone, Debug, Default)]
struct RouterSlots {
    incarnation: Generation,
    slots: BTreeMap<u64, Slot>,
    /// Totals of `slots`, for each source with at least one.
    totals: BTreeMap<SourceId, SlotTotals>,
    digest: LoadDigest,
}

/// Totals of slots on one source, without the blocks that their prompts may share.
#[derive(Clone, Copy, Debug, Default)]
struct SlotTotals {
    requests: u32,
    prefill_tokens: u64,
    /// Blocks beyond the prompts' last samples, and generated blocks.
    unshared_blocks: u64,
    generated_blocks: u64,
}

#[derive(Clone, Debug)]
struct Slot {
    source: SourceId,
    leaf: PromptLeaf,
    identity: SlotIdentity,
    /// 0 after the prefill.
    prefill_tokens: u32,
    prefill: PrefillState,
    /// Blocks of the prompt beyond its last sample.
    tail_blocks: u32,
    generated_blocks: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrefillState {
    Outstanding,
    Done,
}

/// A slot to be opened.
struct AddedSlot<'a> {
    counter: u64,
    source: &'a Source,
    prefill_tokens: u32,
    blocks: u32,
    prompt: &'a SampledPrefix,
}

impl Slots {
    /// Applies one change of a router's slots.
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
        match change {
            LoadChange::AddRequest {
                counter,
                source,
                prefill_tokens,
                blocks,
                prompt,
            } => {
                let added = AddedSlot {
                    counter: *counter,
                    source,
                    prefill_tokens: *prefill_tokens,
                    blocks: *blocks,
                    prompt,
                };
                self.add(table, router, added)
            }
            LoadChange::MarkPrefillCompleted { counter } => self.complete_prefill(router, *counter),
            LoadChange::Grow { counter, blocks } => self.grow(router, *counter, *blocks),
            LoadChange::Free { counter, end } => self.free(router, *counter, *end),
        }
    }

    /// Opens a slot in the state that its router reports, instead of by the changes that led to it.
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
        let opened = AddedSlot {
            counter: slot.counter,
            source: &slot.source,
            prefill_tokens: slot.prefill_tokens,
            blocks: slot.blocks,
            prompt: &slot.prompt,
        };
        let added = self.add(table, router, opened);
        if matches!(added, Applied::Added(_)) && slot.generated_blocks > 0 {
            self.grow(router, slot.counter, slot.generated_blocks);
        }
        added
    }

    /// The first `most` open slots of a router from a counter on, in the order of their counters.
    /// [`Self::restore`] opens each of them again.
    #[must_use]
    pub fn open_slots_from(
        &self,
        table: &SourceTable,
        router: RouterId,
        from: u64,
        most: usize,
    ) -> Vec<OpenSlot> {
        let owned = self.routers.get(&router).into_iter();
        let slots = owned.flat_map(|owned| owned.slots.range(from..));
        slots
            .take(most)
            .filter_map(|(&counter, slot)| self.describe(table, counter, slot))
            .collect()
    }

    /// One open slot of a router.
    #[must_use]
    pub fn open_slot(&self, table: &SourceTable, key: SlotKey) -> Option<OpenSlot> {
        self.describe(table, key.counter, self.slot(key)?)
    }

    fn slot(&self, key: SlotKey) -> Option<&Slot> {
        self.routers.get(&key.router)?.slots.get(&key.counter)
    }

    fn describe(&self, table: &SourceTable, counter: u64, slot: &Slot) -> Option<OpenSlot> {
        let prompt = SampledPrefix {
            hashes: self.prompts.prompt(slot.leaf),
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

    /// Continues a router's open slots under another incarnation.
    pub fn renew(&mut self, router: RouterId, incarnation: Generation) {
        self.routers.entry(router).or_default().incarnation = incarnation;
    }

    /// Forgets a router, its fence included.
    pub fn forget(&mut self, router: RouterId) {
        self.release(router);
        self.routers.remove(&router);
    }

    /// The load of this router on each source, in the order of the sources' names.
    #[must_use]
    pub fn loads_of(&self, table: &SourceTable, router: RouterId) -> Vec<RouterLoad> {
        let row = |(&id, totals): (&SourceId, &SlotTotals)| {
            let source = table.source(id)?;
            Some(RouterLoad {
                worker: source.worker.clone(),
                dp_rank: source.dp_rank,
                active_requests: totals.requests,
                prefill_tokens: totals.prefill_tokens,
                generated_blocks: totals.generated_blocks,
            })
        };
        let owned = self.routers.get(&router).into_iter();
        let totals = owned.flat_map(|owned| &owned.totals);
        let mut rows: Vec<RouterLoad> = totals.filter_map(row).collect();
        rows.sort_by(|a, b| (&a.worker, a.dp_rank).cmp(&(&b.worker, b.dp_rank)));
        rows
    }

    /// The fence: rejects a former incarnation; a newer one frees the slots of the one before.
    fn enter(&mut self, router: RouterId, incarnation: Generation) -> bool {
        let known = self.routers.get(&router).map(|owned| owned.incarnation);
        match known {
            Some(known) if incarnation < known => {
                self.ignored.old_incarnation += 1;
                return false;
            }
            Some(known) if incarnation == known => return true,
            Some(_) => self.release(router),
            None => {}
        }
        self.routers.entry(router).or_default().incarnation = incarnation;
        true
    }

    /// Frees all slots of a router.
    pub fn release(&mut self, router: RouterId) {
        while self.release_step(router) {}
    }

    /// Does one bounded step of [`Self::release`]. Returns true while work remains. The first step
    /// subtracts all slots from the totals; each step frees the prompts of some.
    pub fn release_step(&mut self, router: RouterId) -> bool {
        if let Some(owned) = self.routers.get_mut(&router)
            && !owned.slots.is_empty()
        {
            self.released.push(std::mem::take(&mut owned.slots));
            for (id, totals) in std::mem::take(&mut owned.totals) {
                let load = self.sources.get_mut(id);
                load.subtract(&totals, &mut self.underflows);
            }
            owned.digest = LoadDigest::default();
        }
        for _ in 0..STEP_SLOTS {
            let Some(slots) = self.released.last_mut() else {
                return false;
            };
            match slots.pop_first() {
                Some((_, slot)) => self.prompts.remove(slot.source, slot.leaf),
                None => drop(self.released.pop()),
            }
        }
        !self.released.is_empty()
    }

    /// Digest of a router's open slots: equal on two replicas that applied the same messages.
    #[must_use]
    pub fn digest(&self, router: RouterId) -> LoadDigest {
        let owned = self.routers.get(&router);
        owned.map_or_else(LoadDigest::default, |owned| owned.digest)
    }

    /// The load of this source.
    #[must_use]
    #[inline]
    pub fn load(&self, source: SourceId) -> ActiveLoad {
        let totals = self.sources.get(source).copied().unwrap_or_default();
        ActiveLoad {
            active_requests: totals.requests,
            prefill_tokens: totals.prefill_tokens,
            decode_blocks: self.prompts.blocks(source) + totals.unshared_blocks,
        }
    }

    /// Like [`Self::load`], as if the slot `except` were not open.
    #[must_use]
    #[inline]
    pub fn load_without(&self, source: SourceId, except: Option<SlotKey>) -> ActiveLoad {
        let load = self.load(source);
        let Some(slot) = self.slot_on(source, except) else {
            return load;
        };
        // The slot is in these totals; a total that was clamped stays at zero.
        ActiveLoad {
            active_requests: load.active_requests.saturating_sub(1),
            prefill_tokens: (load.prefill_tokens).saturating_sub(u64::from(slot.prefill_tokens)),
            decode_blocks: (load.decode_blocks)
                .saturating_sub(slot.unshared_blocks())
                .saturating_sub(self.prompts.blocks_only_of(source, slot.leaf)),
        }
    }

    /// Leading blocks of this prompt that the requests of each source hold, as if the slot `except`
    /// were not open.
    #[must_use]
    pub fn shared_blocks(&self, prompt: &SampledPrefix, except: Option<SlotKey>) -> HeldBlocks {
        let mut shared = self.prompts.held(&prompt.hashes);
        if let Some(slot) = except.and_then(|key| self.slot(key)) {
            let rest = self
                .prompts
                .longest_without(slot.source, &prompt.hashes, slot.leaf);
            *shared.get_mut(slot.source) = rest;
        }
        shared
    }

    /// Active requests on a source, as if the slot `except` were not open.
    #[must_use]
    pub fn active_requests(&self, source: SourceId, except: Option<SlotKey>) -> u32 {
        let requests = self.sources.get(source).map_or(0, |load| load.requests);
        requests.saturating_sub(u32::from(self.slot_on(source, except).is_some()))
    }

    fn slot_on(&self, source: SourceId, key: Option<SlotKey>) -> Option<&Slot> {
        let slot = self.slot(key?)?;
        (slot.source == source).then_some(slot)
    }

    #[must_use]
    pub fn is_idle(&self, source: SourceId) -> bool {
        self.active_requests(source, None) == 0
    }

    #[must_use]
    pub const fn ignored(&self) -> IgnoredChanges {
        self.ignored
    }

    /// Totals that would have gone below zero: defects of this module.
    #[must_use]
    pub const fn underflows(&self) -> u64 {
        self.underflows
    }

    /// Number of open slots of all routers.
    #[must_use]
    pub fn open(&self) -> usize {
        self.routers.values().map(|owned| owned.slots.len()).sum()
    }

    fn add(&mut self, table: &mut SourceTable, router: RouterId, opened: AddedSlot<'_>) -> Applied {
        let owned = self.routers.entry(router).or_default();
        if owned.slots.contains_key(&opened.counter) {
            self.ignored.opened_twice += 1;
            return Applied::Nothing;
        }
        let source = table.intern(opened.source);
        let slot = Slot {
            source,
            leaf: self.prompts.insert(source, &opened.prompt.hashes),
            identity: SlotIdentity::of(opened.counter, opened.source, opened.blocks, opened.prompt),
            prefill_tokens: opened.prefill_tokens,
            prefill: PrefillState::Outstanding,
            tail_blocks: opened.blocks.saturating_sub(opened.prompt.covered()),
            generated_blocks: 0,
        };
        self.sources.get_mut(source).add(&slot.totals());
        let totals = owned.totals.entry(source).or_default();
        totals.add(&slot.totals());
        owned.digest.insert(slot.mark());
        owned.slots.insert(opened.counter, slot);
        Applied::Added(source)
    }

    fn complete_prefill(&mut self, router: RouterId, counter: u64) -> Applied {
        let owned = self.routers.entry(router).or_default();
        let Some(slot) = owned.slots.get_mut(&counter) else {
            self.ignored.unknown_slot += 1;
            return Applied::Nothing;
        };
        if slot.prefill == PrefillState::Done {
            self.ignored.prefilled_twice += 1;
            return Applied::Nothing;
        }
        owned.digest.remove(slot.mark());
        let tokens = u64::from(slot.prefill_tokens);
        let load = self.sources.get_mut(slot.source);
        let totals = owned.totals.entry(slot.source).or_default();
        take(&mut load.prefill_tokens, tokens, &mut self.underflows);
        take(&mut totals.prefill_tokens, tokens, &mut self.underflows);
        slot.prefill_tokens = 0;
        slot.prefill = PrefillState::Done;
        owned.digest.insert(slot.mark());
        Applied::PrefillCompleted(slot.source)
    }

    fn grow(&mut self, router: RouterId, counter: u64, blocks: u32) -> Applied {
        let owned = self.routers.entry(router).or_default();
        let Some(slot) = owned.slots.get_mut(&counter) else {
            self.ignored.unknown_slot += 1;
            return Applied::Nothing;
        };
        owned.digest.remove(slot.mark());
        let grown = slot.generated_blocks.saturating_add(blocks);
        let more = u64::from(grown - slot.generated_blocks);
        slot.generated_blocks = grown;
        let part = SlotTotals {
            unshared_blocks: more,
            generated_blocks: more,
            ..SlotTotals::default()
        };
        self.sources.get_mut(slot.source).add(&part);
        owned.totals.entry(slot.source).or_default().add(&part);
        owned.digest.insert(slot.mark());
        Applied::Grown(slot.source)
    }

    fn free(&mut self, router: RouterId, counter: u64, end: SlotEnd) -> Applied {
        let owned = self.routers.entry(router).or_default();
        let Some(slot) = owned.slots.remove(&counter) else {
            self.ignored.unknown_slot += 1;
            return Applied::Nothing;
        };
        owned.digest.remove(slot.mark());
        let freed = slot.totals();
        let load = self.sources.get_mut(slot.source);
        load.subtract(&freed, &mut self.underflows);
        self.prompts.remove(slot.source, slot.leaf);
        let totals = owned.totals.entry(slot.source).or_default();
        totals.subtract(&freed, &mut self.underflows);
        if totals.requests == 0 {
            owned.totals.remove(&slot.source);
        }
        Applied::Freed(slot.source, end)
    }
}

impl Slot {
    fn mark(&self) -> SlotMark {
        self.identity
            .mark(self.prefill_tokens, self.generated_blocks)
    }

    fn unshared_blocks(&self) -> u64 {
        u64::from(self.tail_blocks) + u64::from(self.generated_blocks)
    }

    fn totals(&self) -> SlotTotals {
        SlotTotals {
            requests: 1,
            prefill_tokens: self.prefill_tokens.into(),
            unshared_blocks: self.unshared_blocks(),
            generated_blocks: self.generated_blocks.into(),
        }
    }
}

impl SlotTotals {
    fn add(&mut self, part: &Self) {
        self.requests += part.requests;
        self.prefill_tokens += part.prefill_tokens;
        self.unshared_blocks += part.unshared_blocks;
        self.generated_blocks += part.generated_blocks;
    }

    /// Counts an underflow for each total that is below its part.
    fn subtract(&mut self, part: &Self, underflows: &mut u64) {
        let mut requests = self.requests.into();
        take(&mut requests, part.requests.into(), underflows);
        self.requests = u32::try_from(requests).unwrap_or(u32::MAX);
        take(&mut self.prefill_tokens, part.prefill_tokens, underflows);
        take(&mut self.unshared_blocks, part.unshared_blocks, underflows);
        take(
            &mut self.generated_blocks,
            part.generated_blocks,
            underflows,
        );
    }
}

/// Subtracts from a total that is at least `part` by this module's invariant.
fn take(total: &mut u64, part: u64, underflows: &mut u64) {
    let rest = total.checked_sub(part);
    debug_assert!(rest.is_some(), "{part} of {total} taken");
    *underflows += u64::from(rest.is_none());
    *total = rest.unwrap_or(0);
}

#[cfg(test)]
mod tests;
