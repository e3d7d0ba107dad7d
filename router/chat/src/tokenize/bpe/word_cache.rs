//! The tokens of short words of recent texts: most words of a text occur again, in it or in the next
//! one. Whole words are compared, so that a word never gets another one's tokens.
//!
//! Unlike cached segments it has no scopes: the time of one lookup, of one word, says nothing over a
//! network.

use std::sync::{Mutex, MutexGuard};

/// Words of a table of 768 KiB: most fit into the own cache of a core that has one of 1 MiB.
const SLOTS: usize = 16384;
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

const _: () = assert!(SLOTS * size_of::<CachedWord>() == 768 << 10);

/// All bytes of a short word, followed by zeros, and its length.
#[derive(Clone, Copy, Debug)]
struct WordBytes {
    bytes: [u64; 3],
    len: u8,
}

/// By length: the bytes of a word.
static MASKS: [[u64; 3]; WORD_BYTES_MAX + 1] = {
    let mut masks = [[0; 3]; WORD_BYTES_MAX + 1];
    let mut len = 1;
    while len <= WORD_BYTES_MAX {
        masks[len] = masks[len - 1];
        masks[len][(len - 1) / 8] |= 0xff << ((len - 1) % 8 * 8);
        len += 1;
    }
    masks
};

impl WordBytes {
    /// The word at a place of a text.
    #[inline]
    fn new(text: &[u8], start: usize, end: usize) -> Option<Self> {
        let len = end - start;
        let mask = MASKS.get(len)?;
        let mut last = [0; WORD_BYTES_MAX];
        let bytes = match text.get(start..start + WORD_BYTES_MAX) {
            Some(bytes) => bytes,
            None => {
                last[..len].copy_from_slice(&text[start..end]);
                &last
            }
        };
        let (numbers, _) = bytes.as_chunks::<8>();
        let number = |at: usize| u64::from_le_bytes(numbers[at]) & mask[at];
        Some(Self {
            bytes: [number(0), number(1), number(2)],
            len: len as u8,
        })
    }

    #[inline]
    fn slot(self) -> usize {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        let [first, second, third] = self.bytes;
        let mixed = folded(
            first ^ ODD,
            second ^ u64::from(self.len) ^ ODD.rotate_left(32),
        );
        folded(mixed ^ third, ODD) as usize % SLOTS
    }
}

/// Both halves of a product.
#[inline]
const fn folded(a: u64, b: u64) -> u64 {
    let product = a as u128 * b as u128;
    product as u64 ^ (product >> 64) as u64
}

impl WordCache {
    /// A table that no other text uses, if there is one.
    pub(super) fn lock(&self) -> Option<MutexGuard<'_, WordTable>> {
        self.tables.iter().find_map(|table| table.try_lock().ok())
    }
}

impl WordTable {
    /// Appends the ids of the word at a place of a text, if it was kept.
    #[inline]
    pub(super) fn append(&self, text: &[u8], start: usize, end: usize, ids: &mut Vec<u32>) -> bool {
        let Some(word) = WordBytes::new(text, start, end) else {
            return false;
        };
        let Some(slot) = self.slots.get(word.slot()) else {
            return false;
        };
        if slot.bytes != word.bytes || slot.len != word.len {
            return false;
        }
        // A copy of a fixed length takes no branch.
        let len = ids.len() + usize::from(slot.ids_len);
        ids.extend_from_slice(&slot.ids);
        ids.truncate(len);
        true
    }

    /// Keeps a word's ids, if both are short.
    pub(super) fn put(&mut self, word: &[u8], ids: &[u32]) {
        let mut kept = [0; IDS_MAX];
        if let (Some(word), Some(kept_ids)) = (
            WordBytes::new(word, 0, word.len()),
            kept.get_mut(..ids.len()),
        ) {
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

    fn get(table: &WordTable, word: &[u8]) -> Option<Vec<u32>> {
        let mut ids = vec![7];
        let found = table.append(word, 0, word.len(), &mut ids);
        assert_eq!(ids.remove(0), 7);
        assert!(found || ids.is_empty());
        found.then_some(ids)
    }

    #[test]
    fn a_word_is_kept_whole_or_not_at_all() {
        let mut table = WordTable::default();
        assert_eq!(get(&table, b"word"), None);
        table.put(b"word", &[1, 2]);
        assert_eq!(get(&table, b"word"), Some(vec![1, 2]));
        assert_eq!(get(&table, b"wor"), None);
        assert_eq!(get(&table, b""), Some(Vec::new()));
        for len in 1..=WORD_BYTES_MAX {
            let word: Vec<u8> = (0..len as u8).collect();
            table.put(&word, &[3]);
            assert_eq!(get(&table, &word), Some(vec![3]));
            for at in 0..len {
                let mut other = word.clone();
                other[at] ^= 1;
                assert_eq!(get(&table, &other), None, "{other:?}");
            }
            let longer = [&word[..], &[0]].concat();
            assert_eq!(get(&table, &longer), None, "{longer:?}");
        }
        for long in [WORD_BYTES_MAX + 1, 256, 256 + 4] {
            let word = vec![b'a'; long];
            table.put(&word, &[1]);
            assert_eq!(get(&table, &word), None);
        }
        table.put(b"split", &[1; IDS_MAX + 1]);
        assert_eq!(get(&table, b"split"), None);
    }

    #[test]
    fn a_word_is_found_wherever_it_is_in_a_text() {
        let mut table = WordTable::default();
        let text: Vec<u8> = (0..3 * WORD_BYTES_MAX as u8).collect();
        for len in 1..=WORD_BYTES_MAX {
            for start in 0..=text.len() - len {
                let word = &text[start..start + len];
                table.put(word, &[start as u32]);
                let mut ids = Vec::new();
                assert!(table.append(&text, start, start + len, &mut ids));
                assert_eq!(ids, [start as u32]);
                assert_eq!(get(&table, word), Some(ids));
            }
        }
    }

    #[test]
    fn a_later_word_replaces_another_one_of_its_slot() {
        let mut table = WordTable::default();
        let words: Vec<String> = (0..4 * SLOTS).map(|number| number.to_string()).collect();
        for (id, word) in (0..).zip(&words) {
            table.put(word.as_bytes(), &[id]);
        }
        let kept = (0..).zip(&words).filter(|(id, word)| {
            let ids = get(&table, word.as_bytes());
            assert!(
                ids.as_ref().is_none_or(|ids| ids == &[*id]),
                "another word's ids"
            );
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
            WordBytes::new(word.as_bytes(), 0, word.len()).map(WordBytes::slot)
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
