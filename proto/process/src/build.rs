//! What was built and where it runs: version and commit, for `--version` and the metrics, and the
//! name of the host.

use std::fs;
use std::sync::LazyLock;

use crate::metrics::{MetricKind, MetricLabels, MetricsText};

pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Short hash of the commit that was packaged; `unknown` in builds that are no package, so that a
/// commit does not rebuild the workspace.
pub const COMMIT: &str = match option_env!("BUILD_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};

/// The answer to `--version`, as `0.1.0 (3d901b9)`.
#[must_use]
pub fn version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| format!("{VERSION} ({COMMIT})"));
    &TEXT
}

/// The name by which operators know this process's place: of its pod, or of its machine.
#[must_use]
pub fn host() -> &'static str {
    static NAME: LazyLock<String> = LazyLock::new(|| {
        let name = fs::read_to_string("/proc/sys/kernel/hostname");
        let name = name.ok().map(|name| name.trim().to_owned());
        name.filter(|name| !name.is_empty())
            .unwrap_or_else(|| "unknown-host".to_owned())
    });
    &NAME
}

/// The metric `warmroute_build_info`. A page has it once, also with several parts in one process.
#[must_use]
pub fn metrics_text() -> String {
    let labels = MetricLabels::new(&[
        ("version", &VERSION),
        ("commit", &COMMIT),
        ("host", &host()),
    ]);
    let mut text = MetricsText::new("warmroute_build_");
    text.family(
        MetricKind::Gauge,
        "info",
        "Version, commit and host of this process.",
        [(labels, 1)],
    );
    text.into_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_and_metric_name_the_same_build() {
        assert_eq!(version(), format!("{VERSION} ({COMMIT})"));
        let host = host();
        let series = format!(
            "\nwarmroute_build_info{{version=\"{VERSION}\",commit=\"{COMMIT}\",host=\"{host}\"}} 1\n"
        );
        assert!(metrics_text().ends_with(&series), "{}", metrics_text());
    }
}
