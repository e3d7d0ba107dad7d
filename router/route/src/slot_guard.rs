//! A slot that cannot leak: whatever happens to the request, dropping the guard frees it once.

use std::sync::Arc;

use warmroute_proto::load::SlotEnd;

use super::slots::PrefillState;

/// What happens to an open slot of this router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotEvent {
    /// The first token was seen: prefill ended, and how long it took is worth learning.
    FirstToken {
        counter: u64,
    },
    /// Nothing can be seen (not streaming): prefill is taken as ended.
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
    /// Whether others' decisions suffer if they hear of it a moment later. A generated block does not
    /// wait for long either, but by itself it is not worth a message to everybody.
    #[must_use]
    pub const fn is_urgent(&self) -> bool {
        !matches!(self, Self::Grow { .. })
    }
}

/// Where slots are accounted: locks the core, notes the event, publishes the bytes. Called from drop,
/// so that it must not block for long, must not panic and cannot fail.
pub trait SlotSink: Send + Sync {
    fn note(&self, event: SlotEvent);
}

/// One attempt's open slot. Dropped before its end was told: the client is gone, an abort.
#[derive(Debug)]
pub struct SlotGuard<A: SlotSink> {
    accounts: Arc<A>,
    counter: u64,
    prefill: PrefillState,
    end: SlotEnd,
}

impl<A: SlotSink> SlotGuard<A> {
    /// Takes over a slot that is open. `counter`: as the core gave it.
    #[must_use]
    pub const fn new(accounts: Arc<A>, counter: u64) -> Self {
        Self {
            accounts,
            counter,
            prefill: PrefillState::Outstanding,
            end: SlotEnd::Aborted,
        }
    }

    #[must_use]
    pub const fn counter(&self) -> u64 {
        self.counter
    }

    /// The request was moved: the core freed this slot and opened another one, which is guarded from here
    /// on.
    pub const fn take_over(&mut self, counter: u64) {
        self.counter = counter;
    }

    /// The first token came. Only the first call, of this or of [`Self::prefill_predicted`], counts.
    pub fn first_token(&mut self) {
        let counter = self.counter;
        self.prefill_done(SlotEvent::FirstToken { counter });
    }

    /// The prefill should be over by now, but nothing shows it.
    pub fn prefill_predicted(&mut self) {
        let counter = self.counter;
        self.prefill_done(SlotEvent::PrefillPredicted { counter });
    }

    /// This many more blocks were generated.
    pub fn grow(&mut self, blocks: u32) {
        if blocks > 0 {
            let counter = self.counter;
            self.accounts.note(SlotEvent::Grow { counter, blocks });
        }
    }

    /// The whole answer came.
    pub fn complete(mut self) {
        self.end = SlotEnd::Completed;
    }

    /// The source failed. A retry takes a slot of its own.
    pub fn fail(mut self) {
        self.end = SlotEnd::Failed;
    }

    fn prefill_done(&mut self, event: SlotEvent) {
        if self.prefill == PrefillState::Outstanding {
            self.prefill = PrefillState::Done;
            self.accounts.note(event);
        }
    }
}

impl<A: SlotSink> Drop for SlotGuard<A> {
    fn drop(&mut self) {
        self.accounts.note(SlotEvent::End {
            counter: self.counter,
            end: self.end,
        });
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

    /// The events of slot 4 while `use_it` has its guard.
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
        assert_eq!(events(SlotGuard::complete), [end(SlotEnd::Completed)]);
        assert_eq!(events(SlotGuard::fail), [end(SlotEnd::Failed)]);
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
    fn prefill_ends_once_however_often_it_is_said() {
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
