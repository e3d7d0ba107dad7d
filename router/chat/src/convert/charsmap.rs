//! The table of replacements of a SentencePiece normalizer: a double array trie of 32-bit units, as
//! the library darts-clone has them, and the replacements, each with a zero byte after it.
//!
//! The library `spm_precompiled`, which applies the table, panics where a walk leaves it.

/// Largest table. That of nmt_nfkc_cf has 250 kB.
const CHARSMAP_BYTES_MAX: usize = 4 << 20;

/// Whether every walk through the trie stays inside, and ends at a replacement that exists.
pub(super) fn is_sound(charsmap: &[u8]) -> bool {
    if charsmap.len() > CHARSMAP_BYTES_MAX {
        return false;
    }
    let Some((size, rest)) = charsmap.split_first_chunk() else {
        return false;
    };
    let size = u32::from_le_bytes(*size) as usize;
    let Some((units, replacements)) = rest.split_at_checked(size / 4 * 4) else {
        return false;
    };
    let (units, _) = units.as_chunks();
    let units: Vec<u32> = units.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
    std::str::from_utf8(replacements).is_ok_and(|text| walks_stay_inside(&units, text))
}

fn walks_stay_inside(units: &[u32], replacements: &str) -> bool {
    let Some(root) = units.first() else {
        return false;
    };
    // Positions whose children are yet to be seen. A child of `base` is at `base ^ label`.
    let mut bases = vec![offset(*root)];
    let mut seen = vec![false; units.len()];
    while let Some(base) = bases.pop() {
        match seen.get_mut(base) {
            None => return false,
            Some(true) => continue,
            Some(seen) => *seen = true,
        }
        if base | 0xff >= units.len() {
            return false;
        }
        for label in 1..=0xff {
            let position = base ^ label;
            let unit = units[position];
            if unit & (1 << 31 | 0xff) != label as u32 {
                continue;
            }
            let next = position ^ offset(unit);
            let has_leaf = unit >> 8 & 1 == 1;
            let leaf = units.get(next).map(|leaf| *leaf as usize & 0x7fff_ffff);
            if has_leaf && !leaf.is_some_and(|at| replacements.is_char_boundary(at)) {
                return false;
            }
            bases.push(next);
        }
    }
    true
}

const fn offset(unit: u32) -> usize {
    ((unit >> 10) << ((unit & 1 << 9) >> 6)) as usize
}
