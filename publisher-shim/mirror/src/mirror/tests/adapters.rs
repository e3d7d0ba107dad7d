use super::*;

/// A store of the adapter `a`, loaded under this number from this path: the engine's hashes have the
/// path, as vLLM's have.
fn of_load(number: u64, path: u64, parent: &[u32], tokens: &[u32]) -> CacheEvent {
    let hash = |upto: &[u32]| {
        let mut hash = path;
        upto.iter()
            .for_each(|&token| hash = hash * 1000 + u64::from(token));
        EngineHash(hash)
    };
    let whole = [parent, tokens].concat();
    let ends = parent.len() + 1..=whole.len();
    CacheEvent::Stored(Box::new(StoredBlocks {
        hashes: ends.map(|end| hash(&whole[..end])).collect(),
        parent: (!parent.is_empty()).then(|| hash(parent)),
        lora: LoraRef::Named("a".to_owned()),
        lora_number: Some(number),
        ..run(None, tokens)
    }))
}

/// What a request of the adapter finds of this prompt.
fn found(follower: &Follower, tokens: &[u32]) -> usize {
    let seed = Seed::new(Some("a"), None);
    let held = follower.mirror.held();
    let is_held = |end: &usize| held.contains(&(seeded_prefix(&tokens[..*end], seed), Tier::Gpu));
    (1..=tokens.len()).take_while(is_held).count()
}

#[test]
fn an_adapter_from_another_path_finds_no_block_of_the_former_one() {
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![of_load(1, 7, &[], &[1, 2, 3])]);
    assert_eq!(found(&follower, &[1, 2, 3]), 3);
    // The engine computes the same prompt again: another path.
    follower.apply(vec![of_load(2, 8, &[], &[1, 2])]);
    assert_eq!(found(&follower, &[1, 2, 3]), 2);
    follower.apply(vec![of_load(2, 8, &[1, 2], &[4])]);
    assert_eq!(found(&follower, &[1, 2, 4]), 3);
    // Back to the former path: a request finds its blocks, and continues them.
    follower.apply(vec![of_load(3, 7, &[1, 2, 3], &[5])]);
    assert_eq!(found(&follower, &[1, 2, 3, 5]), 4);
    assert_eq!(found(&follower, &[1, 2, 4]), 2);
    assert_eq!(follower.gpu(), TierState::Complete);
    // Removals are of the blocks that they name, found or not.
    follower.apply(vec![removed(8001002), removed(7001002003)]);
    assert_eq!(found(&follower, &[1, 2, 3, 5]), 2);
    assert_eq!(follower.gpu(), TierState::Complete);
}

/// A prompt that no load has says nothing about the path: only the reload shows, by its number.
#[test]
fn a_reload_finds_nothing_until_a_block_shows_its_path() {
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![of_load(1, 7, &[], &[1, 2])]);
    follower.apply(vec![of_load(2, 7, &[], &[5])]);
    assert_eq!(found(&follower, &[1, 2]), 0);
    assert_eq!(found(&follower, &[5]), 1);
    // It was the same path: what it stored in between is of the same load.
    follower.apply(vec![of_load(2, 7, &[1, 2], &[3])]);
    assert_eq!(found(&follower, &[1, 2, 3]), 3);
    assert_eq!(found(&follower, &[5]), 1);
    // A request of before the reload ends.
    follower.apply(vec![of_load(3, 8, &[], &[1])]);
    assert_eq!(found(&follower, &[1, 2]), 1);
    follower.apply(vec![of_load(2, 7, &[1, 2, 3], &[4])]);
    assert_eq!(
        found(&follower, &[1, 2]),
        1,
        "it does not come back by that"
    );
    assert_eq!(follower.gpu(), TierState::Complete);
}

/// vLLM's `load_inplace` keeps the number.
#[test]
fn another_hash_of_a_held_block_shows_another_path() {
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![of_load(1, 7, &[], &[1, 2])]);
    follower.apply(vec![of_load(1, 8, &[], &[1])]);
    assert_eq!(found(&follower, &[1, 2]), 1);
    // Other adapters and plain blocks are not concerned.
    let mut other = of_load(1, 9, &[], &[1]);
    if let CacheEvent::Stored(stored) = &mut other {
        stored.lora = LoraRef::Named("b".to_owned());
    }
    follower.apply(vec![other, stored(None, &[1])]);
    assert_eq!(found(&follower, &[1]), 1);
    assert!(follower.holds(&[1]));
    let seed = Seed::new(Some("b"), None);
    let of_other = (seeded_prefix(&[1], seed), Tier::Gpu);
    assert!(follower.mirror.held().contains(&of_other));
}

#[test]
fn the_loads_that_are_kept_apart_are_bounded() {
    let mut follower = Follower::new(Start::Empty);
    for number in 1..=4 {
        follower.apply(vec![of_load(number, number, &[], &[1])]);
        assert_eq!(found(&follower, &[1]), 1);
    }
    follower.apply(vec![of_load(5, 5, &[], &[1])]);
    assert_eq!(follower.mirror.limits().gpu, Some(TierLimit::Unidentified));
    // A load whose blocks are gone leaves its place.
    follower.apply(vec![removed(1001)]);
    follower.apply(vec![of_load(6, 6, &[], &[1])]);
    assert_eq!(found(&follower, &[1]), 1);
}

#[test]
fn a_restored_mirror_keeps_loads_apart() {
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![of_load(1, 7, &[], &[1, 2])]);
    follower.apply(vec![of_load(2, 8, &[], &[1])]);
    let mut bytes = Vec::new();
    follower.mirror.snapshot().write(&mut bytes);
    let mut reader = crate::fields::FieldReader::new(&bytes);
    follower.mirror = Mirror::read(known_plain(), &mut reader).unwrap();
    follower.check();
    assert_eq!(found(&follower, &[1, 2]), 1);
    follower.apply(vec![of_load(3, 7, &[1, 2], &[3])]);
    assert_eq!(found(&follower, &[1, 2, 3]), 3);
}
