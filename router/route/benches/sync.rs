//! What keeping replicas in step costs: processor time and bytes a request with 2, 4 and 8
//! replicas, the memory of 20,000 active requests on 512 sources, and how long one hold of the lock
//! lasts while a state is cut or taken in. `cargo bench -p warmroute-route --bench sync`.
//!
//! Pure cores, every message encoded and decoded; what the plane's client takes beside it is not in
//! these figures. All replicas agree at the end, or it stops.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark reads the clock, prints, and stops when it is wrong"
)]

use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_proto::load::SlotEnd;
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::{BlockSize, Generation, LocalHash, RouterId, Seed};
use warmroute_route::sync::{LoadReplica, ReplicaEffect, TICK, TrafficCounts};
use warmroute_route::{
    Core, CoreConfig, Knobs, Policy, Prompt, RouteRequest, SlotEvent, SlotSnapshotBuilder,
};

/// 8,000 tokens of prompt, 500 generated.
const PROMPT_BLOCKS: u64 = 500;
const GROWS: u32 = 31;
const REQUESTS: u32 = 4_000;
const ACTIVE: u32 = 20_000;
const SOURCES: u32 = 512;

/// Measure the memory of active requests, so many blocks of each shared.
const ACTIVE_OF: &str = "--active";

struct Node {
    router: RouterId,
    core: Core,
    replica: LoadReplica,
    busy: Duration,
}

fn core(router: RouterId, sources: u32) -> Core {
    let mut core = Core::new(CoreConfig {
        knobs: Knobs {
            policy: Policy::RoundRobin,
            ..Knobs::default()
        },
        router,
        incarnation: Generation(1),
        seed: 1,
    });
    let entry = |number| WorkerEntry {
        models: vec!["m".into()],
        block_size: BlockSize::new(16),
        main_attention_only: true,
        ..WorkerEntry::new(
            format!("worker-{number}.pool.example"),
            format!("http://worker-{number}:8000"),
        )
    };
    core.set_workers(&(0..sources).map(entry).collect::<Vec<_>>());
    core
}

/// `shared` of the prompt's blocks are those of one of 100 others.
fn prompt(number: u32, shared: u64) -> Prompt {
    let number = u64::from(number);
    let block = |at| match at < shared {
        true => LocalHash((number % 100) << 32 | at),
        false => LocalHash((number + 1000) << 32 | at),
    };
    let blocks: Vec<LocalHash> = (0..PROMPT_BLOCKS).map(block).collect();
    let size = BlockSize::new(16).unwrap();
    Prompt::of_blocks(8_000, size, Seed::PLAIN, blocks)
}

fn admit(core: &mut Core, prompt: &Prompt, now: Instant) -> u64 {
    let ask = RouteRequest {
        model: "m",
        prompt,
        exclude: &[],
        leg: warmroute_route::Leg::Whole,
    };
    core.admit(&ask, None, now).unwrap().slot
}

impl Node {
    fn new(number: usize, now: Instant) -> Self {
        let router = RouterId([u8::try_from(number).unwrap() + 1; 16]);
        let mut node = Self {
            router,
            core: core(router, 16),
            replica: LoadReplica::new(router, now),
            busy: Duration::ZERO,
        };
        node.replica.taken(Generation(2), &mut node.core, now);
        node
    }

    /// Only this is timed: what sync does beside what a lone router does anyway.
    fn sync(&mut self, work: impl FnOnce(&mut LoadReplica, &mut Core)) -> Vec<Bytes> {
        let begin = Instant::now();
        work(&mut self.replica, &mut self.core);
        let mut published = Vec::new();
        while let Some(effect) = self.replica.effect() {
            match effect {
                ReplicaEffect::Publish(bytes) => published.push(bytes),
                ReplicaEffect::Ask { .. }
                | ReplicaEffect::TakeIncarnation
                | ReplicaEffect::Ready => {}
            }
        }
        self.busy += begin.elapsed();
        published
    }
}

fn spread(nodes: &mut [Node], from: usize, published: &[Bytes], now: Instant) {
    for (to, node) in nodes.iter_mut().enumerate() {
        for payload in published {
            // One's own come back too.
            let answer = node.sync(|replica, core| replica.receive(payload, core, now));
            assert!(to != from || answer.is_empty());
        }
    }
}

/// Requests that come evenly, each taking its steps at random times.
#[derive(Default)]
struct Load {
    /// Where, which slot, how many steps were taken.
    open: Vec<(usize, u64, u32)>,
    opened: u32,
    due: f64,
    steps_due: f64,
}

/// Requests open at the same time where none is late.
const OPEN: f64 = 200.0;

impl Load {
    fn is_over(&self) -> bool {
        self.opened == REQUESTS && self.open.is_empty()
    }

    fn advance(&mut self, nodes: &mut [Node], requests: f64, now: Instant) {
        self.due += requests;
        while self.due >= 1.0 && self.opened < REQUESTS {
            self.due -= 1.0;
            let at = self.opened as usize % nodes.len();
            let slot = admit(&mut nodes[at].core, &prompt(self.opened, 400), now);
            self.open.push((at, slot, 0));
            self.opened += 1;
        }
        let share = (self.open.len() as f64 / OPEN).max(0.2);
        self.steps_due += requests * f64::from(GROWS + 2) * share;
        while self.steps_due >= 1.0 && !self.open.is_empty() {
            self.steps_due -= 1.0;
            let index = fastrand::usize(..self.open.len());
            let (at, counter, step) = self.open[index];
            let event = match step {
                0 => SlotEvent::FirstToken { counter },
                1..=GROWS => SlotEvent::Grow { counter, blocks: 1 },
                _ => SlotEvent::End {
                    counter,
                    end: SlotEnd::Completed,
                },
            };
            nodes[at].core.note(event, now).unwrap();
            self.open[index].2 += 1;
            if step > GROWS {
                self.open.swap_remove(index);
            }
        }
    }
}

/// What is written within a `pause` leaves in one frame.
fn replicas(count: usize, pause: Duration, requests_a_second: u32) {
    let mut now = Instant::now();
    let mut nodes: Vec<Node> = (0..count).map(|number| Node::new(number, now)).collect();
    for from in 0..count {
        let published = nodes[from].sync(|replica, core| replica.tick(core, now));
        spread(&mut nodes, from, &published, now);
    }
    let mut load = Load::default();
    let mut ticked = now;
    while !load.is_over() {
        now += pause;
        let requests = f64::from(requests_a_second) * pause.as_secs_f64();
        load.advance(&mut nodes, requests, now);
        let is_tick = now - ticked >= TICK;
        if is_tick {
            ticked = now;
        }
        for from in 0..count {
            let published = nodes[from].sync(|replica, core| {
                replica.wrote(core, now);
                if is_tick {
                    replica.tick(core, now);
                }
            });
            spread(&mut nodes, from, &published, now);
        }
    }
    for of in 0..count {
        let (router, truth) = (nodes[of].router, nodes[of].core.digest(nodes[of].router));
        assert!(nodes.iter().all(|node| node.core.digest(router) == truth));
    }
    report(&nodes, requests_a_second);
}

fn report(nodes: &[Node], requests_a_second: u32) {
    let count = nodes.len();
    let busy: Duration = nodes.iter().map(|node| node.busy).sum();
    let busy = busy.as_secs_f64() * 1e6 / f64::from(REQUESTS);
    let sum = |field: fn(&TrafficCounts) -> u64| -> f64 {
        let all = nodes.iter().map(|node| node.replica.counts().traffic);
        all.map(|traffic| field(&traffic)).sum::<u64>() as f64
    };
    println!(
        "{count} replicas, {requests_a_second} requests/s: {:.1} µs of each replica's processor for \
         a request of the fleet, {busy:.1} µs of all; {:.0} B out, {:.1} messages a frame",
        busy / count as f64,
        sum(|traffic| traffic.bytes_out) / f64::from(REQUESTS),
        sum(|traffic| traffic.messages_out) / sum(|traffic| traffic.frames_out),
    );
}

/// Resident bytes of this process.
fn resident() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: f64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096.0
}

/// Runs in its own process, so that no freed memory is counted or reused.
fn active(shared: u64) {
    let now = Instant::now();
    let (router, peer) = (RouterId([1; 16]), RouterId([2; 16]));
    let mut own = core(router, SOURCES);
    let before = resident();
    for number in 0..ACTIVE {
        admit(&mut own, &prompt(number, shared), now);
    }
    let megabytes = (resident() - before) / 1e6;
    let (mut cut, mut longest_cut, mut is_whole) =
        (SlotSnapshotBuilder::default(), Duration::ZERO, false);
    let begin = Instant::now();
    while !is_whole {
        let step = Instant::now();
        is_whole = own.snapshot_step(&mut cut);
        longest_cut = longest_cut.max(step.elapsed());
    }
    let (cut, stated) = (begin.elapsed(), cut.into_slots());
    let mut other = core(peer, SOURCES);
    let mut longest = Duration::ZERO;
    // As many as one answer holds.
    for part in stated.chunks(180) {
        let begin = Instant::now();
        other.restore(router, Generation(1), part);
        longest = longest.max(begin.elapsed());
    }
    assert_eq!(other.digest(router), own.digest(router));
    let (begin, mut longest_release, mut is_more) = (Instant::now(), Duration::ZERO, true);
    while is_more {
        let step = Instant::now();
        is_more = other.release_step(router, now);
        longest_release = longest_release.max(step.elapsed());
    }
    println!(
        "{ACTIVE} active requests on {SOURCES} sources, {shared} of {PROMPT_BLOCKS} blocks shared: \
         {megabytes:.0} MB; lock held: {longest_cut:?} at most to cut all ({cut:?} in all), {longest:?} \
         for the longest part taken in, {longest_release:?} at most to free all of a dead router ({:?})",
        begin.elapsed(),
    );
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == ACTIVE_OF) {
        active(arguments[at + 1].parse().unwrap());
        return;
    }
    for shared in ["0", "400"] {
        let own = std::env::current_exe().unwrap();
        let mut child = std::process::Command::new(own);
        assert!(child.args([ACTIVE_OF, shared]).status().unwrap().success());
    }
    for count in [2, 4, 8] {
        for requests_a_second in [200, 1_000] {
            replicas(count, Duration::from_millis(1), requests_a_second);
        }
    }
}
