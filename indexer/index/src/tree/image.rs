//! The tree as bytes, for snapshots.
//!
//! Runs, parents first: attach point, local hashes, and per holder its holdings. Prefix hashes,
//! table and links are rebuilt on reading, so a block costs 8 bytes however many sources hold it.
//! Numbers are LEB128, hashes little-endian.
//!
//! No checksum, no compression, no source names.

use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::{Digest, LocalHash, PrefixHash, Tier, Tiers};

use super::blocks::CHUNK;
use super::ids::RunId;
use super::run::BLOCKS_MAX;
use super::spans::Spans;
use super::{Position, SourceNumber, TierMask, Tree};

/// The bytes are not an image of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the bytes are not an image of a tree")]
pub struct BadImage;

/// End marker, in place of a run's length.
const END: u32 = 0;

fn put(bytes: &mut Vec<u8>, mut number: u32) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// A run of an image, without its holders.
struct RunHead<'a> {
    len: u32,
    /// Number of the parent run, counted from one; zero is the root.
    above: usize,
    attach: u32,
    locals: &'a [[u8; 8]],
}

impl RunHead<'_> {
    fn locals(&self) -> impl Iterator<Item = LocalHash> {
        let locals = self.locals.iter();
        locals.map(|&hash| LocalHash(u64::from_le_bytes(hash)))
    }
}

struct ImageReader<'a>(&'a [u8]);

impl<'a> ImageReader<'a> {
    fn number(&mut self) -> Result<u32, BadImage> {
        let mut number = 0_u64;
        for shift in (0..35).step_by(7) {
            let (&byte, rest) = self.0.split_first().ok_or(BadImage)?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return u32::try_from(number).map_err(|_| BadImage);
            }
        }
        Err(BadImage)
    }

    fn sources(&mut self) -> Result<usize, BadImage> {
        let sources = self.number()?;
        // Bounds the allocation: a source without a run takes no bytes.
        let few = sources <= 1 << 20;
        few.then_some(sources as usize).ok_or(BadImage)
    }

    /// The next run; `None` after the last one.
    fn run(&mut self) -> Result<Option<RunHead<'a>>, BadImage> {
        let len = self.number()?;
        if len == END {
            return Ok(None);
        }
        let (above, attach) = (self.number()? as usize, self.number()?);
        let split = self.0.split_at_checked(len as usize * size_of::<u64>());
        let (locals, rest) = split.ok_or(BadImage)?;
        self.0 = rest;
        if len > BLOCKS_MAX {
            return Err(BadImage);
        }
        let (locals, _) = locals.as_chunks();
        let head = RunHead {
            len,
            above,
            attach,
            locals,
        };
        Ok(Some(head))
    }

    /// The next holder of a run of `len` blocks: its source and holdings.
    fn holder(&mut self, len: u32) -> Result<(usize, Spans), BadImage> {
        let source = self.number()? as usize;
        let count = self.number()?;
        let mut spans = Spans::default();
        if count == 0 {
            spans = Spans::leading(self.number()?.min(BLOCKS_MAX + 1));
        }
        let mut end = 0;
        for _ in 0..count {
            let piece = self.number()?;
            end += piece >> 3;
            if end > BLOCKS_MAX || !spans.push(end, TierMask((piece & 0b111) as u8)) {
                return Err(BadImage);
            }
        }
        let last = spans.pieces(0).last();
        let last_is_held = last.is_none_or(|(_, _, tiers)| !tiers.is_empty());
        let fits = spans.end() <= len && last_is_held;
        fits.then_some((source, spans)).ok_or(BadImage)
    }
}

/// Cumulative digests of one run's blocks, so that a holder's digest is a difference.
#[derive(Default)]
struct PrefixDigests {
    of: Tiers<Vec<u64>>,
    prefixes: Vec<PrefixHash>,
}

impl PrefixDigests {
    fn begin(&mut self, prefixes: impl Iterator<Item = PrefixHash>) {
        self.prefixes.clear();
        self.prefixes.extend(prefixes);
        for tier in Tier::ALL {
            self.of.get_mut(tier).clear();
        }
    }

    fn add(&mut self, digest: &mut Digest, spans: &Spans) {
        for (from, to, tiers) in spans.pieces(0) {
            for tier in Tier::ALL.into_iter().filter(|&tier| tiers.has(tier)) {
                let sums = self.of.get_mut(tier);
                if sums.is_empty() {
                    let mut sum = Digest::default();
                    sums.push(sum.sum);
                    sums.extend(self.prefixes.iter().map(|&prefix| {
                        sum.insert(prefix, tier);
                        sum.sum
                    }));
                }
                digest.count += u64::from(to - from);
                let sum = sums[to as usize].wrapping_sub(sums[from as usize]);
                digest.sum = digest.sum.wrapping_add(sum);
            }
        }
    }
}

/// Digests of an image's sources in their order, computed from its blocks with little memory.
pub fn digests_of_image(bytes: &[u8]) -> Result<Vec<Digest>, BadImage> {
    // Attach points, whose prefixes are needed again.
    let mut forks = Vec::new();
    let mut reader = ImageReader(bytes);
    let sources = reader.sources()?;
    while let Some(head) = reader.run()? {
        if head.above > 0 {
            forks.push((head.above, head.attach));
        }
        for _ in 0..reader.number()? {
            reader.holder(head.len)?;
        }
    }
    forks.sort_unstable();
    forks.dedup();
    let mut prefixes = vec![PrefixHash(0); forks.len()];
    let mut digests = vec![Digest::default(); sources];
    let mut sums = PrefixDigests::default();
    let mut locals = Vec::new();
    let mut reader = ImageReader(bytes);
    reader.sources()?;
    let mut count = 0;
    while let Some(head) = reader.run()? {
        count += 1;
        let above = match head.above {
            0 => None,
            above if above < count => {
                let at = forks.binary_search(&(above, head.attach));
                Some(prefixes[at.map_err(|_| BadImage)?])
            }
            _ => return Err(BadImage),
        };
        locals.clear();
        locals.extend(head.locals());
        sums.begin(prefix_hashes(above, &locals));
        let first = forks.partition_point(|&(above, _)| above < count);
        let here = forks[first..]
            .iter()
            .take_while(|(above, _)| *above == count);
        for ((_, attach), prefix) in here.zip(&mut prefixes[first..]) {
            let offset = attach.checked_sub(1).ok_or(BadImage)? as usize;
            *prefix = *sums.prefixes.get(offset).ok_or(BadImage)?;
        }
        for _ in 0..reader.number()? {
            let (source, spans) = reader.holder(head.len)?;
            sums.add(digests.get_mut(source).ok_or(BadImage)?, &spans);
        }
    }
    Ok(digests)
}

impl Tree {
    /// Image of these open sources, in this order.
    #[must_use]
    pub fn image(&self, numbers: &[SourceNumber]) -> Vec<u8> {
        self.image_in(numbers, Vec::with_capacity(self.image_bytes()))
    }

    /// [`Self::image`] in a reused buffer: faulting in fresh memory takes longer than writing the
    /// image.
    #[must_use]
    pub fn image_in(&self, numbers: &[SourceNumber], buffer: Vec<u8>) -> Vec<u8> {
        let mut bytes = buffer;
        bytes.clear();
        let mut places = vec![u32::MAX; self.sources.len()];
        for (place, number) in (0..).zip(numbers) {
            if let Some(at) = places.get_mut(number.index()) {
                *at = place;
            }
        }
        put(&mut bytes, numbers.len() as u32);
        // Number of each run in the image, counted from one; zero is the root.
        let mut written = vec![0_u32; self.runs.len()];
        let mut count = 0;
        let mut open: Vec<RunId> = self.first_root.some().into_iter().collect();
        while let Some(id) = open.pop() {
            let run = self.run(id);
            open.extend(run.next_sibling.some());
            if self.write_run(id, &places, &written, &mut bytes) {
                count += 1;
                written[id.index()] = count;
                open.extend(run.first_child.some());
            }
        }
        put(&mut bytes, END);
        bytes
    }

    /// Writes a run as far as one of the sources stands in it. Returns false if no source does.
    fn write_run(&self, id: RunId, places: &[u32], written: &[u32], bytes: &mut Vec<u8>) -> bool {
        let run = self.run(id);
        let holders = || {
            let places = run.leads.iter().map(|lead| places[lead.source.index()]);
            let all = places.enumerate();
            all.filter(|&(_, place)| place != u32::MAX)
        };
        let len = holders().map(|(at, _)| run.holds[at].end).max();
        let Some(len) = len.filter(|&len| len > 0) else {
            return false;
        };
        put(bytes, len);
        put(
            bytes,
            run.parent.some().map_or(0, |above| written[above.index()]),
        );
        put(bytes, run.attach);
        let mut left = len as usize;
        for &chunk in &run.chunks {
            let (locals, _) = self.blocks.hashes(chunk);
            let locals = &locals[..left.min(CHUNK)];
            left -= locals.len();
            let start = bytes.len();
            bytes.resize(start + size_of_val(locals), 0);
            let (slots, _) = bytes[start..].as_chunks_mut();
            for (slot, local) in slots.iter_mut().zip(locals) {
                *slot = local.to_le_bytes();
            }
        }
        put(bytes, holders().count() as u32);
        for (at, place) in holders() {
            put(bytes, place);
            let spans = &run.holds[at].spans;
            put(bytes, spans.len() as u32);
            if spans.is_empty() {
                put(bytes, run.leads[at].blocks());
            }
            for (start, end, tiers) in spans.pieces(0) {
                put(bytes, ((end - start) << 3) | u32::from(tiers.0));
            }
        }
        true
    }

    /// The tree of an image, and its sources in the image's order.
    pub fn from_image(bytes: &[u8]) -> Result<(Self, Vec<SourceNumber>), BadImage> {
        let read = Self::from_image_of(bytes, |_| true, usize::MAX)?;
        read.ok_or(BadImage)
    }

    /// Like [`Self::from_image`], with unwanted sources left empty. `None` if the tree exceeds
    /// `bytes_max`.
    pub fn from_image_of(
        bytes: &[u8],
        wanted: impl Fn(usize) -> bool,
        bytes_max: usize,
    ) -> Result<Option<(Self, Vec<SourceNumber>)>, BadImage> {
        let mut reader = ImageReader(bytes);
        let sources = reader.sources()?;
        let mut tree = Self::new();
        if bytes_max == usize::MAX {
            tree.table.expect(bytes.len() / size_of::<u64>());
        }
        let mut reading = ImageLoader {
            numbers: (0..sources).map(|_| tree.open()).collect(),
            wanted: (0..sources).map(wanted).collect(),
            digests: vec![Digest::default(); sources],
            runs: Vec::new(),
            sums: PrefixDigests::default(),
            holders: Vec::new(),
        };
        while let Some(head) = reader.run()? {
            reading.run(&mut tree, &head, &mut reader)?;
            if tree.bytes() > bytes_max {
                return Ok(None);
            }
        }
        let all = reading.wanted.iter().all(|&wanted| wanted);
        for &id in reading.runs.iter().filter(|&&id| id != RunId::NONE) {
            // Without the unwanted holders a run may be too long.
            match all {
                true if tree.run(id).at_tail == 0 => return Err(BadImage),
                true => {}
                false => tree.cut(id),
            }
        }
        for (&number, &digest) in reading.numbers.iter().zip(&reading.digests) {
            tree.sources[number.index()].digest = digest;
        }
        let whole = reader.0.is_empty();
        whole
            .then_some(Some((tree, reading.numbers)))
            .ok_or(BadImage)
    }
}

/// State of reading an image into a tree.
struct ImageLoader {
    numbers: Vec<SourceNumber>,
    wanted: Vec<bool>,
    digests: Vec<Digest>,
    /// The runs so far; [`RunId::NONE`] for runs without a wanted holder.
    runs: Vec<RunId>,
    sums: PrefixDigests,
    /// Holders of the present run.
    holders: Vec<(usize, Spans)>,
}

impl ImageLoader {
    fn run(
        &mut self,
        tree: &mut Tree,
        head: &RunHead<'_>,
        reader: &mut ImageReader<'_>,
    ) -> Result<(), BadImage> {
        self.holders.clear();
        for _ in 0..reader.number()? {
            let (source, spans) = reader.holder(head.len)?;
            if *self.wanted.get(source).ok_or(BadImage)? {
                self.holders.push((source, spans));
            }
        }
        let at = match head.above.checked_sub(1) {
            Some(above) => Position {
                run: *self.runs.get(above).ok_or(BadImage)?,
                offset: head.attach,
            },
            None => Position::ROOT,
        };
        let all = self.wanted.iter().all(|&wanted| wanted);
        if self.holders.is_empty() && !all {
            self.runs.push(RunId::NONE);
            return Ok(());
        }
        let fits = match tree.runs.get(at.run.index()) {
            Some(above) => (1..=above.len).contains(&head.attach),
            None => head.above == 0 && head.attach == 0,
        };
        let locals: Vec<LocalHash> = head.locals().collect();
        let first = locals.first().ok_or(BadImage)?;
        if !fits {
            return Err(BadImage);
        }
        let parent = head
            .attach
            .checked_sub(1)
            .map(|last| tree.prefix_at(at.run, last));
        if tree.locate(PrefixHash::after(parent, *first)).is_some() {
            return Err(BadImage);
        }
        let id = tree.add_run(at, parent, &locals);
        self.runs.push(id);
        self.sums.begin(tree.scratch.iter().copied());
        for (source, spans) in self.holders.drain(..) {
            let number = *self.numbers.get(source).ok_or(BadImage)?;
            let run = tree.run(id);
            let above = run.parent.some();
            let stands_above = above.is_none_or(|above| tree.run(above).find(number).is_ok());
            let at = run.find(number).err().filter(|_| stands_above);
            let at = at.ok_or(BadImage)?;
            self.sums.add(&mut self.digests[source], &spans);
            tree.add_holder(number, id, at);
            let end = spans.end();
            tree.edit(id, at, |run| {
                run.set_spans(at, spans);
                run.set_end(at, end);
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
