//! When a certificate expires: the one field that rustls does not show.

use time::{Date, Month, PrimitiveDateTime, Time};

const SEQUENCE: u8 = 0x30;
const EXPLICIT_VERSION: u8 = 0xa0;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// `notAfter` in seconds since 1970: RFC 5280, section 4.1. `None` if it is malformed.
pub(super) fn not_after(certificate: &[u8]) -> Option<i64> {
    let mut whole = Der(certificate);
    let mut certificate = Der(whole.value_of(SEQUENCE)?);
    let mut fields = Der(certificate.value_of(SEQUENCE)?);
    if fields.0.first() == Some(&EXPLICIT_VERSION) {
        fields.next()?;
    }
    // Serial number, signature algorithm, issuer.
    for _ in 0..3 {
        fields.next()?;
    }
    let mut validity = Der(fields.value_of(SEQUENCE)?);
    validity.next()?;
    let (tag, time) = validity.next()?;
    unix_s(tag, std::str::from_utf8(time).ok()?)
}

/// Values of DER, one after the other.
struct Der<'d>(&'d [u8]);

impl<'d> Der<'d> {
    /// The next tag and value.
    fn next(&mut self) -> Option<(u8, &'d [u8])> {
        let (&[tag, first], rest) = self.0.split_first_chunk()?;
        let (length, rest) = match first {
            0..=0x7f => (usize::from(first), rest),
            0x81..=0x84 => {
                let (digits, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
                let fold = |length: usize, digit: &u8| length << 8 | usize::from(*digit);
                (digits.iter().fold(0, fold), rest)
            }
            _ => return None,
        };
        let (value, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some((tag, value))
    }

    fn value_of(&mut self, tag: u8) -> Option<&'d [u8]> {
        self.next()
            .filter(|(found, _)| *found == tag)
            .map(|(_, value)| value)
    }
}

/// Seconds since 1970 of `YYMMDDHHMMSSZ` or `YYYYMMDDHHMMSSZ`.
fn unix_s(tag: u8, text: &str) -> Option<i64> {
    let text = text.strip_suffix('Z').filter(|text| text.is_ascii())?;
    let (year, rest) = match tag {
        UTC_TIME => {
            let (year, rest) = text.split_at_checked(2)?;
            let year: i32 = year.parse().ok()?;
            (if year < 50 { 2000 + year } else { 1900 + year }, rest)
        }
        GENERALIZED_TIME => {
            let (year, rest) = text.split_at_checked(4)?;
            (year.parse().ok()?, rest)
        }
        _ => return None,
    };
    let part = |at: usize| rest.get(at..at + 2)?.parse::<u8>().ok();
    let date = Date::from_calendar_date(year, Month::try_from(part(0)?).ok()?, part(2)?).ok()?;
    let time = Time::from_hms(part(4)?, part(6)?, part(8)?).ok()?;
    let moment = PrimitiveDateTime::new(date, time).assume_utc();
    (rest.len() == 10).then(|| moment.unix_timestamp())
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    #[test]
    fn the_end_is_read_from_both_forms_of_time() {
        // RFC 5280 has two digits of the year before 2050, four from then on.
        for (year, unix_s) in [(2031, 1_924_992_000), (2060, 2_840_140_800)] {
            let mut params = CertificateParams::new(["h".to_owned()]).unwrap();
            params.not_after = date_time_ymd(year, 1, 1);
            let key = KeyPair::generate().unwrap();
            let certificate = params.self_signed(&key).unwrap();
            assert_eq!(not_after(certificate.der()), Some(unix_s));
        }
    }

    #[test]
    fn no_bytes_panic() {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(["h".to_owned()]).unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let whole = certificate.der().to_vec();
        for length in 0..whole.len() {
            assert_eq!(not_after(&whole[..length]), None);
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0xff;
            not_after(&damaged);
        }
    }
}
