//! Classes of characters: characters of one class are in the same sets of a pattern. The sets'
//! content comes from the reference's regex engine, so that both have one Unicode version.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokenizers::utils::SysRegex;

/// Bits of one [`ClassMask`].
const CLASSES_MAX: usize = 64;
const PAGE: usize = 256;
const PAGES: usize = 0x11_0000 / PAGE;
/// Characters that the regex engine scans at a time.
const SCAN_CHARS: u32 = 4096;
/// Planes without assigned characters; the first one's characters stand for all of them.
const EMPTY_PLANES: std::ops::Range<u32> = 0x4_0000..0xE_0000;

/// A set of classes, one bit for each.
pub(super) type ClassMask = u64;

/// Ranges of characters, inclusive and ascending.
type CharRanges = Arc<[(u32, u32)]>;

#[derive(Debug)]
pub(super) struct CharClasses {
    ascii: [u8; 128],
    /// The page of each 256 characters.
    index: Vec<u16>,
    pages: Vec<[u8; PAGE]>,
    all: ClassMask,
}

impl CharClasses {
    /// The classes of sets of single characters, given as regular expressions, and each set's
    /// classes. `None` if there are too many classes.
    pub(super) fn new(sets: &[String]) -> Option<(Self, Vec<ClassMask>)> {
        let mut members = vec![0_u64; 0x11_0000];
        for (bit, set) in sets.iter().enumerate() {
            let bit = 1_u64.checked_shl(u32::try_from(bit).ok()?)?;
            for (first, last) in members_of(set)?.iter() {
                for member in &mut members[*first as usize..=*last as usize] {
                    *member |= bit;
                }
            }
        }
        // Texts have no surrogates: these take a class that others have.
        let unassigned = members[0xd7ff];
        members[0xd800..0xe000].fill(unassigned);
        let mut class_of: HashMap<u64, u8> = HashMap::new();
        let mut masks = vec![0; sets.len()];
        let mut found = Self {
            ascii: [0; 128],
            index: Vec::with_capacity(PAGES),
            pages: Vec::new(),
            all: 0,
        };
        let mut page_of: HashMap<[u8; PAGE], u16> = HashMap::new();
        let (mut previous, mut class) = (None, 0);
        for chunk in members.chunks_exact(PAGE) {
            let mut page = [0; PAGE];
            for (slot, member) in page.iter_mut().zip(chunk) {
                if previous != Some(*member) {
                    let next = u8::try_from(class_of.len()).ok()?;
                    class = *class_of.entry(*member).or_insert(next);
                    previous = Some(*member);
                }
                *slot = class;
            }
            let next = u16::try_from(found.pages.len()).ok()?;
            let number = *page_of.entry(page).or_insert(next);
            if number == next {
                found.pages.push(page);
            }
            found.index.push(number);
        }
        if class_of.len() > CLASSES_MAX {
            return None;
        }
        for (member, class) in class_of {
            found.all |= 1 << class;
            for (bit, mask) in masks.iter_mut().enumerate() {
                *mask |= (member >> bit & 1) << class;
            }
        }
        found.ascii.copy_from_slice(&found.pages[0][..128]);
        Some((found, masks))
    }

    fn of(&self, code: u32) -> u8 {
        let page = usize::from(self.index[code as usize / PAGE]);
        self.pages[page][code as usize % PAGE]
    }

    /// All classes that characters have.
    pub(super) const fn all(&self) -> ClassMask {
        self.all
    }

    /// The class of the character that begins at `at`, and the character's length in bytes.
    #[inline]
    pub(super) fn at(&self, text: &[u8], at: usize) -> Option<(u8, usize)> {
        let byte = *text.get(at)?;
        match self.ascii.get(usize::from(byte)) {
            Some(class) => Some((*class, 1)),
            None => Some(self.at_lead(text, at, byte)),
        }
    }

    /// The class and length of a character of several bytes.
    #[inline(never)]
    fn at_lead(&self, text: &[u8], at: usize, lead: u8) -> (u8, usize) {
        let tail = |i: usize| u32::from(text.get(at + i).copied().unwrap_or(0) & 0x3f);
        let bits = u32::from(lead);
        match lead {
            0..0xe0 => (self.of((bits & 0x1f) << 6 | tail(1)), 2),
            0xe0..0xf0 => (self.of((bits & 0xf) << 12 | tail(1) << 6 | tail(2)), 3),
            _ => {
                let code = (bits & 7) << 18 | tail(1) << 12 | tail(2) << 6 | tail(3);
                (self.of(code), 4)
            }
        }
    }

    /// The class of the character that ends at `end`.
    pub(super) fn before(&self, text: &[u8], end: usize) -> Option<u8> {
        let start = char_start(text, end.checked_sub(1)?);
        self.at(text, start).map(|(class, _)| class)
    }
}

/// The start of the character that the byte at `at` belongs to.
pub(super) fn char_start(text: &[u8], mut at: usize) -> usize {
    while at > 0 && text[at] & 0xc0 == 0x80 {
        at -= 1;
    }
    at
}

/// The characters that a set matches. Kept for the process: models share their sets, and the scan
/// of all characters takes milliseconds.
fn members_of(set: &str) -> Option<CharRanges> {
    static KNOWN: Mutex<Option<HashMap<String, CharRanges>>> = Mutex::new(None);
    const KNOWN_MAX: usize = 256;
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = known().as_ref().and_then(|sets| sets.get(set)) {
        return Some(Arc::clone(found));
    }
    let found: CharRanges = scan(set)?.into();
    let mut known = known();
    let sets = known.get_or_insert_default();
    if sets.len() < KNOWN_MAX {
        sets.insert(set.to_owned(), Arc::clone(&found));
    }
    Some(found)
}

fn scan(set: &str) -> Option<Vec<(u32, u32)>> {
    let regex = SysRegex::new(&format!("(?:{set})+")).ok()?;
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    let mut from = 0;
    while from < 0x11_0000 {
        let chars = (from..from + SCAN_CHARS).filter_map(char::from_u32);
        let text: String = chars.collect();
        for (start, end) in regex.find_iter(&text) {
            let first = u32::from(text[start..].chars().next()?);
            let last = u32::from(text[..end].chars().next_back()?);
            ranges.push((first, last));
        }
        from += SCAN_CHARS;
        if EMPTY_PLANES.contains(&from) && from > EMPTY_PLANES.start {
            let whole = ranges.last() == Some(&(EMPTY_PLANES.start, from - 1));
            if whole {
                ranges.pop();
                ranges.push((EMPTY_PLANES.start, EMPTY_PLANES.end - 1));
            }
            from = EMPTY_PLANES.end;
        }
    }
    Some(ranges)
}
