use proptest::prelude::*;
use warmroute_proto::{Change, Tier};

use super::*;

proptest! {
    #[test]
    fn any_bytes_are_a_tree_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok((tree, numbers)) = Tree::from_image(&bytes) {
            tree.check();
            let digests: Vec<_> = numbers.iter().map(|&number| tree.digest(number)).collect();
            prop_assert_eq!(digests_of_image(&bytes), Ok(digests));
        }
        let part = Tree::from_image_of(&bytes, |at| at % 2 == 0, 1 << 20);
        if let Ok(Some((tree, _))) = part {
            tree.check();
        }
    }
}

/// Prompts of 40 blocks that share beginnings, on four sources, in lower tiers and with holes.
fn rich() -> (Tree, Vec<SourceNumber>) {
    let mut tree = Tree::new();
    let numbers: Vec<_> = (0..4).map(|_| tree.open()).collect();
    for at in 0..60_u64 {
        let fork = at % 7 * 5;
        let name = |depth| {
            LocalHash(if depth < fork {
                depth
            } else {
                at << 32 | depth
            })
        };
        let blocks: Vec<_> = (0..40 - at % 11).map(name).collect();
        let tier = Tier::ALL[at as usize / 20];
        let number = numbers[at as usize % 4];
        let prefixes: Vec<_> = prefix_hashes(None, &blocks).collect();
        let held: Vec<_> = tree.held(number).collect();
        let is_new = |prefix: &PrefixHash| !held.contains(&(*prefix, tier));
        let known = prefixes.iter().take_while(|prefix| !is_new(prefix)).count();
        let stored = Change::Stored {
            parent: known.checked_sub(1).map(|last| prefixes[last]),
            blocks: blocks[known..].to_vec(),
            tier,
        };
        tree.apply(number, &stored).unwrap();
        let removed = Change::Removed {
            blocks: prefixes
                .iter()
                .copied()
                .skip(known.max(30))
                .step_by(2)
                .collect(),
            tier,
        };
        tree.apply(number, &removed).unwrap();
    }
    (tree, numbers)
}

#[test]
fn digests_of_an_image_are_those_of_the_tree() {
    let (tree, numbers) = rich();
    let digests: Vec<_> = numbers.iter().map(|&number| tree.digest(number)).collect();
    let image = tree.image(&numbers);
    assert_eq!(digests_of_image(&image), Ok(digests.clone()));
    let (copy, numbers) = Tree::from_image(&image).unwrap();
    copy.check();
    for (number, digest) in numbers.into_iter().zip(digests) {
        assert_eq!(
            (copy.digest(number), copy.recomputed_digest(number)),
            (digest, digest)
        );
    }
}

#[test]
fn sources_that_are_not_wanted_leave_nothing() {
    let (tree, numbers) = rich();
    let image = tree.image(&numbers);
    for wanted in 0..16_usize {
        let is_wanted = |at: usize| wanted >> at & 1 == 1;
        let read = Tree::from_image_of(&image, is_wanted, usize::MAX);
        let (part, copies) = read.unwrap().unwrap();
        part.check();
        for (at, (&number, &copy)) in numbers.iter().zip(&copies).enumerate() {
            let digest = if is_wanted(at) {
                tree.digest(number)
            } else {
                Digest::default()
            };
            assert_eq!(
                (part.digest(copy), part.recomputed_digest(copy)),
                (digest, digest)
            );
        }
    }
    assert!(matches!(
        Tree::from_image_of(&image, |_| true, 70_000),
        Ok(None)
    ));
}

#[test]
fn image_that_ends_early_is_refused() {
    let mut tree = Tree::new();
    let number = tree.open();
    let stored = Change::Stored {
        parent: None,
        blocks: vec![LocalHash(1), LocalHash(2)],
        tier: Tier::Disk,
    };
    tree.apply(number, &stored).unwrap();
    let image = tree.image(&[number]);
    assert!(Tree::from_image(&image).is_ok());
    for end in 0..image.len() {
        assert_eq!(Tree::from_image(&image[..end]).err(), Some(BadImage));
    }
}
