//! The tree as bytes, for snapshots.
//!
//! Runs, parents first: where each hangs, its local hashes, and per holder what it holds. Prefix
//! hashes, table and links are made anew when it is read, so sources share what they share, and a
//! block costs 8 bytes however many hold it. Numbers are LEB128; hashes little-endian.
//!
//! What it does not do: checksums, compression, names of sources.

use warmroute_proto::{LocalHash, PrefixHash};

use super::run::{BLOCKS_MAX, RunId};
use super::spans::Spans;
use super::{Position, SourceNumber, TierMask, Tree};

/// The bytes are no image of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the bytes are no image of a tree")]
pub struct BadImage;

/// In place of a run's length, behind the last run.
const END: u32 = 0;

fn put(bytes: &mut Vec<u8>, mut number: u32) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
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

    fn locals(&mut self, count: u32) -> Result<Vec<LocalHash>, BadImage> {
        let (hashes, rest) = self
            .0
            .split_at_checked(count as usize * size_of::<u64>())
            .ok_or(BadImage)?;
        self.0 = rest;
        let (hashes, _) = hashes.as_chunks();
        Ok(hashes
            .iter()
            .map(|&hash| LocalHash(u64::from_le_bytes(hash)))
            .collect())
    }
}

impl Tree {
    /// All that these open sources hold. Their order is what [`Self::from_image`] gives back.
    #[must_use]
    pub fn image(&self, numbers: &[SourceNumber]) -> Vec<u8> {
        let mut places = vec![u32::MAX; self.sources.len()];
        for (place, number) in (0..).zip(numbers) {
            if let Some(at) = places.get_mut(number.index()) {
                *at = place;
            }
        }
        let mut bytes = Vec::with_capacity(self.nodes * size_of::<u64>() * 9 / 8);
        put(&mut bytes, numbers.len() as u32);
        // Where each run stands in the image, plus one; zero is the root.
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

    /// Writes a run as far as one of the sources stands in it. Does one?
    fn write_run(&self, id: RunId, places: &[u32], written: &[u32], bytes: &mut Vec<u8>) -> bool {
        let run = self.run(id);
        let holders: Vec<(usize, u32)> = run
            .leads
            .iter()
            .enumerate()
            .map(|(at, lead)| (at, places[lead.source.index()]))
            .filter(|&(_, place)| place != u32::MAX)
            .collect();
        let len = holders.iter().map(|&(at, _)| run.holds[at].end).max();
        let Some(len) = len.filter(|&len| len > 0) else {
            return false;
        };
        put(bytes, len);
        put(
            bytes,
            run.parent.some().map_or(0, |above| written[above.index()]),
        );
        put(bytes, run.attach);
        for offset in 0..len {
            let local = self.blocks.local(run.place(offset));
            bytes.extend_from_slice(&local.0.to_le_bytes());
        }
        put(bytes, holders.len() as u32);
        for (at, place) in holders {
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

    /// The tree of an image, and its sources in the order that it was made with.
    pub fn from_image(bytes: &[u8]) -> Result<(Self, Vec<SourceNumber>), BadImage> {
        let mut reader = Reader(bytes);
        let sources = reader.number()?;
        // A source without a run takes no bytes; this many is not one of ours.
        if sources > 1 << 20 {
            return Err(BadImage);
        }
        let mut tree = Self::new();
        let numbers: Vec<_> = (0..sources).map(|_| tree.open()).collect();
        let mut runs = Vec::new();
        loop {
            let len = reader.number()?;
            if len == END {
                break;
            }
            runs.push(tree.read_run(len, &mut reader, &runs, &numbers)?);
        }
        let needed = tree.runs.iter().all(|run| run.at_tail > 0);
        for &number in &numbers {
            tree.sources[number.index()].digest = tree.recomputed_digest(number);
        }
        let whole = reader.0.is_empty() && needed;
        whole.then_some((tree, numbers)).ok_or(BadImage)
    }

    fn read_run(
        &mut self,
        len: u32,
        reader: &mut Reader<'_>,
        runs: &[RunId],
        numbers: &[SourceNumber],
    ) -> Result<RunId, BadImage> {
        let above = reader.number()? as usize;
        let attach = reader.number()?;
        let locals = reader.locals(len)?;
        let at = match above.checked_sub(1) {
            Some(above) => Position {
                run: *runs.get(above).ok_or(BadImage)?,
                offset: attach,
            },
            None => Position::ROOT,
        };
        let fits = match self.runs.get(at.run.index()) {
            Some(above) => (1..=above.len).contains(&attach),
            None => attach == 0,
        };
        if !fits || !(1..=BLOCKS_MAX).contains(&len) {
            return Err(BadImage);
        }
        let parent = attach
            .checked_sub(1)
            .map(|last| self.prefix_at(at.run, last));
        if self.locate(PrefixHash::after(parent, locals[0])).is_some() {
            return Err(BadImage);
        }
        let id = self.add_run(at, parent, &locals);
        for _ in 0..reader.number()? {
            self.read_holder(reader, id, numbers)?;
        }
        Ok(id)
    }

    fn read_holder(
        &mut self,
        reader: &mut Reader<'_>,
        id: RunId,
        numbers: &[SourceNumber],
    ) -> Result<(), BadImage> {
        let number = *numbers.get(reader.number()? as usize).ok_or(BadImage)?;
        let count = reader.number()?;
        let mut spans = Spans::default();
        if count == 0 {
            spans = Spans::leading(reader.number()?.min(BLOCKS_MAX + 1));
        }
        let mut end = 0;
        for _ in 0..count {
            let piece = reader.number()?;
            end += piece >> 3;
            if end > BLOCKS_MAX || !spans.push(end, TierMask((piece & 0b111) as u8)) {
                return Err(BadImage);
            }
        }
        let last_is_held = spans
            .pieces(0)
            .last()
            .is_none_or(|(_, _, tiers)| !tiers.is_empty());
        let above = self.run(id).parent.some();
        let stands_above = above.is_none_or(|above| self.run(above).find(number).is_ok());
        let run = self.run(id);
        if spans.end() > run.len || !last_is_held || !stands_above {
            return Err(BadImage);
        }
        let at = run.find(number).err().ok_or(BadImage)?;
        self.add_holder(number, id, at);
        let end = spans.end();
        self.edit(id, at, |run| {
            run.set_spans(at, spans);
            run.set_end(at, end);
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use warmroute_proto::{Change, Tier};

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_tree_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok((tree, _)) = Tree::from_image(&bytes) {
                tree.check();
            }
        }
    }

    #[test]
    fn image_that_ends_early_is_refused() {
        let mut tree = Tree::new();
        let number = tree.open();
        let stored = Change::Stored {
            parent: None,
            blocks: vec![LocalHash(1), LocalHash(2)],
            tier: Tier::Disk,
        };
        tree.apply(number, &stored).unwrap();
        let image = tree.image(&[number]);
        assert!(Tree::from_image(&image).is_ok());
        for end in 0..image.len() {
            assert_eq!(Tree::from_image(&image[..end]).err(), Some(BadImage));
        }
    }
}
