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
    Histogram,
}

/// The labels of one series.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetricLabels(String);

/// The observations of one series of a histogram.
#[derive(Clone, Debug, PartialEq)]
pub struct HistogramCounts {
    /// Upper bounds, and how many observations are not above them.
    pub buckets: Vec<(f64, u64)>,
    /// All observations.
    pub count: u64,
    pub sum: f64,
}

impl MetricLabels {
    /// Labels with these names and values. Values are escaped.
    #[must_use]
    pub fn new(labels: &[(&str, &dyn Display)]) -> Self {
        let labels = labels.iter().map(|(name, value)| {
            let value = value.to_string().replace('\\', "\\\\");
            let value = value.replace('"', "\\\"").replace('\n', "\\n");
            format!("{name}=\"{value}\"")
        });
        Self(labels.collect::<Vec<_>>().join(","))
    }
}

impl MetricsText {
    /// An empty text. `prefix` comes before each name, and ends with an underscore.
    #[must_use]
    pub const fn new(prefix: &'static str) -> Self {
        let text = String::new();
        Self { prefix, text }
    }

    /// Appends a counter without labels.
    pub fn counter(&mut self, name: &str, help: &str, value: u64) {
        let series = [(MetricLabels::default(), value)];
        self.family(MetricKind::Counter, name, help, series);
    }

    /// Appends a gauge without labels.
    pub fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        let series = [(MetricLabels::default(), value)];
        self.family(MetricKind::Gauge, name, help, series);
    }

    /// Appends a counter with a series for each value of one label.
    pub fn counters(&mut self, name: &str, help: &str, label: &str, values: &[(&str, u64)]) {
        let series = values
            .iter()
            .map(|(text, value)| (MetricLabels::new(&[(label, text)]), value));
        self.family(MetricKind::Counter, name, help, series);
    }

    /// Appends a metric with one value for each of its series, or nothing if it has no series.
    pub fn family<V: Display>(
        &mut self,
        kind: MetricKind,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (MetricLabels, V)>,
    ) {
        let mut head = Some(self.head(kind, name, help));
        for (labels, value) in series {
            self.text.push_str(&head.take().unwrap_or_default());
            self.sample(name, &labels.0, value);
        }
    }

    /// Appends a histogram, or nothing if it has no series.
    pub fn histograms(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (MetricLabels, HistogramCounts)>,
    ) {
        let mut head = Some(self.head(MetricKind::Histogram, name, help));
        for (MetricLabels(labels), counts) in series {
            self.text.push_str(&head.take().unwrap_or_default());
            let bucket = format!("{name}_bucket");
            for (bound, below) in counts.buckets {
                self.sample(&bucket, &format!("{labels},le=\"{bound}\""), below);
            }
            self.sample(&bucket, &format!("{labels},le=\"+Inf\""), counts.count);
            self.sample(&format!("{name}_sum"), &labels, counts.sum);
            self.sample(&format!("{name}_count"), &labels, counts.count);
        }
    }

    /// A metric's first lines.
    fn head(&self, kind: MetricKind, name: &str, help: &str) -> String {
        let kind = match kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        };
        let prefix = self.prefix;
        format!("# HELP {prefix}{name} {help}\n# TYPE {prefix}{name} {kind}\n")
    }

    #[expect(
        clippy::let_underscore_must_use,
        reason = "writing to a String cannot fail"
    )]
    fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        let prefix = self.prefix;
        let _ = match labels {
            "" => writeln!(self.text, "{prefix}{name} {value}"),
            labels => writeln!(self.text, "{prefix}{name}{{{labels}}} {value}"),
        };
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
        text.gauge("up", "Whether it is up.", 1);
        let none: [(MetricLabels, u64); 0] = [];
        text.family(MetricKind::Gauge, "absent", "No series.", none);
        let labels = MetricLabels::new(&[("worker", &"a\"b\\c\nd"), ("dp_rank", &0)]);
        text.family(MetricKind::Counter, "x_total", "Things.", [(labels, 2.5)]);
        let counts = HistogramCounts {
            buckets: vec![(0.5, 1)],
            count: 2,
            sum: 1.5,
        };
        let labels = MetricLabels::new(&[("worker", &"a")]);
        text.histograms("y_seconds", "Times.", [(labels, counts)]);
        assert_eq!(
            text.into_string(),
            "# HELP wr_up Whether it is up.\n# TYPE wr_up gauge\nwr_up 1\n\
             # HELP wr_x_total Things.\n# TYPE wr_x_total counter\n\
             wr_x_total{worker=\"a\\\"b\\\\c\\nd\",dp_rank=\"0\"} 2.5\n\
             # HELP wr_y_seconds Times.\n# TYPE wr_y_seconds histogram\n\
             wr_y_seconds_bucket{worker=\"a\",le=\"0.5\"} 1\n\
             wr_y_seconds_bucket{worker=\"a\",le=\"+Inf\"} 2\n\
             wr_y_seconds_sum{worker=\"a\"} 1.5\nwr_y_seconds_count{worker=\"a\"} 2\n"
        );
    }
}
