use warmroute_proto::BlockSize;

use super::*;

fn workers(count: usize) -> Vec<(WorkerId, String)> {
    let named = |number: usize| {
        let name = format!("w{number}");
        (WorkerId::from(name.as_str()), format!("http://{name}"))
    };
    (0..count).map(named).collect()
}

#[test]
fn renderings_are_spread_and_bounded() {
    let (renders, now) = (Arc::new(ImageRenders::default()), Instant::now());
    let begin = |count| renders.begin(workers(count), now);
    let refused = |count| begin(count).err();
    assert_eq!(refused(0), Some(RenderFailure::NotOffered));
    let held: Vec<_> = (0..8).map(|_| begin(2).unwrap()).collect();
    let first = held.iter().filter(|place| place.worker == workers(1)[0].0);
    assert_eq!(first.count(), WORKER_RENDERS_MAX);
    assert_eq!(refused(2), Some(RenderFailure::Busy));
    let more: Vec<_> = (8..RENDERS_MAX).map(|_| begin(100).unwrap()).collect();
    assert_eq!(refused(100), Some(RenderFailure::Busy));
    drop(held);
    drop(begin(2).unwrap());
    drop(more);
    assert_eq!(renders.table().in_flight, 0);
}

#[test]
fn a_worker_that_failed_is_left_alone_for_a_while() {
    let (renders, now) = (Arc::new(ImageRenders::default()), Instant::now());
    let place = renders.begin(workers(1), now).unwrap();
    place.pause(now);
    drop(place);
    let refused = |count, now| renders.begin(workers(count), now).err();
    assert_eq!(refused(1, now), Some(RenderFailure::Paused));
    for _ in 0..3 {
        let other = renders.begin(workers(2), now).unwrap();
        assert_eq!(other.worker, workers(2)[1].0);
    }
    assert_eq!(refused(1, now + PAUSE), None);
    assert!(
        renders.table().workers.len() <= 1,
        "nothing is left of others"
    );
}

#[test]
fn a_rendered_prompt_has_the_keys_of_an_engines_blocks() {
    let size = |tokens| BlockSize::new(tokens).unwrap();
    let images = ImagePrompt {
        route: PromptRoute::ChatCompletions,
        info: RequestInfo {
            cache_salt: Some("tenant".to_owned()),
            reads_cache: true,
            ..RequestInfo::default()
        },
        base: "m".to_owned(),
        is_adapter: true,
        cuts: vec![size(16).into(), size(32).into()],
        form: None,
        model_max: Some(1000),
        reads: CacheReads::Allowed,
        mismatched: vec!["other".into()],
    };
    let features = serde_json::json!({
        "mm_hashes": {"image": ["a", "b"]},
        "mm_placeholders": {"image": [{"offset": 3, "length": 40}, {"offset": 43, "length": 3}]},
    });
    let tokens: Vec<u32> = (0..100).collect();
    let answer = serde_json::json!({"token_ids": tokens, "features": features}).to_string();
    let rendered = RenderedPrompt::read(answer.as_bytes()).unwrap();
    let prompt = images.hashed("adapter", &rendered).unwrap();
    assert_eq!((prompt.tokens(), prompt.blocks().len()), (100, 6));
    assert_eq!(prompt.cut(Some(size(32).into())).blocks().len(), 3);
    assert!(!prompt.is_tokenized_by(&"other".into()));
    let seed = Seed::new(Some("adapter"), Some("tenant"));
    let block = |number: usize, items: &[u64]| {
        warmroute_proto::LocalHash::of_block(&tokens[number * 16..][..16], items, seed)
    };
    let hash = warmroute_proto::hash::item_hash;
    let expected = [
        block(0, &[hash("a", 3)]),
        block(1, &[hash("a", -13)]),
        block(2, &[hash("a", -29), hash("b", 11)]),
        block(3, &[]),
    ];
    assert_eq!(prompt.blocks()[..4], expected);
    let mut cut = images;
    cut.info.truncate_prompt = Some(50);
    assert_eq!(cut.hashed("adapter", &rendered).err(), Some(TRUNCATED));
}
