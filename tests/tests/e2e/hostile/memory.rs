//! Peak memory of a router beside attacks, and for prompts that are tokenized.

use std::fs;

use fastrand::Rng;

use super::attack::{Attack, LONG_PROMPT_BYTES};
use super::engine::Reuse;
use super::{HostileEngines, Target, chat, words};

const MIB: u64 = 1 << 20;

/// Bytes of the prompts whose memory is compared with their size.
const PROMPT_BYTES: usize = 4_000_000;

/// Most memory beyond that of the idle router for a byte of a prompt, with its body.
const BYTES_PER_BYTE_MAX: f64 = 12.0;

/// Prompts of up to 32 MiB are tokenized, and however long that takes.
const LONG_PROMPTS: &str = "max_prompt_bytes = 33554432\nprompt_timeout_ms = 60000\n";

/// A measured router.
struct Measured {
    target: Target,
    idle_bytes: u64,
}

impl Measured {
    /// A router of its own: what an earlier request freed would hide what the next one takes.
    async fn start(engines: &HostileEngines, settings: &str) -> Self {
        let target = engines.router(settings).await;
        let idle_bytes = peak_bytes(&target);
        Self { target, idle_bytes }
    }

    fn growth(&self) -> u64 {
        peak_bytes(&self.target) - self.idle_bytes
    }
}

/// The most that was resident so far.
fn peak_bytes(target: &Target) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", target.process.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.unwrap().trim().trim_end_matches(" kB");
    kib.parse::<u64>().unwrap() << 10
}

/// The memory limit of the routers in `deploy/kubernetes`.
fn limit_bytes() -> u64 {
    let manifest = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../deploy/kubernetes/base/router.yaml"
    );
    let manifest = fs::read_to_string(manifest).unwrap();
    let (_, limit) = manifest.split_once("limits: { memory: ").unwrap();
    let (gib, _) = limit.split_once("Gi").unwrap();
    gib.parse::<u64>().unwrap() << 30
}

#[tokio::test(flavor = "multi_thread")]
async fn attacks_take_bounded_memory() {
    let engines = HostileEngines::start(2, Reuse::Served).await;
    let mut faults = Vec::new();
    let mut table = String::from("| attack | peak, MiB | above idle, MiB | bound, MiB |\n");
    for attack in Attack::ALL {
        let measured = Measured::start(&engines, "").await;
        attack.run(&measured.target).await;
        measured.target.ask(chat("", "Hello.")).await;
        let (growth, most) = (measured.growth(), attack.growth_max_mib());
        let peak = peak_bytes(&measured.target);
        let row = format!(
            "| {} | {} | {:.1} | {most} |\n",
            attack.name(),
            peak / MIB,
            growth as f64 / MIB as f64
        );
        if growth > most * MIB || peak >= limit_bytes() {
            faults.push(row.clone());
        }
        table.push_str(&row);
    }
    println!("{table}");
    assert!(faults.is_empty(), "{faults:?}");
}

/// A prompt of 18.6 MB, routed by its load and by its tokens.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_of_18_mb_is_answered_within_the_memory_of_a_deployment() {
    let engines = HostileEngines::start(1, Reuse::Served).await;
    for (how, settings, without_tokens) in [("load", "", 1.0), ("tokens", LONG_PROMPTS, 0.0)] {
        let measured = Measured::start(&engines, settings).await;
        let target = &measured.target;
        let unhashed = target.unhashed().await;
        let text = words(&mut Rng::with_seed(12), LONG_PROMPT_BYTES);
        target.ask(chat("", &text)).await;
        let peak = peak_bytes(target);
        println!(
            "a prompt of 18.6 MB, routed by {how}: {} MiB, {} above idle",
            peak / MIB,
            measured.growth() / MIB
        );
        assert_eq!(target.unhashed().await - unhashed, without_tokens, "{how}");
        assert!(peak < limit_bytes(), "{peak}");
    }
}

/// Sentences of 19 ideographs.
fn ideographs(rng: &mut Rng) -> String {
    let mut text = String::with_capacity(PROMPT_BYTES + 64);
    while text.len() < PROMPT_BYTES {
        text.extend((0..19).map(|_| char::from_u32(0x4e00 + rng.u32(0..8000)).unwrap()));
        text.push('。');
    }
    text
}

fn digits(rng: &mut Rng) -> String {
    (0..PROMPT_BYTES).map(|_| rng.digit(10)).collect()
}

/// Texts of few and of many tokens for their bytes. The cache of encoded text, which has a bound of
/// its own, keeps some of their tokens.
#[tokio::test(flavor = "multi_thread")]
async fn a_tokenized_prompt_takes_memory_by_its_size() {
    const KEPT: &str = "token_cache_kept_bytes";
    let engines = HostileEngines::start(1, Reuse::Served).await;
    let mut rng = Rng::with_seed(13);
    let texts = [
        ("prose", words(&mut rng, PROMPT_BYTES)),
        ("ideographs", ideographs(&mut rng)),
        ("a token for each byte", "ꙮ ".repeat(PROMPT_BYTES / 4)),
        ("added tokens", "<|im_end|>".repeat(PROMPT_BYTES / 10)),
        ("digits", digits(&mut rng)),
    ];
    let mut table = String::from("| 4 MB of | above idle, MiB | cached, MiB | bytes a byte |\n");
    let mut faults = Vec::new();
    for (name, text) in texts {
        let measured = Measured::start(&engines, LONG_PROMPTS).await;
        let target = &measured.target;
        let (unhashed, kept) = (target.unhashed_reasons().await, target.metric(KEPT).await);
        target.ask(chat("", &text)).await;
        let growth = measured.growth() as f64;
        let cached = target.metric(KEPT).await - kept;
        assert_eq!(target.unhashed_reasons().await, unhashed, "{name}");
        let ratio = (growth - cached) / text.len() as f64;
        let [growth, cached] = [growth, cached].map(|bytes| bytes / MIB as f64);
        let row = format!("| {name} | {growth:.1} | {cached:.1} | {ratio:.1} |\n");
        if ratio > BYTES_PER_BYTE_MAX {
            faults.push(row.clone());
        }
        table.push_str(&row);
    }
    println!("{table}");
    assert!(faults.is_empty(), "{faults:?}");
}
