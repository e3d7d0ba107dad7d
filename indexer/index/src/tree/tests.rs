use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use warmroute_proto::hash::prefix_hashes;

use super::*;

/// Checks all invariants that the code relies on.
pub(super) fn check(tree: &Tree) {
    let mut nodes = 0;
    let mut standing = 0;
    let mut heap = 0;
    for index in 0..tree.runs.len() {
        let (id, run) = (RunId(index as u32), &tree.runs[index]);
        heap += run.heap_bytes();
        if run.len == 0 {
            assert_eq!(run.heap_bytes(), 0, "a free run");
            continue;
        }
        nodes += run.len as usize;
        standing += run.leads.len();
        assert_eq!(run.chunks.len(), (run.len as usize).div_ceil(CHUNK));
        assert_eq!(run.tail, tree.prefix_at(id, run.len - 1));
        let mut parent = run.parent.some().map(|above| {
            assert!((1..=tree.run(above).len).contains(&run.attach));
            assert_eq!(run.start, tree.run(above).start + run.attach);
            tree.prefix_at(above, run.attach - 1)
        });
        for offset in 0..run.len {
            let prefix = PrefixHash::after(parent, tree.blocks.local(run.place(offset)));
            assert_eq!(prefix, tree.prefix_at(id, offset));
            assert_eq!(tree.locate(prefix), Some(Position { run: id, offset }));
            parent = Some(prefix);
        }
        let at_tail = run.holds.iter().filter(|hold| hold.end == run.len).count();
        assert_eq!(run.at_tail as usize, at_tail);
        let grown = tree.grown.iter().find(|grown| grown.run == id);
        let held = run.holds.iter().map(|hold| hold.end).max().unwrap_or(0);
        let wanted = grown.map_or(run.len, |grown| grown.len_before);
        assert!(
            (wanted..=run.len).contains(&held),
            "blocks without a holder"
        );
        assert!(
            run.leads
                .windows(2)
                .all(|pair| pair[0].source < pair[1].source)
        );
        check_holders(tree, id);
    }
    assert_eq!(tree.nodes, nodes);
    assert_eq!(tree.holders, standing);
    let holds = tree.runs.iter().flat_map(|run| &run.holds);
    heap += holds.map(|hold| hold.spans.heap_bytes()).sum::<usize>();
    heap += tree
        .sources
        .iter()
        .map(SourceHoldings::list_bytes)
        .sum::<usize>();
    assert_eq!(tree.heap, heap);
    let listed: usize = tree.sources.iter().map(|source| source.runs.len()).sum();
    assert_eq!(listed, standing);
}

/// Checks what a run's holders hold and need against its child runs.
fn check_holders(tree: &Tree, id: RunId) {
    let run = tree.run(id);
    let mut children = Vec::new();
    let mut child = run.first_child;
    while let Some(at) = child.some() {
        assert_eq!(tree.run(at).parent, id);
        children.push(tree.run(at));
        child = tree.run(at).next_sibling;
    }
    for (at, (lead, hold)) in run.leads.iter().zip(&run.holds).enumerate() {
        let source = &tree.sources[lead.source.index()];
        assert_eq!(source.runs[hold.slot as usize], id);
        let mine: Vec<_> = children
            .iter()
            .filter(|child| child.find(lead.source).is_ok())
            .map(|child| child.attach)
            .collect();
        assert_eq!(hold.children as usize, mine.len());
        let pin = mine.iter().copied().max().unwrap_or(0);
        assert!(hold.pin >= pin && (hold.pin_is_old || hold.pin == pin));
        let end = run.held_end(at).max(pin);
        assert!(hold.end >= end);
        assert!(source.life != SourceLife::Open || hold.end == end);
        assert!(hold.spans.as_leading().is_none_or(|blocks| blocks == 0));
    }
}

/// How many nodes the source stands in.
fn entries(tree: &Tree, number: SourceNumber) -> usize {
    tree.listed(number).count()
}

type Pairs = BTreeSet<(PrefixHash, Tier)>;

fn locals(names: &[u64]) -> Vec<LocalHash> {
    names.iter().map(|&name| LocalHash(name)).collect()
}

fn prefixes(names: &[u64]) -> Vec<PrefixHash> {
    prefix_hashes(None, &locals(names)).collect()
}

fn prefix(names: &[u64]) -> PrefixHash {
    *prefixes(names).last().unwrap()
}

fn stored(parent: &[u64], names: &[u64], tier: Tier) -> Change {
    Change::Stored {
        parent: prefixes(parent).last().copied(),
        blocks: locals(names),
        tier,
    }
}

fn removed(chains: &[&[u64]], tier: Tier) -> Change {
    Change::Removed {
        blocks: chains.iter().map(|chain| prefix(chain)).collect(),
        tier,
    }
}

fn run(tree: &Tree, number: SourceNumber, names: &[u64]) -> (u32, u32, u32) {
    let runs = tree.lookup(&locals(names), &[(number, TierMask::ALL)]);
    (runs[0].gpu, runs[0].cpu, runs[0].disk)
}

fn reclaim_all(tree: &mut Tree) {
    while tree.reclaim(7) {
        tree.check();
    }
}

#[test]
fn hole_ends_the_run_until_it_is_back() {
    let mut tree = Tree::new();
    let w = tree.open();
    tree.apply(w, &stored(&[], &[1, 2, 3, 4], Tier::Gpu))
        .unwrap();
    tree.apply(w, &removed(&[&[1, 2]], Tier::Gpu)).unwrap();
    assert_eq!(run(&tree, w, &[1, 2, 3, 4]), (1, 0, 0));
    assert_eq!(tree.digest(w).count, 3);
    tree.apply(w, &stored(&[1], &[2], Tier::Gpu)).unwrap();
    assert_eq!(run(&tree, w, &[1, 2, 3, 4]), (4, 0, 0));
}

#[test]
fn lower_tiers_continue_where_the_gpu_ends_and_the_gpu_does_not_come_back() {
    let mut tree = Tree::new();
    let w = tree.open();
    tree.apply(w, &stored(&[], &[1, 2], Tier::Gpu)).unwrap();
    tree.apply(w, &stored(&[1, 2], &[3], Tier::Disk)).unwrap();
    tree.apply(w, &stored(&[1, 2, 3], &[4], Tier::Cpu)).unwrap();
    tree.apply(w, &stored(&[1, 2, 3], &[4], Tier::Disk))
        .unwrap();
    tree.apply(w, &stored(&[1, 2, 3, 4], &[5], Tier::Gpu))
        .unwrap();
    assert_eq!(run(&tree, w, &[1, 2, 3, 4, 5]), (2, 1, 1));
}

#[test]
fn deepest_resume_point_is_found_below_its_root_only() {
    const ROOT: u64 = LocalHash::RESUME_ROOT.0;
    let mut tree = Tree::new();
    let (points, runs) = (tree.open(), tree.open());
    assert_eq!((points.index(), runs.index()), (0, 1));
    let allowed = [TierMask::ALL; 2];
    assert_eq!(tree.resume_depths(&locals(&[1, 2]), &allowed), []);
    tree.apply(points, &stored(&[], &[ROOT, 1, 2, 3, 4], Tier::Gpu))
        .unwrap();
    let ancestors: [&[u64]; 3] = [&[ROOT], &[ROOT, 1], &[ROOT, 1, 2, 3]];
    tree.apply(points, &removed(&ancestors, Tier::Gpu)).unwrap();
    tree.apply(runs, &stored(&[], &[1, 2, 3], Tier::Gpu))
        .unwrap();
    for (names, depth) in [
        (&[1, 2, 3, 4, 5][..], 4),
        (&[1, 2, 3, 4], 4),
        (&[1, 2, 3], 2),
        (&[1, 2, 9], 2),
        (&[1], 0),
        (&[], 0),
    ] {
        assert_eq!(tree.resume_depths(&locals(names), &allowed), [depth, 0]);
        // A reader without the rule finds nothing.
        assert_eq!(run(&tree, points, names), (0, 0, 0));
    }
    let unknown = [TierMask::NONE, TierMask::ALL];
    assert_eq!(tree.resume_depths(&locals(&[1, 2]), &unknown), [0, 0]);
}

/// A prompt is hashed in steps, as far as the tree reaches.
#[test]
fn resume_points_of_a_long_prompt_are_found() {
    let mut tree = Tree::new();
    let number = tree.open();
    let path: Vec<u64> = std::iter::once(LocalHash::RESUME_ROOT.0)
        .chain(1..=2000)
        .collect();
    for depth in [2000, 1024, 513, 512, 511, 256] {
        tree.apply(number, &stored(&[], &path[..=depth], Tier::Gpu))
            .unwrap();
        let above: Vec<_> = (1..=depth).map(|len| &path[..len]).collect();
        tree.apply(number, &removed(&above, Tier::Gpu)).unwrap();
    }
    let points = [2000, 1024, 513, 512, 511, 256];
    for common in [0, 255, 256, 257, 511, 512, 513, 700, 1023, 1024, 1999, 2000] {
        let prompt: Vec<u64> = (1..=common).chain(5000..6000).collect();
        let deepest = points
            .into_iter()
            .filter(|&point| u64::from(point) <= common)
            .max();
        let found = tree.resume_depths(&locals(&prompt), &[TierMask::ALL]);
        assert_eq!(found, [deepest.unwrap_or(0)], "{common}");
    }
}

/// Wherever a prompt is cut, what its later part answers, and elsewhere what its first part does.
#[test]
fn a_prompt_in_two_parts_is_credited_like_the_whole() {
    let mut tree = Tree::new();
    let path: Vec<u64> = (1..=600).collect();
    let resume = [&[LocalHash::RESUME_ROOT.0], &*path].concat();
    let mut hold = |pieces: &[(usize, usize, Tier)]| {
        let number = tree.open();
        for &(from, to, tier) in pieces {
            tree.apply(number, &stored(&path[..from], &path[from..to], tier))
                .unwrap();
        }
        number
    };
    hold(&[(0, 600, Tier::Gpu)]);
    hold(&[(0, 250, Tier::Gpu), (250, 400, Tier::Cpu)]);
    let holed = hold(&[
        (0, 300, Tier::Gpu),
        (300, 301, Tier::Disk),
        (301, 400, Tier::Gpu),
    ]);
    hold(&[(0, 100, Tier::Cpu), (100, 120, Tier::Disk)]);
    let branch = tree.open();
    let turn = [&path[..350], &[9000, 9001]].concat();
    tree.apply(branch, &stored(&[], &turn, Tier::Gpu)).unwrap();
    let none = &removed(&[&path[..280]], Tier::Gpu);
    tree.apply(holed, none).unwrap();
    let points = tree.open();
    for depth in [512, 256, 40] {
        tree.apply(points, &stored(&[], &resume[..=depth], Tier::Gpu))
            .unwrap();
        let above: Vec<_> = (1..=depth).map(|len| &resume[..len]).collect();
        tree.apply(points, &removed(&above, Tier::Gpu)).unwrap();
    }
    let allowed = [TierMask::ALL; 6];
    let root = PrefixHash::after(None, LocalHash::RESUME_ROOT);
    for prompt in [
        &path[..],
        &path[..450],
        &turn,
        &[&path[..], &[7, 8]].concat(),
    ] {
        let blocks = locals(prompt);
        let chain: Vec<_> = prefix_hashes(None, &blocks).collect();
        let points: Vec<_> = prefix_hashes(Some(root), &blocks).collect();
        let whole = tree.lookup_credit(&blocks, &chain, &allowed);
        assert!(
            whole.iter().all(|run| *run != Tiers::default()),
            "{whole:?}"
        );
        for cut in 1..blocks.len() {
            let mut runs = tree.lookup_credit(&blocks[..cut], &chain[..cut], &allowed);
            let before = BlocksBefore {
                blocks: cut as u32,
                prefix: chain[cut - 1],
                resume: points[cut - 1],
            };
            let rest = (&blocks[cut..], &chain[cut - 1..]);
            let deep = tree.lookup_deep_credit(&before, rest.0, rest.1, &allowed);
            for (run, deep) in runs.iter_mut().zip(deep) {
                if deep != Tiers::default() {
                    *run = deep;
                }
            }
            assert_eq!(runs, whole, "{cut} of {}", blocks.len());
            // Its depth is not that of a hash that is known elsewhere.
            for blocks in [cut as u32 + 1, u32::MAX] {
                let other = BlocksBefore { blocks, ..before };
                let none = tree.lookup_deep_credit(&other, rest.0, rest.1, &allowed);
                assert!(none.iter().all(|run| *run == Tiers::default()));
            }
        }
    }
}

#[test]
fn tier_that_is_not_allowed_holds_nothing() {
    let mut tree = Tree::new();
    let w = tree.open();
    tree.apply(w, &stored(&[], &[1, 2], Tier::Gpu)).unwrap();
    tree.apply(w, &stored(&[], &[1], Tier::Cpu)).unwrap();
    let lower = TierMask::ALL.without(Tier::Gpu);
    let runs = tree.lookup(&locals(&[1, 2]), &[(w, lower), (w, lower)]);
    assert_eq!(
        runs[0],
        Tiers {
            gpu: 0,
            cpu: 1,
            disk: 0
        }
    );
    assert_eq!(runs[0], runs[1]);
    let runs = tree.lookup(&locals(&[1, 2]), &[(w, TierMask::NONE)]);
    assert_eq!(runs[0], Tiers::default());
}

#[test]
fn contradictions_are_named() {
    let mut tree = Tree::new();
    let (w, other) = (tree.open(), tree.open());
    tree.apply(other, &stored(&[], &[1, 2], Tier::Gpu)).unwrap();
    let (one, two) = (prefix(&[1]), prefix(&[1, 2]));
    let tier = Tier::Gpu;
    assert_eq!(
        tree.apply(w, &stored(&[1], &[2], tier)),
        Err(ChangeError::NoParent { parent: one }),
        "another source's node is no parent"
    );
    assert_eq!(
        tree.apply(w, &removed(&[&[1, 2]], tier)),
        Err(ChangeError::NotHeld { prefix: two, tier })
    );
    assert_eq!(
        tree.apply(other, &stored(&[], &[1], tier)),
        Err(ChangeError::AlreadyHeld { prefix: one, tier })
    );
    tree.apply(other, &removed(&[&[1]], tier)).unwrap();
    assert_eq!(
        tree.apply(other, &removed(&[&[1]], tier)),
        Err(ChangeError::NotHeld { prefix: one, tier }),
        "kept for its child, but not held"
    );
    tree.close(other);
    assert_eq!(
        tree.apply(other, &stored(&[], &[9], tier)),
        Err(ChangeError::Closed)
    );
}

#[test]
fn parent_is_forgotten_with_its_last_descendant() {
    let mut tree = Tree::new();
    let w = tree.open();
    tree.apply(w, &stored(&[], &[1, 2], Tier::Gpu)).unwrap();
    tree.apply(w, &removed(&[&[1]], Tier::Gpu)).unwrap();
    tree.apply(w, &stored(&[1], &[3], Tier::Cpu)).unwrap();
    tree.apply(w, &removed(&[&[1, 2]], Tier::Gpu)).unwrap();
    tree.apply(w, &removed(&[&[1, 3]], Tier::Cpu)).unwrap();
    let parent = prefix(&[1]);
    assert_eq!(
        tree.apply(w, &stored(&[1], &[2], Tier::Gpu)),
        Err(ChangeError::NoParent { parent })
    );
    assert_eq!(tree.nodes(), 0);
}

#[test]
fn closed_source_is_dead_before_its_memory_is_back() {
    let mut tree = Tree::new();
    let old = tree.open();
    tree.apply(old, &stored(&[], &[1, 2, 3], Tier::Gpu))
        .unwrap();
    tree.close(old);
    let new = tree.open();
    assert_ne!(old, new, "a number with remains is not given again");
    assert_eq!(run(&tree, new, &[1, 2, 3]), (0, 0, 0));
    tree.apply(new, &stored(&[], &[1], Tier::Gpu)).unwrap();
    assert_eq!(tree.held(old).count(), 0);
    assert_eq!(tree.digest(old), Digest::default());
    reclaim_all(&mut tree);
    assert_eq!(tree.nodes(), 1);
    assert_eq!(tree.open(), old, "numbers stay dense");
    assert_eq!(run(&tree, new, &[1, 2, 3]), (1, 0, 0));
}

#[test]
fn long_paths_go_on_in_further_runs() {
    let mut tree = Tree::new();
    let (a, b) = (tree.open(), tree.open());
    let path: Vec<u64> = (0..20_000).collect();
    for part in (0..path.len()).step_by(700) {
        let end = path.len().min(part + 700);
        let change = stored(&path[..part], &path[part..end], Tier::Gpu);
        tree.apply(a, &change).unwrap();
    }
    tree.apply(b, &stored(&[], &path, Tier::Cpu)).unwrap();
    tree.check();
    assert_eq!(run(&tree, a, &path), (20_000, 0, 0));
    assert_eq!(run(&tree, b, &path), (0, 20_000, 0));
    tree.apply(a, &removed(&[&path[..9_000]], Tier::Gpu))
        .unwrap();
    assert_eq!(run(&tree, a, &path), (8_999, 0, 0));
    tree.apply(b, &Change::Cleared { tier: Tier::Cpu }).unwrap();
    tree.check();
    assert_eq!(entries(&tree, a), 20_000);
    assert_eq!(entries(&tree, b), 0);
}

/// Other threads run between the steps.
#[test]
fn many_nodes_become_changes_in_short_steps() {
    let mut tree = Tree::new();
    let source = tree.open();
    let path: Vec<u64> = (0..10_000).collect();
    tree.apply(source, &stored(&[], &path, Tier::Gpu)).unwrap();
    let mut pauses = 0;
    let changes = tree.nodes_of(source).into_changes_in_steps(|| pauses += 1);
    assert_eq!(changes, tree.dump(source));
    assert!(pauses >= 2 * (path.len() / 256), "{pauses}");
}

#[test]
fn blocks_that_are_moved_stay_what_they_are() {
    let mut tree = Tree::new();
    let numbers: Vec<_> = (0..3).map(|_| tree.open()).collect();
    let path = |of: u64, len: u64| (0..len).map(|at| of << 32 | at).collect::<Vec<_>>();
    for round in 0..60_u64 {
        let number = numbers[round as usize % 3];
        let blocks = path(round, 1 + round * 7);
        tree.apply(number, &stored(&[], &blocks, Tier::Gpu))
            .unwrap();
    }
    let kept = tree.digest(numbers[2]);
    tree.close(numbers[0]);
    tree.close(numbers[1]);
    // Nothing is given back before it is moved.
    while tree.is_reclaiming() {
        tree.reclaim(1);
    }
    let (bytes, spare) = (tree.bytes(), tree.spare_bytes());
    assert!(spare > 0);
    while tree.compact(CHUNK, 0) {
        tree.check();
    }
    assert_eq!(tree.spare_bytes(), 0);
    assert!(tree.bytes() + spare <= bytes + (1 << 16));
    assert_eq!(tree.recomputed_digest(numbers[2]), kept);
    // What was freed twice would be given away twice.
    let number = tree.open();
    for round in 100..140_u64 {
        let blocks = path(round, 1 + round);
        tree.apply(number, &stored(&[], &blocks, Tier::Gpu))
            .unwrap();
        tree.check();
    }
    assert_eq!(tree.recomputed_digest(numbers[2]), kept);
}

/// The last run has a child before it.
#[test]
fn a_run_that_is_moved_keeps_its_children() {
    let mut tree = Tree::new();
    let (kept, gone) = (tree.open(), tree.open());
    for name in [1, 2, 3] {
        tree.apply(gone, &stored(&[], &[name], Tier::Gpu)).unwrap();
    }
    tree.apply(kept, &stored(&[], &[4, 5], Tier::Gpu)).unwrap();
    tree.close(gone);
    // Frees the runs, and leaves the compaction to later.
    while tree.is_reclaiming() {
        tree.reclaim(1);
    }
    tree.apply(kept, &stored(&[4], &[6], Tier::Gpu)).unwrap();
    while tree.compact(1, 0) {
        tree.check();
    }
    tree.check();
    assert_eq!(run(&tree, kept, &[4, 6]), (2, 0, 0));
}

/// A fleet of 40 sources shrinks to five: the tree takes as much memory as one that never knew more.
#[test]
fn memory_of_closed_sources_is_freed() {
    let mut tree = Tree::new();
    let numbers: Vec<_> = (0..40).map(|_| tree.open()).collect();
    let shared: Vec<u64> = (0..64).collect();
    for round in 0..400_u64 {
        for (number, name) in numbers.iter().zip(1_u64..) {
            let own: Vec<u64> = (0..10 + round % 40)
                .map(|at| name << 48 | round << 32 | at)
                .collect();
            let path: Vec<u64> = shared.iter().copied().chain(own).collect();
            let known = tree.held(*number).next().is_some();
            let parent = if known { &path[..64] } else { &[] };
            let change = stored(parent, &path[parent.len()..], Tier::Gpu);
            tree.apply(*number, &change).unwrap();
        }
    }
    // Those that stay are spread over all memory.
    let (kept, gone): (Vec<_>, Vec<_>) = numbers.iter().partition(|number| number.0 % 8 == 7);
    let full_image = tree.image(&numbers);
    for number in gone {
        tree.close(number);
    }
    let full = tree.bytes();
    while tree.reclaim(64) {}
    tree.check();
    let (fresh, _) = Tree::from_image(&tree.image(&kept)).unwrap();
    let (old, new) = (tree.bytes(), fresh.bytes());
    assert!(full > 5 * new, "{full} bytes of 40 sources");
    assert!(old * 5 <= new * 6, "{old} bytes, and {new} of a fresh tree");
    // Without a reserve, and after a restart from an image of all.
    let (mut restored, all) = Tree::from_image(&full_image).unwrap();
    for number in all.iter().filter(|number| number.0 % 8 != 7) {
        restored.close(*number);
    }
    restored.trim();
    tree.trim();
    while tree.reclaim(64) | restored.reclaim(64) {}
    restored.check();
    for bytes in [tree.bytes(), restored.bytes()] {
        assert!(
            bytes * 10 <= new * 11,
            "{bytes} bytes, and {new} of a fresh tree"
        );
    }
}

/// Each batch frees twice as many chunks as a step moves: there is free memory after every step.
#[test]
fn trimming_ends_under_a_steady_stream_of_stores_and_removals() {
    const BATCH: u64 = 8;
    const PROMPTS: u64 = 1_000;
    let mut tree = Tree::new();
    let (stays, leaves) = (tree.open(), tree.open());
    let path = |name: u64| (0..16).map(|at| name << 8 | at).collect::<Vec<_>>();
    for name in 0..PROMPTS {
        tree.apply(leaves, &stored(&[], &path(1 << 32 | name), Tier::Gpu))
            .unwrap();
        tree.apply(stays, &stored(&[], &path(name), Tier::Gpu))
            .unwrap();
    }
    tree.close(leaves);
    tree.trim();
    let full = tree.bytes();
    // A step frees 4 chunks of the source that left, then moves 4.
    let steps_max = 2 * PROMPTS / 4 + 50;
    for name in 0..steps_max * BATCH {
        tree.apply(stays, &stored(&[], &path(PROMPTS + name), Tier::Gpu))
            .unwrap();
        let evicted = path(name);
        let chains: Vec<_> = (1..=16).rev().map(|to| &evicted[..to]).collect();
        tree.apply(stays, &removed(&chains, Tier::Gpu)).unwrap();
        if name % BATCH == BATCH - 1 {
            tree.reclaim(64);
        }
    }
    tree.check();
    assert!(tree.trim == Trim::Off, "trimming has not ended");
    assert!(tree.bytes() * 10 < full * 6, "{} of {full}", tree.bytes());
}

/// A run that grows, has a child, and grows again.
#[test]
fn what_was_added_ahead_goes_with_what_hangs_at_it() {
    let mut tree = Tree::new();
    let w = tree.open();
    tree.apply(w, &stored(&[], &[9], Tier::Gpu)).unwrap();
    for apply in 0..4 {
        let changes = [
            stored(&[9], &[1, 2], Tier::Gpu),
            stored(&[9, 1], &[3], Tier::Gpu),
            stored(&[9, 1, 2], &[4, 5], Tier::Gpu),
        ];
        for change in &changes {
            let mut growth = tree.warm(w, change, &mut Vec::new());
            tree.grow(change, &mut growth);
            assert_eq!(growth.left(), 0);
            tree.check();
        }
        assert_eq!(tree.nodes(), 6);
        for change in &changes[..apply] {
            tree.apply(w, change).unwrap();
        }
        tree.drop_grown();
        tree.check();
        assert_eq!(tree.nodes(), [1, 3, 4, 6][apply]);
        tree.apply(w, &Change::Cleared { tier: Tier::Gpu }).unwrap();
        tree.apply(w, &stored(&[], &[9], Tier::Gpu)).unwrap();
    }
}

/// Between two turns another source stores the same, and then something else.
#[test]
fn blocks_stored_by_others_between_turns_are_not_added_again() {
    let mut tree = Tree::new();
    let (w, other) = (tree.open(), tree.open());
    tree.apply(w, &stored(&[], &[1], Tier::Gpu)).unwrap();
    let change = stored(&[1], &[2, 3, 4, 5], Tier::Gpu);
    let mut growth = tree.warm(w, &change, &mut Vec::new());
    tree.apply(other, &stored(&[], &[1, 2, 3, 9], Tier::Gpu))
        .unwrap();
    while growth.left() > 0 {
        tree.grow(&change, &mut growth);
        tree.check();
    }
    tree.apply(w, &change).unwrap();
    tree.check();
    assert_eq!(tree.nodes(), 6);
}

/// A model of the tree as sets of pairs.
#[derive(Clone, Default)]
struct Model {
    pairs: Pairs,
    /// Parent and local hash of every prefix ever met.
    known: BTreeMap<PrefixHash, (Option<PrefixHash>, LocalHash)>,
}

impl Model {
    /// Is the prefix held in any tier, or an ancestor of one that is?
    fn has_node(&self, wanted: PrefixHash) -> bool {
        self.pairs.iter().any(|&(held, _)| {
            let mut next = Some(held);
            while let Some(at) = next {
                if at == wanted {
                    return true;
                }
                next = self.known[&at].0;
            }
            false
        })
    }

    fn apply(&mut self, change: &Change) -> Result<(), ()> {
        match change {
            Change::Stored {
                parent,
                blocks,
                tier,
            } => {
                let mut parent = *parent;
                for &local in blocks {
                    let prefix = PrefixHash::after(parent, local);
                    if parent.is_some_and(|parent| !self.has_node(parent)) {
                        return Err(());
                    }
                    self.known.insert(prefix, (parent, local));
                    if !self.pairs.insert((prefix, *tier)) {
                        return Err(());
                    }
                    parent = Some(prefix);
                }
            }
            Change::Removed { blocks, tier } => {
                for &prefix in blocks {
                    if !self.pairs.remove(&(prefix, *tier)) {
                        return Err(());
                    }
                }
            }
            Change::Cleared { tier } => self.pairs.retain(|&(_, held)| held != *tier),
        }
        Ok(())
    }

    fn run(&self, names: &[u64], allowed: TierMask) -> Tiers<u32> {
        let has = |prefix, tier| allowed.has(tier) && self.pairs.contains(&(prefix, tier));
        let chain = prefixes(names);
        let gpu = chain
            .iter()
            .take_while(|&&prefix| has(prefix, Tier::Gpu))
            .count();
        let mut run = Tiers {
            gpu: u32::try_from(gpu).unwrap(),
            ..Tiers::default()
        };
        for &prefix in &chain[gpu..] {
            if has(prefix, Tier::Cpu) {
                run.cpu += 1;
            } else if has(prefix, Tier::Disk) {
                run.disk += 1;
            } else {
                break;
            }
        }
        run
    }
}

#[derive(Clone, Debug)]
enum Step {
    Change(usize, Change),
    Record(Record),
    NewGeneration(usize),
    Reclaim(usize),
    Compact,
    /// The tree becomes what its image is read as.
    Restore,
}

/// Changes that are made ready for, each in so many turns, while other things happen between the
/// turns.
#[derive(Clone, Debug)]
struct Record {
    source: usize,
    changes: Vec<(Change, u8)>,
    between: Vec<Option<Step>>,
    /// What is asked for between the turns.
    names: Vec<u64>,
    comes: bool,
}

fn chain() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(0..3_u64, 1..6)
}

fn tier() -> impl Strategy<Value = Tier> {
    prop::sample::select(Tier::ALL.to_vec())
}

fn change() -> impl Strategy<Value = Change> {
    let store = (chain(), 0..6_usize, tier()).prop_map(|(chain, cut, tier)| {
        let cut = cut.min(chain.len() - 1);
        stored(&chain[..cut], &chain[cut..], tier)
    });
    prop_oneof![
        6 => store,
        4 => (chain(), tier()).prop_map(|(chain, tier)| removed(&[&chain], tier)),
        1 => tier().prop_map(|tier| Change::Cleared { tier }),
    ]
}

fn short_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        16 => (0..3_usize, change()).prop_map(|(source, change)| Step::Change(source, change)),
        1 => (0..3_usize).prop_map(Step::NewGeneration),
        2 => (0..4_usize).prop_map(Step::Reclaim),
        1 => Just(Step::Compact),
        1 => Just(Step::Restore),
    ]
}

fn record() -> impl Strategy<Value = Record> {
    let changes = prop::collection::vec((change(), 0..4_u8), 1..6);
    let between = prop::collection::vec(prop::option::weighted(0.2, short_step()), 0..8);
    let comes = prop::bool::weighted(0.8);
    (0..3_usize, changes, between, chain(), comes).prop_map(
        |(source, changes, between, names, comes)| Record {
            source,
            changes,
            between,
            names,
            comes,
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![3 => short_step(), 1 => record().prop_map(Step::Record)]
}

fn mask() -> impl Strategy<Value = TierMask> {
    (0..8_u8).prop_map(TierMask)
}

struct World {
    tree: Tree,
    numbers: Vec<SourceNumber>,
    models: Vec<Model>,
}

impl World {
    fn new() -> Self {
        let mut tree = Tree::new();
        let numbers = (0..3).map(|_| tree.open()).collect();
        Self {
            tree,
            numbers,
            models: vec![Model::default(); 3],
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Change(source, change) => {
                self.apply(*source, change);
            }
            Step::Record(record) => self.record(record),
            Step::NewGeneration(source) => {
                self.tree.close(self.numbers[*source]);
                self.numbers[*source] = self.tree.open();
                self.models[*source] = Model::default();
            }
            Step::Reclaim(blocks_max) => {
                self.tree.reclaim(*blocks_max);
            }
            Step::Compact => {
                self.tree.compact(CHUNK, 0);
            }
            Step::Restore => {
                let image = self.tree.image(&self.numbers);
                (self.tree, self.numbers) = Tree::from_image(&image).unwrap();
            }
        }
        self.tree.check();
    }

    /// Does the source's tree go on?
    fn apply(&mut self, source: usize, change: &Change) -> bool {
        let tree = self.tree.apply(self.numbers[source], change);
        let model = self.models[source].apply(change);
        assert_eq!(tree.is_err(), model.is_err(), "{change:?}: {tree:?}");
        tree.is_ok()
    }

    /// As the indexer folds a record beside readers.
    fn record(&mut self, record: &Record) {
        let mut between = record.between.iter();
        for (change, turns) in &record.changes {
            let number = self.numbers[record.source];
            let mut growth = self.tree.warm(number, change, &mut Vec::new());
            for _ in 0..*turns {
                if let Some(Some(step)) = between.next() {
                    self.step(step);
                }
                self.tree.grow(change, &mut growth);
                self.tree.check();
                self.look_up(&record.names, TierMask::ALL);
            }
        }
        if record.comes {
            let mut changes = record.changes.iter();
            let _goes_on = changes.all(|(change, _)| self.apply(record.source, change));
        }
    }

    fn look_up(&self, names: &[u64], mask: TierMask) {
        let allowed: Vec<_> = self.numbers.iter().map(|&number| (number, mask)).collect();
        let runs = self.tree.lookup(&locals(names), &allowed);
        for (run, model) in runs.iter().zip(&self.models) {
            assert_eq!(*run, model.run(names, mask));
        }
    }

    fn check(&self) {
        self.tree.check();
        let image = self.tree.image(&self.numbers);
        let (image, numbers) = Tree::from_image(&image).unwrap();
        image.check();
        for (&number, &here) in numbers.iter().zip(&self.numbers) {
            assert_eq!(image.digest(number), self.tree.digest(here));
            assert_eq!(image.dump(number), self.tree.dump(here));
        }
        for (&number, model) in self.numbers.iter().zip(&self.models) {
            assert_eq!(self.tree.held(number).collect::<Pairs>(), model.pairs);
            assert_eq!(
                self.tree.digest(number),
                self.tree.recomputed_digest(number)
            );
            let mut copy = Tree::new();
            let copied = copy.open();
            for change in self.tree.dump(number) {
                copy.apply(copied, &change).unwrap();
            }
            assert_eq!(copy.held(copied).collect::<Pairs>(), model.pairs);
            assert_eq!(copy.nodes(), entries(&self.tree, number));
        }
    }
}

proptest! {
    #[test]
    fn tree_is_what_sets_say(
        steps in prop::collection::vec(step(), 0..120),
        queries in prop::collection::vec((chain(), mask()), 1..20),
    ) {
        let mut world = World::new();
        for step in &steps {
            world.step(step);
        }
        world.check();
        for (names, mask) in &queries {
            world.look_up(names, *mask);
        }
        let World { mut tree, numbers, models } = world;
        for (&number, model) in numbers.iter().zip(&models) {
            for &(prefix, tier) in &model.pairs {
                tree.apply(number, &Change::Removed { blocks: vec![prefix], tier }).unwrap();
            }
        }
        reclaim_all(&mut tree);
        prop_assert_eq!(tree.nodes(), 0);
        let lists: usize = tree.sources.iter().map(SourceHoldings::list_bytes).sum();
        let sources = tree.sources.capacity() * size_of::<SourceHoldings>();
        prop_assert_eq!(tree.bytes(), sources + lists);
    }

    /// Prompts of hundreds of blocks that branch anywhere, holes anywhere: the search over depths.
    #[test]
    fn long_prompts_are_searched(
        branches in prop::collection::vec((0..8_usize, 0..400_usize, 1..400_u64), 1..8),
        stores in prop::collection::vec((0..3_usize, 0..8_usize, 1..800_usize), 1..12),
        holes in prop::collection::vec((0..3_usize, any::<prop::sample::Index>()), 0..6),
    ) {
        let mut paths: Vec<Vec<u64>> = vec![(0..300).collect()];
        for (name, (from, cut, length)) in (1..).zip(branches) {
            let from = &paths[from % paths.len()];
            let mut path = from[..cut.min(from.len())].to_vec();
            path.extend((0..length).map(|block| name * 1_000_000 + block));
            paths.push(path);
        }
        let mut tree = Tree::new();
        let numbers: Vec<_> = (0..3).map(|_| tree.open()).collect();
        let mut held = vec![BTreeSet::new(); 3];
        for (source, path, length) in stores {
            let path = &paths[path % paths.len()];
            let path = &path[..length.min(path.len())];
            let known = prefixes(path).iter().take_while(|at| held[source].contains(*at)).count();
            if known < path.len() {
                held[source].extend(prefixes(path));
                let change = stored(&path[..known], &path[known..], Tier::Gpu);
                tree.apply(numbers[source], &change).unwrap();
            }
        }
        for (source, at) in holes {
            let all: Vec<_> = held[source].iter().copied().collect();
            if let Some(&hole) = all.get(at.index(all.len().max(1))) {
                held[source].remove(&hole);
                let change = Change::Removed { blocks: vec![hole], tier: Tier::Gpu };
                tree.apply(numbers[source], &change).unwrap();
            }
        }
        tree.check();
        for path in &paths {
            let cuts = [path.len(), path.len() / 2, path.len() / 3 + 1];
            // With many unknown blocks behind them, the middle is unknown, too.
            for (cut, more) in cuts.into_iter().flat_map(|cut| [(cut, 2), (cut, cut as u64 * 3)]) {
                let mut prompt = path[..cut].to_vec();
                prompt.extend(7_000_000..7_000_000 + more);
                let chain = prefixes(&prompt);
                let runs = tree.lookup_all(&chain);
                for (number, held) in numbers.iter().zip(&held) {
                    let run = chain.iter().take_while(|at| held.contains(*at)).count();
                    prop_assert_eq!(runs[number.index()].gpu as usize, run);
                    let all = vec![TierMask::ALL; tree.sources.len()];
                    let whole = ChainPart::whole(&chain);
                    let deepest = lookup::deepest(&tree, whole, &all)[number.index()];
                    let last = chain.iter().rposition(|at| held.contains(at)).unwrap_or(0);
                    prop_assert_eq!(deepest as usize, last);
                }
            }
        }
    }
}
