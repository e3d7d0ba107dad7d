//! Any order of faults on both sides, restarts of the shim included.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug)]
enum Step {
    Publish {
        lost: bool,
        token: u32,
        removes: bool,
    },
    /// A dead engine's connection always breaks; sooner or later it is back.
    Restart {
        reconnects: bool,
    },
    Reconnect,
    Trim,
    HoleInReplay,
    EngineAnswers(bool),
    LogUp(bool),
    Resync,
    Health(bool),
    Beyond(Beyond),
    Wait(u64),
}

/// What happens on the other side of the shim, and to itself.
#[derive(Clone, Copy, Debug)]
enum Beyond {
    /// The connection to the log breaks, or is back.
    PlaneUp(bool),
    LogLosesItsEnd,
    /// The lease expires, another shim may write, and the lease is taken again.
    Lapse {
        rival: bool,
    },
    Save,
    RestartShim,
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        30 => (any::<bool>(), 1..30_u32, any::<bool>()).prop_map(|(lost, token, removes)| {
            Step::Publish { lost, token, removes }
        }),
        2 => any::<bool>().prop_map(|reconnects| Step::Restart { reconnects }),
        2 => Just(Step::Reconnect),
        1 => Just(Step::Trim),
        2 => Just(Step::HoleInReplay),
        2 => any::<bool>().prop_map(Step::EngineAnswers),
        2 => any::<bool>().prop_map(Step::LogUp),
        1 => Just(Step::Resync),
        1 => any::<bool>().prop_map(Step::Health),
        9 => beyond().prop_map(Step::Beyond),
        6 => (100..2500_u64).prop_map(Step::Wait),
    ]
}

fn beyond() -> impl Strategy<Value = Beyond> {
    prop_oneof![
        2 => any::<bool>().prop_map(Beyond::PlaneUp),
        1 => Just(Beyond::LogLosesItsEnd),
        1 => any::<bool>().prop_map(|rival| Beyond::Lapse { rival }),
        3 => Just(Beyond::Save),
        2 => Just(Beyond::RestartShim),
    ]
}

/// What the engine truly holds: the token of every block, with its copies.
#[derive(Default)]
struct Truth(BTreeMap<u32, u32>);

impl World {
    fn step(&mut self, step: Step, truth: &mut Truth) {
        match step {
            Step::Publish {
                lost,
                token,
                removes,
            } => {
                let event = match truth.0.get_mut(&token) {
                    Some(copies) if removes => {
                        *copies -= 1;
                        if *copies == 0 {
                            truth.0.remove(&token);
                        }
                        remove(u64::from(token))
                    }
                    Some(_) | None => {
                        *truth.0.entry(token).or_default() += 1;
                        store(None, &[token])
                    }
                };
                let (seq, payload) = self.engine.publish(&[event]);
                if !lost && self.core.status(self.now).is_connected {
                    self.deliver(seq, payload);
                }
            }
            Step::Restart { reconnects } => {
                truth.0.clear();
                self.engine.restart();
                self.holes.clear();
                self.core.disconnected(self.now);
                self.drive();
                if reconnects {
                    self.reconnect();
                }
            }
            Step::Reconnect => self.reconnect(),
            Step::Trim => self.engine.oldest = self.engine.batches.len().saturating_sub(2),
            Step::HoleInReplay => {
                let last = self.engine.batches.len() as u64;
                self.holes.insert(last.saturating_sub(1), 1);
            }
            Step::EngineAnswers(answers) => self.engine_answers = answers,
            Step::LogUp(up) => self.log_is_up = up,
            Step::Resync => {
                let above = self.generation;
                self.core.resync(self.now, above, ResyncReason::Gap);
                self.drive();
            }
            Step::Health(healthy) => {
                let health = if healthy {
                    EngineHealth::Healthy
                } else {
                    EngineHealth::Unhealthy
                };
                self.core.health(self.now, health);
                self.drive();
            }
            Step::Beyond(beyond) => self.step_beyond(beyond),
            Step::Wait(ms) => self.tick_ms(ms),
        }
    }

    fn step_beyond(&mut self, step: Beyond) {
        match step {
            Beyond::PlaneUp(true) => {
                self.core.plane_back(self.now);
                self.drive();
            }
            Beyond::PlaneUp(false) => self.core.plane_lost(),
            Beyond::LogLosesItsEnd => {
                let count = self.records.len().min(2);
                self.lose_records(count);
            }
            Beyond::Lapse { rival } => {
                self.core.lease_lapsed();
                self.tick_ms(300);
                if rival {
                    self.generation = self.generation.next().unwrap();
                }
                self.core.lease_taken(self.now);
                self.drive();
            }
            Beyond::Save => self.save(),
            Beyond::RestartShim => {
                self.restart_shim();
                self.start();
            }
        }
    }

    fn heal(&mut self) {
        self.engine_answers = true;
        self.log_is_up = true;
        self.core.plane_back(self.now);
        self.core.health(self.now, EngineHealth::Healthy);
        if !self.core.status(self.now).is_connected {
            self.core.connected(self.now);
        }
        self.drive();
        self.tick_ms(12_000);
    }
}

proptest! {
    /// After the faults stop, what is credited is held; and complete means equal.
    #[test]
    fn whatever_happens_the_source_ends_equal_or_says_that_it_is_not(
        steps in proptest::collection::vec(steps(), 1..80)
    ) {
        let mut world = World::started(true);
        let mut truth = Truth::default();
        for step in steps {
            world.step(step, &mut truth);
        }
        world.heal();
        let held: std::collections::BTreeSet<_> = world.reader.held().into_iter().collect();
        let truly: std::collections::BTreeSet<_> =
            truth.0.keys().map(|&token| (prefix(&[token]), Tier::Gpu)).collect();
        match world.gpu() {
            TierState::Complete => prop_assert_eq!(held, truly),
            TierState::Partial => prop_assert!(held.is_subset(&truly)),
            state @ (TierState::Unverified
            | TierState::Stale
            | TierState::CatchingUp
            | TierState::Absent) => {
                prop_assert!(false, "no credit after healing: {:?}", state);
            }
        }
    }
}
