//! Sizes in bytes as operators write them: `64MiB`, `6GB` or `4096`.

use std::num::ParseIntError;
use std::ops::RangeInclusive;

#[derive(Debug, thiserror::Error)]
pub enum BytesError {
    #[error(
        "bytes are a whole number with B, KB, MB, GB, TB, KiB, MiB, GiB, TiB or nothing behind it"
    )]
    Unit,
    #[error(transparent)]
    Number(#[from] ParseIntError),
    #[error("{0} to {1} bytes are possible")]
    Range(u64, u64),
}

/// A size of at least one byte.
pub fn bytes<N: TryFrom<u64>>(text: &str) -> Result<N, BytesError> {
    bytes_within(text, 1..=u64::MAX)
}

/// A size in this range.
pub fn bytes_within<N: TryFrom<u64>>(
    text: &str,
    range: RangeInclusive<u64>,
) -> Result<N, BytesError> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "k" | "ki" | "kib" => 1 << 10,
        "m" | "mi" | "mib" => 1 << 20,
        "g" | "gi" | "gib" => 1 << 30,
        "t" | "ti" | "tib" => 1 << 40,
        _ => return Err(BytesError::Unit),
    };
    let number: u64 = digits.trim_end().parse()?;
    let bytes = number
        .checked_mul(unit)
        .filter(|bytes| range.contains(bytes));
    bytes
        .and_then(|bytes| N::try_from(bytes).ok())
        .ok_or_else(|| BytesError::Range(*range.start(), *range.end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_operators_write_them() {
        let check = |text: &str, value: Option<u64>| {
            assert_eq!(bytes::<u64>(text).ok(), value, "{text}");
        };
        check("4096", Some(4096));
        check("6GiB", Some(6 << 30));
        check("6Gi", Some(6 << 30));
        check("6 GB", Some(6_000_000_000));
        check("128m", Some(128 << 20));
        check("1.5GB", None);
        check("0", None);
        check("GiB", None);
        check("-1", None);
        check("5 parsecs", None);
        check("99999999TB", None);
        let within = |text: &str| bytes_within::<usize>(text, 1024..=4 << 30).ok();
        assert_eq!(within("1KiB"), Some(1024));
        assert_eq!(within("1000"), None);
        assert_eq!(within("5GiB"), None);
    }
}
