use super::*;

fn hashes(lora: Option<&str>, salt: Option<&str>) -> Vec<u64> {
    let tokens: Vec<u32> = (0..64).collect();
    let size = BlockSize::new(16).unwrap();
    let hashes = local_hashes(&tokens, size, Seed::new(lora, salt));
    hashes.into_iter().map(|hash| hash.0).collect()
}

#[test]
fn whole_prompts_are_hashed_as_their_blocks_are() {
    let tokens: Vec<u32> = (0..1000).map(|token| token * 7919).collect();
    for size in [1, 8, 16, 32, 128] {
        let seed = Seed::PLAIN.with_salt("tenant-a");
        let blocks: Vec<_> = tokens
            .chunks_exact(size)
            .map(|block| LocalHash::of_block(block, &[], seed))
            .collect();
        let size = BlockSize::new(u32::try_from(size).unwrap()).unwrap();
        assert_eq!(local_hashes(&tokens, size, seed), blocks);
        let prefixes: Vec<_> = prefix_hashes(None, &blocks).collect();
        assert_eq!(prompt_hashes(&tokens, size, seed), prefixes);
    }
}

#[test]
fn items_are_appended_in_order() {
    let tokens: Vec<u32> = (0..16).collect();
    let bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .chain([3u64, 9].iter().flat_map(|item| item.to_le_bytes()))
        .collect();
    let expected = LocalHash(xxh3_64_with_seed(&bytes, 1337));
    for items in [[3, 9], [9, 3]] {
        assert_eq!(LocalHash::of_block(&tokens, &items, Seed::PLAIN), expected);
    }
}

#[test]
fn seeds_keep_what_is_different_apart() {
    let seeds = [
        Seed::PLAIN,
        Seed::new(Some("a"), None),
        Seed::new(None, Some("a")),
        Seed::new(Some("a"), Some("a")),
        Seed::PLAIN.with_opaque(b"a"),
    ];
    for (index, seed) in seeds.iter().enumerate() {
        assert!(!seeds[..index].contains(seed));
    }
    assert_eq!(
        Seed::new(Some(""), Some("")),
        Seed::PLAIN,
        "no name is no name"
    );
}

#[test]
fn local_hashes_are_those_of_the_peer() {
    assert_eq!(
        hashes(None, None),
        [
            15310707395893867146,
            15292316782987903195,
            5532946206955930018,
            14928757266181269122
        ]
    );
    assert_eq!(
        hashes(Some("my-lora"), None),
        [
            7774427462321301335,
            11306793257002815283,
            5227710324928887427,
            16227747212725006563
        ]
    );
    assert_eq!(
        hashes(None, Some("tenant-a")),
        [
            2130915519417463704,
            14342547135021016991,
            11634673069974245442,
            3876172088424304685
        ]
    );
    assert_eq!(
        hashes(Some("my-lora"), Some("tenant-a")),
        [
            9308087154931608541,
            7049012067311110175,
            16592140720145377758,
            3993800751465012722
        ]
    );
}
