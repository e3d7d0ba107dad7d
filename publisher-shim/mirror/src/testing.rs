//! What the pure modules' tests share: a tiny reader of the log.

use std::collections::BTreeMap;
use std::time::Instant;

use warmroute_proto::{Change, Digest, PrefixHash, Tier};

#[expect(
    clippy::disallowed_methods,
    reason = "an origin, never compared with real time"
)]
pub(crate) fn start() -> Instant {
    Instant::now()
}

/// Folds changes as an indexer does, and insists on its rules.
#[derive(Debug, Default)]
pub(crate) struct LogReader {
    held: BTreeMap<(PrefixHash, Tier), ()>,
    /// Every prefix ever stored, with its parent.
    parents: BTreeMap<PrefixHash, Option<PrefixHash>>,
    digest: Digest,
}

impl LogReader {
    pub(crate) fn apply(&mut self, changes: &[Change]) {
        changes.iter().for_each(|change| self.apply_one(change));
    }

    pub(crate) fn held(&self) -> Vec<(PrefixHash, Tier)> {
        self.held.keys().copied().collect()
    }

    pub(crate) const fn digest(&self) -> Digest {
        self.digest
    }

    fn apply_one(&mut self, change: &Change) {
        match change {
            Change::Stored { parent, tier, .. } => {
                let mut last = *parent;
                assert!(
                    last.is_none_or(|parent| self.knows(parent)),
                    "unknown parent"
                );
                for prefix in change.stored_prefixes() {
                    self.parents.insert(prefix, last);
                    let held = self.held.insert((prefix, *tier), ());
                    assert!(held.is_none(), "stored twice");
                    self.digest.insert(prefix, *tier);
                    last = Some(prefix);
                }
            }
            Change::Removed { blocks, tier } => {
                for &prefix in blocks {
                    let held = self.held.remove(&(prefix, *tier));
                    assert!(held.is_some(), "removed what is not held");
                    self.digest.remove(prefix, *tier);
                }
            }
            Change::Cleared { tier } => {
                let gone: Vec<_> = self
                    .held
                    .keys()
                    .copied()
                    .filter(|(_, t)| t == tier)
                    .collect();
                assert!(!gone.is_empty(), "cleared an empty tier");
                for (prefix, tier) in gone {
                    self.held.remove(&(prefix, tier));
                    self.digest.remove(prefix, tier);
                }
            }
        }
    }

    /// Held, or above a held one: an indexer need not remember anything else.
    fn knows(&self, prefix: PrefixHash) -> bool {
        let is_held = |tier: &Tier| self.held.contains_key(&(prefix, *tier));
        if Tier::ALL.iter().any(is_held) {
            return true;
        }
        self.held.keys().any(|&(held, _)| {
            let mut at = Some(held);
            while let Some(node) = at {
                if node == prefix {
                    return true;
                }
                at = self.parents.get(&node).copied().flatten();
            }
            false
        })
    }
}
