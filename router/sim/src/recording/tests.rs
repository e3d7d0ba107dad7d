use warmroute_proto::{BlockSize, LocalHash, Seed};

use super::*;

fn facts(arrived_ms: u64) -> RequestFacts {
    RequestFacts {
        arrived: Duration::from_millis(arrived_ms),
        model: "llama".into(),
        prompt_tokens: 16_000,
        output_tokens: 5,
        block_tokens: 16,
        ttft: Some(Duration::from_micros(1_500)),
        duration: Duration::from_micros(9_500),
        cached_tokens: Some(0),
        outcome: RecordedOutcome::Completed,
        placement: Some(RecordedPlacement {
            worker: "w-1".into(),
            dp_rank: 3,
            credited_blocks: 4,
            predicted_blocks: 1,
            active_requests: 300,
            queue: Duration::from_micros(20),
            prefill: Duration::from_micros(30_000),
            decode: Duration::ZERO,
        }),
        tenant: Some("search".into()),
    }
}

fn blocks(tokens: std::ops::Range<u32>) -> Vec<LocalHash> {
    let tokens: Vec<u32> = tokens.collect();
    let seed = Seed::new(Some("adapter"), Some("tenant-secret"));
    warmroute_proto::hash::local_hashes(&tokens, BlockSize::new(16).unwrap(), seed)
}

const HEADER: FileHeader = FileHeader {
    recording: 77,
    file: 0,
    started_unix_ms: 1_700_000_000_000,
};

fn file(salt: u8, requests: &[(RequestFacts, Vec<LocalHash>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = FileEncoder::new(RecordingSalt::new([salt; 32]), HEADER, &mut bytes);
    for (facts, blocks) in requests {
        encoder.encode(facts, blocks, &mut bytes);
    }
    bytes
}

fn decode(files: &[&[u8]]) -> Result<Recording, String> {
    let named = files.iter().map(|bytes| NamedFile { name: "f", bytes });
    Recording::decode(named).map_err(|error| error.to_string())
}

#[test]
fn a_request_is_read_as_it_was_written() {
    let none = RequestFacts {
        ttft: None,
        cached_tokens: None,
        placement: None,
        tenant: None,
        outcome: RecordedOutcome::Unplaced,
        ..facts(u64::from(u32::MAX))
    };
    let bytes = file(1, &[(facts(0), blocks(0..70)), (none.clone(), Vec::new())]);
    let recording = decode(&[&bytes]).unwrap();
    let found: Vec<_> = recording.requests.iter().map(|(facts, _)| facts).collect();
    assert_eq!(found, [&facts(0), &none]);
    assert_eq!(recording.path(recording.requests[0].1).len(), 4);
    assert_eq!((recording.requests[1].1, recording.torn), (None, 0));
    assert_eq!(facts(0).itl(), Some(Duration::from_millis(2)));
}

#[test]
fn equal_prefixes_are_equal_nodes_within_and_between_files() {
    let shared = blocks(0..160);
    let mut branch = shared[..6].to_vec();
    branch.extend(blocks(500..532));
    let one = file(1, &[(facts(0), shared.clone()), (facts(1), branch.clone())]);
    let other = file(1, &[(facts(2), branch), (facts(3), shared[..3].to_vec())]);
    let recording = decode(&[&one, &other]).unwrap();
    let requests = recording.requests.iter();
    let paths: Vec<_> = requests.map(|(_, last)| recording.path(*last)).collect();
    assert_eq!(paths[0][..6], paths[1][..6]);
    assert_ne!(paths[0][6], paths[1][6]);
    assert_eq!(paths[1], paths[2]);
    assert_eq!(paths[3], paths[0][..3]);
    assert_eq!(recording.blocks(), 12);
}

/// A repeated prompt of 1,000 blocks takes less than 100 bytes.
#[test]
fn a_shared_prefix_is_written_once() {
    let long = blocks(0..16_000);
    let once = file(1, &[(facts(0), long.clone())]).len();
    let twice = file(1, &[(facts(0), long.clone()), (facts(1), long)]).len();
    assert!(twice - once < 100, "{once} {twice}");
}

#[test]
fn no_hash_of_a_prompt_is_in_a_file_and_each_recording_names_blocks_differently() {
    let prompt = blocks(0..1600);
    let [one, other] = [1, 2].map(|salt| file(salt, &[(facts(0), prompt.clone())]));
    let prefixes: Vec<u64> = warmroute_proto::hash::prefix_hashes(None, &prompt)
        .map(|prefix| prefix.0)
        .collect();
    for hash in prompt.iter().map(|hash| hash.0).chain(prefixes) {
        let [a, b, c, d, e, f, g, h] = hash.to_le_bytes();
        for half in [[a, b, c, d], [e, f, g, h]] {
            assert!(!one.windows(4).any(|window| window == half));
        }
    }
    let tail = |bytes: &[u8]| bytes[bytes.len() - 400..].to_vec();
    assert_ne!(tail(&one), tail(&other));
    assert_eq!(one.len(), other.len());
}

/// Wherever a process ends, what was written before is readable.
#[test]
fn a_cut_tail_costs_the_last_record_only() {
    let requests = [0, 1, 2].map(|at| (facts(at), blocks(0..160)));
    let bytes = file(1, &requests);
    let ends: Vec<usize> = (0..=3)
        .map(|count| file(1, &requests[..count]).len())
        .collect();
    for cut in 0..bytes.len() {
        let recording = decode(&[&bytes[..cut]]).unwrap();
        let whole = ends.iter().filter(|&&end| end <= cut).count();
        assert_eq!(recording.requests.len(), whole.saturating_sub(1), "{cut}");
        let clean = ends.contains(&cut) || cut == MAGIC.len();
        assert_eq!(recording.torn, usize::from(!clean), "{cut}");
    }
    let mut zeros = bytes.clone();
    zeros.extend([0; 100]);
    assert_eq!(decode(&[&zeros]).unwrap().torn, 1);
    let mut flipped = bytes.clone();
    *flipped.last_mut().unwrap() ^= 1;
    assert_eq!(decode(&[&flipped]).unwrap().requests.len(), 2);
}

#[test]
fn damage_is_an_error_with_file_and_record() {
    let requests = [0, 1, 2].map(|at| (facts(at), blocks(0..160)));
    let good = file(1, &requests);
    let second = file(1, &requests[..1]).len() + 10;
    let mut bytes = good.clone();
    bytes[second] ^= 1;
    assert_eq!(
        decode(&[&bytes]).unwrap_err(),
        "f, record 2: its check sum is wrong"
    );
    let mut newer = good.clone();
    newer[7] += 1;
    assert!(is_recording(&newer));
    assert!(
        decode(&[&newer])
            .unwrap_err()
            .starts_with("f: not a recording")
    );
    assert!(!is_recording(b"{\"timestamp\":0}"));
    let mut other = Vec::new();
    let header = FileHeader {
        recording: 78,
        ..HEADER
    };
    drop(FileEncoder::new(
        RecordingSalt::new([1; 32]),
        header,
        &mut other,
    ));
    let error = decode(&[&good, &other]).unwrap_err();
    assert!(error.contains("another recording"), "{error}");
}

/// No bytes make the decoder panic or take memory beyond their length.
#[test]
fn any_payload_is_read_or_refused() {
    let mut rng = fastrand::Rng::with_seed(3);
    let start = file(1, &[(facts(0), blocks(0..64))]);
    for _ in 0..20_000 {
        let mut payload: Vec<u8> = (0..rng.usize(0..60)).map(|_| rng.u8(..)).collect();
        if rng.bool() {
            payload.insert(0, REQUEST);
        }
        let mut bytes = start.clone();
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(check_sum(&payload).to_le_bytes());
        bytes.extend(payload);
        if let Err(error) = decode(&[&bytes]) {
            assert!(error.starts_with("f, record 2: "), "{error}");
        }
    }
}
