//! Workload files: events, queries, and the checksum of the right answers.
//!
//! `KVWL0001`, little-endian, unpadded: header, events, sequences, queries, trailer. A block comes
//! with its local hash and an opaque engine hash, as in an engine's events. In `KVWL0002`, of the
//! same layout, bits 1 and 2 of an event's second byte are its tier, blocks are removed anywhere in
//! a prefix, and the checksum covers the runs of all tiers.

use std::io;

use warmroute_proto::{Tier, Tiers};

pub const TOKENS_PER_BLOCK: usize = 16;

/// `SplitMix64` (Steele, Lea, Flood 2014).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    pub fn chance(&mut self, of: f64) -> bool {
        ((self.next() >> 11) as f64) < of * (1u64 << 53) as f64
    }
}

pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[derive(Clone, Debug)]
pub enum Event {
    Store {
        worker: u32,
        tier: Tier,
        parent: Option<u64>,
        /// Local hash and engine hash.
        blocks: Vec<(u64, u64)>,
    },
    Remove {
        worker: u32,
        tier: Tier,
        blocks: Vec<u64>,
    },
}

#[derive(Clone, Copy, Debug)]
pub struct Query {
    pub sequence: u32,
    pub prefix: u32,
    pub suffix: u32,
    pub class: u32,
    pub suffix_seed: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Trailer {
    pub stored: u64,
    pub removed: u64,
    pub resident_entries: u64,
    pub resident_distinct: u64,
    pub checksum_all: u64,
    pub checksum_best: u64,
    pub sum_best: u64,
    pub sum_query_len: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Version {
    One,
    Two,
}

pub struct Workload {
    bytes: Vec<u8>,
    pub version: Version,
    pub workers: u32,
    events: usize,
    pub sequences: Vec<Vec<u64>>,
    pub queries: Vec<Query>,
    pub trailer: Trailer,
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let bytes = self.bytes[self.at..self.at + N].try_into().unwrap();
        self.at += N;
        bytes
    }
    fn u8(&mut self) -> u8 {
        self.take::<1>()[0]
    }
    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }
    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }
    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    fn event(&mut self) -> Event {
        let kind = self.u8();
        let flags = self.u8();
        let count = self.u16();
        let worker = self.u32();
        let parent = self.u64();
        let tier = Tier::ALL[usize::from(flags >> 1)];
        if kind == 1 {
            let blocks = (0..count).map(|_| (self.u64(), self.u64())).collect();
            let parent = (flags & 1 == 1).then_some(parent);
            Event::Store {
                worker,
                tier,
                parent,
                blocks,
            }
        } else {
            let blocks = (0..count).map(|_| self.u64()).collect();
            Event::Remove {
                worker,
                tier,
                blocks,
            }
        }
    }
}

const EVENTS_AT: usize = 40;

impl Workload {
    pub fn load(path: &str) -> io::Result<Self> {
        Ok(Self::parse(std::fs::read(path)?))
    }

    /// Panics if the bytes are not a workload file.
    pub fn parse(bytes: Vec<u8>) -> Self {
        let mut cursor = Cursor {
            bytes: &bytes,
            at: 0,
        };
        let version = match &cursor.take::<8>() {
            b"KVWL0001" => Version::One,
            b"KVWL0002" => Version::Two,
            _ => panic!("no workload file"),
        };
        assert_eq!(cursor.u32() as usize, TOKENS_PER_BLOCK);
        let workers = cursor.u32();
        let [events, sequences, queries] = [(); 3].map(|()| cursor.u64() as usize);
        for _ in 0..events {
            let kind = cursor.u8();
            cursor.u8();
            let count = usize::from(cursor.u16());
            cursor.at += 12 + count * if kind == 1 { 16 } else { 8 };
        }
        let sequences = (0..sequences)
            .map(|_| (0..cursor.u64()).map(|_| cursor.u64()).collect())
            .collect();
        let queries = (0..queries)
            .map(|_| Query {
                sequence: cursor.u32(),
                prefix: cursor.u32(),
                suffix: cursor.u32(),
                class: cursor.u32(),
                suffix_seed: cursor.u64(),
            })
            .collect();
        let trailer = Trailer {
            stored: cursor.u64(),
            removed: cursor.u64(),
            resident_entries: cursor.u64(),
            resident_distinct: cursor.u64(),
            checksum_all: cursor.u64(),
            checksum_best: cursor.u64(),
            sum_best: cursor.u64(),
            sum_query_len: cursor.u64(),
        };
        assert_eq!(cursor.at, bytes.len());
        Self {
            version,
            workers,
            events,
            sequences,
            queries,
            trailer,
            bytes,
        }
    }

    pub fn events(&self) -> impl Iterator<Item = Event> + '_ {
        let mut cursor = Cursor {
            bytes: &self.bytes,
            at: EVENTS_AT,
        };
        (0..self.events).map(move |_| cursor.event())
    }

    /// The local hashes of a query.
    pub fn fill(&self, query: &Query, blocks: &mut Vec<u64>) {
        blocks.clear();
        if query.prefix > 0 {
            let sequence = &self.sequences[query.sequence as usize];
            blocks.extend_from_slice(&sequence[..query.prefix as usize]);
        }
        let mut random = Random(query.suffix_seed);
        blocks.extend((0..query.suffix).map(|_| random.next()));
    }
}

/// An answer's contribution to a file's checksum; zero for workers without blocks.
pub fn checksum(version: Version, query: usize, worker: u32, run: Tiers<u32>) -> u64 {
    if run == Tiers::default() {
        return 0;
    }
    let plain = mix(((query as u64) << 40) ^ (u64::from(worker) << 20) ^ u64::from(run.gpu));
    match version {
        Version::One => plain,
        Version::Two => mix(plain ^ (u64::from(run.cpu) << 32) ^ u64::from(run.disk)),
    }
}
