//! A saved and loaded mirror is the one that lived.

use super::*;
use crate::fields::{FieldReader, Malformed};

fn bytes_of(mirror: &Mirror) -> Vec<u8> {
    let mut bytes = Vec::new();
    mirror.snapshot().write(&mut bytes);
    bytes
}

fn load(bytes: &[u8]) -> Result<Mirror, Malformed> {
    let mut reader = FieldReader::new(bytes);
    let mirror = Mirror::read(known_plain(), &mut reader)?;
    if reader.is_at_end() {
        Ok(mirror)
    } else {
        Err(Malformed("bytes behind the end"))
    }
}

fn assert_same(lived: &Mirror, loaded: &Mirror) {
    assert_eq!(loaded.image(), lived.image());
    assert_eq!(loaded.states(), lived.states());
    assert_eq!(loaded.digests(), lived.digests());
    assert_eq!(loaded.held(), lived.held());
    assert_eq!(loaded.orphans(), lived.orphans());
    assert_eq!(loaded.prefixes(), lived.prefixes());
    assert_eq!(loaded.block_size(), lived.block_size());
    assert_eq!(bytes_of(loaded), bytes_of(lived));
}

/// The mirror after a save and a load.
pub(super) fn reloaded(lived: &Mirror) -> Mirror {
    let bytes = bytes_of(lived);
    let loaded = Mirror::read(lived.config, &mut FieldReader::new(&bytes)).unwrap();
    assert_same(lived, &loaded);
    loaded
}

#[test]
fn copies_tiers_seeds_orphans_and_knowledge_come_back() {
    let mut lived = mirror(Start::Empty);
    let mut salted = run(None, &[1, 2]);
    salted.salt = Some("tenant".to_owned());
    salted.hashes = vec![EngineHash(101), EngineHash(102)];
    let mut lower = run(None, &[1]);
    lower.medium = Medium::Cpu;
    let mut second_group = run(None, &[1, 2, 3]);
    second_group.group = group(1);
    let events = vec![
        stored(None, &[1, 2, 3]),
        stored(None, &[1]),
        CacheEvent::Stored(Box::new(second_group)),
        CacheEvent::Stored(Box::new(salted)),
        CacheEvent::Stored(Box::new(lower)),
        stored(Some(77), &[8, 9]),
        removed(2),
    ];
    lived.apply(&batch(events)).unwrap();
    let mut loaded = load(&bytes_of(&lived)).unwrap();
    assert_same(&lived, &loaded);
    assert_eq!(loaded.orphans(), 2);
    for events in [
        vec![removed(1)],
        vec![removed(1)],
        vec![stored(None, &[77])],
        vec![stored(Some(102), &[5])],
        vec![removed(4_000)],
        vec![CacheEvent::Cleared],
    ] {
        let batch = batch(events);
        assert_eq!(loaded.apply(&batch), lived.apply(&batch));
        assert_same(&lived, &loaded);
    }
}

#[test]
fn what_no_mirror_could_have_been_is_refused() {
    let mut lived = mirror(Start::Empty);
    lived
        .apply(&batch(vec![
            stored(None, &[1, 2]),
            stored(Some(9), &[4]),
            stored(None, &[3]),
            removed(3),
        ]))
        .unwrap();
    let bytes = bytes_of(&lived);
    assert!(load(&bytes).is_ok());
    for len in 0..bytes.len() {
        assert!(load(&bytes[..len]).is_err(), "cut off at {len}");
    }
    let mut refused = 0;
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut other = bytes.clone();
            other[at] ^= 1 << bit;
            // A flag or an engine hash may be another and still make a mirror; then it is exactly
            // the one that is written there.
            match load(&other) {
                Ok(mirror) => assert_eq!(bytes_of(&mirror), other, "byte {at}, bit {bit}"),
                Err(_) => refused += 1,
            }
        }
    }
    assert!(
        refused > bytes.len() * 4,
        "{refused} of {}",
        bytes.len() * 8
    );
}

proptest! {
    /// At any batch: cut, save, load; then the same batches into both.
    #[test]
    fn a_loaded_mirror_behaves_like_the_one_that_lived(
        batches in proptest::collection::vec(proptest::collection::vec(ops(), 1..6), 1..40),
        at in any::<prop::sample::Index>(),
        is_empty in any::<bool>(),
    ) {
        let mut naive = Naive::default();
        let mut lived = mirror(if is_empty { Start::Empty } else { Start::Unknown });
        lived.suggest_block_size(BlockSize::new(1).unwrap());
        let mut loaded = None;
        let at = at.index(batches.len());
        for (number, ops) in batches.iter().enumerate() {
            let mut events = Vec::new();
            for op in ops {
                events.extend(naive.event(op));
            }
            naive.end_of_batch();
            let batch = batch(events);
            let changes = lived.apply(&batch);
            if let Some(loaded) = &mut loaded {
                let loaded: &mut Mirror = loaded;
                prop_assert_eq!(loaded.apply(&batch), changes);
                assert_same(&lived, loaded);
            } else if number == at {
                let copy = load(&bytes_of(&lived)).map_err(|error| {
                    TestCaseError::fail(error.to_string())
                })?;
                assert_same(&lived, &copy);
                loaded = Some(copy);
            }
        }
    }

    #[test]
    fn loading_is_total(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        drop(load(&bytes));
    }
}
