//! Consistent hashing of a prompt's beginning, with bounded loads (Mirrokni, Thorup and
//! Zadimoghaddam, 2016).
//!
//! A prompt belongs to the source with the greatest rendezvous weight for its first
//! [`PREFIX_TOKENS`]. A source takes it only below a bound, in percent of the mean number of
//! active requests; else the next one in the order of weights has it. The order of weights replaces the
//! ring: there is no state to keep, and a full source's keys spread over all others.

use warmroute_proto::Source;
use warmroute_proto::load::sampled_lengths;

use super::rendezvous::weight;
use crate::prompt::Prompt;

/// Tokens that decide. More would separate the turns of a young conversation, fewer would send all
/// prompts with a common system prompt to one source.
const PREFIX_TOKENS: u32 = 1024;

/// The hash of a prompt's beginning; `None` if it has no whole block.
pub(crate) fn key(prompt: &Prompt) -> Option<u64> {
    let blocks_max = (PREFIX_TOKENS / prompt.block_tokens()).max(1);
    let lengths = sampled_lengths().take_while(|&blocks| blocks <= blocks_max);
    let hashes = prompt.sampled().hashes.iter();
    hashes.zip(lengths).last().map(|(hash, _)| hash.0)
}

/// Index of the source that takes the key; `None` for an empty list. `sources` are those that may
/// be chosen, with their active requests.
pub(crate) fn taker(key: u64, sources: &[(&Source, u32)], percent: u32) -> Option<usize> {
    let active: u64 = sources.iter().map(|(_, active)| u64::from(*active)).sum();
    let mean = (active + 1) as f64 / sources.len() as f64;
    // The least loaded source is below: from 100 on the bound exceeds the mean.
    let bound = (f64::from(percent) / 100.0 * mean).ceil();
    let below = sources.iter().enumerate();
    let below = below.filter(|(_, (_, active))| f64::from(*active) < bound);
    let heaviest = below.max_by_key(|(_, (source, _))| weight(key, source));
    heaviest.map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::rendezvous::owner;
    use warmroute_proto::{BlockSize, DpRank, Seed};

    fn sources() -> Vec<Source> {
        let source = |number| Source {
            worker: format!("w{number}").into(),
            dp_rank: DpRank(0),
        };
        (0..8).map(source).collect()
    }

    fn loaded<'s>(sources: &'s [Source], active: &[u32]) -> Vec<(&'s Source, u32)> {
        sources.iter().zip(active.iter().copied()).collect()
    }

    #[test]
    fn below_the_bound_a_key_stays_with_its_owner() {
        let sources = sources();
        for key in 0..200 {
            let taken = taker(key, &loaded(&sources, &[4; 8]), 125);
            assert_eq!(taken, owner(key, sources.iter()));
        }
    }

    #[test]
    fn one_hot_key_fills_no_source_beyond_the_bound() {
        let sources = sources();
        let mut active = [0_u32; 8];
        for request in 1..=800_u32 {
            let taken = taker(7, &loaded(&sources, &active), 125).unwrap();
            active[taken] += 1;
            let bound = (1.25 * f64::from(request) / 8.0).ceil();
            assert!(active.iter().all(|&active| f64::from(active) <= bound));
        }
        // No more sources than the bound needs.
        let busy = active.iter().filter(|&&active| active > 100).count();
        assert_eq!(busy, 6, "{active:?}");
    }

    #[test]
    fn a_full_source_gives_up_only_what_exceeds_its_bound() {
        let sources = sources();
        for key in 0..200 {
            let first = owner(key, sources.iter()).unwrap();
            let mut active = [4; 8];
            active[first] = 9;
            let second = taker(key, &loaded(&sources, &active), 125).unwrap();
            let others = (0..8).filter(|&place| place != first);
            let next = others.max_by_key(|&place| weight(key, &sources[place]));
            assert_eq!(Some(second), next);
        }
    }

    #[test]
    fn every_load_has_a_taker() {
        let sources = sources();
        for active in [[0; 8], [u32::MAX; 8], [0, 0, 0, 0, 0, 0, 0, u32::MAX]] {
            assert!(taker(3, &loaded(&sources, &active), 100).is_some());
        }
        assert_eq!(taker(3, &[], 100), None);
    }

    #[test]
    fn the_first_thousand_tokens_decide() {
        let of = |changed: usize, length: usize| {
            let mut tokens: Vec<u32> = (0..4096).collect();
            tokens[changed] = 9999;
            let size = BlockSize::new(16).unwrap();
            key(&Prompt::new(&tokens[..length], size, Seed::PLAIN))
        };
        assert_eq!(of(1024, 4096), of(3000, 2000));
        assert_ne!(of(1023, 4096), of(3000, 4096));
        assert_eq!(of(40, 15), None);
        assert!(of(0, 16).is_some());
    }
}
