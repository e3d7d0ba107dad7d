use super::*;
use crate::codec;
use crate::{DpRank, LocalHash};
use proptest::prelude::*;

fn blocks(count: u64) -> Vec<LocalHash> {
    (0..count)
        .map(|n| LocalHash(n.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
        .collect()
}

fn source(name: &str) -> Source {
    Source {
        worker: name.into(),
        dp_rank: DpRank(1),
    }
}

fn add(source: Source, prompt: SampledPrefix) -> Vec<u8> {
    let message = LoadMessage {
        router: RouterId([1; 16]),
        incarnation: Generation(2),
        number: RecordNumber(3),
        changes: vec![LoadChange::AddRequest {
            counter: 4,
            source,
            prefill_tokens: 5,
            blocks: 6,
            prompt,
        }],
    };
    codec::encode(&message).unwrap()
}

/// Stable: replicas of different versions must sample alike.
#[test]
fn the_sampled_lengths_never_change() {
    let lengths: Vec<u32> = sampled_lengths().collect();
    assert_eq!(lengths.len(), SAMPLES_MAX);
    assert_eq!(lengths[..64], (1..=64).collect::<Vec<_>>());
    assert_eq!(lengths[64..68], [66, 68, 70, 72]);
    assert_eq!(lengths[95..98], [128, 132, 136]);
    assert_eq!(lengths.last(), Some(&262_144));
    assert_eq!(sampled_length(0), 0);
    assert_eq!(sampled_length(usize::MAX), 262_144);
}

#[test]
fn a_gap_is_at_most_a_thirty_second_of_the_depth() {
    let lengths: Vec<u32> = sampled_lengths().collect();
    for pair in lengths.windows(2) {
        let gap = pair[1] - pair[0];
        assert!(gap >= 1 && gap <= (pair[0] / 32).max(1), "{pair:?}");
    }
}

#[test]
fn a_message_is_small_whatever_the_prompt_and_the_name() {
    for name in [1, 63, 253, 600, 3000] {
        let source = source(&"w".repeat(name));
        for count in [0, 1, 64, 1000, 300_000] {
            let prompt = SampledPrefix::of(&blocks(count)).fitting(&source);
            let bytes = add(source.clone(), prompt);
            assert!(
                bytes.len() <= LOAD_BYTES_MAX,
                "{name}, {count}: {}",
                bytes.len()
            );
        }
    }
}

#[test]
fn an_ordinary_name_costs_no_sample() {
    let full = SampledPrefix::of(&blocks(262_144));
    assert_eq!(full.hashes.len(), SAMPLES_MAX);
    let fitting = full.clone().fitting(&source(&"w".repeat(253)));
    assert_eq!(fitting, full);
}

/// Wire values: a change of a digit here splits replicas of two versions.
#[test]
fn marks_never_change() {
    let prompt = SampledPrefix::of(&[LocalHash(1), LocalHash(2)]);
    let identity = SlotIdentity::of(7, &source("w-1"), 3, &prompt);
    let marks = [(0, 0), (40, 0), (0, 40)].map(|(left, grown)| identity.mark(left, grown).0);
    assert_eq!(
        (identity.0, marks),
        (IDENTITY, MARKS),
        "identity and marks of the sample"
    );
}

const IDENTITY: u64 = 2292694848816512343;
const MARKS: [u64; 3] = [
    6645748403468989648,
    1804866324520429140,
    9397410216020757596,
];

#[test]
fn a_mark_tells_every_field() {
    let prompt = SampledPrefix::of(&blocks(3));
    let identity = |counter, name, blocks, prompt| {
        SlotIdentity::of(counter, &source(name), blocks, prompt).mark(1, 2)
    };
    let mut marks = vec![
        identity(1, "a", 4, &prompt),
        identity(2, "a", 4, &prompt),
        identity(1, "b", 4, &prompt),
        identity(1, "a", 5, &prompt),
        identity(1, "a", 4, &SampledPrefix::default()),
        SlotIdentity::of(1, &source("a"), 4, &prompt).mark(2, 1),
    ];
    marks.sort_unstable_by_key(|mark| mark.0);
    marks.dedup();
    assert_eq!(marks.len(), 6);
}

proptest! {
    /// Two prompts name the same hashes in their common prefix, and no other.
    #[test]
    fn common_prefixes_have_common_samples(
        common in 0..300_usize,
        tails in (0..300_usize, 0..300_usize),
    ) {
        let shared = blocks(600);
        let with_tail = |tail: usize, first: u64| {
            let mut prompt = shared[..common].to_vec();
            prompt.extend((0..tail as u64).map(|n| LocalHash(first.wrapping_add(n).wrapping_mul(77))));
            SampledPrefix::of(&prompt)
        };
        let (a, b) = (with_tail(tails.0, 1 << 40), with_tail(tails.1, 1 << 50));
        let same = a.hashes.iter().zip(&b.hashes).take_while(|(a, b)| a == b).count();
        let expected = sampled_lengths().take_while(|&n| n as usize <= common).count();
        prop_assert_eq!(same, expected);
    }

    #[test]
    fn weights_add_up_to_what_is_covered(count in 0..2000_u64) {
        let prompt = SampledPrefix::of(&blocks(count));
        let sum: u32 = prompt.weighted().map(|(_, weight)| weight).sum();
        prop_assert_eq!(sum, prompt.covered());
        prop_assert!(u64::from(sum) <= count);
        prop_assert!(count - u64::from(sum) <= count / 32);
    }

    /// Insertions and removals in any order leave the digest of what is left.
    #[test]
    fn the_digest_forgets_what_is_removed(
        marks in prop::collection::vec(any::<u64>(), 0..20),
        keep in 0..20_usize,
    ) {
        let mut digest = LoadDigest::default();
        let mut expected = LoadDigest::default();
        for &mark in &marks {
            digest.insert(SlotMark(mark));
        }
        for (index, &mark) in marks.iter().enumerate() {
            if index < keep {
                expected.insert(SlotMark(mark));
            } else {
                digest.remove(SlotMark(mark));
            }
        }
        prop_assert_eq!(digest, expected);
    }
}
