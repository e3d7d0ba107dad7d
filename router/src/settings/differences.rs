//! What a changed settings file changes, for the log. Pure.

use toml::{Table, Value};

/// Keys that are read at the start only.
const AT_START: [&str; 4] = [
    "endpoint_picker.host",
    "endpoint_picker.port",
    "prefix_hash_load_percent",
    "request_threads",
];

/// The changed keys as lines of TOML. Rows of keys are named and not shown.
pub(super) fn differences(before: &Table, now: &Table) -> Vec<String> {
    let mut lines = Vec::new();
    compare("", before, now, &mut lines);
    lines
}

fn compare(path: &str, before: &Table, now: &Table, lines: &mut Vec<String>) {
    let gone = before.keys().filter(|key| !now.contains_key(*key));
    for key in now.keys().chain(gone) {
        let name = match path {
            "" => key.clone(),
            path => format!("{path}.{key}"),
        };
        match (before.get(key), now.get(key)) {
            (before, now) if before == now => {}
            (Some(Value::Table(before)), Some(Value::Table(now))) => {
                compare(&name, before, now, lines);
            }
            (None, Some(Value::Table(now))) => compare(&name, &Table::new(), now, lines),
            (_, Some(now)) => {
                let late = match AT_START.contains(&name.as_str()) {
                    true => " (from the next start on)",
                    false => "",
                };
                lines.push(match shown(now) {
                    Some(now) => format!("{name} = {now}{late}"),
                    None => format!("{name} changed"),
                });
            }
            (_, None) => lines.push(format!("{name} removed")),
        }
    }
}

/// A value in TOML. `None`: it has tables, which are tenants, keys or workers.
fn shown(value: &Value) -> Option<String> {
    match value {
        Value::Array(values) => {
            let values: Option<Vec<String>> = values.iter().map(shown).collect();
            Some(format!("[{}]", values?.join(", ")))
        }
        Value::Table(_) => None,
        Value::String(text) => Some(format!("{text:?}")),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        Value::Boolean(flag) => Some(flag.to_string()),
        Value::Datetime(time) => Some(time.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_lines_of_toml_and_keys_are_not_shown() {
        let check = |before: &str, now: &str, lines: &[&str]| {
            let [before, now] = [before, now].map(|text| text.parse().unwrap());
            assert_eq!(differences(&before, &now), lines);
        };
        check("a = 1", "a = 1", &[]);
        check("a = 1\nb = 2", "a = 3", &["a = 3", "b removed"]);
        check("", "[engines]\nload = true", &["engines.load = true"]);
        check("", "a = [\"b\", 1]", &["a = [\"b\", 1]"]);
        let restart = "request_threads = 2 (from the next start on)";
        check("request_threads = 1", "request_threads = 2", &[restart]);
        let picker = "endpoint_picker.port = 9002 (from the next start on)";
        check("", "[endpoint_picker]\nport = 9002", &[picker]);
        let tenant = "[[tenants]]\nname = \"t\"\nkeys = [{ id = \"k\", sha256 = \"00\" }]";
        check("", tenant, &["tenants changed"]);
    }

    #[test]
    fn what_needs_a_restart_is_what_the_reference_names() {
        let rows = include_str!("../../../docs/REFERENCE.md").lines();
        let rows = rows.filter(|row| row.starts_with("| `") && row.contains("at start"));
        let named: Vec<&str> = rows.filter_map(|row| row.split('`').nth(1)).collect();
        assert_eq!(named, AT_START);
    }
}
