use super::*;
use crate::mirror::{Assumptions, Start};

fn source(worker: &str) -> Source {
    Source {
        worker: WorkerId::from(worker),
        dp_rank: DpRank(3),
    }
}

fn bytes(config: MirrorConfig) -> Vec<u8> {
    encode(&Checkpoint {
        header: CheckpointHeader {
            source: source("w.1"),
            generation: Generation(7),
            engine_seq: EngineSeq(41),
            payload_hash: 99,
        },
        config,
        mirror: Mirror::new(config, Start::Empty).snapshot(),
    })
}

#[test]
fn a_checkpoint_round_trips() {
    let config = MirrorConfig::default();
    let restored = decode(&bytes(config), &source("w.1"), config).unwrap();
    assert_eq!(restored.header.source, source("w.1"));
    assert_eq!(restored.header.generation, Generation(7));
    assert_eq!(restored.header.engine_seq, EngineSeq(41));
    assert_eq!(restored.header.payload_hash, 99);
}

#[test]
fn a_torn_or_changed_checkpoint_is_refused() {
    let config = MirrorConfig::default();
    let bytes = bytes(config);
    let refused = |bytes: &[u8]| decode(bytes, &source("w.1"), config).unwrap_err();
    for len in 0..bytes.len() {
        drop(refused(&bytes[..len]));
    }
    for at in 0..bytes.len() {
        let mut other = bytes.clone();
        other[at] ^= 0x10;
        drop(refused(&other));
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert_eq!(refused(&longer), CheckpointError::Checksum);
    assert_eq!(refused(b""), CheckpointError::Foreign);
    assert_eq!(refused(&[7; 400]), CheckpointError::Foreign);
}

#[test]
fn a_checkpoint_of_another_source_version_or_configuration_is_refused() {
    let config = MirrorConfig::default();
    let bytes = bytes(config);
    assert_eq!(
        decode(&bytes, &source("w.2"), config).unwrap_err(),
        CheckpointError::Source(source("w.1"))
    );
    let mut newer = bytes.clone();
    newer[MAGIC.len()] += 1;
    assert_eq!(
        decode(&newer, &source("w.1"), config).unwrap_err(),
        CheckpointError::Version(VERSION + 1)
    );
    let others = [
        MirrorConfig {
            block_size: BlockSize::new(16),
            ..config
        },
        MirrorConfig {
            assume: Assumptions {
                no_lora: true,
                ..Assumptions::default()
            },
            ..config
        },
    ];
    for other in others {
        let refused = decode(&bytes, &source("w.1"), other).unwrap_err();
        assert_eq!(refused, CheckpointError::Config);
    }
}
