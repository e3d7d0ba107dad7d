use super::*;
use crate::source_table::SourceTable;
use crate::testing::{source, source_id};
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

fn sources(count: usize) -> Vec<SourceId> {
    let mut table = SourceTable::default();
    let names = (0..count).map(|number| number.to_string());
    names.map(|name| table.intern(&source(&name))).collect()
}

/// Distinct samples of these prompts, and the blocks that they stand for.
fn distinct<'p>(prompts: impl Iterator<Item = &'p Vec<PrefixHash>>) -> HeldSize {
    let mut distinct = BTreeSet::new();
    for prompt in prompts {
        distinct.extend(prompt.iter().copied().enumerate());
    }
    let blocks = |index: usize| sampled_length(index + 1) - sampled_length(index);
    HeldSize {
        blocks: distinct
            .iter()
            .map(|&(index, _)| u64::from(blocks(index)))
            .sum(),
        samples: distinct.len() as u64,
    }
}

fn longest<'p>(prompts: impl Iterator<Item = &'p Vec<PrefixHash>>, prompt: &[PrefixHash]) -> u32 {
    let common = |other: &Vec<PrefixHash>| {
        let pairs = other.iter().zip(prompt);
        pairs.take_while(|(a, b)| a == b).count()
    };
    sampled_length(prompts.map(common).max().unwrap_or(0))
}

/// The reference model: a list of each source's prompts, and every answer computed from it.
#[derive(Default)]
struct PromptLists(Vec<(SourceId, PromptLeaf, Vec<PrefixHash>)>);

impl PromptLists {
    fn of(&self, source: SourceId) -> impl Iterator<Item = &Vec<PrefixHash>> {
        let own = self.0.iter().filter(move |(of, ..)| *of == source);
        own.map(|(_, _, prompt)| prompt)
    }

    /// Without one of them.
    fn of_without(&self, except: usize) -> impl Iterator<Item = &Vec<PrefixHash>> {
        let all = self.0.iter().enumerate();
        let others =
            all.filter(move |(index, (of, ..))| *index != except && *of == self.0[except].0);
        others.map(|(_, (_, _, prompt))| prompt)
    }

    fn check_sizes(&self, tree: &PromptTree, sources: &[SourceId]) {
        let mut samples = 0;
        for &source in sources {
            let size = distinct(self.of(source));
            assert_eq!(tree.sizes.of(source), size);
            samples += size.samples;
        }
        assert_eq!(tree.samples(), samples);
    }

    fn check_prompt(&self, tree: &PromptTree, sources: &[SourceId], probe: &[PrefixHash]) {
        let held = tree.held(probe);
        for &source in sources {
            let expected = longest(self.of(source), probe);
            assert_eq!(held.of(source), expected);
            assert_eq!(tree.longest(source, probe), expected);
            let along = tree.leaves_along(source, probe, u32::MAX);
            let along: BTreeSet<PromptLeaf> = along.into_iter().collect();
            assert_eq!(tree.with_beginnings(probe).of(source), !along.is_empty());
            let own = self.0.iter().filter(|(of, ..)| *of == source);
            let prefixes = own.filter(|(_, _, own)| !own.is_empty() && probe.starts_with(own));
            assert_eq!(along, prefixes.map(|(_, leaf, _)| *leaf).collect());
        }
    }

    fn check_each(&self, tree: &PromptTree, probe: &[PrefixHash]) {
        for (index, (source, leaf, prompt)) in self.0.iter().enumerate() {
            assert_eq!(tree.prompt(*leaf), *prompt);
            let without = longest(self.of_without(index), probe);
            assert_eq!(tree.longest_without(*source, probe, *leaf), without);
            let only = distinct(self.of(*source)).blocks - distinct(self.of_without(index)).blocks;
            assert_eq!(tree.blocks_only_of(*source, *leaf), only);
        }
    }

    /// No more nodes than ends and forks, and no holder without a prompt there.
    fn check_memory(&self, tree: &PromptTree) {
        let prompts = self.0.iter().map(|(_, _, prompt)| prompt);
        let different: BTreeSet<_> = prompts.filter(|prompt| !prompt.is_empty()).collect();
        let used = tree.nodes.len() - tree.vacant.len();
        assert!(used <= 2 * different.len() + 1, "{used} nodes");
        assert_eq!(tree.children.len() + 1, used);
        let (mut ends, mut holders) = (0, 0);
        for node in &tree.nodes {
            ends += node.ends;
            holders += node.holders.len() as u64;
        }
        let held = self.0.iter().filter(|(_, _, prompt)| !prompt.is_empty());
        assert_eq!(ends as usize, held.count());
        assert!(holders <= tree.samples(), "{holders} holders");
    }
}

#[test]
fn shared_beginnings_are_counted_once() {
    let (mut tree, id) = (PromptTree::default(), source_id());
    tree.insert(id, &prompt("abcd"));
    tree.insert(id, &prompt("abxy"));
    tree.insert(id, &prompt("abcd"));
    assert_eq!(tree.blocks(id), 6);
    assert_eq!(tree.longest(id, &prompt("abcz")), 3);
    assert_eq!(tree.longest(id, &prompt("ab")), 2);
    assert_eq!(tree.longest(id, &prompt("zzz")), 0);
}

#[test]
fn one_walk_finds_what_each_source_holds() {
    let (mut tree, ids) = (PromptTree::default(), sources(4));
    tree.insert(ids[0], &prompt("abcdef"));
    tree.insert(ids[1], &prompt("abcx"));
    tree.insert(ids[2], &prompt("ab"));
    tree.insert(ids[3], &prompt("xyz"));
    let held = |path| {
        ids.iter()
            .map(|&id| tree.held(&prompt(path)).of(id))
            .collect()
    };
    let (long, short): (Vec<u32>, Vec<u32>) = (held("abcdeq"), held("a"));
    assert_eq!((long, short), (vec![5, 3, 2, 0], vec![1, 1, 1, 0]));
    let samples = [&tree.samples(), &tree.blocks(ids[3])].map(|count| *count);
    assert_eq!(samples, [6 + 4 + 2 + 3, 3]);
}

/// Equal prompts of two sources end at one node.
#[test]
fn the_last_source_that_leaves_takes_the_node_along() {
    let (mut tree, ids) = (PromptTree::default(), sources(2));
    let leaves = [0, 1].map(|at| tree.insert(ids[at], &prompt("abcd")));
    assert_eq!(leaves[0], leaves[1]);
    tree.remove(ids[0], leaves[0]);
    assert_eq!((tree.blocks(ids[0]), tree.blocks(ids[1])), (0, 4));
    assert_eq!(tree.longest(ids[0], &prompt("abcd")), 0);
    // A source that ended nothing there.
    tree.remove(ids[0], leaves[0]);
    assert_eq!(tree.blocks(ids[1]), 4);
    tree.remove(ids[1], leaves[1]);
    PromptLists::default().check_memory(&tree);
    assert_eq!(tree.vacant.len() + 1, tree.nodes.len());
}

#[test]
fn a_leaf_removed_too_often_does_no_harm() {
    let (mut tree, id) = (PromptTree::default(), source_id());
    let mut lists = PromptLists::default();
    let leaf = tree.insert(id, &prompt("ab"));
    let long = tree.insert(id, &prompt("abcd"));
    for _ in 0..3 {
        tree.remove(id, leaf);
    }
    lists.0.push((id, long, prompt("abcd")));
    lists.check_memory(&tree);
    let gone = tree.insert(id, &prompt("x"));
    tree.remove(id, gone);
    tree.remove(id, gone);
    lists.check_memory(&tree);
    lists.check_sizes(&tree, &[id]);
}

#[test]
fn leaves_along_a_prompt_are_its_prefixes_up_to_a_length() {
    let (mut tree, ids) = (PromptTree::default(), sources(2));
    let id = ids[0];
    let short = tree.insert(id, &prompt("ab"));
    let long = tree.insert(id, &prompt("abcd"));
    tree.insert(id, &prompt("abx"));
    tree.insert(ids[1], &prompt("abc"));
    let along = |path, most| tree.leaves_along(id, &prompt(path), most);
    assert_eq!(along("abcdef", 99), [long, short]);
    assert_eq!(along("abcdef", 3), [short]);
    assert_eq!(along("abc", 99), [short]);
    assert_eq!(along("abcdef", 1), []);
}

#[test]
fn long_prompts_are_counted_by_their_sampled_lengths() {
    let (mut tree, id) = (PromptTree::default(), source_id());
    let long: Vec<_> = (1..=1000).map(PrefixHash).collect();
    tree.insert(id, &long);
    assert_eq!(tree.samples(), SAMPLES_MAX as u64);
    assert_eq!(tree.blocks(id), u64::from(sampled_length(SAMPLES_MAX)));
    assert_eq!(tree.longest(id, &long[..100]), sampled_length(100));
}

/// Prompts over a small alphabet, so that they share and part everywhere.
fn paths() -> impl Strategy<Value = String> {
    "[ab]{0,12}"
}

proptest! {
    /// Any order of insertions and removals: all answers are those of the reference model, and what
    /// is left takes no more than if nothing else had ever been.
    #[test]
    fn answers_are_those_of_lists_of_prompts(
        steps in prop::collection::vec(
            (paths(), any::<prop::sample::Index>(), 0..3_u8, 0..3_usize),
            0..60,
        ),
    ) {
        let (mut tree, ids) = (PromptTree::default(), sources(3));
        let mut lists = PromptLists::default();
        for (path, index, what, at) in steps {
            let probe = prompt(&path);
            if what > 0 || lists.0.is_empty() {
                let leaf = tree.insert(ids[at], &probe);
                lists.0.push((ids[at], leaf, probe.clone()));
            } else {
                let (source, leaf, _) = lists.0.swap_remove(index.index(lists.0.len()));
                tree.remove(source, leaf);
            }
            lists.check_sizes(&tree, &ids);
            lists.check_memory(&tree);
            lists.check_prompt(&tree, &ids, &probe);
            lists.check_each(&tree, &probe);
        }
        for (source, leaf, _) in std::mem::take(&mut lists.0) {
            tree.remove(source, leaf);
        }
        lists.check_sizes(&tree, &ids);
        lists.check_memory(&tree);
    }

    /// Hashes that no honest prompt has: nothing panics, nothing stays.
    #[test]
    fn hostile_hashes_leave_nothing_behind(
        prompts in prop::collection::vec(
            (prop::collection::vec(0..4_u64, 0..8), 0..3_usize),
            0..20,
        ),
    ) {
        let (mut tree, ids) = (PromptTree::default(), sources(3));
        let mut leaves = Vec::new();
        for (hashes, at) in prompts {
            let hashes: Vec<_> = hashes.into_iter().map(PrefixHash).collect();
            leaves.push((ids[at], tree.insert(ids[at], &hashes)));
        }
        for (source, leaf) in leaves {
            tree.remove(source, leaf);
        }
        let lists = PromptLists::default();
        lists.check_sizes(&tree, &ids);
        lists.check_memory(&tree);
    }
}
