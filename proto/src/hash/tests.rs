use super::*;
use crate::BlockSize;

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

fn item(identifier: &str, offset: usize, length: usize) -> PlacedItem {
    PlacedItem {
        identifier: identifier.into(),
        offset,
        length,
    }
}

/// Stable values.
#[test]
fn an_item_is_hashed_with_its_content_and_place() {
    let digest = "00000000000000ff".to_owned() + &"a".repeat(48);
    assert_eq!(item_number(&digest), 0xff);
    assert_eq!(
        item_number("00000000000000ff"),
        xxh3_64(b"00000000000000ff")
    );
    let (content, here) = (
        xxh3_64_with_seed(digest.as_bytes(), 3),
        item_hash(&digest, 3),
    );
    let bytes = [content, 3].map(u64::to_le_bytes);
    assert_eq!(here, xxh3_64_with_seed(bytes.as_flattened(), 3));
    let other = "00000000000000ff".to_owned() + &"b".repeat(48);
    assert_ne!(here, item_hash(&other, 3), "all digits count");
    assert_eq!(here, 0x3112_b2c0_d98d_c155);
    assert_ne!(here, item_hash(&digest, -3));
    assert_ne!(here, item_hash("cat", 3));
}

#[test]
fn items_count_in_every_block_that_they_overlap() {
    let tokens: Vec<u32> = (0..20).collect();
    let size = BlockSize::new(4).unwrap();
    let hashes = |items: &[PlacedItem]| local_hashes_with_items(&tokens, size, Seed::PLAIN, items);
    let block = |number: usize, items: &[(&str, i64)]| {
        let items: Vec<u64> = items.iter().map(|(id, at)| item_hash(id, *at)).collect();
        LocalHash::of_block(&tokens[number * 4..][..4], &items, Seed::PLAIN)
    };
    let items = [item("a", 2, 8), item("b", 10, 1), item("c", 11, 1)];
    let expected = [
        block(0, &[("a", 2)]),
        block(1, &[("a", -2)]),
        block(2, &[("a", -6), ("b", 2), ("c", 3)]),
        block(3, &[]),
        block(4, &[]),
    ];
    assert_eq!(hashes(&items), expected);
    assert_eq!(hashes(&[]), local_hashes(&tokens, size, Seed::PLAIN));
    // Tokens are equal, and so are the items.
    let swapped = hashes(&[item("a", 2, 8), item("c", 10, 1), item("b", 11, 1)]);
    assert_eq!(swapped[..2], expected[..2]);
    assert_ne!(swapped[2], expected[2]);
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

#[test]
fn a_block_with_a_lookahead_is_named_by_the_tokens_behind_it_too() {
    let tokens: Vec<u32> = (0..13).collect();
    let size = BlockSize::new(4).unwrap();
    let cut = |lookahead| BlockCut { size, lookahead };
    let of = |ranges: &[Range<usize>]| -> Vec<LocalHash> {
        let hash =
            |range: &Range<usize>| LocalHash::of_block(&tokens[range.clone()], &[], Seed::PLAIN);
        ranges.iter().map(hash).collect()
    };
    let hashes = |lookahead| local_hashes(&tokens, cut(lookahead), Seed::PLAIN);
    assert_eq!(hashes(0), local_hashes(&tokens, size, Seed::PLAIN));
    assert_eq!(hashes(1), of(&[0..5, 4..9, 8..13]));
    // Without two tokens behind it, the third block has no name.
    assert_eq!(hashes(2), of(&[0..6, 4..10]));
    for lookahead in 0..20 {
        let (cut, named) = (cut(lookahead), hashes(lookahead));
        assert_eq!(cut.blocks(tokens.len()), named.len());
        let chain: Vec<_> = prefix_hashes(None, &named).collect();
        assert_eq!(prompt_hashes(&tokens, cut, Seed::PLAIN), chain);
    }
    // An item that begins behind the block and within its lookahead is a part of its name.
    let items = [PlacedItem {
        identifier: "image".into(),
        offset: 4,
        length: 2,
    }];
    let named = |lookahead| local_hashes_with_items(&tokens, cut(lookahead), Seed::PLAIN, &items);
    assert_eq!(named(0)[0], hashes(0)[0]);
    let item = item_hash("image", 4);
    let expected = LocalHash::of_block(&tokens[..5], &[item], Seed::PLAIN);
    assert_eq!(named(1)[0], expected);
    assert_eq!(named(1)[2], hashes(1)[2]);
}
