//! The measurements. Changes are built before the clock starts, applying includes dropping them;
//! each query stands in a fresh buffer, cache-hot, before its lookup; dropping the answer is timed.

use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::index::Index;
use crate::workload::{Query, TOKENS_PER_BLOCK, Workload, checksum};

/// One line of output. Figures that a variant does not support are absent.
#[derive(Clone, Default)]
pub struct Figures(pub Vec<(&'static str, Option<f64>)>);

impl Figures {
    pub fn put(&mut self, key: &'static str, value: f64) {
        self.0.push((key, Some(value)));
    }
    fn none(&mut self, keys: &[&'static str]) {
        self.0.extend(keys.iter().map(|&key| (key, None)));
    }
}

fn changes<I: Index>(workload: &Workload) -> Vec<I::Change> {
    let mut translator = I::translator();
    let translate = |event| I::translate(&mut translator, event);
    workload.events().map(translate).collect()
}

fn percentile(sorted: &[u32], percent: f64) -> f64 {
    let at = (sorted.len() - 1) as f64 * percent / 100.0;
    f64::from(sorted[at.round() as usize])
}

/// Times the queries; nanoseconds each.
fn lookups<I: Index>(index: &I, workload: &Workload, queries: &[Query]) -> Vec<u32> {
    let mut prepared = I::Prepared::default();
    let mut blocks = Vec::new();
    let mut times = Vec::with_capacity(queries.len());
    for query in queries {
        workload.fill(query, &mut blocks);
        index.prepare(&blocks, &mut prepared);
        let start = Instant::now();
        drop(black_box(index.lookup(&mut prepared)));
        times.push(start.elapsed().as_nanos() as u32);
    }
    times
}

fn rate(times: &[u32]) -> f64 {
    times.len() as f64 / times.iter().map(|&time| f64::from(time)).sum::<f64>() * 1e9
}

fn is_exact<I: Index>(index: &I, workload: &Workload) -> bool {
    let mut prepared = I::Prepared::default();
    let mut blocks = Vec::new();
    let mut sum = 0u64;
    for (number, query) in workload.queries.iter().enumerate() {
        workload.fill(query, &mut blocks);
        index.prepare(&blocks, &mut prepared);
        let answer = index.lookup(&mut prepared);
        index.each(&answer, &mut |worker, run| {
            sum = sum.wrapping_add(checksum(workload.version, number, worker, run));
        });
    }
    sum == workload.trailer.checksum_all
}

/// Times from tokens to the answer: hashes tokens of the query's length, then looks it up.
fn totals<I: Index>(index: &I, workload: &Workload) -> Vec<u32> {
    let longest = workload
        .queries
        .iter()
        .map(|query| query.prefix + query.suffix)
        .max();
    let tokens = longest.unwrap_or(0) as usize * TOKENS_PER_BLOCK;
    let tokens: Vec<u32> = (0..tokens as u32)
        .map(|token| token.wrapping_mul(2_654_435_761))
        .collect();
    let (mut prepared, mut scratch) = (I::Prepared::default(), I::Prepared::default());
    let (mut blocks, mut prompt) = (Vec::new(), Vec::new());
    let mut times = Vec::with_capacity(workload.queries.len());
    for query in &workload.queries {
        workload.fill(query, &mut blocks);
        index.prepare(&blocks, &mut prepared);
        prompt.clear();
        prompt.extend_from_slice(&tokens[..blocks.len() * TOKENS_PER_BLOCK]);
        let start = Instant::now();
        index.hash(black_box(&prompt), &mut scratch);
        drop(black_box(index.lookup(&mut prepared)));
        times.push(start.elapsed().as_nanos() as u32);
    }
    times
}

/// Processor time of a thread, for rates independent of other work.
struct Processor(std::path::PathBuf);

impl Processor {
    fn of_this_thread() -> Self {
        let thread = std::fs::read_link("/proc/thread-self").unwrap_or_default();
        Self(std::path::Path::new("/proc").join(thread).join("schedstat"))
    }

    fn seconds(&self) -> f64 {
        let stat = std::fs::read_to_string(&self.0).unwrap_or_default();
        let nanoseconds = stat.split_whitespace().next();
        nanoseconds
            .and_then(|ns| ns.parse::<f64>().ok())
            .unwrap_or(f64::NAN)
            / 1e9
    }
}

/// Measures everything but concurrency and memory.
fn alone<I: Index>(workload: &Workload, figures: &mut Figures) -> I {
    let index = I::new(workload.workers);
    let changes = changes::<I>(workload);
    let finished = Mutex::new(None);
    let processor = Processor::of_this_thread();
    let (start, spent) = (Instant::now(), processor.seconds());
    index.write(vec![changes], &|_| {
        *finished.lock().unwrap() = Some((start.elapsed(), processor.seconds() - spent));
    });
    let (applied, spent) = finished.lock().unwrap().unwrap();
    let blocks = workload.trailer.stored + workload.trailer.removed;
    let exact = is_exact(&index, workload);
    figures.put("exact", f64::from(u8::from(exact)));
    figures.put("apply_mblk_s", blocks as f64 / applied.as_secs_f64() / 1e6);
    figures.put("apply_mblk_cpu_s", blocks as f64 / spent / 1e6);
    let mut times = lookups(&index, workload, &workload.queries);
    let alone = rate(&times);
    times.sort_unstable();
    figures.put("lookup_p50_ns", percentile(&times, 50.0));
    figures.put("lookup_p99_ns", percentile(&times, 99.0));
    let mut times = totals(&index, workload);
    times.sort_unstable();
    figures.put("total_p50_ns", percentile(&times, 50.0));
    figures.put("lookups_s_1", alone);
    index
}

fn snapshot<I: Index>(workload: &Workload, index: &I, figures: &mut Figures) {
    let start = Instant::now();
    let Some(snapshot) = index.snapshot() else {
        figures.none(&["snapshot_ms", "snapshot_bytes", "restore_ms"]);
        return;
    };
    figures.put("snapshot_ms", start.elapsed().as_secs_f64() * 1e3);
    figures.put("snapshot_bytes", snapshot.len() as f64);
    let start = Instant::now();
    let restored = index.restore(&snapshot);
    figures.put("restore_ms", start.elapsed().as_secs_f64() * 1e3);
    let exact = restored.is_some_and(|restored| is_exact(&restored, workload));
    figures.put("restored_exact", f64::from(u8::from(exact)));
}

/// Two readers, half the queries each; rates added.
fn two_readers<I: Index + Sync>(workload: &Workload, index: &I) -> f64 {
    let (first, second) = workload.queries.split_at(workload.queries.len() / 2);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| rate(&lookups(index, workload, first)));
        rate(&lookups(index, workload, second)) + reader.join().unwrap()
    })
}

/// Half of the events applied, then a writer and a reader in parallel.
fn mixed<I: Index + Sync>(workload: &Workload, figures: &mut Figures) {
    let index = &I::new(workload.workers);
    let mut first = changes::<I>(workload);
    let second = first.split_off(first.len() / 2);
    let blocks: usize = workload
        .events()
        .skip(first.len())
        .map(|event| match event {
            crate::workload::Event::Store { blocks, .. } => blocks.len(),
            crate::workload::Event::Remove { blocks, .. } => blocks.len(),
        })
        .sum();
    let (started, stopped) = (&AtomicBool::new(false), &AtomicBool::new(false));
    let marks = &Mutex::new(Vec::new());
    let mut times = std::thread::scope(|scope| {
        let reader = scope.spawn(move || {
            while !started.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
            let mut prepared = I::Prepared::default();
            let mut buffer = Vec::new();
            let mut times = Vec::new();
            for query in workload.queries.iter().cycle() {
                if stopped.load(Ordering::Acquire) {
                    break;
                }
                workload.fill(query, &mut buffer);
                index.prepare(&buffer, &mut prepared);
                let start = Instant::now();
                drop(black_box(index.lookup(&mut prepared)));
                times.push(start.elapsed().as_nanos() as u32);
            }
            times
        });
        index.write(vec![first, second], &|part| {
            marks.lock().unwrap().push(Instant::now());
            let flag = if part == 0 { started } else { stopped };
            flag.store(true, Ordering::Release);
        });
        reader.join().unwrap()
    });
    let marks = marks.lock().unwrap();
    let seconds = (marks[1] - marks[0]).as_secs_f64();
    figures.put("mixed_writer_mblk_s", blocks as f64 / seconds / 1e6);
    figures.put("mixed_reader_s", rate(&times));
    times.sort_unstable();
    figures.put("mixed_p99_ns", percentile(&times, 99.0));
    figures.put("mixed_lookups", times.len() as f64);
}

pub fn single<I: Index>(workload: &Workload) -> Figures {
    let mut figures = Figures::default();
    let index = alone::<I>(workload, &mut figures);
    figures.none(&[
        "lookups_s_2",
        "mixed_writer_mblk_s",
        "mixed_reader_s",
        "mixed_p99_ns",
    ]);
    snapshot(workload, &index, &mut figures);
    figures
}

pub fn concurrent<I: Index + Sync>(workload: &Workload) -> Figures {
    let mut figures = Figures::default();
    let index = alone::<I>(workload, &mut figures);
    figures.put("lookups_s_2", two_readers(workload, &index));
    mixed::<I>(workload, &mut figures);
    snapshot(workload, &index, &mut figures);
    figures
}

fn resident() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().nth(1);
    pages
        .and_then(|pages| pages.parse::<f64>().ok())
        .unwrap_or(0.0)
        * 4096.0
}

/// Resident bytes that the tree takes, in this process, which must be fresh.
pub fn memory<I: Index>(workload: &Workload) -> Figures {
    // The translation's table is made whole first, so that it does not grow while the tree does.
    let mut translator = I::translator();
    for event in workload.events() {
        drop(I::translate(&mut translator, event));
    }
    let before = resident();
    let index = I::new(workload.workers);
    let after = Mutex::new(0.0);
    let mut changes = workload
        .events()
        .map(|event| I::translate(&mut translator, event));
    index.write_lazily(&mut changes, &|| *after.lock().unwrap() = resident());
    let bytes = *after.lock().unwrap() - before;
    let mut figures = Figures::default();
    figures.put(
        "bytes_per_entry",
        bytes / workload.trailer.resident_entries as f64,
    );
    figures.put(
        "bytes_per_block",
        bytes / workload.trailer.resident_distinct as f64,
    );
    figures
}

/// Median time of a lookup by prompt length (in blocks, two steps to a doubling), of prompts whose
/// beginning is held.
pub fn lengths<I: Index>(workload: &Workload) -> Vec<(u32, u32)> {
    let index = I::new(workload.workers);
    index.write(vec![changes::<I>(workload)], &|_| ());
    let mut deep: Vec<_> = workload
        .queries
        .iter()
        .filter(|query| query.class == 0)
        .copied()
        .collect();
    deep.sort_by_key(|query| query.prefix + query.suffix);
    let step = |query: &Query| (f64::from(query.prefix + query.suffix).log2() * 2.0) as u32;
    deep.chunk_by(|one, other| step(one) == step(other))
        .filter(|queries| queries.len() >= 100)
        .map(|queries| {
            let mut times = lookups(&index, workload, queries);
            times.sort_unstable();
            let middle = &queries[queries.len() / 2];
            (middle.prefix + middle.suffix, times[times.len() / 2])
        })
        .collect()
}
