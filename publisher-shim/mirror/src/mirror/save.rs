//! A mirror's cut, its bytes, and the mirror that they make again.
//!
//! Only what cannot be derived is saved: the forest with its slots and free node_ids as they are (an
//! image's order depends on them), each engine hash with its references, orphans, groups and
//! knowledge. Prefix hashes, holdings and digests are computed again on loading, and the digests
//! compared with those saved: bytes that do not make the same mirror are refused.
//!
//! Invariant: a mirror loaded from a cut behaves exactly as the one that was cut, counters apart.

use warmroute_proto::{BlockSize, Digest, LocalHash, Seed, Tier};

use super::groups::Groups;
use super::knowledge::Knowledge;
use super::nodes::{GroupSlot, NodeId, Nodes, SavedNode};
use super::orphans::{BlockContent, Orphans};
use super::{Mirror, MirrorConfig, Start};
use crate::checkpoint::{FieldReader, FieldWriter, Malformed};
use crate::wire::EngineHash;

/// A copy of a mirror at one batch, made quickly: it lacks what can be derived.
#[derive(Debug)]
pub struct MirrorSnapshot(Mirror);

/// References by group and tier.
pub(super) type References = Vec<(GroupSlot, Tier, u32)>;

const REFERENCE_BYTES: usize = 6;
const NAME_BYTES: usize = 12;

impl Mirror {
    /// Copies what `MirrorSnapshot::save` writes.
    #[must_use]
    pub fn snapshot(&self) -> MirrorSnapshot {
        debug_assert!(self.touched.is_empty(), "a cut between batches");
        MirrorSnapshot(Self {
            nodes: self.nodes.without_indices(),
            engine_hashes: self.engine_hashes.clone(),
            orphans: self.orphans.clone(),
            groups: self.groups.clone(),
            knowledge: self.knowledge.clone(),
            touched: Vec::new(),
            path: Vec::new(),
            ..*self
        })
    }

    /// The mirror that was saved, under this configuration.
    pub(crate) fn load(
        config: MirrorConfig,
        reader: &mut FieldReader<'_>,
    ) -> Result<Self, Malformed> {
        let mut mirror = Self::new(config, Start::Unknown);
        mirror.block_size = BlockSize::new(reader.u32()?);
        mirror.block_size_is_confirmed = reader.flag()?;
        mirror.knowledge = Knowledge::load(reader)?;
        mirror.groups = Groups::load(reader)?;
        mirror.load_nodes(reader)?;
        mirror.orphans = load_orphans(&mirror, reader)?;
        for tier in Tier::ALL {
            let saved = Digest {
                count: reader.u64()?,
                sum: reader.u64()?,
            };
            if saved != *mirror.digests.get(tier) {
                return Err(Malformed("a digest that its blocks do not have"));
            }
        }
        Ok(mirror)
    }

    fn load_nodes(&mut self, reader: &mut FieldReader<'_>) -> Result<(), Malformed> {
        let slots = reader.count(4)?;
        let free = (0..reader.count(4)?)
            .map(|_| reader.u32().map(NodeId::of))
            .collect::<Result<Vec<_>, _>>()?;
        let mut nodes = Nodes::with_slots(slots, free).ok_or(Malformed("a free position"))?;
        for id in nodes.node_ids() {
            let local = LocalHash(reader.u64()?);
            let seed = Seed(reader.u64()?);
            let parent = NodeId::of(reader.u32()?);
            let entries = reader.count(NAME_BYTES)?;
            if entries == 0 {
                return Err(Malformed("a block without a name"));
            }
            for number in 0..entries {
                let engine = EngineHash(reader.u64()?);
                if number == 0 {
                    nodes.restore_node(
                        id,
                        SavedNode {
                            local,
                            seed,
                            parent,
                            engine,
                        },
                    );
                } else {
                    nodes.add_alias(id, engine);
                }
                let references = load_references(&self.groups, reader)?;
                if !self.engine_hashes.load(engine, id, &references) {
                    return Err(Malformed("one engine hash twice"));
                }
                for (slot, tier, count) in references {
                    nodes.add_references(id, (slot, tier), count);
                }
            }
        }
        let order = nodes.rebuild_prefixes().ok_or(Malformed("no forest"))?;
        let held = nodes.rebuild_held(&order, &self.groups.main_groups());
        self.digests = held.ok_or(Malformed("a block that nothing needs"))?;
        self.nodes = nodes;
        Ok(())
    }
}

impl MirrorSnapshot {
    pub(crate) fn save(&self, writer: &mut FieldWriter) {
        let mirror = &self.0;
        let block_size = mirror.block_size.map_or(0, |size| size.tokens());
        writer.count(block_size);
        writer.u8(u8::from(mirror.block_size_is_confirmed));
        mirror.knowledge.save(writer);
        mirror.groups.save(writer);
        self.save_nodes(writer);
        save_orphans(&mirror.orphans, writer);
        for tier in Tier::ALL {
            let digest = mirror.digests.get(tier);
            writer.u64(digest.count);
            writer.u64(digest.sum);
        }
    }

    /// About what the bytes will take.
    pub(crate) fn bytes_hint(&self) -> usize {
        4096 + self.0.nodes.slots() * 48 + self.0.orphans.len() * 256
    }

    fn save_nodes(&self, writer: &mut FieldWriter) {
        let nodes = &self.0.nodes;
        writer.count(nodes.slots());
        writer.count(nodes.free().len());
        nodes.free().iter().for_each(|id| writer.u32(id.number()));
        for id in nodes.ids() {
            let Some(node) = nodes.get(id) else { continue };
            writer.u64(node.local.0);
            writer.u64(node.seed.0);
            writer.u32(node.parent.number());
            let aliases = nodes.aliases(id);
            writer.count(1 + aliases.len());
            for &engine in std::iter::once(&node.engine).chain(aliases) {
                writer.u64(engine.0);
                let groups = &self.0.groups;
                let references = self
                    .0
                    .engine_hashes
                    .references(engine, |tier| groups.main_count(tier));
                save_references(&references, writer);
            }
        }
    }
}

fn save_references(references: &[(GroupSlot, Tier, u32)], writer: &mut FieldWriter) {
    writer.count(references.len());
    for &(slot, tier, count) in references {
        writer.u8(slot);
        writer.u8(tier.number());
        writer.u32(count);
    }
}

fn load_references(groups: &Groups, reader: &mut FieldReader<'_>) -> Result<References, Malformed> {
    let mut references = References::new();
    for _ in 0..reader.count(REFERENCE_BYTES)? {
        let slot = reader.u8()?;
        let tier = Tier::ALL.get(usize::from(reader.u8()?));
        let &tier = tier.ok_or(Malformed("a tier"))?;
        let count = reader.u32()?;
        let known = references.iter().any(|&(s, t, _)| (s, t) == (slot, tier));
        if known || count == 0 || slot >= groups.main_count(tier) {
            return Err(Malformed("a reference"));
        }
        references.push((slot, tier, count));
    }
    Ok(references)
}

fn save_orphans(orphans: &Orphans, writer: &mut FieldWriter) {
    let parents = orphans.by_parent();
    writer.count(parents.len());
    for (parent, children) in parents {
        writer.u64(parent.0);
        writer.count(children.len());
        for orphan in children {
            writer.u64(orphan.hash.0);
            writer.count(orphan.content.tokens.len());
            orphan.content.tokens.iter().for_each(|&t| writer.u32(t));
            for numbers in [&orphan.content.items, &orphan.content.opaque] {
                writer.count(numbers.len());
                numbers.iter().for_each(|&number| writer.u64(number));
            }
            save_references(&orphan.references, writer);
        }
    }
}

fn load_orphans(mirror: &Mirror, reader: &mut FieldReader<'_>) -> Result<Orphans, Malformed> {
    let mut orphans = Orphans::new(mirror.config.orphans_max);
    for _ in 0..reader.count(16)? {
        let parent = EngineHash(reader.u64()?);
        for _ in 0..reader.count(24)? {
            let hash = EngineHash(reader.u64()?);
            let content = BlockContent {
                tokens: list(reader, 4, FieldReader::u32)?,
                items: list(reader, 8, FieldReader::u64)?,
                opaque: list(reader, 8, FieldReader::u64)?,
            };
            let references = load_references(&mirror.groups, reader)?;
            let is_named = mirror.engine_hashes.node(hash).is_some();
            if is_named || !orphans.load(hash, parent, content, references) {
                return Err(Malformed("an orphan"));
            }
        }
    }
    Ok(orphans)
}

fn list<'a, T>(
    reader: &mut FieldReader<'a>,
    entry_bytes: usize,
    read: impl Fn(&mut FieldReader<'a>) -> Result<T, Malformed>,
) -> Result<Box<[T]>, Malformed> {
    let len = reader.count(entry_bytes)?;
    (0..len).map(|_| read(reader)).collect()
}
