//! Messages that were on their way for long.

use bytes::Bytes;
use warmroute_proto::{Heartbeat, LogTime, Tiers};

use super::*;
use crate::tests_support::{TestShim, clock_answer};

/// One source, in a log whose clock is looked at each second.
struct Late {
    world: World,
    start: Instant,
    shim: TestShim,
}

impl Late {
    fn new() -> Self {
        let world = World::new();
        let mut late = Self {
            start: world.now,
            shim: TestShim::new(W),
            world,
        };
        late.look();
        let record = late.record("a");
        assert_eq!(late.deliver(&record), RecordVerdict::Started);
        assert_eq!(late.state(), SourceState::Exact);
        late
    }

    fn log_time(&self) -> LogTime {
        let elapsed = Duration::from_secs(1_000) + (self.world.now - self.start);
        LogTime(u64::try_from(elapsed.as_nanos()).unwrap())
    }

    fn look(&mut self) {
        let (now, last) = (self.world.now, self.world.position);
        let LogTime(shows) = self.log_time();
        self.world.fold.observe_end(now, last, shows);
    }

    fn wait(&mut self, secs: u32) {
        for _ in 0..secs {
            self.world.now += SECOND;
            self.look();
            self.world.fold.tick(self.world.now);
        }
    }

    /// The shim's present state.
    fn record(&mut self, names: &str) -> Record {
        Record {
            sent_at: Some(self.log_time()),
            ..self.shim.record(gpu(names))
        }
    }

    fn heartbeat(&self) -> Heartbeat {
        Heartbeat {
            sent_at: Some(self.log_time()),
            ..self.shim.heartbeat()
        }
    }

    /// The log takes and delivers it now.
    fn deliver(&mut self, record: &Record) -> RecordVerdict {
        self.world.position = self.world.position.next();
        let message = LogMessage {
            position: self.world.position,
            subject: Subjects::new(&namespace()).records(&record.source),
            payload: Bytes::from(codec::encode(record).unwrap()),
            stored_unix_ns: self.log_time().0,
        };
        self.world.fold.apply(self.world.now, &message)
    }

    fn hear(&mut self, heartbeat: &Heartbeat) -> HeartbeatVerdict {
        self.world
            .fold
            .heartbeat(self.world.now, &heartbeat_message(heartbeat))
    }

    fn state(&self) -> SourceState {
        self.world.state(W)
    }
}

#[test]
fn a_record_kept_on_its_way_is_folded_and_proves_what_was() {
    let mut late = Late::new();
    let kept = late.record("b");
    late.wait(3);
    assert_eq!(late.deliver(&kept), RecordVerdict::Applied);
    assert_eq!(late.state(), SourceState::Exact);
    late.wait(2);
    assert_eq!(late.state(), SourceState::Unknown, "sent 5 s ago");
    let kept = late.record("c");
    late.wait(7);
    assert_eq!(late.deliver(&kept), RecordVerdict::Applied);
    assert_eq!(late.state(), SourceState::Unknown);
    assert_eq!(late.hear(&late.heartbeat()), HeartbeatVerdict::Proof);
    assert_eq!(late.state(), SourceState::Exact, "all of it is in");
    assert_eq!(late.world.ask("a")[0].number, Some(RecordNumber(2)));
}

#[test]
fn a_heartbeat_kept_on_its_way_proves_what_was() {
    let mut late = Late::new();
    late.wait(1);
    let kept = late.heartbeat();
    late.wait(3);
    assert_eq!(late.hear(&kept), HeartbeatVerdict::Proof);
    assert_eq!(late.state(), SourceState::Exact);
    late.wait(2);
    assert_eq!(late.state(), SourceState::Unknown);
    assert_eq!(late.hear(&kept), HeartbeatVerdict::Proof);
    assert_eq!(late.state(), SourceState::Unknown, "again, and no younger");
}

/// The shim sends each on its own: a later one may overtake an earlier one.
#[test]
fn heartbeats_that_swap_give_back_nothing() {
    let mut late = Late::new();
    late.wait(1);
    let gives = late.heartbeat();
    late.world.now += Duration::from_millis(1);
    let mut withdraws = late.heartbeat();
    withdraws.states = Tiers::all(TierState::Stale);
    for _ in 0..2 {
        assert_eq!(late.hear(&withdraws), HeartbeatVerdict::Proof);
        assert_eq!(late.state(), SourceState::Stale);
        assert_eq!(late.hear(&gives), HeartbeatVerdict::Proof);
        assert_eq!(late.state(), SourceState::Stale);
    }
    late.wait(1);
    assert_eq!(late.hear(&late.heartbeat()), HeartbeatVerdict::Proof);
    assert_eq!(late.state(), SourceState::Exact);
}

/// The log's clock was set back: what came before ends no later claim.
#[test]
fn heartbeats_of_a_clock_that_was_set_back_count() {
    let mut late = Late::new();
    late.wait(20);
    let mut withdraws = late.heartbeat();
    withdraws.states = Tiers::all(TierState::Stale);
    assert_eq!(late.hear(&withdraws), HeartbeatVerdict::Proof);
    let mut gives = late.heartbeat();
    let back = u64::try_from(PROOF_AGE_MAX.as_nanos()).unwrap();
    gives.sent_at = gives.sent_at.map(|at| LogTime(at.0 - back));
    late.hear(&gives);
    assert_ne!(late.state(), SourceState::Stale);
}

/// Credit lives on the proof of what gave it, not on that of what took it back.
#[test]
fn what_was_taken_back_does_not_come_back_with_a_late_word() {
    let mut late = Late::new();
    late.wait(1);
    let kept = late.heartbeat();
    late.wait(3);
    let mut taken_back = late.heartbeat();
    taken_back.states = Tiers::all(TierState::Stale);
    assert_eq!(late.hear(&taken_back), HeartbeatVerdict::Proof);
    assert_eq!(late.state(), SourceState::Stale);
    assert_eq!(late.hear(&kept), HeartbeatVerdict::Proof);
    assert_eq!(late.state(), SourceState::Stale);
    late.wait(2);
    assert_eq!(late.hear(&kept), HeartbeatVerdict::Proof);
    assert_eq!(late.state(), SourceState::Stale);
    assert_eq!(late.hear(&taken_back), HeartbeatVerdict::Proof);
    assert_eq!(late.state(), SourceState::Stale);
}

/// Shims without the log's clock.
#[test]
fn a_message_without_a_time_counts_from_when_it_is_read() {
    let mut late = Late::new();
    let mut kept = late.record("b");
    kept.sent_at = None;
    late.wait(7);
    assert_eq!(late.deliver(&kept), RecordVerdict::Applied);
    assert_eq!(late.state(), SourceState::Exact);
}

#[test]
fn the_long_gone_is_not_asked_above_its_fence() {
    let mut late = Late::new();
    let old = late.heartbeat();
    late.shim.next_generation();
    let record = late.record("z");
    assert_eq!(late.deliver(&record), RecordVerdict::Started);
    late.wait(8);
    assert_eq!(late.hear(&old), HeartbeatVerdict::Old);
    assert_eq!(resyncs(&mut late.world), Vec::new());
    let lives = Heartbeat {
        sent_at: Some(late.log_time()),
        ..old
    };
    assert_eq!(late.hear(&lives), HeartbeatVerdict::Old);
    let fenced = (ResyncReason::Fenced, Generation(2));
    assert_eq!(resyncs(&mut late.world), vec![fenced]);
}

/// The log does not answer; heartbeats come. They may have waited while the machine was suspended.
#[test]
fn nothing_is_credited_while_the_log_does_not_show_its_clock() {
    let mut late = Late::new();
    let shows = |late: &mut Late| {
        let (now, LogTime(shows)) = (late.world.now, late.log_time());
        late.world.fold.observe_clock(clock_answer(now, now, shows))
    };
    shows(&mut late);
    for (millis, state) in [
        (1_000, SourceState::Exact),
        (2_500, SourceState::Exact),
        (2_501, SourceState::Unknown),
        (9_000, SourceState::Unknown),
    ] {
        late.world.now = late.start + Duration::from_millis(millis);
        let heartbeat = late.heartbeat();
        assert_eq!(late.hear(&heartbeat), HeartbeatVerdict::Proof);
        assert_eq!(late.state(), state, "{millis}");
    }
    assert_eq!(shows(&mut late), Duration::ZERO);
    assert_eq!(
        late.state(),
        SourceState::Exact,
        "what it proved counts again"
    );
}

/// The log's clock ran 6 s ahead of ours between two answers: our machine was suspended.
#[test]
fn proofs_from_before_a_suspension_are_older_by_its_length() {
    let mut late = Late::new();
    let LogTime(shows) = late.log_time();
    let now = late.world.now;
    late.world.fold.observe_clock(clock_answer(now, now, shows));
    late.wait(1);
    assert_eq!(late.state(), SourceState::Exact);
    let (now, later) = (late.world.now, shows + 7_000_000_000);
    let stood = late.world.fold.observe_clock(clock_answer(now, now, later));
    assert_eq!(stood, 6 * SECOND);
    assert_eq!(late.state(), SourceState::Unknown);
}
