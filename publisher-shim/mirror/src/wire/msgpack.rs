//! A bounded cursor over msgpack, on `rmp`'s readers. Borrows from the payload, allocates nothing.
//!
//! Total on any input: a length counts only if the remaining bytes can hold it, and
//! [`Cursor::skip`] walks nested values with a counter instead of recursion.
//!
//! Why not `rmp-serde`: it cannot go on behind an event that does not decode, which loses the
//! batch's other events; it does not give the raw bytes that opaque keys are digested by; and it
//! recurses per level.

use rmp::Marker;
use rmp::decode::bytes::BytesReadError;
use rmp::decode::{self, Bytes, NumValueReadError, ValueReadError};

/// Why a payload, or one event of it, is not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("the payload ends within a value")]
    Truncated,
    #[error("a value has another type than the field")]
    Type,
    #[error("a string is not UTF-8")]
    Utf8,
    #[error("a number is out of the field's range")]
    Range,
    #[error("the payload exceeds the limit of {max} bytes")]
    TooLong { max: usize },
    #[error("a required field is missing")]
    Missing,
}

impl From<ValueReadError<BytesReadError>> for WireError {
    fn from(error: ValueReadError<BytesReadError>) -> Self {
        NumValueReadError::from(error).into()
    }
}

impl From<NumValueReadError<BytesReadError>> for WireError {
    fn from(error: NumValueReadError<BytesReadError>) -> Self {
        match error {
            NumValueReadError::TypeMismatch(_) => Self::Type,
            NumValueReadError::OutOfRange => Self::Range,
            NumValueReadError::InvalidMarkerRead(_) | NumValueReadError::InvalidDataRead(_) => {
                Self::Truncated
            }
        }
    }
}

/// The type of the next value, as far as fields distinguish it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueKind {
    Nil,
    Int,
    Float,
    Str,
    Bin,
    Array,
    Map,
    Other,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor<'a> {
    rest: Bytes<'a>,
}

/// The bytes of a number, nil or boolean with this first byte; 0 for other values.
const SCALAR_BYTES: [u8; 256] = {
    let mut bytes = [0; 256];
    let mut head = 0;
    while head < bytes.len() {
        bytes[head] = match head {
            0x00..=0x7f | 0xc0 | 0xc2 | 0xc3 | 0xe0.. => 1,
            0xcc | 0xd0 => 2,
            0xcd | 0xd1 => 3,
            0xca | 0xce | 0xd2 => 5,
            0xcb | 0xcf | 0xd3 => 9,
            _ => 0,
        };
        head += 1;
    }
    bytes
};

impl<'a> Cursor<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self {
            rest: Bytes::new(bytes),
        }
    }

    pub(super) fn rest(&self) -> &'a [u8] {
        self.rest.remaining_slice()
    }

    pub(super) fn kind(&self) -> Result<ValueKind, WireError> {
        let &head = self
            .rest
            .remaining_slice()
            .first()
            .ok_or(WireError::Truncated)?;
        Ok(match head {
            0xc0 => ValueKind::Nil,
            0x00..=0x7f | 0xcc..=0xd3 | 0xe0..=0xff => ValueKind::Int,
            0xca | 0xcb => ValueKind::Float,
            0xa0..=0xbf | 0xd9..=0xdb => ValueKind::Str,
            0xc4..=0xc6 => ValueKind::Bin,
            0x90..=0x9f | 0xdc | 0xdd => ValueKind::Array,
            0x80..=0x8f | 0xde | 0xdf => ValueKind::Map,
            0xc1..=0xc3 | 0xc7..=0xc9 | 0xd4..=0xd8 => ValueKind::Other,
        })
    }

    /// Takes a nil, if one is next.
    pub(super) fn nil(&mut self) -> Result<bool, WireError> {
        let is_nil = self.kind()? == ValueKind::Nil;
        if is_nil {
            self.take(1)?;
        }
        Ok(is_nil)
    }

    /// An array's length; never more than the bytes that are left.
    pub(super) fn array(&mut self) -> Result<usize, WireError> {
        let len = decode::read_array_len(&mut self.rest)? as usize;
        self.plausible(len)
    }

    /// A map's number of entries; never more than half the bytes that are left.
    pub(super) fn map(&mut self) -> Result<usize, WireError> {
        let len = decode::read_map_len(&mut self.rest)? as usize;
        self.plausible(len.saturating_mul(2))?;
        Ok(len)
    }

    /// An integer of either sign, by its 64-bit pattern.
    pub(super) fn int_bits(&mut self) -> Result<u64, WireError> {
        // The forms of token ids and hashes, which are most of a payload.
        let (bits, bytes) = match *self.rest.remaining_slice() {
            [head @ 0..=0x7f, ..] => (head.into(), 1),
            [0xcd, a, b, ..] => (u16::from_be_bytes([a, b]).into(), 3),
            [0xce, a, b, c, d, ..] => (u32::from_be_bytes([a, b, c, d]).into(), 5),
            [0xcf, a, b, c, d, e, f, g, h, ..] => (u64::from_be_bytes([a, b, c, d, e, f, g, h]), 9),
            _ => return self.other_int_bits(),
        };
        self.take(bytes)?;
        Ok(bits)
    }

    fn other_int_bits(&mut self) -> Result<u64, WireError> {
        let int: i128 = decode::read_int(&mut self.rest)?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "msgpack has no wider integers, and a negative one is wanted as its pattern"
        )]
        Ok(int as u64)
    }

    pub(super) fn u32(&mut self) -> Result<u32, WireError> {
        Ok(decode::read_int(&mut self.rest)?)
    }

    /// A float or an integer: encoders write whole numbers either way.
    pub(super) fn float(&mut self) -> Result<f64, WireError> {
        if self.kind()? != ValueKind::Float {
            return Ok(decode::read_int(&mut self.rest)?);
        }
        if self.rest.remaining_slice().first() == Some(&0xca) {
            return Ok(decode::read_f32(&mut self.rest)?.into());
        }
        Ok(decode::read_f64(&mut self.rest)?)
    }

    pub(super) fn str(&mut self) -> Result<&'a str, WireError> {
        let len = decode::read_str_len(&mut self.rest)?;
        str::from_utf8(self.take(u64::from(len))?).map_err(|_| WireError::Utf8)
    }

    pub(super) fn bin(&mut self) -> Result<&'a [u8], WireError> {
        let len = decode::read_bin_len(&mut self.rest)?;
        self.take(u64::from(len))
    }

    /// Passes over one value of any type and depth, and returns its bytes.
    pub(super) fn skip(&mut self) -> Result<&'a [u8], WireError> {
        let start = self.rest.remaining_slice();
        let mut left: u64 = 1;
        while left > 0 {
            left -= self.skip_scalars(left)?;
            if left > 0 {
                left = (left - 1).saturating_add(self.skip_head()?);
            }
        }
        let used = start.len() - self.rest.remaining_slice().len();
        Ok(&start[..used])
    }

    /// Passes over at most `max` numbers, nils and booleans, and returns their number.
    fn skip_scalars(&mut self, max: u64) -> Result<u64, WireError> {
        let rest = self.rest.remaining_slice();
        let (mut bytes, mut values) = (0, 0);
        while values < max
            && let Some(&head) = rest.get(bytes)
            && let len @ 1.. = SCALAR_BYTES[usize::from(head)]
        {
            bytes += usize::from(len);
            values += 1;
        }
        self.take(bytes as u64)?;
        Ok(values)
    }

    /// Passes over a value without its children, and returns their number.
    fn skip_head(&mut self) -> Result<u64, WireError> {
        let (bytes, children) = match Marker::from_u8(self.take(1)?[0]) {
            Marker::FixPos(_) | Marker::FixNeg(_) => (0, 0),
            Marker::Null | Marker::False | Marker::True | Marker::Reserved => (0, 0),
            Marker::U8 | Marker::I8 => (1, 0),
            Marker::U16 | Marker::I16 | Marker::FixExt1 => (2, 0),
            Marker::FixExt2 => (3, 0),
            Marker::U32 | Marker::I32 | Marker::F32 => (4, 0),
            Marker::FixExt4 => (5, 0),
            Marker::U64 | Marker::I64 | Marker::F64 => (8, 0),
            Marker::FixExt8 => (9, 0),
            Marker::FixExt16 => (17, 0),
            Marker::FixStr(len) => (u64::from(len), 0),
            Marker::Str8 | Marker::Bin8 => (self.length::<1>()?, 0),
            Marker::Str16 | Marker::Bin16 => (self.length::<2>()?, 0),
            Marker::Str32 | Marker::Bin32 => (self.length::<4>()?, 0),
            Marker::Ext8 => (self.length::<1>()? + 1, 0),
            Marker::Ext16 => (self.length::<2>()? + 1, 0),
            Marker::Ext32 => (self.length::<4>()? + 1, 0),
            Marker::FixArray(len) => (0, u64::from(len)),
            Marker::Array16 => (0, self.length::<2>()?),
            Marker::Array32 => (0, self.length::<4>()?),
            Marker::FixMap(len) => (0, 2 * u64::from(len)),
            Marker::Map16 => (0, 2 * self.length::<2>()?),
            Marker::Map32 => (0, 2 * self.length::<4>()?),
        };
        self.take(bytes)?;
        Ok(children)
    }

    fn length<const BYTES: usize>(&mut self) -> Result<u64, WireError> {
        let field = self.take(BYTES as u64)?;
        Ok(field
            .iter()
            .fold(0, |len, &byte| (len << 8) | u64::from(byte)))
    }

    fn plausible(&self, values: usize) -> Result<usize, WireError> {
        if values > self.rest.remaining_slice().len() {
            return Err(WireError::Truncated);
        }
        Ok(values)
    }

    fn take(&mut self, bytes: u64) -> Result<&'a [u8], WireError> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let split = self.rest.remaining_slice().split_at_checked(bytes);
        let (taken, rest) = split.ok_or(WireError::Truncated)?;
        self.rest = Bytes::new(rest);
        Ok(taken)
    }
}
