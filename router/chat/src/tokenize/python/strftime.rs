//! `datetime.strftime` in the C locale, for a time that the caller gives.

use std::fmt::Write;

/// A wall-clock time. The engine uses its own local time, which in a container is UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CivilTime {
    pub year: i64,
    /// 1 to 12.
    pub month: u32,
    /// 1 to 31.
    pub day: u32,
    pub hour: u32,
    pub minute: u32,
    pub second: u32,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

impl CivilTime {
    /// UTC of a Unix time in seconds.
    pub fn from_unix(seconds: i64) -> Self {
        let days = seconds.div_euclid(86_400);
        let of_day = seconds.rem_euclid(86_400) as u32;
        // Days since 0000-03-01, in eras of 400 years: the leap day ends each such year.
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let of_era = shifted.rem_euclid(146_097);
        let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * of_year + 2) / 153;
        let day = (of_year - (153 * march_month + 2) / 5 + 1) as u32;
        let month = (if march_month < 10 {
            march_month + 3
        } else {
            march_month - 9
        }) as u32;
        Self {
            year: year_of_era + era * 400 + i64::from(month <= 2),
            month,
            day,
            hour: of_day / 3_600,
            minute: of_day / 60 % 60,
            second: of_day % 60,
        }
    }

    /// Formats as Python does. An unknown directive stays as it is written.
    pub fn format(&self, format: &str) -> String {
        let mut out = String::with_capacity(format.len() + 16);
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = chars.next();
            let padded = directive != Some('-');
            if !padded {
                directive = chars.next();
            }
            match directive {
                Some(d) if self.write_directive(&mut out, d, padded) => {}
                Some(d) => {
                    out.push_str(if padded { "%" } else { "%-" });
                    out.push(d);
                }
                None => out.push('%'),
            }
        }
        out
    }

    fn write_directive(&self, out: &mut String, directive: char, padded: bool) -> bool {
        let hour12 = if self.hour.is_multiple_of(12) {
            12
        } else {
            self.hour % 12
        };
        let (value, width) = match directive {
            'd' => (self.day, 2),
            'm' => (self.month, 2),
            'y' => (self.year.rem_euclid(100) as u32, 2),
            'H' => (self.hour, 2),
            'I' => (hour12, 2),
            'M' => (self.minute, 2),
            'S' => (self.second, 2),
            'j' => (self.day_of_year(), 3),
            'U' => ((self.day_of_year() + 6 - self.weekday()) / 7, 2),
            'W' => ((self.day_of_year() + 6 - (self.weekday() + 6) % 7) / 7, 2),
            'w' => (self.weekday(), 1),
            'u' => (
                if self.weekday() == 0 {
                    7
                } else {
                    self.weekday()
                },
                1,
            ),
            _ => return self.write_text(out, directive),
        };
        let width = if padded { width } else { 1 };
        write!(out, "{value:0width$}").is_ok()
    }

    fn write_text(&self, out: &mut String, directive: char) -> bool {
        let month = MONTHS
            .get(self.month.saturating_sub(1) as usize)
            .copied()
            .unwrap_or("");
        let day = DAYS.get(self.weekday() as usize).copied().unwrap_or("");
        let expanded = match directive {
            'Y' => return write!(out, "{}", self.year).is_ok(),
            'e' => return write!(out, "{:>2}", self.day).is_ok(),
            'B' => month,
            'b' | 'h' => month.get(..3).unwrap_or(month),
            'A' => day,
            'a' => day.get(..3).unwrap_or(day),
            'p' => {
                if self.hour < 12 {
                    "AM"
                } else {
                    "PM"
                }
            }
            'f' => "000000",
            'z' | 'Z' => "",
            '%' => "%",
            'n' => "\n",
            't' => "\t",
            'F' => return self.write_format(out, "%Y-%m-%d"),
            'T' | 'X' => return self.write_format(out, "%H:%M:%S"),
            'R' => return self.write_format(out, "%H:%M"),
            'D' | 'x' => return self.write_format(out, "%m/%d/%y"),
            'c' => return self.write_format(out, "%a %b %e %H:%M:%S %Y"),
            _ => return false,
        };
        out.push_str(expanded);
        true
    }

    fn write_format(&self, out: &mut String, format: &str) -> bool {
        out.push_str(&self.format(format));
        true
    }

    fn is_leap(&self) -> bool {
        self.year % 4 == 0 && (self.year % 100 != 0 || self.year % 400 == 0)
    }

    /// 1 to 366.
    fn day_of_year(&self) -> u32 {
        const BEFORE: [u32; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let before = BEFORE
            .get(self.month.saturating_sub(1) as usize)
            .copied()
            .unwrap_or(0);
        before + self.day + u32::from(self.month > 2 && self.is_leap())
    }

    /// 0 is Sunday.
    fn weekday(&self) -> u32 {
        let before = self.year - 1;
        let days = before * 365 + before.div_euclid(4) - before.div_euclid(100)
            + before.div_euclid(400)
            + i64::from(self.day_of_year());
        days.rem_euclid(7) as u32
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
