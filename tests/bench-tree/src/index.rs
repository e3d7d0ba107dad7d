//! The interface of a measured tree.

use warmroute_proto::Tiers;

use crate::workload::Event;

/// A variant. Events are translated, and queries are hashed as the tree needs, before the clock
/// starts.
pub trait Index: Sized {
    const NAME: &'static str;
    type Translator: Send;
    type Change: Send;
    type Prepared: Default + Send;
    type Answer;

    fn new(workers: u32) -> Self;
    fn translator() -> Self::Translator;
    fn translate(translator: &mut Self::Translator, event: Event) -> Self::Change;

    /// Applies one part after the other on the calling thread and calls `done` after each.
    fn write(&self, parts: Vec<Vec<Self::Change>>, done: &(dyn Fn(usize) + Sync));
    /// Like [`Self::write`], with changes made one by one to save memory; `done` is called at the
    /// end.
    fn write_lazily(
        &self,
        changes: &mut (dyn Iterator<Item = Self::Change> + Send),
        done: &(dyn Fn() + Sync),
    );

    fn prepare(&self, blocks: &[u64], prepared: &mut Self::Prepared);
    /// Computes all hashes of a query from tokens, and discards them.
    fn hash(&self, tokens: &[u32], prepared: &mut Self::Prepared);
    fn lookup(&self, prepared: &mut Self::Prepared) -> Self::Answer;
    fn each(&self, answer: &Self::Answer, see: &mut dyn FnMut(u32, Tiers<u32>));

    fn snapshot(&self) -> Option<Vec<u8>> {
        None
    }
    /// Restores a tree from a snapshot.
    fn restore(&self, _snapshot: &[u8]) -> Option<Self> {
        None
    }
}
