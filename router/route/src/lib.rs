//! The routing decision: the source of each request, and the load of every source.
//!
//! Pure: no IO, no clock, no tasks; time and randomness are arguments. [`Core`] owns all state and
//! stands behind one mutex that is held for one call, never across an await. The other modules are
//! its parts, each with its own tests. [`sync`] replicates the load between routers.
//!
//! How the shell drives it:
//!
//! ```text
//! let mut core = Core::new(CoreConfig { knobs, router, incarnation, seed });
//!
//! core.set_workers(&entries);                      // at every registry change
//! core.set_health(&worker, Health::Healthy);       // at every health check; unknown at first
//! core.set_drain(&worker, DrainState::Draining);   // by an operator
//!
//! let model = core.model("my-lora")?;              // RouteRefusal: unknown model, none healthy, …
//! let seed = model.seed(cache_salt);               // includes the LoRA
//! let prompt = Prompt::new(&tokens, block_size, seed);   // or Prompt::of_text(text, …)
//! let answer = index.query(prompt.blocks()).await;       // Option<IndexReply>
//!
//! let request = RouteRequest { model: "my-lora", prompt: &prompt, exclude: &tried,
//!     leg: Leg::Whole };
//! let admitted = core.admit(&request, answer.as_ref(), now)?;   // decides and opens a slot
//! let mut slot = SlotGuard::new(sink, admitted.slot);           // sink: Arc<impl SlotSink>
//!
//! // forward to admitted.decision.{url, source}; headers from admitted.decision
//! slot.first_token();                // streaming: at the first byte of content
//! slot.prefill_predicted();          // else: admitted.decision.predicted_ttft after sending
//! slot.grow(1);                      // every block_size generated tokens
//! slot.complete();                   // or slot.fail(); dropped without either: aborted
//! // a retry: slot.fail(), push decision.source to `tried`, admit again: a new slot
//!
//! core.audit(&admitted.decision, &prompt, cached_tokens, now); // -> AuditVerdict, maybe a Recheck
//! core.tick(now);                    // a few times a second
//! ```
//!
//! A [`SlotSink`] has `core.note(event, now)` called before any later call of the core, and wakes
//! the sender of the ledger's messages. Own changes are applied through the bytes that are sent, so
//! that this router and its peers agree. [`sync`] decides which message of a peer is passed to
//! `core.apply_remote`.
//!
//! Deliberately absent: retries, timeouts and queues (the shell's), the index, and request content
//! (a prompt is a list of hashes here).

#![forbid(unsafe_code)]

pub mod args;
pub mod audit;
pub mod backlog;
pub mod candidates;
pub mod choice;
pub mod cost;
pub mod decide;
pub mod engine_load;
pub mod evidence;
pub mod expectations;
pub mod fit;
pub mod index_view;
pub mod itl;
pub mod ledger;
pub mod moves;
pub mod pairing;
pub mod prediction;
pub mod prefix_table;
pub mod prompt;
mod prompt_form;
mod prompt_match;
pub mod prompt_tree;
mod replica_roster;
pub mod room;
pub mod sent;
pub mod slot_guard;
pub mod slots;
pub mod slowness;
pub mod source_table;
pub mod speed;
pub mod stall;
mod state;
pub mod sync;
pub mod terms;
#[cfg(test)]
mod testing;
pub mod traffic;
pub mod transfer;
pub mod ttft;

pub use audit::{AuditVerdict, Recheck, RecheckVerdict};
pub use candidates::{Candidate, Health, Leg, RouteRefusal, ServedModel};
pub use choice::Policy;
pub use cost::Knobs;
pub use decide::{Decision, DecisionBasis, WEIGHED_MAX};
pub use engine_load::{EngineBounds, EngineReading, ForeignLoad};
pub use moves::MoveCounts;
pub use pairing::{PairThreshold, SplitVerdict};
pub use prompt::{CacheReads, Prompt, PromptBasis, SessionKey};
pub use prompt_form::{PromptFeatures, PromptForm};
pub use replica_roster::{
    AnswerPosition, BadRosterPage, HolderReply, IndexReply, KnownHolder, ReplicaRoster,
};
pub use slot_guard::{SlotEvent, SlotGuard, SlotSink};
pub use slots::{RouterLoad, SlotKey, SourceLoad};
pub use source_table::{SourceId, SourceTable};
pub use state::{
    AdmitError, Admitted, Core, CoreConfig, CoreCounts, DoubtEvent, DoubtedScope, FreedCounts,
    RouteRequest, SlotSnapshotBuilder, SourceFigures,
};
pub use terms::{ComparedCandidate, Terms};
pub use traffic::{RUNGS, TrafficTotals};
