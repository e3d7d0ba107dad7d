//! A guard that frees its slot exactly once when it is dropped.

use std::sync::Arc;

use warmroute_proto::load::SlotEnd;

use super::slots::PrefillState;

/// Event of an open slot of this router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotEvent {
    /// The first token arrived: the prefill ended, and its time is measured.
    FirstToken {
        counter: u64,
    },
    /// The answer is not streamed: the prefill is assumed to have ended.
    PrefillPredicted {
        counter: u64,
    },
    Grow {
        counter: u64,
        blocks: u32,
    },
    End {
        counter: u64,
        end: SlotEnd,
    },
}

impl SlotEvent {
    /// Whether peers need the event immediately. Generated blocks leave with the next frame.
    #[must_use]
    pub const fn is_urgent(&self) -> bool {
        !matches!(self, Self::Grow { .. })
    }
}

/// Records slot events, which the next user of the core sees applied, and wakes the sender. Called
/// from `drop`, so it must be short and cannot fail or panic.
pub trait SlotSink: Send + Sync {
    fn note(&self, event: SlotEvent);
}

/// The open slot of one attempt. Dropped without an end it is aborted: the client disconnected.
#[derive(Debug)]
pub struct SlotGuard<A: SlotSink> {
    accounts: Arc<A>,
    counter: u64,
    prefill: PrefillState,
    is_open: bool,
}

impl<A: SlotSink> SlotGuard<A> {
    /// Guards an open slot.
    #[must_use]
    pub const fn new(accounts: Arc<A>, counter: u64) -> Self {
        Self {
            accounts,
            counter,
            prefill: PrefillState::Outstanding,
            is_open: true,
        }
    }

    #[must_use]
    pub const fn counter(&self) -> u64 {
        self.counter
    }

    /// Guards another slot, after the core moved the request and freed this one.
    pub const fn take_over(&mut self, counter: u64) {
        self.counter = counter;
    }

    /// Records the first token. Only the first call of this or [`Self::prefill_predicted`] counts.
    pub fn first_token(&mut self) {
        let counter = self.counter;
        self.prefill_done(SlotEvent::FirstToken { counter });
    }

    /// Records the assumed end of the prefill.
    pub fn prefill_predicted(&mut self) {
        let counter = self.counter;
        self.prefill_done(SlotEvent::PrefillPredicted { counter });
    }

    /// Records generated blocks.
    pub fn grow(&mut self, blocks: u32) {
        if blocks > 0 && self.is_open {
            let counter = self.counter;
            self.accounts.note(SlotEvent::Grow { counter, blocks });
        }
    }

    /// Ends the slot after a complete answer.
    pub fn complete(&mut self) {
        self.end_as(SlotEnd::Completed);
    }

    /// Ends the slot after a failure of the source. A retry opens another slot.
    pub fn fail(&mut self) {
        self.end_as(SlotEnd::Failed);
    }

    /// Only the first end counts.
    fn end_as(&mut self, end: SlotEnd) {
        if std::mem::take(&mut self.is_open) {
            let counter = self.counter;
            self.accounts.note(SlotEvent::End { counter, end });
        }
    }

    fn prefill_done(&mut self, event: SlotEvent) {
        if self.prefill == PrefillState::Outstanding && self.is_open {
            self.prefill = PrefillState::Done;
            self.accounts.note(event);
        }
    }
}

impl<A: SlotSink> Drop for SlotGuard<A> {
    fn drop(&mut self) {
        self.end_as(SlotEnd::Aborted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Notes(Mutex<Vec<SlotEvent>>);

    impl SlotSink for Notes {
        fn note(&self, event: SlotEvent) {
            self.0.lock().unwrap().push(event);
        }
    }

    /// Events of slot 4 during `use_it`.
    fn events(use_it: impl FnOnce(SlotGuard<Notes>)) -> Vec<SlotEvent> {
        let notes = Arc::new(Notes::default());
        use_it(SlotGuard::new(Arc::clone(&notes), 4));
        notes.0.lock().unwrap().clone()
    }

    const fn end(end: SlotEnd) -> SlotEvent {
        SlotEvent::End { counter: 4, end }
    }

    #[test]
    fn every_way_out_frees_exactly_once() {
        assert_eq!(events(drop), [end(SlotEnd::Aborted)]);
        let completed = events(|mut guard| guard.complete());
        assert_eq!(completed, [end(SlotEnd::Completed)]);
        let failed = events(|mut guard| {
            guard.fail();
            guard.first_token();
            guard.grow(1);
            guard.complete();
        });
        assert_eq!(failed, [end(SlotEnd::Failed)]);
    }

    #[test]
    fn a_panic_frees_too() {
        let found = events(|guard| {
            let thrown = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                let _guard = guard;
                std::panic::resume_unwind(Box::new(()));
            }));
            assert!(thrown.is_err());
        });
        assert_eq!(found, [end(SlotEnd::Aborted)]);
    }

    #[test]
    fn prefill_ends_once_for_any_number_of_calls() {
        let found = events(|mut guard| {
            guard.first_token();
            guard.prefill_predicted();
            guard.first_token();
            guard.grow(0);
            guard.grow(2);
            guard.complete();
        });
        let expected = [
            SlotEvent::FirstToken { counter: 4 },
            SlotEvent::Grow {
                counter: 4,
                blocks: 2,
            },
            end(SlotEnd::Completed),
        ];
        assert_eq!(found, expected);
    }
}
