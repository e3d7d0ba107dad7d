//! Ids of traces and spans, W3C's `traceparent`, and sampling.

use serde::Deserialize;
use uuid::Uuid;

/// Bits of a trace id that are random by W3C's Trace Context, level 2.
const RANDOM_BITS: u32 = 56;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TraceId(pub u128);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpanId(pub u64);

/// What a client's `traceparent` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ParentContext {
    pub trace: TraceId,
    pub span: SpanId,
    pub decision: ParentDecision,
}

/// Whether a client samples its trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ParentDecision {
    Sampled,
    NotSampled,
}

/// The share of traces that are sampled, of those that begin here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "f64")]
pub(crate) struct SampleRatio(u64);

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{0} is not between 0 and 1")]
pub(crate) struct SampleRatioError(f64);

impl TraceId {
    pub(super) fn random() -> Self {
        Self(Uuid::new_v4().as_u128())
    }
}

impl SpanId {
    pub(super) fn random() -> Self {
        Self(Uuid::new_v4().as_u64_pair().1)
    }
}

impl ParentContext {
    /// `None` for a value that is invalid by W3C's rules.
    pub(super) fn parse(value: &[u8]) -> Option<Self> {
        let value = std::str::from_utf8(value).ok()?;
        let mut fields = value.split('-');
        let mut number = |digits: usize| {
            let field = fields.next()?;
            let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            let fits = field.len() == digits && field.bytes().all(is_hex);
            fits.then(|| u128::from_str_radix(field, 16).ok())?
        };
        let (version, trace) = (number(2)?, number(32)?);
        let (span, flags) = (number(16)?, number(2)?);
        let is_known = version == 0;
        if version == 0xff || (is_known && fields.next().is_some()) || trace == 0 || span == 0 {
            return None;
        }
        Some(Self {
            trace: TraceId(trace),
            span: SpanId(u64::try_from(span).ok()?),
            decision: if flags & 1 == 1 {
                ParentDecision::Sampled
            } else {
                ParentDecision::NotSampled
            },
        })
    }
}

pub(super) fn traceparent(TraceId(trace): TraceId, SpanId(span): SpanId) -> String {
    format!("00-{trace:032x}-{span:016x}-01")
}

impl SampleRatio {
    pub(crate) const ALL: Self = Self(1 << RANDOM_BITS);

    pub(super) const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub(super) const fn bits(self) -> u64 {
        self.0
    }

    pub(super) fn samples(self, TraceId(trace): TraceId) -> bool {
        let random = trace & ((1 << RANDOM_BITS) - 1);
        random < u128::from(self.0)
    }
}

impl TryFrom<f64> for SampleRatio {
    type Error = SampleRatioError;

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share of 2^56, between 0 and all"
    )]
    fn try_from(ratio: f64) -> Result<Self, SampleRatioError> {
        if !(0.0..=1.0).contains(&ratio) {
            return Err(SampleRatioError(ratio));
        }
        Ok(Self((ratio * Self::ALL.0 as f64) as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_read_by_the_rules_of_w3c() {
        let trace = "0af7651916cd43dd8448eb211c80319c";
        for (value, decision) in [
            (
                format!("00-{trace}-b7ad6b7169203331-01"),
                Some(ParentDecision::Sampled),
            ),
            (
                format!("00-{trace}-b7ad6b7169203331-00"),
                Some(ParentDecision::NotSampled),
            ),
            (
                format!("01-{trace}-b7ad6b7169203331-03-x"),
                Some(ParentDecision::Sampled),
            ),
            (format!("00-{trace}-b7ad6b7169203331-01-x"), None),
            (format!("ff-{trace}-b7ad6b7169203331-01"), None),
            (format!("00-{trace}-0000000000000000-01"), None),
            (format!("00-{}-b7ad6b7169203331-01", "0".repeat(32)), None),
            (
                format!("00-{}-b7ad6b7169203331-01", trace.to_uppercase()),
                None,
            ),
            ("00-1-2-3".to_owned(), None),
            (String::new(), None),
        ] {
            let parent = ParentContext::parse(value.as_bytes());
            assert_eq!(parent.map(|parent| parent.decision), decision, "{value}");
            if let Some(parent) = parent {
                assert_eq!(format!("{:x}", parent.trace.0), trace[1..], "{value}");
                let again = traceparent(parent.trace, parent.span);
                assert_eq!(again, format!("00-{trace}-b7ad6b7169203331-01"));
            }
        }
    }

    #[test]
    fn the_ratio_is_a_share_of_the_trace_ids() {
        let ratio = |share| SampleRatio::try_from(share).unwrap();
        let of_1000 = |share| {
            let ids = (0..1000_u128).map(|n| TraceId((n << (RANDOM_BITS - 10)) | (7 << 64)));
            ids.filter(|id| ratio(share).samples(*id)).count()
        };
        assert_eq!([of_1000(0.0), of_1000(1.0)], [0, 1000]);
        assert_eq!(of_1000(0.25), 256);
        assert_eq!(ratio(1.0), SampleRatio::ALL);
        for wrong in [-0.1, 1.1, f64::NAN] {
            assert!(SampleRatio::try_from(wrong).is_err());
        }
    }
}
