//! `datetime.strftime` in the C locale, for a given time.

use std::fmt::Write as _;

use time::OffsetDateTime;

/// A wall-clock time in UTC. The engine uses its local time, which is UTC in a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CivilTime(OffsetDateTime);

impl CivilTime {
    /// The time of a Unix timestamp in seconds; 1970 for one beyond the year 9999.
    pub fn from_unix(seconds: i64) -> Self {
        Self(OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH))
    }

    /// Formats as Python does. An unknown directive is kept as written.
    pub fn format(&self, format: &str) -> String {
        let mut out = String::with_capacity(format.len() + 16);
        let mut rest = format;
        while let Some((before, after)) = rest.split_once('%') {
            out.push_str(before);
            let (flag, after) = match after.strip_prefix('-') {
                Some(after) => ("-", after),
                None => ("", after),
            };
            let mut chars = after.chars();
            let directive = chars.next();
            rest = chars.as_str();
            if let Some((value, width)) = directive.and_then(|d| self.number(d)) {
                let width = if flag.is_empty() { width } else { 1 };
                // Writing to a String cannot fail.
                write!(out, "{value:0width$}").unwrap_or_default();
            } else if let Some(text) = directive.and_then(|d| self.text(d)) {
                out.push_str(&text);
            } else {
                out.extend(["%", flag]);
                out.extend(directive);
            }
        }
        out + rest
    }

    /// The value of a numeric directive and its width in digits.
    fn number(&self, directive: char) -> Option<(u32, usize)> {
        let time = self.0;
        let hour12 = (u32::from(time.hour()) + 11) % 12 + 1;
        Some(match directive {
            'd' => (time.day().into(), 2),
            'm' => (u8::from(time.month()).into(), 2),
            'y' => (time.year().rem_euclid(100).unsigned_abs(), 2),
            'H' => (time.hour().into(), 2),
            'I' => (hour12, 2),
            'M' => (time.minute().into(), 2),
            'S' => (time.second().into(), 2),
            'j' => (time.ordinal().into(), 3),
            'U' => (time.sunday_based_week().into(), 2),
            'W' => (time.monday_based_week().into(), 2),
            'w' => (time.weekday().number_days_from_sunday().into(), 1),
            'u' => (time.weekday().number_from_monday().into(), 1),
            _ => return None,
        })
    }

    fn text(&self, directive: char) -> Option<String> {
        let time = self.0;
        let short = |name: String| name.chars().take(3).collect();
        Some(match directive {
            'Y' => time.year().to_string(),
            'e' => format!("{:>2}", time.day()),
            'B' => time.month().to_string(),
            'b' | 'h' => short(time.month().to_string()),
            'A' => time.weekday().to_string(),
            'a' => short(time.weekday().to_string()),
            'p' if time.hour() < 12 => "AM".to_owned(),
            'p' => "PM".to_owned(),
            'f' => "000000".to_owned(),
            'z' | 'Z' => String::new(),
            '%' => "%".to_owned(),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            'F' => self.format("%Y-%m-%d"),
            'T' | 'X' => self.format("%H:%M:%S"),
            'R' => self.format("%H:%M"),
            'D' | 'x' => self.format("%m/%d/%y"),
            'c' => self.format("%a %b %e %H:%M:%S %Y"),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unix_times_become_dates() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00 Thu 001"),
            (951_782_399, "2000-02-28 23:59:59 Mon 059"),
            (951_782_400, "2000-02-29 00:00:00 Tue 060"),
            (1_772_874_302, "2026-03-07 09:05:02 Sat 066"),
            (4_107_542_400, "2100-03-01 00:00:00 Mon 060"),
            (-1, "1969-12-31 23:59:59 Wed 365"),
        ] {
            assert_eq!(
                CivilTime::from_unix(seconds).format("%F %T %a %j"),
                expected
            );
        }
    }

    #[test]
    fn unknown_directives_stay() {
        assert_eq!(CivilTime::from_unix(0).format("%q%-q%"), "%q%-q%");
    }
}
