//! Warmroute's tree behind the indexer's lock.

use rustc_hash::FxHashMap;
use warmroute_index::fair_lock::{FairReader, FairWriter};
use warmroute_index::tree::{self, Growth, SourceNumber, Tree};
use warmroute_proto::hash::{LocalHash, PrefixHash, Seed, prefix_hashes, prompt_hashes};
use warmroute_proto::{BlockSize, Change, Tiers};

use crate::index::Index;
use crate::workload::{Event, TOKENS_PER_BLOCK};

pub fn local_hashes(tokens: &[u32]) -> impl Iterator<Item = LocalHash> {
    tokens
        .chunks_exact(TOKENS_PER_BLOCK)
        .map(|block| LocalHash::of_block(block, &[], Seed::PLAIN))
}

fn chain(locals: impl Iterator<Item = LocalHash>, prefixes: &mut Vec<PrefixHash>) {
    let mut parent = None;
    prefixes.extend(locals.map(|local| {
        let prefix = PrefixHash::after(parent, local);
        parent = Some(prefix);
        prefix
    }));
}

/// Translates engine hashes to prefix hashes, as the shim does.
#[derive(Default)]
pub struct Translator(FxHashMap<u64, PrefixHash>);

impl Translator {
    pub fn change(&mut self, event: Event) -> (u32, Change) {
        match event {
            Event::Store {
                worker,
                tier,
                parent,
                blocks,
            } => {
                let parent = parent.map(|parent| self.0[&parent]);
                let locals: Vec<_> = blocks.iter().map(|block| LocalHash(block.0)).collect();
                for (prefix, (_, engine)) in prefix_hashes(parent, &locals).zip(blocks) {
                    self.0.insert(engine, prefix);
                }
                let change = Change::Stored {
                    parent,
                    blocks: locals,
                    tier,
                };
                (worker, change)
            }
            Event::Remove {
                worker,
                tier,
                blocks,
            } => {
                let blocks = blocks.iter().map(|block| self.0[block]).collect();
                (worker, Change::Removed { blocks, tier })
            }
        }
    }
}

pub struct Ours {
    writer: FairWriter<Tree>,
    reader: FairReader<Tree>,
    numbers: Vec<SourceNumber>,
}

fn blocks(change: &Change) -> usize {
    tree::blocks_in(std::slice::from_ref(change))
}

impl Ours {
    fn of(tree: Tree, numbers: Vec<SourceNumber>) -> Self {
        let writer = FairWriter::new(tree);
        let reader = writer.reader();
        Self {
            writer,
            reader,
            numbers,
        }
    }

    /// Writes like the indexer: short changes together, and prepared while there are readers.
    pub fn apply_all(&self, changes: impl Iterator<Item = (u32, Change)>) {
        let mut scratch = Vec::new();
        let mut turn = Vec::new();
        let mut changes = changes.peekable();
        while let Some((worker, change)) = changes.next() {
            let mut room = Growth::TURN.saturating_sub(blocks(&change));
            if tree::is_long(std::slice::from_ref(&change)) && self.writer.has_recent_readers() {
                self.make_ready(worker, &change, &mut scratch);
            }
            turn.push((worker, change));
            while let Some(next) = changes.next_if(|(_, next)| blocks(next) <= room) {
                room -= blocks(&next.1);
                turn.push(next);
            }
            self.apply(&turn);
            turn.clear();
        }
    }

    fn make_ready(&self, worker: u32, change: &Change, scratch: &mut Vec<PrefixHash>) {
        let number = self.numbers[worker as usize];
        let mut growth = self.writer.read().warm(number, change, scratch);
        while growth.left() > Growth::TURN {
            self.writer.write().grow(change, &mut growth);
        }
    }

    pub fn apply(&self, changes: &[(u32, Change)]) {
        let mut tree = self.writer.write();
        for (worker, change) in changes {
            let number = self.numbers[*worker as usize];
            tree.apply(number, change).unwrap();
        }
        tree.drop_grown();
    }
}

impl Index for Ours {
    const NAME: &'static str = "warmroute";
    type Translator = Translator;
    type Change = (u32, Change);
    type Prepared = Vec<PrefixHash>;
    type Answer = Vec<Tiers<u32>>;

    fn new(workers: u32) -> Self {
        let mut tree = Tree::new();
        let numbers: Vec<_> = (0..workers).map(|_| tree.open()).collect();
        Self::of(tree, numbers)
    }

    fn translator() -> Translator {
        Translator::default()
    }

    fn translate(translator: &mut Translator, event: Event) -> (u32, Change) {
        translator.change(event)
    }

    fn write(&self, parts: Vec<Vec<Self::Change>>, done: &(dyn Fn(usize) + Sync)) {
        for (index, part) in parts.into_iter().enumerate() {
            self.apply_all(part.into_iter());
            done(index);
        }
    }

    fn write_lazily(
        &self,
        changes: &mut (dyn Iterator<Item = Self::Change> + Send),
        done: &(dyn Fn() + Sync),
    ) {
        self.apply_all(changes);
        done();
    }

    fn prepare(&self, blocks: &[u64], prepared: &mut Vec<PrefixHash>) {
        prepared.clear();
        chain(blocks.iter().map(|&local| LocalHash(local)), prepared);
    }

    fn hash(&self, tokens: &[u32], prepared: &mut Vec<PrefixHash>) {
        let block_size = BlockSize::new(TOKENS_PER_BLOCK as u32).unwrap();
        *prepared = prompt_hashes(tokens, block_size, Seed::PLAIN);
    }

    fn lookup(&self, prepared: &mut Vec<PrefixHash>) -> Vec<Tiers<u32>> {
        let runs = vec![Tiers::default(); self.numbers.len()];
        self.reader.read().lookup_all_from(prepared, runs)
    }

    fn each(&self, answer: &Vec<Tiers<u32>>, see: &mut dyn FnMut(u32, Tiers<u32>)) {
        for (worker, run) in (0..).zip(answer) {
            see(worker, *run);
        }
    }

    fn snapshot(&self) -> Option<Vec<u8>> {
        let tree = self.reader.read();
        let image = tree.image(&self.numbers);
        let digests = tree::digests_of_image(&image).unwrap();
        for (&number, digest) in self.numbers.iter().zip(digests) {
            assert_eq!(digest, tree.digest(number));
        }
        Some(image)
    }

    fn restore(&self, snapshot: &[u8]) -> Option<Self> {
        let (tree, numbers) = Tree::from_image(snapshot).ok()?;
        Some(Self::of(tree, numbers))
    }
}
