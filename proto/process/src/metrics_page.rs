//! Reads metrics in Prometheus's text format. Pure and tolerant: what is not a sample is passed over.

/// One line of a page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MetricSample<'a> {
    labels: &'a str,
    pub value: f64,
}

/// The samples of a metric, by its whole name.
pub fn samples<'a>(page: &'a str, name: &'a str) -> impl Iterator<Item = MetricSample<'a>> {
    page.lines().filter_map(move |line| {
        let rest = line.strip_prefix(name)?;
        if !rest.starts_with(['{', ' ']) {
            return None;
        }
        // Values have no spaces; a time may follow.
        let (labels, value) = match rest.rsplit_once('}') {
            Some((labels, value)) => (labels, value),
            None => ("", rest),
        };
        let value = value.split_whitespace().next()?.parse().ok()?;
        Some(MetricSample { labels, value })
    })
}

impl<'a> MetricSample<'a> {
    /// The value of a label, as it is written: escapes are left.
    #[must_use]
    pub fn label(&self, name: &str) -> Option<&'a str> {
        let mut places = self.labels.match_indices(name);
        let (at, _) = places.find(|&(at, _)| {
            self.labels[..at].ends_with(['{', ','])
                && self.labels[at + name.len()..].starts_with("=\"")
        })?;
        let value = &self.labels[at + name.len() + 2..];
        value.split_once('"').map(|(value, _)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_labels_and_values() {
        let page = "# TYPE a gauge\n\
            a{engine=\"0\",model_name=\"a } b\"} 3.0\n\
            a_sum{engine=\"0\"} 9\n\
            a 4 1700000000000\n\
            a{engine=\"1\"} much\n\
            a{engine=\"1\"\n";
        let read: Vec<_> = samples(page, "a").collect();
        let values: Vec<f64> = read.iter().map(|sample| sample.value).collect();
        assert_eq!(values, [3.0, 4.0]);
        assert_eq!(read[0].label("engine"), Some("0"));
        assert_eq!(read[0].label("model_name"), Some("a } b"));
        assert_eq!(read[0].label("name"), None);
        assert_eq!(read[1].label("engine"), None);
    }
}
