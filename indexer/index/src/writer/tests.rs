use bytes::Bytes;
use proptest::prelude::*;
use warmroute_proto::message::LogMessage;
use warmroute_proto::query::{IndexAnswer, IndexQuery};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{LocalHash, Record, Tier, codec, hash};

use super::*;
use crate::query;
use crate::tests_support::{IDENTITY, TestShim, World, namespace};

const SHIMS: [&str; 3] = ["a/0", "b/0", "b/1"];

/// One change of a record, or what is wrong with it.
#[derive(Clone, Debug)]
enum Part {
    /// As much of a prompt as is not held yet.
    Prompt(Vec<u64>, Tier),
    /// One of the pairs that are held.
    Evict(prop::sample::Index),
    Clear(Tier),
    /// Whether it is held or not.
    Store(Vec<u64>, Tier),
    Remove(Vec<u64>, Tier),
}

#[derive(Clone, Debug)]
enum Event {
    Record(usize, Vec<Part>),
    /// The log does not deliver it.
    Lost(usize, Vec<Part>),
    Again,
    NewGeneration(usize),
}

fn prompt() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(1..4_u64, 1..24)
}

fn tier() -> impl Strategy<Value = Tier> {
    prop_oneof![4 => Just(Tier::Gpu), 1 => Just(Tier::Cpu)]
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        40 => (prompt(), tier()).prop_map(|(prompt, tier)| Part::Prompt(prompt, tier)),
        20 => any::<prop::sample::Index>().prop_map(Part::Evict),
        1 => tier().prop_map(Part::Clear),
        1 => (prompt(), tier()).prop_map(|(prompt, tier)| Part::Store(prompt, tier)),
        1 => (prompt(), tier()).prop_map(|(prompt, tier)| Part::Remove(prompt, tier)),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    let parts = || prop::collection::vec(part(), 1..6);
    prop_oneof![
        20 => (0..SHIMS.len(), parts()).prop_map(|(shim, parts)| Event::Record(shim, parts)),
        1 => (0..SHIMS.len(), parts()).prop_map(|(shim, parts)| Event::Lost(shim, parts)),
        1 => Just(Event::Again),
        2 => (0..SHIMS.len()).prop_map(Event::NewGeneration),
    ]
}

fn locals(names: &[u64]) -> Vec<LocalHash> {
    names.iter().copied().map(LocalHash).collect()
}

fn change(shim: &TestShim, part: &Part) -> Option<Change> {
    let stored = |prompt: &[u64], known: usize, tier| {
        let blocks = locals(prompt);
        let change = Change::Stored {
            parent: hash::prefix_hashes(None, &blocks[..known]).last(),
            blocks: blocks[known..].to_vec(),
            tier,
        };
        (known < blocks.len()).then_some(change)
    };
    match part {
        Part::Prompt(prompt, tier) => {
            let blocks = locals(prompt);
            let held = hash::prefix_hashes(None, &blocks)
                .map(|prefix| shim.pairs.contains(&(prefix, *tier)));
            let known = held.take_while(|&held| held).count();
            stored(prompt, known, *tier)
        }
        Part::Evict(at) => {
            let at = at.index(shim.pairs.len().max(1));
            let &(prefix, tier) = shim.pairs.iter().nth(at)?;
            let blocks = vec![prefix];
            Some(Change::Removed { blocks, tier })
        }
        Part::Clear(tier) => Some(Change::Cleared { tier: *tier }),
        Part::Store(prompt, tier) => stored(prompt, 0, *tier),
        Part::Remove(prompt, tier) => {
            let blocks = hash::prefix_hashes(None, &locals(prompt)).collect();
            Some(Change::Removed {
                blocks,
                tier: *tier,
            })
        }
    }
}

/// Each change is made of what its shim holds after the one before.
fn record(shim: &mut TestShim, parts: &[Part]) -> Record {
    let mut after = shim.clone();
    let mut changes = Vec::new();
    for part in parts {
        if let Some(change) = change(&after, part) {
            after.record(vec![change.clone()]);
            changes.push(change);
        }
    }
    shim.record(changes)
}

/// What three shims write, and a log that does not deliver all of it.
fn log(events: &[Event]) -> Vec<LogMessage> {
    let mut shims = SHIMS.map(TestShim::new);
    let mut delivered: Vec<Record> = Vec::new();
    for event in events {
        match event {
            Event::Record(shim, parts) => delivered.push(record(&mut shims[*shim], parts)),
            Event::Lost(shim, parts) => drop(record(&mut shims[*shim], parts)),
            Event::Again => delivered.extend(delivered.last().cloned()),
            Event::NewGeneration(shim) => shims[*shim].next_generation(),
        }
    }
    let subjects = Subjects::new(&namespace());
    let messages = (1..).zip(&delivered).map(|(position, record)| LogMessage {
        position: LogPosition(position),
        subject: subjects.records(&record.source),
        payload: Bytes::from(codec::encode(record).unwrap()),
        stored_unix_ns: position,
    });
    messages.collect()
}

fn empty() -> (FairWriter<Fold>, Instant) {
    let world = World::new();
    let mut fold = Fold::new(&namespace(), None);
    fold.follow(IDENTITY);
    (FairWriter::new(fold), world.now)
}

proptest! {
    /// Same log, same verdicts, same answers, same bytes.
    #[test]
    fn turns_do_what_is_done_in_one_turn(
        events in prop::collection::vec(event(), 1..60),
        prompts in prop::collection::vec(prompt(), 1..8),
        batch in 1..8_usize,
    ) {
        let subjects = Subjects::new(&namespace());
        let log = log(&events);
        let parsed = log.iter().map(|message| ParsedMessage::of(&subjects, message));
        let log: Vec<_> = parsed.collect();
        let (one, now) = empty();
        let (other, _) = empty();
        for messages in log.chunks(batch) {
            let verdicts = in_one_turn(&one, messages, now);
            prop_assert_eq!(in_short_turns(&other, messages, now), verdicts);
        }
        let (one, other) = (one.read(), other.read());
        for prompt in prompts {
            let query = IndexQuery { blocks: locals(&prompt), at_least: None };
            let [one, other] = [&one, &other].map(|fold| match query::answer(fold, &query, now) {
                IndexAnswer::Runs { sources, .. } => sources,
                IndexAnswer::Behind { .. } => panic!("behind"),
            });
            prop_assert_eq!(one, other);
        }
        prop_assert_eq!(one.tree().nodes(), other.tree().nodes());
    }
}

#[test]
fn a_record_that_clears_a_tier_is_applied_alone() {
    let subjects = Subjects::new(&namespace());
    let mut shim = TestShim::new("a/0");
    let mut parsed = |changes: Vec<Change>| {
        let record = shim.record(changes);
        let message = LogMessage {
            position: LogPosition(1),
            subject: subjects.records(&record.source),
            payload: Bytes::from(codec::encode(&record).unwrap()),
            stored_unix_ns: 1,
        };
        ParsedMessage::of(&subjects, &message)
    };
    let clear = vec![Change::Cleared { tier: Tier::Gpu }];
    let log = [
        parsed(Vec::new()),
        parsed(Vec::new()),
        parsed(clear.clone()),
        parsed(clear),
    ];
    assert_eq!([0, 2, 3].map(|from| turn_len(&log[from..])), [2, 1, 1]);
}
