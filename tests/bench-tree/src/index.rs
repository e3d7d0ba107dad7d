//! What a tree has to offer to be measured here.

use warmroute_proto::Tiers;

use crate::workload::Event;

/// One variant. Events are translated before the clock starts; queries are prepared (the hashes that
/// the tree wants) before theirs.
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
    /// Like [`Self::write`], with changes made one by one to save memory; `done` is called at the end.
    fn write_lazily(
        &self,
        changes: &mut (dyn Iterator<Item = Self::Change> + Send),
        done: &(dyn Fn() + Sync),
    );

    fn prepare(&self, blocks: &[u64], prepared: &mut Self::Prepared);
    /// All hashing from tokens that a query needs; what is prepared by it is thrown away.
    fn hash(&self, tokens: &[u32], prepared: &mut Self::Prepared);
    fn lookup(&self, prepared: &mut Self::Prepared) -> Self::Answer;
    fn each(&self, answer: &Self::Answer, see: &mut dyn FnMut(u32, Tiers<u32>));

    fn snapshot(&self) -> Option<Vec<u8>> {
        None
    }
    /// From a snapshot's bytes to a tree that answers.
    fn restore(&self, _snapshot: &[u8]) -> Option<Self> {
        None
    }
}
