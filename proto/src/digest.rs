//! Digests, which compare two sets without listing either.

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::{PrefixHash, Tier};

/// A count and a wrapping sum of the full mixes of all held (prefix hash, tier) pairs: independent
/// of order, O(1) a change, and equal for equal sets. Two different sets agree by chance with a
/// probability of 2⁻⁶⁴.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, Encode, Decode,
)]
pub struct Digest {
    pub count: u64,
    pub sum: u64,
}

impl Digest {
    pub fn insert(&mut self, prefix: PrefixHash, tier: Tier) {
        self.count = self.count.wrapping_add(1);
        self.sum = self.sum.wrapping_add(pair_mix(prefix, tier));
    }

    pub fn remove(&mut self, prefix: PrefixHash, tier: Tier) {
        self.count = self.count.wrapping_sub(1);
        self.sum = self.sum.wrapping_sub(pair_mix(prefix, tier));
    }

    /// The sum as the fixed-width hexadecimal that `/v1/digest` shows.
    #[must_use]
    pub fn hex(&self) -> String {
        format!("{:016x}", self.sum)
    }
}

/// Stable: a wire value. The mix of the prefix hash, moved by the tier.
fn pair_mix(prefix: PrefixHash, tier: Tier) -> u64 {
    let tier = u64::from(tier.number()).wrapping_add(1);
    mix(prefix.0.wrapping_add(tier.wrapping_mul(GOLDEN_GAMMA)))
}

/// Stable: `SplitMix64`'s increment.
pub(crate) const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// Stable: `SplitMix64`'s finaliser (Steele, Lea, Flood 2014).
pub(crate) const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
