//! The blocks' hashes, 16 blocks to a chunk. Chunks are all alike, so freed ones fit anywhere and
//! churn leaves no holes in memory.

use warmroute_proto::{LocalHash, PrefixHash};

use super::run::RunId;

pub(super) const CHUNK: usize = 16;
/// Chunks that are allocated together.
const SEGMENT: usize = 256;

/// One block: the chunk's number times 16, plus the block's number in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(pub(super) u32);

/// 16 local hashes, then their 16 prefix hashes.
type Chunk = [u64; 2 * CHUNK];

/// Which part of which run a chunk is.
#[derive(Clone, Copy)]
struct Owner {
    run: RunId,
    index: u32,
}

#[derive(Default)]
pub(super) struct Blocks {
    segments: Vec<Box<[Chunk]>>,
    owners: Vec<Owner>,
    free: Vec<u32>,
}

impl Blocks {
    /// A chunk for the blocks of `run` from `16 * index` on; its number.
    pub(super) fn allocate(&mut self, run: RunId, index: usize) -> u32 {
        let owner = Owner {
            run,
            index: index as u32,
        };
        if let Some(chunk) = self.free.pop() {
            self.owners[chunk as usize] = owner;
            return chunk;
        }
        if self.owners.len() == self.segments.len() * SEGMENT {
            let segment = vec![[0; 2 * CHUNK]; SEGMENT];
            self.segments.push(segment.into_boxed_slice());
        }
        self.owners.push(owner);
        (self.owners.len() - 1) as u32
    }

    pub(super) fn free(&mut self, chunk: u32) {
        self.free.push(chunk);
    }

    fn chunk(&self, chunk: u32) -> &Chunk {
        &self.segments[chunk as usize / SEGMENT][chunk as usize % SEGMENT]
    }

    /// The local and the prefix hashes of a chunk.
    pub(super) fn hashes(&self, chunk: u32) -> (&[u64], &[u64]) {
        self.chunk(chunk).split_at(CHUNK)
    }

    pub(super) fn hashes_mut(&mut self, chunk: u32) -> (&mut [u64], &mut [u64]) {
        let segment = &mut self.segments[chunk as usize / SEGMENT];
        segment[chunk as usize % SEGMENT].split_at_mut(CHUNK)
    }

    pub(super) fn prefix(&self, place: Place) -> PrefixHash {
        let chunk = self.chunk(place.0 / CHUNK as u32);
        PrefixHash(chunk[CHUNK + place.0 as usize % CHUNK])
    }

    pub(super) fn local(&self, place: Place) -> LocalHash {
        LocalHash(self.chunk(place.0 / CHUNK as u32)[place.0 as usize % CHUNK])
    }

    /// The run that the block belongs to, and its offset there.
    pub(super) fn owner(&self, place: Place) -> (RunId, u32) {
        let owner = self.owners[place.0 as usize / CHUNK];
        (
            owner.run,
            owner.index * CHUNK as u32 + place.0 % CHUNK as u32,
        )
    }

    /// What the chunks in use take, with their owners' mention of them.
    pub(super) const fn bytes(&self) -> usize {
        let chunks = self.owners.len() - self.free.len();
        chunks * (size_of::<Chunk>() + size_of::<Owner>() + size_of::<u32>() * 3 / 2)
    }
}
