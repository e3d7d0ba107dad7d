//! A consumer that keeps the rules by hand, or breaks one of them, which the tests must find.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::query::SourceState;
use warmroute_proto::{LocalHash, Tier, Tiers};

use crate::world::{Claim, Consumer};
use warmroute_simulation::world::model::{Model, Rules, gpu_run};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// A block has one copy for each store without a remove.
    References,
    /// A hit needs the last blocks of every group with a window.
    Windows,
    /// A run ends at the first hole.
    Holes,
    /// A replay starts at the last seen batch, which must be unchanged.
    InclusiveReplay,
    /// Missing numbers are requested.
    Gaps,
}

impl Rule {
    pub(crate) const ALL: [Self; 5] = [
        Self::References,
        Self::Windows,
        Self::Holes,
        Self::InclusiveReplay,
        Self::Gaps,
    ];
}

/// A model and every payload of the engine's current life.
pub(crate) struct Naive {
    without: Option<Rule>,
    applied: BTreeMap<u64, Bytes>,
    model: Model,
    /// It has seen this life of the engine from batch 0 on.
    from_start: bool,
    is_sure: bool,
    wants: bool,
    replay: Vec<(u64, Bytes)>,
}

impl Naive {
    pub(crate) fn new(without: Option<Rule>) -> Self {
        Self {
            without,
            applied: BTreeMap::new(),
            model: model(without),
            from_start: false,
            is_sure: false,
            wants: false,
            replay: Vec::new(),
        }
    }

    fn keeps(&self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    fn last(&self) -> Option<u64> {
        self.applied.keys().next_back().copied()
    }

    fn apply(&mut self, seq: u64, payload: &Bytes) {
        if seq == 0 {
            self.from_start = true;
        }
        self.applied.insert(seq, payload.clone());
        self.model.apply(&json(payload));
    }

    fn forget(&mut self) {
        self.applied.clear();
        self.model = model(self.without);
        self.from_start = false;
    }

    fn ask(&mut self) {
        self.is_sure = false;
        self.wants = true;
    }
}

fn model(without: Option<Rule>) -> Model {
    Model::new(Rules {
        references: without != Some(Rule::References),
        windows: without != Some(Rule::Windows),
    })
}

impl Consumer for Naive {
    fn connected(&mut self) {
        self.ask();
    }

    fn disconnected(&mut self) {
        self.is_sure = false;
        self.wants = false;
    }

    fn live(&mut self, seq: u64, payload: &Bytes) {
        let expected = self.last().map_or(0, |last| last + 1);
        if seq == expected || (seq > expected && !self.keeps(Rule::Gaps)) {
            if self.is_sure {
                self.apply(seq, payload);
            }
        } else {
            self.ask();
        }
    }

    fn wants_replay(&mut self) -> Option<u64> {
        if !std::mem::take(&mut self.wants) {
            return None;
        }
        let inclusive = self.keeps(Rule::InclusiveReplay);
        Some(
            self.last()
                .map_or(0, |last| if inclusive { last } else { last + 1 }),
        )
    }

    fn replayed(&mut self, seq: u64, payload: &Bytes) {
        self.replay.push((seq, payload.clone()));
    }

    fn replay_ended(&mut self) {
        let replay = std::mem::take(&mut self.replay);
        let last = self.last();
        let same_life = match last {
            Some(last) if self.keeps(Rule::InclusiveReplay) => {
                replay.first() == Some(&(last, self.applied[&last].clone()))
            }
            Some(_) | None => true,
        };
        if !same_life {
            self.forget();
            self.ask();
            return;
        }
        let mut expected = last.map_or(0, |last| last + 1);
        for (seq, payload) in replay {
            if seq < expected {
                continue;
            }
            if seq > expected {
                // Unsure for the rest of this life, unless the batch is replayed.
                self.ask();
                return;
            }
            self.apply(seq, &payload);
            expected += 1;
        }
        self.is_sure = true;
    }

    fn time_passes(&mut self, by: Duration) {
        if by >= Duration::from_millis(100) {
            self.wants = true;
        }
    }

    fn rank(&self) -> u32 {
        0
    }

    fn goes_on_without_history(&self) -> bool {
        false
    }

    fn claim(&self) -> Claim {
        let none = SourceState::Unknown;
        let is_exact = self.is_sure && (self.from_start || self.applied.is_empty());
        Claim {
            states: Tiers {
                gpu: if is_exact { SourceState::Exact } else { none },
                cpu: none,
                disk: none,
            },
            seq: self.last(),
            held: self.model.held(),
        }
    }

    fn gpu_run(&self, blocks: &[LocalHash]) -> u32 {
        let held = self.model.held();
        let run = gpu_run(&held, blocks.iter().map(|block| block.0));
        let run = if self.keeps(Rule::Holes) {
            run
        } else {
            let prefixes = prefix_hashes(None, blocks);
            let held = prefixes.filter(|prefix| held.contains(&(prefix.0, Tier::Gpu.number())));
            run.max(held.count())
        };
        u32::try_from(run).unwrap()
    }
}

/// Converts byte-string hashes to text, which the model accepts as well.
fn json(payload: &Bytes) -> Value {
    let payload: Lossless = rmp_serde::from_slice(payload).unwrap();
    payload.0
}

struct Lossless(Value);

impl<'de> serde::Deserialize<'de> for Lossless {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LosslessVisitor)
    }
}

struct LosslessVisitor;

impl<'de> serde::de::Visitor<'de> for LosslessVisitor {
    type Value = Lossless;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<Lossless, E> {
        Ok(Lossless(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Lossless, E> {
        Ok(Lossless(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Lossless, E> {
        Ok(Lossless(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Lossless, E> {
        Ok(Lossless(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Lossless, E> {
        Ok(Lossless(value.into()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Lossless, E> {
        Ok(Lossless(value.into()))
    }

    fn visit_bytes<E>(self, value: &[u8]) -> Result<Lossless, E> {
        let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Lossless(hex.into()))
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<Lossless, A::Error> {
        let mut values = Vec::new();
        while let Some(Lossless(value)) = list.next_element()? {
            values.push(value);
        }
        Ok(Lossless(values.into()))
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Lossless, A::Error> {
        let mut values = serde_json::Map::new();
        while let Some((key, Lossless(value))) = map.next_entry::<String, _>()? {
            values.insert(key, value);
        }
        Ok(Lossless(values.into()))
    }
}
