//! The bytes of a snapshot: a mark with the format version, the head (a message of the codec), the
//! tree's image, and XXH3-128 over all of it.
//!
//! Not compressed: an image is almost only 8 random bytes a block, which zstd reduces by less than
//! a thousandth (docs/PERF.md). The checksum detects torn and corrupt blobs; the digests,
//! recomputed from the tree that was read, detect everything else.

use std::collections::BTreeSet;

use warmroute_proto::Source;
use warmroute_proto::codec::{self, DecodeError, EncodeError, MESSAGE_BYTES_MAX};
use warmroute_proto::snapshot::{SnapshotHead, SnapshotHolding, SnapshotSource};
use xxhash_rust::xxh3::xxh3_128;

use crate::tree::{BadImage, SourceNumber, Tree};

/// The last byte is the format's version.
const MARK: [u8; 8] = *b"WRSNAP\0\x01";
const CHECKSUM_BYTES: usize = size_of::<u128>();
const LENGTH_BYTES: usize = size_of::<u32>();

/// Why bytes are not a usable snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotReadError {
    #[error("it is of another format or version")]
    Mark,
    #[error("it is cut short")]
    Short,
    #[error("its checksum is wrong")]
    Checksum,
    #[error("its head cannot be read: {0}")]
    Head(#[from] DecodeError),
    #[error(transparent)]
    Image(#[from] BadImage),
    #[error("its parts do not belong together")]
    Parts,
    #[error("the digest of {0} is not that of its blocks")]
    Digest(Source),
}

/// Why a snapshot cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotWriteError {
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error("a head of {0} bytes is too large to be read again")]
    Head(usize),
}

/// A consistent snapshot that was read.
pub struct Restored {
    pub head: SnapshotHead,
    pub(crate) tree: Tree,
    /// Tree numbers of the folded sources, in their order.
    pub(crate) numbers: Vec<SourceNumber>,
    /// Folded sources left out for want of memory.
    pub(crate) left_out: BTreeSet<Source>,
}

/// Encodes a head and its image as a blob.
pub fn encode(head: &SnapshotHead, image: &[u8]) -> Result<Vec<u8>, SnapshotWriteError> {
    let head = codec::encode(head)?;
    let length = u32::try_from(head.len())
        .ok()
        .filter(|_| head.len() <= MESSAGE_BYTES_MAX)
        .ok_or(SnapshotWriteError::Head(head.len()))?;
    let bytes = MARK.len() + LENGTH_BYTES + head.len() + image.len() + CHECKSUM_BYTES;
    let mut blob = Vec::with_capacity(bytes);
    blob.extend_from_slice(&MARK);
    blob.extend_from_slice(&length.to_le_bytes());
    blob.extend_from_slice(&head);
    blob.extend_from_slice(image);
    let checksum = xxh3_128(&blob);
    blob.extend_from_slice(&checksum.to_le_bytes());
    Ok(blob)
}

/// Head and image of a blob, after checking the checksum.
pub fn open(blob: &[u8]) -> Result<(SnapshotHead, &[u8]), SnapshotReadError> {
    let (body, checksum) = blob.split_last_chunk().ok_or(SnapshotReadError::Short)?;
    let rest = body.strip_prefix(&MARK).ok_or(SnapshotReadError::Mark)?;
    if u128::from_le_bytes(*checksum) != xxh3_128(body) {
        return Err(SnapshotReadError::Checksum);
    }
    let (length, rest) = rest.split_first_chunk().ok_or(SnapshotReadError::Short)?;
    let length = u32::from_le_bytes(*length) as usize;
    let (head, image) = rest
        .split_at_checked(length)
        .ok_or(SnapshotReadError::Short)?;
    let head: SnapshotHead = codec::decode(head)?;
    let whole = head.image_bytes == image.len() as u64;
    let ordered = head.sources.is_sorted_by(|a, b| a.source < b.source);
    if !whole || !ordered || head.at.position.0 == 0 {
        return Err(SnapshotReadError::Parts);
    }
    Ok((head, image))
}

impl Restored {
    /// Reads a blob. Checks the checksum, and every digest against the tree's blocks.
    pub fn read(blob: &[u8]) -> Result<Self, SnapshotReadError> {
        Self::read_within(blob, usize::MAX)
    }

    /// Like [`Self::read`], with at most `bytes_max` of tree: the largest sources are left out.
    pub fn read_within(blob: &[u8], bytes_max: usize) -> Result<Self, SnapshotReadError> {
        let (head, image) = open(blob)?;
        let is_folded = |source: &&SnapshotSource| source.holding == SnapshotHolding::Folded;
        let folded: Vec<_> = head.sources.iter().filter(is_folded).collect();
        let mut by_size: Vec<usize> = (0..folded.len()).collect();
        by_size.sort_unstable_by_key(|&at| folded[at].after.count);
        let mut wanted = vec![true; folded.len()];
        let mut pairs: u64 = folded.iter().map(|source| source.after.count).sum();
        let (tree, numbers) = loop {
            let is_wanted = |at: usize| wanted.get(at).is_none_or(|&wanted| wanted);
            if let Some(read) = Tree::from_image_of(image, is_wanted, bytes_max)? {
                break read;
            }
            // Leaves out an eighth at a time: each attempt costs as much as reading what fits.
            let enough = pairs - pairs / 8;
            while let Some(at) = by_size.pop() {
                wanted[at] = false;
                pairs -= folded[at].after.count;
                if pairs < enough {
                    break;
                }
            }
            if by_size.is_empty() && wanted.iter().all(|&wanted| !wanted) {
                break Tree::from_image_of(image, |_| false, usize::MAX)?.ok_or(BadImage)?;
            }
        };
        if folded.len() != numbers.len() {
            return Err(SnapshotReadError::Parts);
        }
        let mut left_out = BTreeSet::new();
        for ((source, &number), &wanted) in folded.iter().zip(&numbers).zip(&wanted) {
            // The image has no digests: the tree's are computed from its blocks.
            if !wanted {
                left_out.insert(source.source.clone());
            } else if tree.digest(number) != source.after {
                return Err(SnapshotReadError::Digest(source.source.clone()));
            }
        }
        Ok(Self {
            head,
            tree,
            numbers,
            left_out,
        })
    }
}
