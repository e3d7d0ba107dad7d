//! A cursor over msgpack that borrows from the payload and allocates nothing.
//!
//! Total on any input: every length is checked against the bytes that are left before it is used,
//! nothing recurses, and [`Cursor::skip`] walks nested values with a counter instead of a stack.
//! Extension types are skipped over but never interpreted.

/// Why a payload, or one event of it, is not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("the payload ends in mid-value")]
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

/// An integer of either sign by its 64-bit pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Int {
    pub(super) bits: u64,
    pub(super) negative: bool,
}

/// Bytes of a nil, truth value, integer or float by its first byte; 0 for anything else. Most of a payload is
/// token ids.
const SCALAR_BYTES: [u8; 256] = {
    let mut bytes = [0; 256];
    let mut head = 0;
    while head < bytes.len() {
        bytes[head] = match head {
            0x00..=0x7f | 0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => 1,
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

/// What the next value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Nil,
    Int,
    Str,
    Bin,
    Array,
    Map,
    Other,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn kind(&self) -> Result<Kind, WireError> {
        let &head = self.rest.first().ok_or(WireError::Truncated)?;
        Ok(match head {
            0xc0 => Kind::Nil,
            0x00..=0x7f | 0xcc..=0xd3 | 0xe0..=0xff => Kind::Int,
            0xa0..=0xbf | 0xd9..=0xdb => Kind::Str,
            0xc4..=0xc6 => Kind::Bin,
            0x90..=0x9f | 0xdc | 0xdd => Kind::Array,
            0x80..=0x8f | 0xde | 0xdf => Kind::Map,
            0xc1..=0xc3 | 0xc7..=0xcb | 0xd4..=0xd8 => Kind::Other,
        })
    }

    /// Takes a nil, if one is next.
    pub(super) fn nil(&mut self) -> Result<bool, WireError> {
        let nil = self.kind()? == Kind::Nil;
        if nil {
            self.take(1)?;
        }
        Ok(nil)
    }

    /// An array's length; never more than the bytes that are left.
    pub(super) fn array(&mut self) -> Result<usize, WireError> {
        let len = match self.byte()? {
            head @ 0x90..=0x9f => usize::from(head & 0x0f),
            0xdc => self.length(2)?,
            0xdd => self.length(4)?,
            _ => return Err(WireError::Type),
        };
        self.plausible(len)
    }

    /// A map's number of entries; never more than half the bytes that are left.
    pub(super) fn map(&mut self) -> Result<usize, WireError> {
        let len = match self.byte()? {
            head @ 0x80..=0x8f => usize::from(head & 0x0f),
            0xde => self.length(2)?,
            0xdf => self.length(4)?,
            _ => return Err(WireError::Type),
        };
        self.plausible(len.saturating_mul(2))?;
        Ok(len)
    }

    pub(super) fn int(&mut self) -> Result<Int, WireError> {
        let head = self.byte()?;
        let unsigned = |bits| {
            Ok(Int {
                bits,
                negative: false,
            })
        };
        let signed = |value: i64| {
            Ok(Int {
                bits: value.cast_unsigned(),
                negative: value < 0,
            })
        };
        match head {
            0x00..=0x7f => unsigned(u64::from(head)),
            0xcc => unsigned(u64::from(self.byte()?)),
            0xcd => unsigned(u64::from(u16::from_be_bytes(self.fixed()?))),
            0xce => unsigned(u64::from(u32::from_be_bytes(self.fixed()?))),
            0xcf => unsigned(u64::from_be_bytes(self.fixed()?)),
            0xd0 => signed(i64::from(i8::from_be_bytes(self.fixed()?))),
            0xd1 => signed(i64::from(i16::from_be_bytes(self.fixed()?))),
            0xd2 => signed(i64::from(i32::from_be_bytes(self.fixed()?))),
            0xd3 => signed(i64::from_be_bytes(self.fixed()?)),
            0xe0..=0xff => signed(i64::from(head.cast_signed())),
            _ => Err(WireError::Type),
        }
    }

    pub(super) fn u32(&mut self) -> Result<u32, WireError> {
        let int = self.int()?;
        if int.negative {
            return Err(WireError::Range);
        }
        u32::try_from(int.bits).map_err(|_| WireError::Range)
    }

    /// A float; integers are taken too, as encoders write whole numbers either way.
    pub(super) fn float(&mut self) -> Result<f64, WireError> {
        let &head = self.rest.first().ok_or(WireError::Truncated)?;
        match head {
            0xca => {
                self.take(1)?;
                Ok(f64::from(f32::from_be_bytes(self.fixed()?)))
            }
            0xcb => {
                self.take(1)?;
                Ok(f64::from_be_bytes(self.fixed()?))
            }
            _ => {
                let int = self.int()?;
                #[expect(
                    clippy::cast_precision_loss,
                    reason = "a time stamp for display; nothing is decided by it"
                )]
                Ok(if int.negative {
                    int.bits.cast_signed() as f64
                } else {
                    int.bits as f64
                })
            }
        }
    }

    pub(super) fn str(&mut self) -> Result<&'a str, WireError> {
        let len = match self.byte()? {
            head @ 0xa0..=0xbf => usize::from(head & 0x1f),
            0xd9 => self.length(1)?,
            0xda => self.length(2)?,
            0xdb => self.length(4)?,
            _ => return Err(WireError::Type),
        };
        std::str::from_utf8(self.take(len)?).map_err(|_| WireError::Utf8)
    }

    pub(super) fn bin(&mut self) -> Result<&'a [u8], WireError> {
        let len = match self.byte()? {
            0xc4 => self.length(1)?,
            0xc5 => self.length(2)?,
            0xc6 => self.length(4)?,
            _ => return Err(WireError::Type),
        };
        self.take(len)
    }

    /// Passes over one value of any type and depth, and gives its bytes.
    pub(super) fn skip(&mut self) -> Result<&'a [u8], WireError> {
        let start = self.rest;
        let mut left: u64 = 1;
        while left > 0 {
            left -= 1;
            let &head = self.rest.first().ok_or(WireError::Truncated)?;
            let bytes = SCALAR_BYTES[usize::from(head)];
            if bytes > 0 {
                self.take(usize::from(bytes))?;
            } else {
                left = left.saturating_add(self.skip_head()?);
            }
        }
        let used = start.len() - self.rest.len();
        start.get(..used).ok_or(WireError::Truncated)
    }

    /// Passes over a value without its children, and gives their number.
    fn skip_head(&mut self) -> Result<u64, WireError> {
        let head = self.byte()?;
        let (bytes, children) = match head {
            0x00..=0x7f | 0xc0..=0xc3 | 0xe0..=0xff => (0, 0),
            0x80..=0x8f => (0, 2 * u64::from(head & 0x0f)),
            0x90..=0x9f => (0, u64::from(head & 0x0f)),
            0xa0..=0xbf => (usize::from(head & 0x1f), 0),
            0xc4 | 0xd9 => (self.length(1)?, 0),
            0xc5 | 0xda => (self.length(2)?, 0),
            0xc6 | 0xdb => (self.length(4)?, 0),
            0xc7 => (self.length(1)?.saturating_add(1), 0),
            0xc8 => (self.length(2)?.saturating_add(1), 0),
            0xc9 => (self.length(4)?.saturating_add(1), 0),
            0xcc | 0xd0 => (1, 0),
            0xcd | 0xd1 | 0xd4 => (2, 0),
            0xca | 0xce | 0xd2 => (4, 0),
            0xcb | 0xcf | 0xd3 => (8, 0),
            0xd5 => (3, 0),
            0xd6 => (5, 0),
            0xd7 => (9, 0),
            0xd8 => (17, 0),
            0xdc => (0, self.length(2)? as u64),
            0xdd => (0, self.length(4)? as u64),
            0xde => (0, 2 * self.length(2)? as u64),
            0xdf => (0, 2 * self.length(4)? as u64),
        };
        self.take(bytes)?;
        Ok(children)
    }

    fn length(&mut self, bytes: usize) -> Result<usize, WireError> {
        let field = self.take(bytes)?;
        Ok(field
            .iter()
            .fold(0, |len, &byte| (len << 8) | usize::from(byte)))
    }

    const fn plausible(&self, values: usize) -> Result<usize, WireError> {
        if values > self.rest.len() {
            return Err(WireError::Truncated);
        }
        Ok(values)
    }

    fn byte(&mut self) -> Result<u8, WireError> {
        let (&byte, rest) = self.rest.split_first().ok_or(WireError::Truncated)?;
        self.rest = rest;
        Ok(byte)
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (fixed, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(WireError::Truncated)?;
        self.rest = rest;
        Ok(*fixed)
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self
            .rest
            .split_at_checked(bytes)
            .ok_or(WireError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }
}
