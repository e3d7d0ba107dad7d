//! Removals that differ from the one before in the block only.
//!
//! vLLM sends an event for each evicted block, hundreds in a row. Their fields are the same bytes.

use super::EngineHash;
use super::msgpack::Cursor;

/// A list of one integer.
const INT: ListForm = ListForm { list: 10, hash: 8 };
/// A list of one SHA-256 digest.
const DIGEST: ListForm = ListForm { list: 35, hash: 32 };

/// Bytes of a list of one hash, and of the hash alone.
#[derive(Clone, Copy)]
struct ListForm {
    list: usize,
    hash: usize,
}

/// The bytes of an event that removes one block, without the block's hash.
#[derive(Clone, Copy)]
pub(super) struct RemovalShape<'a> {
    before: &'a [u8],
    after: &'a [u8],
    hash_bytes: usize,
}

impl<'a> RemovalShape<'a> {
    /// The shape of an event with a list of hashes of `list_bytes`, and `bytes_after` behind it.
    /// `None` unless the list is one hash of a usual form.
    pub(super) fn of(event: &'a [u8], list_bytes: usize, bytes_after: usize) -> Option<Self> {
        let form = [INT, DIGEST]
            .into_iter()
            .find(|form| form.list == list_bytes)?;
        let (until_after, after) = event.split_at_checked(event.len().checked_sub(bytes_after)?)?;
        let before = &until_after[..until_after.len().checked_sub(form.hash)?];
        let is_one = before.ends_with(&[0x91, 0xcf]) || before.ends_with(&[0x91, 0xc4, 32]);
        is_one.then_some(Self {
            before,
            after,
            hash_bytes: form.hash,
        })
    }

    /// Passes over the next event and returns its hash, if it has this shape.
    pub(super) fn next(self, cursor: &mut Cursor<'a>) -> Option<EngineHash> {
        let rest = cursor.rest().strip_prefix(self.before)?;
        let (hash, rest) = rest.split_at_checked(self.hash_bytes)?;
        *cursor = Cursor::new(rest.strip_prefix(self.after)?);
        Some(EngineHash::of_bytes(hash))
    }
}
