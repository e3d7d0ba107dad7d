//! The tokens of short words of recent texts: most words of a text occur again, in it or in the next
//! one. Whole words are compared, so that a word never gets another one's tokens.
//!
//! Unlike cached segments it has no scopes: the time of one lookup, of one word, says nothing over a
//! network.

use std::sync::{Mutex, MutexGuard};

/// Words of a table: 384 KiB, part of a core's own cache.
const SLOTS: usize = 8192;
/// Texts that are encoded at a time with a table.
const TABLES: usize = 4;
const WORD_BYTES_MAX: usize = 24;
const IDS_MAX: usize = 5;

/// Tables, each of which one text uses at a time.
#[derive(Debug, Default)]
pub(super) struct WordCache {
    tables: [Mutex<WordTable>; TABLES],
}

/// Words by their hash; a later word replaces an earlier one. Allocated by the first word.
#[derive(Debug, Default)]
pub(super) struct WordTable {
    slots: Box<[CachedWord]>,
}

#[derive(Clone, Copy, Debug, Default)]
struct CachedWord {
    bytes: [u64; 3],
    len: u8,
    ids_len: u8,
    ids: [u32; IDS_MAX],
}

const _: () = assert!(SLOTS * size_of::<CachedWord>() == 384 << 10);

/// All bytes of a short word, as numbers that may overlap, and its length.
#[derive(Clone, Copy, Debug)]
struct WordBytes {
    bytes: [u64; 3],
    len: u8,
}

impl WordBytes {
    fn new(word: &[u8]) -> Option<Self> {
        let (first, last) = match word.len() {
            8..=WORD_BYTES_MAX => (
                u64::from_le_bytes(*word.first_chunk()?),
                u64::from_le_bytes(*word.last_chunk()?),
            ),
            4..8 => (
                u32::from_le_bytes(*word.first_chunk()?).into(),
                u32::from_le_bytes(*word.last_chunk()?).into(),
            ),
            2..4 => (
                u16::from_le_bytes(*word.first_chunk()?).into(),
                u16::from_le_bytes(*word.last_chunk()?).into(),
            ),
            1 => (word[0].into(), 0),
            _ => return None,
        };
        let middle = match word.get(8..16) {
            Some(bytes) => u64::from_le_bytes(*bytes.first_chunk()?),
            None => 0,
        };
        Some(Self {
            bytes: [first, middle, last],
            len: word.len() as u8,
        })
    }

    fn slot(self) -> usize {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        let all = [u64::from(self.len)].into_iter().chain(self.bytes);
        let mixed = all.fold(0_u64, |mixed, number| {
            (mixed.rotate_left(26) ^ number).wrapping_mul(ODD)
        });
        // A product's highest bits depend on all bits of its factors.
        (mixed >> (u64::BITS - SLOTS.ilog2())) as usize
    }
}

impl WordCache {
    /// A table that no other text uses, if there is one.
    pub(super) fn lock(&self) -> Option<MutexGuard<'_, WordTable>> {
        self.tables.iter().find_map(|table| table.try_lock().ok())
    }
}

impl WordTable {
    /// The ids of a word that was kept.
    pub(super) fn get(&self, word: &[u8]) -> Option<&[u32]> {
        let word = WordBytes::new(word)?;
        let slot = self.slots.get(word.slot())?;
        let is_same = slot.bytes == word.bytes && slot.len == word.len;
        slot.ids.get(..slot.ids_len.into()).filter(|_| is_same)
    }

    /// Keeps a word's ids, if both are short.
    pub(super) fn put(&mut self, word: &[u8], ids: &[u32]) {
        let mut kept = [0; IDS_MAX];
        if let (Some(word), Some(kept_ids)) = (WordBytes::new(word), kept.get_mut(..ids.len())) {
            kept_ids.copy_from_slice(ids);
            if self.slots.is_empty() {
                self.slots = vec![CachedWord::default(); SLOTS].into();
            }
            self.slots[word.slot()] = CachedWord {
                bytes: word.bytes,
                len: word.len,
                ids_len: ids.len() as u8,
                ids: kept,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_kept_whole_or_not_at_all() {
        let mut table = WordTable::default();
        assert_eq!(table.get(b"word"), None);
        table.put(b"word", &[1, 2]);
        assert_eq!(table.get(b"word"), Some(&[1, 2][..]));
        assert_eq!(table.get(b"wor"), None);
        assert_eq!(table.get(b""), None);
        for len in 1..=WORD_BYTES_MAX {
            let word: Vec<u8> = (0..len as u8).collect();
            table.put(&word, &[3]);
            assert_eq!(table.get(&word), Some(&[3][..]));
            for at in 0..len {
                let mut other = word.clone();
                other[at] ^= 1;
                assert_eq!(table.get(&other), None, "{other:?}");
            }
        }
        for long in [WORD_BYTES_MAX + 1, 256, 256 + 4] {
            let word = vec![b'a'; long];
            table.put(&word, &[1]);
            assert_eq!(table.get(&word), None);
        }
        table.put(b"split", &[1; IDS_MAX + 1]);
        assert_eq!(table.get(b"split"), None);
    }

    #[test]
    fn a_later_word_replaces_another_one_of_its_slot() {
        let mut table = WordTable::default();
        let words: Vec<String> = (0..4 * SLOTS).map(|number| number.to_string()).collect();
        for (id, word) in (0..).zip(&words) {
            table.put(word.as_bytes(), &[id]);
        }
        let kept = (0..).zip(&words).filter(|(id, word)| {
            let ids = table.get(word.as_bytes());
            assert!(ids.is_none_or(|ids| ids == [*id]), "another word's ids");
            ids.is_some()
        });
        assert!((SLOTS / 2..=SLOTS).contains(&kept.count()));
    }

    /// They are frequent next to each other, and differ in their last bytes.
    #[test]
    fn similar_words_have_slots_of_their_own() {
        let ends = "them then they there these their that than about above which while white";
        let slots = ends.split(' ').map(|word| {
            let word = format!(" {word}");
            WordBytes::new(word.as_bytes()).map(WordBytes::slot)
        });
        let slots: std::collections::HashSet<_> = slots.collect();
        assert_eq!(slots.len(), 13);
    }

    #[test]
    fn more_texts_than_tables_go_without_one() {
        let cache = WordCache::default();
        let locked: Vec<_> = (0..TABLES).map_while(|_| cache.lock()).collect();
        assert_eq!(locked.len(), TABLES);
        assert!(cache.lock().is_none());
        drop(locked);
        assert!(cache.lock().is_some());
    }
}
