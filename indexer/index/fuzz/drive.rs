//! What a fuzzer does with the tree; the corpus test does the same.
//!
//! Bytes are a program: four bytes a step. Beside the tree runs the plainest model there is, a set
//! of (chain of names, tier) a source, and after every step both must say the same.

#![allow(clippy::unwrap_used, reason = "a panic is what a fuzzer looks for")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use warmroute_index::tree::{ChangeError, Growth, SourceNumber, TierMask, Tree};
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::{Change, LocalHash, PrefixHash, Tier, Tiers};

/// More sources than these are not opened.
const SOURCES_MAX: usize = 6;

/// Changes that are still made ready for.
const LATE_MAX: usize = 4;

/// Three chunks of a run and a bit.
const DEPTH_MAX: u8 = 55;

/// A prompt: names 0 up to where it forks off, then its own.
type Chain = Vec<u8>;

/// What one source holds.
type Model = BTreeSet<(Chain, u8)>;

/// A program for the tree: no panic, no contradiction to the model.
pub(crate) fn tree(bytes: &[u8]) {
    let mut world = World::default();
    for step in bytes.chunks_exact(4) {
        world.step(step[0], step[1], step[2], step[3]);
    }
    world.compare_all();
}

#[derive(Default)]
struct World {
    tree: Tree,
    applied: usize,
    /// Changes, applied or not, that are prepared late.
    late: VecDeque<(Change, Growth)>,
    sources: BTreeMap<SourceNumber, Model>,
}

/// `fork`: the high half is where it leaves the trunk, the low half the branch.
fn chain(fork: u8, length: u8) -> Chain {
    let leaves = (fork >> 4) * 4;
    let branch = fork & 15;
    (0..length % (DEPTH_MAX + 1))
        .map(|depth| if depth < leaves { 0 } else { branch })
        .collect()
}

fn locals(chain: &[u8]) -> Vec<LocalHash> {
    chain.iter().map(|&name| LocalHash(name.into())).collect()
}

fn prefix(chain: &[u8]) -> Option<PrefixHash> {
    prefix_hashes(None, &locals(chain)).last()
}

fn tier(byte: u8) -> Tier {
    // Mostly the GPU's, as it is.
    match byte & 7 {
        6 => Tier::Cpu,
        7 => Tier::Disk,
        _ => Tier::Gpu,
    }
}

impl World {
    fn step(&mut self, what: u8, who: u8, fork: u8, length: u8) {
        let source = self.pick(who);
        if who & 0x40 != 0 {
            self.grow_late();
        }
        match (what % 16, source) {
            (0, _) if self.sources.len() < SOURCES_MAX => {
                let number = self.tree.open();
                let known = self.sources.insert(number, Model::new());
                assert!(known.is_none(), "a number that is in use was given again");
            }
            (1, Some(number)) if length > 200 => {
                self.tree.close(number);
                self.sources.remove(&number);
                let gone = self
                    .tree
                    .apply(number, &Change::Cleared { tier: Tier::Gpu });
                assert_eq!(gone, Err(ChangeError::Closed));
            }
            (2..=7, Some(number)) => self.store(number, fork, length, what >> 4, tier(who >> 4)),
            (8..=11, Some(number)) => self.remove(number, fork, length, what >> 4, tier(who >> 4)),
            (12, Some(number)) if length > 200 => {
                let tier = tier(who >> 4);
                self.apply(number, &Change::Cleared { tier }, Ok(()));
                let model = self.sources.get_mut(&number).unwrap();
                model.retain(|(_, held)| *held != tier.number());
            }
            (13, _) if fork > 200 => drop(self.tree.compact(usize::from(length), 0)),
            (13, _) => drop(self.tree.reclaim(usize::from(length))),
            (14, _) => self.round_trip(),
            (15, _) => self.look_up(&chain(fork, length)),
            _ => {}
        }
        if let Some(number) = source.filter(|number| self.sources.contains_key(number)) {
            self.compare(number);
        }
    }

    fn pick(&self, who: u8) -> Option<SourceNumber> {
        let at = usize::from(who & 15) % self.sources.len().max(1);
        self.sources.keys().nth(at).copied()
    }

    fn apply(&mut self, number: SourceNumber, change: &Change, is: Result<(), ChangeError>) {
        // In none to three turns ahead.
        self.applied += 1;
        let mut growth = self.tree.warm(number, change, &mut Vec::new());
        if self.applied.is_multiple_of(5) {
            self.late.push_back((change.clone(), growth));
        }
        for _ in 0..self.applied % 4 {
            self.tree.grow(change, &mut growth);
            self.grow_late();
        }
        if self.applied.is_multiple_of(7) {
            self.tree.drop_grown();
            self.tree.grow(change, &mut growth);
        }
        assert_eq!(self.tree.apply(number, change), is, "{change:?}");
    }

    fn grow_late(&mut self) {
        if self.late.len() > LATE_MAX {
            self.late.pop_front();
        }
        for (change, growth) in &mut self.late {
            self.tree.grow(change, growth);
        }
    }

    /// The blocks of a chain behind its first `skip`, up to the first that is held.
    fn store(&mut self, number: SourceNumber, fork: u8, length: u8, skip: u8, tier: Tier) {
        let chain = chain(fork, length);
        let from = usize::from(skip * 4).min(chain.len());
        let model = self.sources.get_mut(&number).unwrap();
        let parent = &chain[..from];
        let is_known = model.iter().any(|(held, _)| held.starts_with(parent));
        let mut is = Ok(());
        if from > 0 && !is_known {
            let parent = prefix(parent).unwrap();
            is = Err(ChangeError::NoParent { parent });
        } else {
            for depth in from + 1..=chain.len() {
                if !model.insert((chain[..depth].to_vec(), tier.number())) {
                    let prefix = prefix(&chain[..depth]).unwrap();
                    is = Err(ChangeError::AlreadyHeld { prefix, tier });
                    break;
                }
            }
        }
        let change = Change::Stored {
            parent: prefix(parent),
            blocks: locals(&chain[from..]),
            tier,
        };
        if change_is_empty(&change) {
            return;
        }
        self.apply(number, &change, is);
    }

    /// The last blocks of a chain, the deepest first as engines do, up to the first not held.
    fn remove(&mut self, number: SourceNumber, fork: u8, length: u8, count: u8, tier: Tier) {
        let chain = chain(fork, length);
        let from = chain.len().saturating_sub(usize::from(count));
        let depths: Vec<usize> = (from + 1..=chain.len()).rev().collect();
        let model = self.sources.get_mut(&number).unwrap();
        let mut is = Ok(());
        for &depth in &depths {
            if !model.remove(&(chain[..depth].to_vec(), tier.number())) {
                let prefix = prefix(&chain[..depth]).unwrap();
                is = Err(ChangeError::NotHeld { prefix, tier });
                break;
            }
        }
        let blocks: Vec<_> = depths
            .iter()
            .filter_map(|&depth| prefix(&chain[..depth]))
            .collect();
        if !blocks.is_empty() {
            self.apply(number, &Change::Removed { blocks, tier }, is);
        }
    }

    /// The tree as an image and back is the same tree for the same sources.
    fn round_trip(&mut self) {
        let numbers: Vec<_> = self.sources.keys().copied().collect();
        let image = self.tree.image(&numbers);
        let (tree, given) = Tree::from_image(&image).unwrap();
        assert_eq!(given.len(), numbers.len());
        let models = std::mem::take(&mut self.sources);
        self.sources = given.into_iter().zip(models.into_values()).collect();
        self.tree = tree;
        self.compare_all();
    }

    fn look_up(&self, chain: &[u8]) {
        let prefixes: Vec<_> = prefix_hashes(None, &locals(chain)).collect();
        let all = self.tree.lookup_all(&prefixes);
        for tiers in [TierMask::ALL, TierMask::of(Tier::Gpu), TierMask::NONE] {
            let allowed: Vec<_> = self.sources.keys().map(|&number| (number, tiers)).collect();
            let runs = self.tree.lookup(&locals(chain), &allowed);
            for ((&number, model), run) in self.sources.iter().zip(&runs) {
                assert_eq!(*run, expected(model, chain, tiers), "{chain:?}");
                if tiers == TierMask::ALL {
                    assert_eq!(all[number.index()], *run);
                }
            }
        }
    }

    fn compare(&self, number: SourceNumber) {
        let model = &self.sources[&number];
        let digest = self.tree.digest(number);
        assert_eq!(digest.count, model.len() as u64);
        assert_eq!(digest, self.tree.recomputed_digest(number));
    }

    fn compare_all(&self) {
        for (&number, model) in &self.sources {
            self.compare(number);
            let held: BTreeSet<_> = self.tree.held(number).collect();
            let truth: BTreeSet<_> = model
                .iter()
                .map(|(chain, held)| (prefix(chain).unwrap(), of_number(*held)))
                .collect();
            assert_eq!(held, truth);
            self.dump(number);
        }
        for fork in [0x10, 0x21, 0x43, 0x75] {
            self.look_up(&chain(fork, DEPTH_MAX));
        }
    }

    /// The dump makes an empty source equal.
    fn dump(&self, number: SourceNumber) {
        let mut other = Tree::new();
        let copy = other.open();
        for change in self.tree.dump(number) {
            other.apply(copy, &change).unwrap();
        }
        assert_eq!(other.digest(copy), self.tree.digest(number));
    }
}

fn change_is_empty(change: &Change) -> bool {
    matches!(change, Change::Stored { blocks, .. } if blocks.is_empty())
}

fn of_number(number: u8) -> Tier {
    let found = Tier::ALL.into_iter().find(|tier| tier.number() == number);
    found.unwrap()
}

/// The run on the GPU, then on from its end in the lower tiers, CPU before disk.
fn expected(model: &Model, chain: &[u8], tiers: TierMask) -> Tiers<u32> {
    let mut run = Tiers::default();
    let mut on_gpu = true;
    for depth in 1..=chain.len() {
        let held = |tier: Tier| {
            tiers.has(tier) && model.contains(&(chain[..depth].to_vec(), tier.number()))
        };
        on_gpu &= held(Tier::Gpu);
        if on_gpu {
            run.gpu += 1;
        } else if held(Tier::Cpu) {
            run.cpu += 1;
        } else if held(Tier::Disk) {
            run.disk += 1;
        } else {
            break;
        }
    }
    run
}
