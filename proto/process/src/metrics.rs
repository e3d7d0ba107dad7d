//! Metrics in Prometheus's text format, written from plain values.

use std::fmt::{Display, Write as _};
use std::time::Duration;

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

/// A metric of a state: name without the prefix, help, and the value.
pub type MetricRow<S> = (&'static str, &'static str, MetricOf<S>);

/// A metric's kind, and what it is in a state. A state without a value has no series.
#[derive(Debug)]
pub enum MetricOf<S> {
    Counter(fn(&S) -> u64),
    /// A counter for each value of a label.
    Counters(&'static str, fn(&S) -> Vec<(&'static str, u64)>),
    Gauge(fn(&S) -> u64),
    /// A gauge for each value of a label.
    Gauges(&'static str, fn(&S) -> Vec<(&'static str, u64)>),
    Known(fn(&S) -> Option<u64>),
    Flag(fn(&S) -> bool),
    Number(fn(&S) -> f64),
    Age(fn(&S) -> Option<Duration>),
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

    fn and(&self, label: &str, value: &str) -> Self {
        let mut labels = Self::new(&[(label, &value)]);
        if !self.0.is_empty() {
            labels.0 = format!("{},{}", self.0, labels.0);
        }
        labels
    }
}

impl<S> MetricOf<S> {
    const fn kind(&self) -> MetricKind {
        match self {
            Self::Counter(_) | Self::Counters(..) => MetricKind::Counter,
            Self::Gauge(_)
            | Self::Gauges(..)
            | Self::Known(_)
            | Self::Flag(_)
            | Self::Number(_)
            | Self::Age(_) => MetricKind::Gauge,
        }
    }

    fn series(&self, labels: &MetricLabels, state: &S) -> Vec<(MetricLabels, String)> {
        let value = match self {
            Self::Counters(label, of) | Self::Gauges(label, of) => {
                let values = of(state).into_iter();
                let series = values.map(|(text, n)| (labels.and(label, text), n.to_string()));
                return series.collect();
            }
            Self::Counter(of) | Self::Gauge(of) => Some(of(state).to_string()),
            Self::Known(of) => of(state).map(|value| value.to_string()),
            Self::Flag(of) => Some(u8::from(of(state)).to_string()),
            Self::Number(of) => Some(of(state).to_string()),
            Self::Age(of) => of(state).map(|age| age.as_secs_f64().to_string()),
        };
        let series = value.map(|value| (labels.clone(), value));
        series.into_iter().collect()
    }
}

impl MetricsText {
    /// An empty text. `prefix` comes before each name, and ends with an underscore.
    #[must_use]
    pub const fn new(prefix: &'static str) -> Self {
        let text = String::new();
        Self { prefix, text }
    }

    /// Appends metrics of one state.
    pub fn rows<S>(&mut self, rows: &[MetricRow<S>], state: &S) {
        self.rows_of(rows, [(MetricLabels::default(), state)]);
    }

    /// Appends metrics, each with the series of all states.
    pub fn rows_of<'a, S: 'a>(
        &mut self,
        rows: &[MetricRow<S>],
        states: impl IntoIterator<Item = (MetricLabels, &'a S)>,
    ) {
        let states: Vec<_> = states.into_iter().collect();
        for (name, help, of) in rows {
            let states = states.iter();
            let series = states.flat_map(|(labels, state)| of.series(labels, state));
            self.family(of.kind(), name, help, series);
        }
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
        let rows: [MetricRow<u64>; 3] = [
            (
                "of_total",
                "By end.",
                MetricOf::Counters("end", |n| vec![("ok", *n)]),
            ),
            ("age", "Not known.", MetricOf::Age(|_| None)),
            ("flag", "Whether.", MetricOf::Flag(|n| *n > 1)),
        ];
        text.rows_of(&rows, [(MetricLabels::new(&[("a", &0)]), &2)]);
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
             # HELP wr_of_total By end.\n# TYPE wr_of_total counter\n\
             wr_of_total{a=\"0\",end=\"ok\"} 2\n\
             # HELP wr_flag Whether.\n# TYPE wr_flag gauge\nwr_flag{a=\"0\"} 1\n\
             # HELP wr_y_seconds Times.\n# TYPE wr_y_seconds histogram\n\
             wr_y_seconds_bucket{worker=\"a\",le=\"0.5\"} 1\n\
             wr_y_seconds_bucket{worker=\"a\",le=\"+Inf\"} 2\n\
             wr_y_seconds_sum{worker=\"a\"} 1.5\nwr_y_seconds_count{worker=\"a\"} 2\n"
        );
    }
}
