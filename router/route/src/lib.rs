//! The decision: which source gets this request, and what every source is believed to hold and bear.
//!
//! Pure: no IO, no clock, no task; time and randomness are arguments. [`Core`] owns everything and is
//! meant to stand behind one mutex that is held for one call, never across an await. The other
//! modules are its parts, each with its own tests.
//!
//! How the shell drives it:
//!
//! ```text
//! let mut core = Core::new(CoreConfig { knobs, router, incarnation, seed });
//!
//! core.set_workers(&entries);                       // at every registry change
//! core.set_health(&worker, Health::Healthy);        // at every health check; unknown at first
//! core.set_drain(&worker, DrainState::Draining);         // by an operator
//!
//! let model = core.model("my-lora")?;               // RouteRefusal: unknown model, nobody healthy, …
//! let seed = model.seed(cache_salt);                // carries the LoRA
//! let prompt = Prompt::new(&tokens, block_size, seed);     // or Prompt::opaque(estimate, size)
//! let answer = index.query(prompt.blocks()).await;  // Option<Answer>; None: late, or nothing to ask
//!
//! let ask = RouteRequest { model: "my-lora", prompt: &prompt, exclude: &tried };
//! let admitted = core.admit(&ask, answer.as_ref(), now)?;  // decides AND accounts, in one step
//! // admitted.message: bytes of the AddRequest, applied already, kept in the ledger for the peers
//! let mut slot = SlotGuard::new(accounts, admitted.slot);  // accounts: Arc<impl SlotSink>
//!
//! // forward to admitted.decision.{url, source}; headers from admitted.decision
//! slot.first_token();                // streaming: at the first byte of content
//! slot.prefill_predicted();          // else: admitted.decision.predicted_ttft after sending
//! slot.grow(1);                      // every block_size generated tokens
//! slot.complete();                   // or slot.fail(); dropped without either: aborted
//! // a retry: slot.fail(), push decision.source to `tried`, admit again: a new slot
//!
//! core.audit(&admitted.decision, cached_tokens, now);      // -> AuditVerdict, maybe a Recheck
//! core.tick(now);                    // every quarter of a second or so
//! core.loads();                      // /v1/slots
//! core.counts();                     // metrics
//! ```
//!
//! The shell's [`SlotSink`] is three lines: lock the core, `core.note(event, now)`, tell whoever sends
//! what the ledger keeps. A router's own changes are applied through the bytes that are sent: what it
//! believes of itself is what its peers believe of it. [`crate::sync`] decides which message of a peer
//! goes to `core.apply_remote(&message, now)`.
//!
//! What is deliberately absent: retries, time-outs and queues (the shell's), the index (asked before),
//! and any request content (a prompt is a list of hashes here).

#![forbid(unsafe_code)]

pub mod args;
pub mod audit;
pub mod candidates;
pub mod choice;
pub mod cost;
pub mod decide;
pub mod index_view;
pub mod ledger;
pub mod moves;
pub mod prediction;
pub mod prompt;
pub mod prompt_tree;
pub mod slot_guard;
pub mod slots;
pub mod slowness;
pub mod source_table;
pub mod stall;
mod state;
pub mod sync;
pub mod ttft;

pub use audit::{AuditVerdict, Recheck, RecheckVerdict};
pub use candidates::{Candidate, Health, RouteRefusal, ServedModel};
pub use choice::Policy;
pub use cost::Knobs;
pub use decide::{Decision, DecisionBasis, Terms};
pub use moves::MoveCounts;
pub use prompt::{CacheReads, Prompt};
pub use slot_guard::{SlotEvent, SlotGuard, SlotSink};
pub use slots::{RouterLoad, SlotKey, SourceLoad};
pub use source_table::SourceId;
pub use state::{
    AdmitError, Admitted, Core, CoreConfig, CoreCounts, FreedCounts, RouteRequest,
    SlotSnapshotBuilder,
};
