//! Prints what many models cost: load time and resident memory of copies of one model's tokenizer.
//! Linux only. [PERF.md](../../../docs/PERF.md) has the command and results.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a benchmark fails, prints and reads the clock"
)]

use std::fs;
use std::path::Path;
use std::time::Instant;

use warmroute_chat::tokenize::Tokenizer;

const COMPARED_TEXTS: usize = 2_000;

fn resident_mib() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.unwrap().trim().trim_end_matches(" kB");
    kib.parse::<f64>().unwrap() / 1024.0
}

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap();
    let models: u32 = args.next().unwrap().parse().unwrap();
    let path = Path::new(&path);
    let file = fs::metadata(path.join("tokenizer.json")).unwrap().len() as f64;
    let (before, started) = (resident_mib(), Instant::now());
    let mut compared = 0.0;
    let mut loaded = Vec::new();
    for _ in 0..models {
        let tokenizer = Tokenizer::load(path).unwrap();
        let loading = Instant::now();
        assert!(tokenizer.compare_generated(COMPARED_TEXTS, 1).is_none());
        compared += loading.elapsed().as_secs_f64();
        tokenizer.set_cache_bytes_max(0);
        loaded.push(tokenizer);
    }
    let (memory, took) = (resident_mib() - before, started.elapsed().as_secs_f64());
    let each = memory / f64::from(models);
    let file = file / f64::from(1 << 20);
    println!("{models} models with a tokenizer.json of {file:.1} MiB:");
    println!(
        "{memory:.0} MiB, {each:.1} MiB each, {:.1} × the file",
        each / file
    );
    println!("{took:.1} s one after the other, of which {compared:.1} s are the comparison");
}
