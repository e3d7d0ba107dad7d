use super::*;

fn parse(lines: &[&str]) -> Result<Trace, String> {
    Trace::parse(&lines.join("\n")).map_err(|error| error.to_string())
}

fn open(at: u32, input: u32, ids: &[u64]) -> String {
    format!(r#"{{"timestamp":{at},"input_length":{input},"output_length":3,"hash_ids":{ids:?}}}"#)
}

#[test]
fn equal_ids_are_equal_tokens_and_what_is_beyond_them_is_the_requests_own() {
    let (one, other) = (open(0, 1100, &[7, 9]), open(5, 1100, &[7, 9]));
    let trace = parse(&[&one, &other]).unwrap();
    let (one, other) = (trace.prompt(0), trace.prompt(1));
    assert_eq!(one.len(), 1100);
    assert_eq!(one[..1024], other[..1024]);
    assert!(one[1024..].iter().all(|token| !other.contains(token)));
    let distinct: std::collections::BTreeSet<_> = one.iter().collect();
    assert_eq!(distinct.len(), 1100, "no two blocks of a prompt are alike");
}

#[test]
fn a_last_piece_that_is_named_is_shared_as_far_as_it_goes() {
    let (short, long) = (open(0, 600, &[1, 2]), open(1, 1024, &[1, 2]));
    let trace = parse(&[&short, &long]).unwrap();
    let (short, long) = (trace.prompt(0), trace.prompt(1));
    assert_eq!(short[..], long[..600]);
}

#[test]
fn open_requests_are_put_in_order() {
    let trace = parse(&[&open(9, 1, &[]), "", &open(3, 2, &[])]).unwrap();
    let inputs: Vec<u32> = trace.requests.iter().map(|r| r.input_tokens).collect();
    assert_eq!(inputs, [2, 1]);
    assert!(!trace.has_sessions());
}

#[test]
fn sessions_are_gathered_from_between_each_other() {
    let row = |id: u32, delay: &str| {
        format!(
            r#"{{"session_id":{id},"input_length":1,"output_length":{},"hash_ids":[]{delay}}}"#,
            id + 1
        )
    };
    let later = r#","delay":250"#;
    let trace = parse(&[&row(5, ""), &row(6, ""), &row(5, later)]).unwrap();
    assert_eq!(trace.sessions, [0..2, 2..3]);
    assert_eq!(trace.requests[1].millis, 250.0);
    assert_eq!(trace.requests[2].output_tokens, 7);
    let wrong = parse(&[&row(5, ""), &row(5, "")]).unwrap_err();
    assert!(wrong.starts_with("line 2: "), "{wrong}");
}

#[test]
fn another_shape_fails_with_its_line() {
    let good = open(0, 1, &[]);
    for (bad, says) in [
        ("[1, 2]".to_owned(), "line 2: invalid"),
        ("{\"timestamp\": 1}".to_owned(), "line 2: missing field"),
        (open(1, 1024, &[1]), "line 2: 1 hash_ids for 1024 tokens"),
        (open(1, 0, &[]), "line 2: a request has at least one token"),
        (good.replace("\"timestamp\":0,", ""), "line 2: neither"),
        (good.replace(":0,", ":-4,"), "line 2: -4 ms"),
        (
            good.replace('{', "{\"user\":1,"),
            "line 2: unknown field `user`",
        ),
        (
            good.replace("\"input_length\":1", "\"input_length\":4000000000"),
            "line 2: 4000000000 tokens",
        ),
        (
            good.replace("timestamp", "session_id"),
            "line 2: a trace has",
        ),
    ] {
        let error = parse(&[&good, &bad]).unwrap_err();
        assert!(error.starts_with(says), "{error}");
    }
    assert_eq!(parse(&[""]).unwrap_err(), "it has no requests");
}

/// What is written is read as the same trace, whatever it was read from.
#[test]
fn a_written_trace_is_the_trace() {
    let session = |id: u32, delay: &str| {
        format!(
            r#"{{"session_id":{id},"input_length":513,"output_length":2,"hash_ids":[1]{delay}}}"#
        )
    };
    let later = r#","delay":250"#;
    let open = [
        open(0, 1100, &[7, 9]),
        open(5, 1100, &[7, 9, 11]),
        open(8, 9, &[]),
    ];
    for lines in [
        open.to_vec(),
        vec![session(5, ""), session(5, later), session(6, "")],
    ] {
        let trace = parse(&lines.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
        let written: Vec<String> = trace.mooncake_lines().collect();
        let again = Trace::parse(&written.join("\n")).unwrap();
        assert_eq!(written, again.mooncake_lines().collect::<Vec<_>>());
        assert_eq!(trace.requests.len(), again.requests.len());
        for request in 0..trace.requests.len() {
            assert_eq!(trace.prompt(request), again.prompt(request), "{written:?}");
        }
        assert_eq!(trace.sessions, again.sessions);
    }
}

mod recorded {
    use std::sync::Arc;
    use std::time::Duration;

    use proptest::prelude::*;
    use warmroute_proto::{BlockSize, Seed};

    use super::*;
    use crate::recording::{
        FileEncoder, FileHeader, NamedFile, RecordedOutcome, Recording, RecordingSalt, RequestFacts,
    };

    struct Asked {
        model: &'static str,
        block: u32,
        outcome: RecordedOutcome,
        prompt: Vec<u32>,
    }

    fn recording(requests: &[Asked]) -> Recording {
        let header = FileHeader {
            recording: 1,
            file: 0,
            started_unix_ms: 0,
        };
        let mut bytes = Vec::new();
        let mut encoder = FileEncoder::new(RecordingSalt::new([7; 32]), header, &mut bytes);
        for (at, asked) in requests.iter().enumerate() {
            let size = BlockSize::new(asked.block).unwrap();
            let blocks = warmroute_proto::hash::local_hashes(&asked.prompt, size, Seed::PLAIN);
            let facts = RequestFacts {
                arrived: Duration::from_millis(100 * at as u64),
                model: Arc::from(asked.model),
                prompt_tokens: asked.prompt.len() as u32,
                output_tokens: 4,
                block_tokens: asked.block,
                ttft: None,
                duration: Duration::from_secs(1),
                cached_tokens: None,
                outcome: asked.outcome,
                placement: None,
                tenant: None,
            };
            encoder.encode(&facts, &blocks, &mut bytes);
        }
        let name = "f";
        Recording::decode([NamedFile {
            name,
            bytes: &bytes,
        }])
        .unwrap()
    }

    fn asked(prompt: Vec<u32>) -> Asked {
        Asked {
            model: "m",
            block: 16,
            outcome: RecordedOutcome::Completed,
            prompt,
        }
    }

    fn shared(one: &[u32], other: &[u32]) -> usize {
        one.iter().zip(other).take_while(|(a, b)| a == b).count()
    }

    #[test]
    fn requests_that_no_engine_served_are_left_out() {
        let outcomes = [
            (RecordedOutcome::Completed, 1),
            (RecordedOutcome::Cancelled, 1),
            (RecordedOutcome::Failed, 0),
            (RecordedOutcome::Unplaced, 0),
        ];
        for (outcome, kept) in outcomes {
            let other = Asked {
                outcome,
                ..asked((0..40).collect())
            };
            let recording = recording(&[asked((0..9).collect()), other]);
            let trace = Trace::of_recording(&recording, &[]).unwrap();
            assert_eq!(trace.requests.len(), 1 + kept, "{outcome:?}");
        }
    }

    #[test]
    fn models_are_selected_and_block_sizes_agree() {
        let other = Asked {
            model: "other",
            block: 32,
            ..asked((0..40).collect())
        };
        let recording = recording(&[asked((0..40).collect()), other]);
        let error = Trace::of_recording(&recording, &[])
            .unwrap_err()
            .to_string();
        assert!(error.contains("--model"), "{error}");
        let of = |model: &str| Trace::of_recording(&recording, &[model.to_owned()]);
        assert_eq!(of("other").unwrap().requests.len(), 1);
        let error = of("third").unwrap_err().to_string();
        assert!(error.contains("m, other"), "{error}");
    }

    proptest! {
        /// Replayed prompts share whole blocks as the recorded ones did; written in Mooncake's
        /// form, they share them in pieces of 512 tokens, never more than there were.
        #[test]
        fn prompts_share_what_the_recorded_ones_shared(
            prompts in proptest::collection::vec(
                proptest::collection::vec(0_u32..2, 1..9), 2..7),
            step in 100_u32..400, block in prop::sample::select(vec![16_u32, 48, 512, 784]),
        ) {
            let prompts: Vec<Vec<u32>> = prompts
                .iter()
                .map(|parts| parts.iter().flat_map(|part| (0..step).map(move |at| part * 9_000 + at)))
                .map(Iterator::collect)
                .collect();
            let requests: Vec<Asked> = prompts
                .iter()
                .map(|prompt| Asked { block, ..asked(prompt.clone()) })
                .collect();
            let trace = Trace::of_recording(&recording(&requests), &[]).unwrap();
            let lines: Vec<String> = trace.mooncake_lines().collect();
            let mooncake = Trace::parse(&lines.join("\n")).unwrap();
            let block = block as usize;
            for one in 0..prompts.len() {
                prop_assert_eq!(trace.prompt(one).len(), prompts[one].len());
                for other in 0..one {
                    let truth = shared(&prompts[one], &prompts[other]);
                    let replayed = shared(&trace.prompt(one), &trace.prompt(other));
                    prop_assert_eq!(replayed, truth / block * block);
                    let coarse = shared(&mooncake.prompt(one), &mooncake.prompt(other));
                    prop_assert!(coarse < truth / block * block + block.max(2));
                    let whole = truth / block * block / 512 * 512;
                    prop_assert!(coarse + block.saturating_sub(1) >= whole || block > 512,
                        "{} of {}", coarse, whole);
                }
            }
        }
    }
}
