//! A report as a page for operators and as JSON for scripts.

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use serde_json::{Value, json};

use super::{Finding, Severity, StatusLine};

/// Items shown per finding; further ones are counted.
const SHOWN_MAX: usize = 6;

/// The result of a diagnosis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub namespace: String,
    pub server: String,
    /// Findings, the worst first.
    pub findings: Vec<Finding>,
    /// Status lines.
    pub rest: Vec<StatusLine>,
}

impl Report {
    /// Returns true if a finding needs action.
    #[must_use]
    pub fn needs_action(&self) -> bool {
        let mut severities = self.findings.iter().map(|finding| finding.code.severity());
        severities.any(|severity| severity < Severity::Note)
    }

    /// The report for scripts. Codes and severities are stable, texts are not.
    #[must_use]
    pub fn json(&self) -> Value {
        let finding = |finding: &Finding| {
            let explains = finding.explains.iter().map(|(code, _)| code.label());
            json!({
                "code": finding.code.label(),
                "severity": finding.code.severity(),
                "about": finding.about,
                "cause": finding.code.cause(),
                "effect": finding.code.effect(),
                "run": finding.code.run(&self.namespace),
                "explains": explains.collect::<Vec<&str>>(),
            })
        };
        let row = |(what, is): &StatusLine| json!({ "what": what, "is": is });
        json!({
            "namespace": self.namespace,
            "server": self.server,
            "needs_somebody": self.needs_action(),
            "findings": self.findings.iter().map(finding).collect::<Vec<Value>>(),
            "rest": self.rest.iter().map(row).collect::<Vec<Value>>(),
        })
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let verdict = match (self.findings.is_empty(), self.needs_action()) {
            (true, _) => "nothing wrong",
            (false, false) => "no action needed",
            (false, true) => "action needed",
        };
        let (namespace, server) = (&self.namespace, &self.server);
        writeln!(
            f,
            "namespace {namespace} on nats-server {server}: {verdict}"
        )?;
        for finding in &self.findings {
            let (code, about) = (finding.code, &finding.about);
            let (severity, word) = (code.severity().label(), code.label());
            writeln!(f, "\n{severity:<8} {word}")?;
            for one in about.iter().take(SHOWN_MAX) {
                writeln!(f, "         - {one}")?;
            }
            if about.len() > SHOWN_MAX {
                writeln!(f, "         - and {} more", about.len() - SHOWN_MAX)?;
            }
            writeln!(f, "         cause:  {}", code.cause())?;
            writeln!(f, "         effect: {}", code.effect())?;
            writeln!(f, "         run:    {}", code.run(namespace))?;
            let explained = finding.explains.iter();
            let explained = explained.map(|(code, count)| format!("{} ({count})", code.label()));
            let explained: Vec<String> = explained.collect();
            if !explained.is_empty() {
                writeln!(f, "         explains: {}", explained.join(", "))?;
            }
        }
        writeln!(f)?;
        for (what, is) in self.rest.iter().take(SHOWN_MAX * 4) {
            writeln!(f, "{what:<11}{is}")?;
        }
        Ok(())
    }
}

/// Bytes as text with two or three digits.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut tenths = u128::from(bytes) * 10;
    while tenths >= 10_240 && unit + 1 < UNITS.len() {
        tenths /= 1024;
        unit += 1;
    }
    let name = UNITS.get(unit).copied().unwrap_or_default();
    match (tenths / 10, tenths % 10) {
        (whole, 0) => format!("{whole} {name}"),
        (whole, tenth) => format!("{whole}.{tenth} {name}"),
    }
}

pub(crate) fn duration(age: Duration) -> String {
    let secs = age.as_secs();
    match secs {
        0..=9 => format!("{}.{} s", secs, age.subsec_millis() / 100),
        10..=119 => format!("{secs} s"),
        120..=7199 => format!("{} min", secs / 60),
        7200..=172_799 => format!("{} h", secs / 3600),
        _ => format!("{} days", secs / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Code;
    use super::*;

    #[test]
    fn figures_are_short() {
        let check = |count, text: &str| assert_eq!(bytes(count), text);
        check(0, "0 B");
        check(1023, "1023 B");
        check(1536, "1.5 KiB");
        check(2 << 30, "2 GiB");
        check(u64::MAX, "16777215.9 TiB");
        let check = |millis, text: &str| assert_eq!(duration(Duration::from_millis(millis)), text);
        check(1250, "1.2 s");
        check(61_000, "61 s");
        check(600_000, "10 min");
        check(86_400_000, "24 h");
    }

    #[test]
    fn a_page_shows_some_of_many_and_json_all() {
        let about: Vec<String> = (0..10_000).map(|number| format!("w/{number}")).collect();
        let report = Report {
            namespace: "prod".to_owned(),
            server: "2.15.1".to_owned(),
            findings: vec![Finding {
                code: Code::SourceStale,
                about,
                explains: Vec::new(),
            }],
            rest: vec![("log", "well".to_owned())],
        };
        let page = report.to_string();
        assert!(page.contains("action needed"), "{page}");
        assert!(page.contains("- and 9994 more\n"), "{page}");
        assert!(page.contains(Code::SourceStale.cause()), "{page}");
        assert!(page.contains("log        well\n"), "{page}");
        assert!(page.lines().count() < 60);
        let shown = report.json()["findings"][0]["about"]
            .as_array()
            .map(Vec::len);
        assert_eq!(shown, Some(10_000));
    }
}
