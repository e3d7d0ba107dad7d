//! The benchmark of the plane, as far as a run shows that it still measures: it stopped once without
//! notice, as its engine lacked what shims had begun to ask for.

use std::process::Command;

const BENCH: &str = env!("CARGO_BIN_EXE_warmroute-bench-plane");

#[test]
fn the_benchmark_of_the_plane_reaches_its_figures() {
    let run = Command::new(BENCH)
        .args(["--ranks", "2", "--only", "queries"])
        .output()
        .unwrap();
    let (figures, errors) = (
        String::from_utf8_lossy(&run.stdout),
        String::from_utf8_lossy(&run.stderr),
    );
    assert!(run.status.success(), "{errors}");
    assert!(
        figures.contains("| query of 64 blocks over NATS |"),
        "{figures}"
    );
}
