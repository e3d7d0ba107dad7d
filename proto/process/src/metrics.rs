//! Metrics in Prometheus's text format, written from plain values.

use std::fmt::{Display, Write as _};

/// Text of metrics whose names have one prefix.
#[derive(Debug)]
pub struct MetricsText {
    prefix: &'static str,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    Counter,
    Gauge,
}

/// The labels of one series.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetricLabels(String);

impl MetricLabels {
    /// Labels with these names and values. Values are escaped.
    #[must_use]
    pub fn new(labels: &[(&str, &dyn Display)]) -> Self {
        let labels = labels.iter().map(|(name, value)| {
            let value = value.to_string().replace('\\', "\\\\");
            let value = value.replace('"', "\\\"").replace('\n', "\\n");
            format!("{name}=\"{value}\"")
        });
        Self(format!("{{{}}}", labels.collect::<Vec<_>>().join(",")))
    }
}

impl MetricsText {
    /// An empty text. `prefix` comes before each name, and ends with an underscore.
    #[must_use]
    pub const fn new(prefix: &'static str) -> Self {
        let text = String::new();
        Self { prefix, text }
    }

    /// Appends a metric without labels.
    pub fn value(&mut self, kind: MetricKind, name: &str, help: &str, value: impl Display) {
        self.family(kind, name, help, [(MetricLabels::default(), value)]);
    }

    /// Appends a metric with one value for each of its series, or nothing if it has no series.
    #[expect(
        clippy::let_underscore_must_use,
        reason = "writing to a String cannot fail"
    )]
    pub fn family<V: Display>(
        &mut self,
        kind: MetricKind,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (MetricLabels, V)>,
    ) {
        let kind = match kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
        };
        let prefix = self.prefix;
        let mut head = Some(format!(
            "# HELP {prefix}{name} {help}\n# TYPE {prefix}{name} {kind}\n"
        ));
        for (MetricLabels(labels), value) in series {
            self.text.push_str(&head.take().unwrap_or_default());
            let _ = writeln!(self.text, "{prefix}{name}{labels} {value}");
        }
    }

    #[must_use]
    pub fn into_string(self) -> String {
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_written_and_label_values_are_escaped() {
        let mut text = MetricsText::new("wr_");
        text.value(MetricKind::Gauge, "up", "Whether it is up.", 1);
        let none: [(MetricLabels, u64); 0] = [];
        text.family(MetricKind::Gauge, "absent", "No series.", none);
        let labels = MetricLabels::new(&[("worker", &"a\"b\\c\nd"), ("dp_rank", &0)]);
        text.family(MetricKind::Counter, "x_total", "Things.", [(labels, 2.5)]);
        assert_eq!(
            text.into_string(),
            "# HELP wr_up Whether it is up.\n# TYPE wr_up gauge\nwr_up 1\n\
             # HELP wr_x_total Things.\n# TYPE wr_x_total counter\n\
             wr_x_total{worker=\"a\\\"b\\\\c\\nd\",dp_rank=\"0\"} 2.5\n"
        );
    }
}
