use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// The sampled hashes of a path of letters: one letter a sample.
fn prompt(path: &str) -> Vec<PrefixHash> {
    let mut hash = 0_u64;
    path.bytes()
        .map(|letter| {
            hash = (hash ^ u64::from(letter)).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
            PrefixHash(hash)
        })
        .collect()
}

/// What the set must say, computed from the list of its prompts.
fn check(set: &PromptTree, prompts: &[Vec<PrefixHash>]) {
    let mut distinct = BTreeSet::new();
    for prompt in prompts {
        distinct.extend(prompt.iter().copied().enumerate());
    }
    let blocks: u64 = distinct
        .iter()
        .map(|(index, _)| u64::from(sampled_length(index + 1) - sampled_length(*index)))
        .sum();
    assert_eq!(set.blocks(), blocks);
    assert_eq!(set.samples(), distinct.len() as u64);
    // Compressed: no more nodes than ends and forks.
    let different: BTreeSet<_> = prompts.iter().filter(|prompt| !prompt.is_empty()).collect();
    let used = set.nodes.len() - set.vacant.len();
    assert!(used <= 2 * different.len() + 1, "{used} nodes");
    assert_eq!(set.children.len() + 1, used);
}

fn longest(prompts: &[Vec<PrefixHash>], prompt: &[PrefixHash]) -> u32 {
    let common = |other: &Vec<PrefixHash>| {
        let pairs = other.iter().zip(prompt);
        pairs.take_while(|(a, b)| a == b).count()
    };
    sampled_length(prompts.iter().map(common).max().unwrap_or(0))
}

#[test]
fn shared_beginnings_are_counted_once() {
    let mut set = PromptTree::default();
    set.insert(&prompt("abcd"));
    set.insert(&prompt("abxy"));
    set.insert(&prompt("abcd"));
    assert_eq!(set.blocks(), 6);
    assert_eq!(set.longest(&prompt("abcz")), 3);
    assert_eq!(set.longest(&prompt("ab")), 2);
    assert_eq!(set.longest(&prompt("zzz")), 0);
}

#[test]
fn the_last_one_that_leaves_takes_the_blocks_along() {
    let mut set = PromptTree::default();
    let first = set.insert(&prompt("abcd"));
    let second = set.insert(&prompt("abcd"));
    set.remove(first);
    assert_eq!(set.blocks(), 4);
    set.remove(second);
    assert_eq!(set.blocks(), 0);
    check(&set, &[]);
}

#[test]
fn a_leaf_removed_too_often_does_no_harm() {
    let mut set = PromptTree::default();
    let leaf = set.insert(&prompt("ab"));
    set.insert(&prompt("abcd"));
    for _ in 0..3 {
        set.remove(leaf);
    }
    check(&set, &[prompt("abcd")]);
    let gone = set.insert(&prompt("x"));
    set.remove(gone);
    set.remove(gone);
    check(&set, &[prompt("abcd")]);
}

#[test]
fn leaves_along_a_prompt_are_its_prefixes_up_to_a_length() {
    let mut set = PromptTree::default();
    let short = set.insert(&prompt("ab"));
    let long = set.insert(&prompt("abcd"));
    set.insert(&prompt("abx"));
    assert_eq!(set.leaves_along(&prompt("abcdef"), 99), [long, short]);
    assert_eq!(set.leaves_along(&prompt("abcdef"), 3), [short]);
    assert_eq!(set.leaves_along(&prompt("abc"), 99), [short]);
    assert_eq!(set.leaves_along(&prompt("abcdef"), 1), []);
}

#[test]
fn long_prompts_are_counted_by_their_sampled_lengths() {
    let mut set = PromptTree::default();
    let long: Vec<_> = (1..=1000).map(PrefixHash).collect();
    set.insert(&long);
    assert_eq!(set.samples(), SAMPLES_MAX as u64);
    assert_eq!(set.blocks(), u64::from(sampled_length(SAMPLES_MAX)));
    assert_eq!(set.longest(&long[..100]), sampled_length(100));
}

/// Prompts over a small alphabet, so that they share and part everywhere.
fn paths() -> impl Strategy<Value = String> {
    "[ab]{0,12}"
}

proptest! {
    /// Any order of insertions and removals: what is left counts as if nothing else had ever been.
    #[test]
    fn counts_are_those_of_a_naive_set(
        steps in prop::collection::vec((paths(), any::<prop::sample::Index>(), 0..3_u8), 0..60),
    ) {
        let mut set = PromptTree::default();
        let mut held: Vec<(PromptLeaf, Vec<PrefixHash>)> = Vec::new();
        for (path, index, what) in steps {
            if what > 0 || held.is_empty() {
                let prompt = prompt(&path);
                held.push((set.insert(&prompt), prompt));
            } else {
                let (leaf, _) = held.swap_remove(index.index(held.len()));
                set.remove(leaf);
            }
            let prompts: Vec<_> = held.iter().map(|(_, prompt)| prompt.clone()).collect();
            check(&set, &prompts);
            let probe = prompt(&path);
            prop_assert_eq!(set.longest(&probe), longest(&prompts, &probe));
        }
        for (leaf, _) in held {
            set.remove(leaf);
        }
        check(&set, &[]);
    }

    /// Hashes that no honest prompt has: nothing panics, nothing stays.
    #[test]
    fn hostile_hashes_leave_nothing_behind(
        prompts in prop::collection::vec(prop::collection::vec(0..4_u64, 0..8), 0..20),
    ) {
        let mut set = PromptTree::default();
        let leaves: Vec<PromptLeaf> = prompts
            .iter()
            .map(|prompt| set.insert(&prompt.iter().copied().map(PrefixHash).collect::<Vec<_>>()))
            .collect();
        for leaf in leaves {
            set.remove(leaf);
        }
        check(&set, &[]);
    }
}
