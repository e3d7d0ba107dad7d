//! The blocks' hashes, 16 blocks to a chunk. Chunks are all alike, so freed ones fit anywhere and
//! churn leaves no holes in memory.

use warmroute_proto::{LocalHash, PrefixHash};

use super::room::heap;
use super::run::RunId;

pub(super) const CHUNK: usize = 16;
/// Chunks that are allocated together.
const SEGMENT: usize = 256;

/// One block: the chunk's number times 16, plus the block's number in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockPlace(pub(super) u32);

/// 16 local hashes, then their 16 prefix hashes.
type Chunk = [u64; 2 * CHUNK];

/// Which part of which run a chunk is.
#[derive(Clone, Copy)]
struct ChunkOwner {
    /// None if the chunk is free.
    run: RunId,
    index: u32,
}

/// A chunk that lies elsewhere now.
pub(super) struct MovedChunk {
    pub(super) run: RunId,
    /// Which of the run's chunks it is.
    pub(super) index: usize,
    pub(super) from: u32,
    pub(super) to: u32,
}

#[derive(Default)]
pub(super) struct BlockArena {
    segments: Vec<Box<[Chunk]>>,
    owners: Vec<ChunkOwner>,
    /// Free chunks, the last freed at the end. Some may be beyond the end by now: they are passed over, and
    /// there are none left once the chunks grow again.
    free: Vec<u32>,
    free_count: usize,
}

impl BlockArena {
    /// A chunk for the blocks of `run` from `16 * index` on; its number.
    pub(super) fn allocate(&mut self, run: RunId, index: usize) -> u32 {
        let owner = ChunkOwner {
            run,
            index: index as u32,
        };
        if let Some(chunk) = self.take_free() {
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

    fn take_free(&mut self) -> Option<u32> {
        while let Some(chunk) = self.free.pop() {
            if (chunk as usize) < self.owners.len() {
                self.free_count -= 1;
                return Some(chunk);
            }
        }
        None
    }

    pub(super) fn free(&mut self, chunk: u32) {
        self.owners[chunk as usize].run = RunId::NONE;
        self.free.push(chunk);
        self.free_count += 1;
    }

    /// Frees the memory behind the last chunk, moving that to a free place if it is in use. There must be
    /// a free one.
    pub(super) fn move_last(&mut self) -> Option<MovedChunk> {
        let owner = self.owners.pop()?;
        let from = self.owners.len() as u32;
        let mut moved = None;
        if owner.run == RunId::NONE {
            self.free_count -= 1;
        } else if let Some(to) = self.take_free() {
            let chunk = *self.chunk(from);
            self.segments[to as usize / SEGMENT][to as usize % SEGMENT] = chunk;
            self.owners[to as usize] = owner;
            moved = Some(MovedChunk {
                run: owner.run,
                index: owner.index as usize,
                from,
                to,
            });
        }
        let needed = self.owners.len().div_ceil(SEGMENT);
        self.segments.truncate(needed);
        if self.free_count == 0 {
            self.free = Vec::new();
        }
        if self.owners.is_empty() {
            self.owners = Vec::new();
        }
        moved
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

    pub(super) fn prefix(&self, place: BlockPlace) -> PrefixHash {
        let chunk = self.chunk(place.0 / CHUNK as u32);
        PrefixHash(chunk[CHUNK + place.0 as usize % CHUNK])
    }

    pub(super) fn local(&self, place: BlockPlace) -> LocalHash {
        LocalHash(self.chunk(place.0 / CHUNK as u32)[place.0 as usize % CHUNK])
    }

    /// The run that the block belongs to, and its offset there.
    pub(super) fn owner(&self, place: BlockPlace) -> (RunId, u32) {
        let owner = self.owners[place.0 as usize / CHUNK];
        (
            owner.run,
            owner.index * CHUNK as u32 + place.0 % CHUNK as u32,
        )
    }

    /// What the chunks take, those in use and those that are free, with their owners' mention of them.
    pub(super) const fn bytes(&self) -> usize {
        let lists = self.owners.capacity() * size_of::<ChunkOwner>();
        let segments = self.segments.len() * heap(SEGMENT * size_of::<Chunk>());
        segments + heap(lists) + heap(self.free.capacity() * size_of::<u32>())
    }

    /// What the free chunks take.
    pub(super) const fn spare_bytes(&self) -> usize {
        self.free_count * size_of::<Chunk>()
    }
}
