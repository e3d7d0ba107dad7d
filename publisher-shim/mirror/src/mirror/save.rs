//! A mirror's snapshot, its encoding, and the mirror restored from it.
//!
//! Only what cannot be derived is saved: the forest with its slots and free slots as they are (the
//! order of an image depends on them), each engine hash with its references, orphans, groups and
//! knowledge. Prefix hashes, holdings and digests are computed on reading. The digests are compared
//! with the saved ones, so that bytes of another mirror are refused.
//!
//! Invariant: a restored mirror behaves exactly as the saved one, counters apart.

use warmroute_proto::{BlockSize, Digest, LocalHash, Seed, Tier};

use super::adapters::Adapters;
use super::block_chain::BlockChain;
use super::groups::Groups;
use super::knowledge::Knowledge;
use super::nodes::{LoadId, NodeId, Nodes, SavedNode};
use super::orphans::{BlockContent, Orphan, Orphans};
use super::references::References;
use super::resume::ResumePoints;
use super::{Mirror, MirrorConfig, Start};
use crate::fields::{Field, FieldReader, Malformed, write_length};
use crate::wire::EngineHash;

/// A copy of a mirror at one batch, without what can be derived.
#[derive(Debug)]
pub struct MirrorSnapshot(Mirror);

/// Bytes of the shortest entry of each list.
const FREE_SLOT_BYTES: usize = 4;
const HASH_BYTES: usize = 12;
const PARENT_BYTES: usize = 16;
const ORPHAN_BYTES: usize = 24;

impl Mirror {
    /// Copies what [`MirrorSnapshot`] encodes. Call it between batches.
    #[must_use]
    pub fn snapshot(&self) -> MirrorSnapshot {
        debug_assert!(self.touched.is_empty(), "a snapshot between batches");
        MirrorSnapshot(Self {
            nodes: self.nodes.without_indices(),
            engine_hashes: self.engine_hashes.clone(),
            orphans: self.orphans.clone(),
            groups: self.groups.clone(),
            knowledge: self.knowledge.clone(),
            touched: Vec::new(),
            path: Vec::new(),
            resume: None,
            block_chain: self.block_chain.clone(),
            adapters: self.adapters.clone(),
            dipped: Vec::new(),
            ..*self
        })
    }

    /// Restores a saved mirror under this configuration.
    pub(crate) fn read(
        config: MirrorConfig,
        from: &mut FieldReader<'_>,
    ) -> Result<Self, Malformed> {
        let mut mirror = Self::new(config, Start::Unknown);
        mirror.block_size = BlockSize::new(from.read()?);
        mirror.block_size_is_confirmed = from.read()?;
        mirror.lookahead = from.read()?;
        mirror.knowledge = Knowledge::read(from)?;
        mirror.groups = Groups::read(from)?;
        mirror.adapters = Adapters::read(from)?;
        mirror.read_nodes(from)?;
        mirror.read_orphans(from)?;
        mirror.block_chain = BlockChain::read(from)?;
        for tier in Tier::ALL {
            let saved = Digest {
                count: from.read()?,
                sum: from.read()?,
            };
            if saved != *mirror.digests.get(tier) {
                return Err(Malformed("a digest that its blocks do not have"));
            }
        }
        Ok(mirror)
    }

    fn read_nodes(&mut self, from: &mut FieldReader<'_>) -> Result<(), Malformed> {
        let slots = from.length(FREE_SLOT_BYTES)?;
        let free: Vec<u32> = from.read()?;
        let free = free.into_iter().map(NodeId::of).collect();
        let mut nodes = Nodes::with_slots(slots, free).ok_or(Malformed("a free slot"))?;
        for id in nodes.ids().collect::<Vec<_>>() {
            let local = LocalHash(from.read()?);
            let seed = Seed(from.read()?);
            let parent = NodeId::of(from.read()?);
            let load = LoadId::of(from.read()?);
            if !self.adapters.knows(load) {
                return Err(Malformed("an adapter"));
            }
            let hashes = from.length(HASH_BYTES)?;
            if hashes == 0 {
                return Err(Malformed("a block without an engine hash"));
            }
            for number in 0..hashes {
                let engine = EngineHash(from.read()?);
                if number == 0 {
                    let saved = SavedNode {
                        local,
                        seed,
                        parent,
                        engine,
                        load,
                    };
                    nodes.restore_node(id, saved);
                } else {
                    nodes.add_alias(id, engine);
                }
                let references = self.read_references(from)?;
                if !self.engine_hashes.restore(engine, id, &references) {
                    return Err(Malformed("a duplicate engine hash"));
                }
                for (at, count) in references {
                    nodes.add_references(id, at, count);
                }
            }
        }
        if nodes.has_overflowed() {
            return Err(Malformed("a count of references"));
        }
        let order = nodes.rebuild_prefixes().ok_or(Malformed("not a forest"))?;
        if self.groups.is_windowed() {
            nodes.keep_children();
            let mut points = ResumePoints::new(&self.groups);
            points.rebuild(&nodes, &order);
            self.resume = Some(points);
        }
        let held = nodes.rebuild_held(&order, |nodes, id, tier| {
            let load = nodes.get(id).map_or(LoadId::NONE, |node| node.load);
            self.adapters.are_found(load)
                && match &self.resume {
                    None => nodes.is_held(id, tier, self.groups.slots(tier)),
                    Some(points) => tier == Tier::Gpu && points.contains(id),
                }
        });
        self.digests = held.ok_or(Malformed("a block that nothing needs"))?;
        self.nodes = nodes;
        Ok(())
    }

    fn read_references(&self, from: &mut FieldReader<'_>) -> Result<References, Malformed> {
        let references: References = from.read()?;
        for (index, &(at, count)) in references.iter().enumerate() {
            let is_known = references[..index].iter().any(|&(known, _)| known == at);
            if is_known || count == 0 || at.slot >= self.groups.slots(at.tier) {
                return Err(Malformed("a reference"));
            }
        }
        Ok(references)
    }

    fn read_orphans(&mut self, from: &mut FieldReader<'_>) -> Result<(), Malformed> {
        let mut orphans = Orphans::new(self.config.orphans_max);
        for _ in 0..from.length(PARENT_BYTES)? {
            let parent = EngineHash(from.read()?);
            for _ in 0..from.length(ORPHAN_BYTES)? {
                let hash = EngineHash(from.read()?);
                let orphan = Orphan {
                    hash,
                    parent,
                    content: BlockContent {
                        tokens: from.read()?,
                        items: from.read()?,
                        opaque: from.read()?,
                    },
                    references: self.read_references(from)?,
                };
                let has_node = self.engine_hashes.node(hash).is_some();
                if has_node || !orphans.restore(orphan) {
                    return Err(Malformed("an orphan"));
                }
            }
        }
        self.orphans = orphans;
        Ok(())
    }
}

impl MirrorSnapshot {
    pub(crate) fn write(&self, to: &mut Vec<u8>) {
        let mirror = &self.0;
        write_length(mirror.block_size.map_or(0, BlockSize::tokens), to);
        mirror.block_size_is_confirmed.write(to);
        mirror.lookahead.write(to);
        mirror.knowledge.write(to);
        mirror.groups.write(to);
        mirror.adapters.write(to);
        self.write_nodes(to);
        self.write_orphans(to);
        mirror.block_chain.write(to);
        for tier in Tier::ALL {
            let digest = mirror.digests.get(tier);
            digest.count.write(to);
            digest.sum.write(to);
        }
    }

    /// Estimate of the encoded size in bytes.
    pub(crate) fn bytes_hint(&self) -> usize {
        4096 + self.0.nodes.slots() * 48 + self.0.orphans.len() * 256
    }

    fn write_nodes(&self, to: &mut Vec<u8>) {
        let mirror = &self.0;
        let nodes = &mirror.nodes;
        write_length(nodes.slots(), to);
        write_length(nodes.free().len(), to);
        nodes.free().iter().for_each(|id| id.number().write(to));
        for id in nodes.ids() {
            let Some(node) = nodes.get(id) else { continue };
            node.local.0.write(to);
            node.seed.0.write(to);
            node.parent.number().write(to);
            u32::from(node.load.number()).write(to);
            let aliases = nodes.aliases(id);
            write_length(1 + aliases.len(), to);
            for &engine in std::iter::once(&node.engine).chain(aliases) {
                engine.0.write(to);
                let slots = |tier| mirror.groups.slots(tier);
                let references = mirror.engine_hashes.references(engine, slots);
                references.write(to);
            }
        }
    }

    fn write_orphans(&self, to: &mut Vec<u8>) {
        let parents = self.0.orphans.by_parent();
        write_length(parents.len(), to);
        for (parent, children) in parents {
            parent.0.write(to);
            write_length(children.len(), to);
            for orphan in children {
                orphan.hash.0.write(to);
                orphan.content.tokens.write(to);
                orphan.content.items.write(to);
                orphan.content.opaque.write(to);
                orphan.references.write(to);
            }
        }
    }
}
