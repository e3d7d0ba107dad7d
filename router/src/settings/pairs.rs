//! When requests are split between a prefill and a decode worker.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, Unexpected, Visitor};

use crate::route::PairThreshold;

const LEARNED: &str = "learned";

/// [`PairThreshold`] as the file names it: `"learned"`, or a number of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UncachedThreshold(pub(super) PairThreshold);

struct ThresholdVisitor;

impl Visitor<'_> for ThresholdVisitor {
    type Value = UncachedThreshold;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{LEARNED:?} or a number of tokens")
    }

    fn visit_str<E: Error>(self, word: &str) -> Result<UncachedThreshold, E> {
        match word {
            LEARNED => Ok(UncachedThreshold::default()),
            _ => Err(E::invalid_value(Unexpected::Str(word), &self)),
        }
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<UncachedThreshold, E> {
        let tokens = u32::try_from(number)
            .map_err(|_| E::invalid_value(Unexpected::Signed(number), &self))?;
        Ok(UncachedThreshold(PairThreshold::Tokens(tokens)))
    }
}

impl<'de> Deserialize<'de> for UncachedThreshold {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ThresholdVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Settings;
    use super::*;

    #[test]
    fn a_threshold_is_learned_or_a_number() {
        let threshold = |value: &str| {
            let text = format!("pd_uncached_threshold = {value}");
            let settings = Settings::parse(&text).ok();
            settings.map(|settings| settings.pair_threshold())
        };
        assert_eq!(threshold("\"learned\""), Some(PairThreshold::Learned));
        assert_eq!(threshold("0"), Some(PairThreshold::Tokens(0)));
        assert_eq!(threshold("4096"), Some(PairThreshold::Tokens(4096)));
        for value in ["-1", "4294967296", "\"short\"", "true", "1.5"] {
            assert_eq!(threshold(value), None, "{value}");
        }
        assert_eq!(Settings::default().pair_threshold(), PairThreshold::Learned);
    }
}
