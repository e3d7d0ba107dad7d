//! The blocks' hashes, 16 blocks to a chunk. All chunks have one size, so churn does not fragment
//! memory.

use warmroute_proto::{LocalHash, PrefixHash};

use super::heap::heap;
use super::ids::{BlockPlace, RunId};

pub(super) const CHUNK: usize = 16;
/// Chunks of a segment.
const SEGMENT: usize = 256;

/// 16 local hashes, then their 16 prefix hashes.
type Chunk = [u64; 2 * CHUNK];

/// The run that a chunk belongs to.
#[derive(Clone, Copy)]
struct ChunkOwner {
    /// [`RunId::NONE`] if the chunk is free.
    run: RunId,
    index: u32,
}

/// A chunk that was moved.
pub(super) struct MovedChunk {
    pub(super) run: RunId,
    /// Index among the run's chunks.
    pub(super) index: usize,
    pub(super) from: u32,
    pub(super) to: u32,
}

#[derive(Default)]
pub(super) struct BlockArena {
    segments: Vec<Box<[Chunk]>>,
    owners: Vec<ChunkOwner>,
    /// Free chunks, the last freed at the end. Those beyond the end are skipped; they are gone
    /// before the chunks grow again.
    free: Vec<u32>,
    free_count: usize,
}

impl BlockArena {
    /// Allocates a chunk for the blocks of `run` from `16 * index` on. Returns its number.
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

    /// The run that a chunk belongs to was moved.
    pub(super) fn set_owner(&mut self, chunk: u32, run: RunId) {
        self.owners[chunk as usize].run = run;
    }

    /// Frees the last chunk's memory; if it is in use, moves it to a free chunk, which must exist.
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
        self.trim_lists();
        moved
    }

    /// Frees the lists' memory that is mostly unused.
    fn trim_lists(&mut self) {
        let chunks = self.owners.len();
        if self.owners.capacity() > 4 * chunks {
            self.owners.shrink_to(2 * chunks);
        }
        if self.free.len() > 2 * self.free_count {
            self.free.retain(|&chunk| (chunk as usize) < chunks);
        }
        if self.free.capacity() > 4 * self.free.len() {
            self.free.shrink_to(2 * self.free.len());
        }
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

    /// The block's run and offset.
    pub(super) fn owner(&self, place: BlockPlace) -> (RunId, u32) {
        let owner = self.owners[place.0 as usize / CHUNK];
        (
            owner.run,
            owner.index * CHUNK as u32 + place.0 % CHUNK as u32,
        )
    }

    /// Bytes of all chunks, in use or free, and of their lists.
    pub(super) const fn bytes(&self) -> usize {
        let lists = self.owners.capacity() * size_of::<ChunkOwner>();
        let segments = self.segments.len() * heap(SEGMENT * size_of::<Chunk>());
        segments + heap(lists) + heap(self.free.capacity() * size_of::<u32>())
    }

    /// Bytes of the free chunks.
    pub(super) const fn spare_bytes(&self) -> usize {
        self.free_count * size_of::<Chunk>()
    }
}
