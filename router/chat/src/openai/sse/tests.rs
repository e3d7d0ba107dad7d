use proptest::prelude::*;

use super::*;

fn split(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
    let mut splitter = SseSplitter::default();
    let mut events = Vec::new();
    let mut keep = |event: SseEvent<'_>| match event {
        SseEvent::Whole(bytes) => events.push(bytes.to_vec()),
        SseEvent::Oversized(len) => events.push(format!("oversized {len}").into_bytes()),
    };
    for chunk in chunks {
        splitter.push(chunk, &mut keep);
    }
    splitter.finish(&mut keep);
    events
}

/// The definition, on the whole text: lines end with `\n` or `\r\n`, an empty line ends an event.
fn naive(text: &[u8]) -> Vec<Vec<u8>> {
    let mut events = Vec::new();
    let mut current: Vec<u8> = Vec::new();
    for line in text.split_inclusive(|&byte| byte == b'\n') {
        current.extend_from_slice(line);
        if line == b"\n" || line == b"\r\n" {
            events.push(std::mem::take(&mut current));
        }
    }
    events.push(current);
    events
        .iter()
        .map(|event| trim_line_ends(event).to_vec())
        .filter(|event| !event.is_empty())
        .collect()
}

const STREAM: &[u8] =
    b"data: {\"id\":\"c\",\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n\
    : keep-alive\n\n\
    data: {\"choices\":[{\"delta\":{\"content\":\"say \\\"usage\\\":{\\\"x\\\":1}\"}}]}\r\n\r\n\
    data: {\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\n\n\
    data: {\"choices\":[],\"usage\":{\"prompt_tokens\":40,\"completion_tokens\":2,\
    \"prompt_tokens_details\":{\"cached_tokens\":32}}}\n\n\
    data: [DONE]\n\n";

#[test]
fn both_line_ends_and_comments() {
    assert_eq!(
        split(&[b"data: a\n\ndata: b\r\n\r\n: c\n\ndata: d\ndata: e\n\n\n\n\ndata: f"]),
        [
            &b"data: a"[..],
            b"data: b",
            b": c",
            b"data: d\ndata: e",
            b"data: f"
        ]
    );
    let joined = SseEvent::Whole(b"event: x\r\ndata: d\r\ndata:e");
    assert_eq!(joined.data().as_deref(), Some(&b"d\ne"[..]));
    assert_eq!(SseEvent::Whole(b": c").data(), None);
}

#[test]
fn first_token_chunks_and_usage_do_not_depend_on_chunk_sizes() {
    for size in 1..STREAM.len() {
        let mut watch = StreamObserver::default();
        let firsts = STREAM
            .chunks(size)
            .filter(|chunk| watch.push(chunk))
            .count();
        watch.finish();
        assert_eq!(firsts, 1, "chunks of {size}");
        assert_eq!(watch.output_chunks(), 3);
        let expected = TokenUsage {
            prompt_tokens: 40,
            completion_tokens: 2,
            cached_tokens: Some(32),
        };
        assert_eq!(watch.usage(), Some(expected));
        assert!(watch.done());
    }
}

/// As Python's `json.dumps` and other writers of events format them.
#[test]
fn blanks_and_the_order_of_lines_do_not_matter() {
    let mut stream = StreamObserver::default();
    stream.push(b"data: {\"choices\": [{\"text\": \"usage\"}]}\n\n");
    assert_eq!((stream.output_chunks(), stream.usage()), (1, None));
    stream.push(b"data: {\"choices\": [ ], \"usage\" : {\"prompt_tokens\": 4}}\n\n");
    assert_eq!(stream.output_chunks(), 1);
    assert_eq!(stream.usage().map(|usage| usage.prompt_tokens), Some(4));
    assert!(!stream.done());
    stream.push(b"id: 7\ndata: {}\nevent: message_stop\n\n");
    assert!(stream.done());
}

#[test]
fn chunks_with_usage_count_as_output() {
    let mut watch = StreamObserver::default();
    watch.push(
        b"data: {\"choices\":[{\"text\":\"a\"}],\"usage\":{\"prompt_tokens\":4,\
          \"completion_tokens\":1}}\n\ndata: {\"error\":{\"message\":\"x\"}}\n\n",
    );
    assert_eq!(watch.output_chunks(), 1);
    assert_eq!(watch.usage().map(|usage| usage.completion_tokens), Some(1));
    assert!(!watch.done());
}

#[test]
fn errors_of_all_forms_are_no_output() {
    for event in [
        &b"data: {\"error\":{\"message\":\"x\"}}"[..],
        b"data: { \"error\" : \"x\" }",
        b"data: {\"object\":\"error\",\"message\":\"x\"}",
        b"event: error\ndata: {\"type\":\"error\",\"error\":{}}",
        b"data: {\"type\": \"error\", \"code\":\"x\"}",
        b"event: response.failed\ndata: {\"type\":\"response.failed\"}",
        b"event: error\ndata: x",
    ] {
        let mut stream = StreamObserver::default();
        assert!(!stream.push(&[event, b"\n\n"].concat()));
        assert!(stream.failed() && !stream.is_at_start());
        assert_eq!(stream.output_chunks(), 0);
    }
    for event in [
        &b"data: {\"id\":\"error\",\"error\":null}"[..],
        b"data: {\"error\":null,\"choices\":[]}",
        b"data: {\"choices\":[{\"text\":\"{\\\"error\\\":1}\"}]}",
        b"data: {\"type\":\"content_block_delta\"}",
    ] {
        let mut stream = StreamObserver::default();
        assert!(stream.push(&[event, b"\n\n"].concat()));
        assert!(!stream.failed());
    }
}

#[test]
fn a_stream_is_at_its_start_until_its_first_output_or_anything_that_clients_wait_for() {
    let mut stream = StreamObserver::default();
    stream.push(b"event: response.created\ndata: {}\n\nevent: response.in_progress\n");
    stream.push(b"data: {}\n\ndata: {\"cho");
    assert!(stream.is_at_start());
    stream.push(b"ices\":[{}]}\n\n");
    assert!(!stream.is_at_start());
    for other in [
        &b": keep-alive\n\n"[..],
        b"event: ping\ndata: {}\n\n",
        b"data: [DONE]\n\n",
    ] {
        let mut stream = StreamObserver::default();
        stream.push(other);
        assert!(!stream.is_at_start());
    }
}

#[test]
fn a_line_that_never_ends_needs_bounded_memory() {
    let mut splitter = SseSplitter::default();
    let mut events = Vec::new();
    for _ in 0..1024 {
        splitter.push(&[b'x'; 4096], |_| unreachable!("no event has ended"));
        assert!(splitter.buffered() <= EVENT_BYTES_MAX);
    }
    splitter.push(b"\n\ndata: next\n\n", |event| {
        events.push(match event {
            SseEvent::Whole(bytes) => bytes.len(),
            SseEvent::Oversized(len) => len,
        });
    });
    assert_eq!(events, [4096 * 1024 + 2, b"data: next".len()]);
}

#[test]
fn an_event_inside_one_chunk_is_not_copied() {
    let chunk = b"data: a\n\n";
    SseSplitter::default().push(chunk, |event| {
        let SseEvent::Whole(bytes) = event else {
            panic!("small event")
        };
        assert_eq!(bytes.as_ptr(), chunk.as_ptr());
    });
}

proptest! {
    #[test]
    fn any_cutting_gives_the_events_of_the_whole(
        text in prop::collection::vec(
            prop_oneof![Just(b'\n'), Just(b'\r'), Just(b'd'), Just(b':'), any::<u8>()], 0..80),
        cuts in prop::collection::vec(0usize..80, 0..12),
    ) {
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
        cuts.sort_unstable();
        let mut chunks = Vec::new();
        let mut from = 0;
        for cut in cuts {
            chunks.push(&text[from..cut]);
            from = cut;
        }
        chunks.push(&text[from..]);
        prop_assert_eq!(split(&chunks), naive(&text));
    }
}

/// `/v1/responses` sends events before its first token, `/v1/messages` does not.
#[test]
fn named_events_begin_and_end_an_answer() {
    let mut stream = StreamObserver::default();
    assert!(!stream.push(b"event: response.created\ndata: {\"type\":\"response.created\"}\n\n"));
    assert!(!stream.push(b"event: response.in_progress\ndata: {}\n\n"));
    assert!(stream.push(b"event: response.output_item.added\ndata: {}\n\n"));
    assert!(!stream.done());
    stream.push(
        b"event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":3}}}\n\n",
    );
    assert!(stream.done());
    assert_eq!(stream.usage().unwrap().prompt_tokens, 3);
    let mut stream = StreamObserver::default();
    assert!(stream.push(b"event: message_start\ndata: {\"type\":\"message_start\"}\n\n"));
    stream.push(b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
    assert!(stream.done());
}
