//! The encoding of a checkpoint's fields: little-endian, fixed width, lists behind their length.
//!
//! Reading is total: a length counts only if the remaining bytes can hold the list, so that nothing
//! larger than the input is allocated.

/// The part at which the bytes stop being a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed: {0}")]
pub struct Malformed(pub &'static str);

/// A value with one encoding.
pub(crate) trait Field: Sized {
    /// Bytes of the shortest value.
    const BYTES_MIN: usize;

    fn write(&self, to: &mut Vec<u8>);

    fn read(from: &mut FieldReader<'_>) -> Result<Self, Malformed>;
}

#[derive(Debug)]
pub(crate) struct FieldReader<'a> {
    rest: &'a [u8],
}

impl<'a> FieldReader<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) const fn is_at_end(&self) -> bool {
        self.rest.is_empty()
    }

    pub(crate) fn read<F: Field>(&mut self) -> Result<F, Malformed> {
        F::read(self)
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or(Malformed("short"))?;
        self.rest = rest;
        Ok(bytes)
    }

    /// The length of a list whose entries take at least `entry_bytes_min` bytes each.
    pub(crate) fn length(&mut self, entry_bytes_min: usize) -> Result<usize, Malformed> {
        let length = self.read::<u32>()? as usize;
        let needs = length.checked_mul(entry_bytes_min);
        if needs.is_none_or(|bytes| bytes > self.rest.len()) {
            return Err(Malformed("a length beyond the end"));
        }
        Ok(length)
    }
}

/// Writes a list's length. Lists are bounded far below 2^32 entries by what an engine can hold.
pub(crate) fn write_length(length: usize, to: &mut Vec<u8>) {
    u32::try_from(length).unwrap_or(u32::MAX).write(to);
}

macro_rules! integer_fields {
    ($($integer:ty),*) => {$(
        impl Field for $integer {
            const BYTES_MIN: usize = size_of::<Self>();

            fn write(&self, to: &mut Vec<u8>) {
                to.extend_from_slice(&self.to_le_bytes());
            }

            fn read(from: &mut FieldReader<'_>) -> Result<Self, Malformed> {
                let (chunk, rest) = from.rest.split_first_chunk().ok_or(Malformed("short"))?;
                from.rest = rest;
                Ok(Self::from_le_bytes(*chunk))
            }
        }
    )*};
}

integer_fields!(u8, u32, u64);

impl Field for bool {
    const BYTES_MIN: usize = 1;

    fn write(&self, to: &mut Vec<u8>) {
        u8::from(*self).write(to);
    }

    fn read(from: &mut FieldReader<'_>) -> Result<Self, Malformed> {
        match from.read::<u8>()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("a flag")),
        }
    }
}

impl<F: Field> Field for Vec<F> {
    const BYTES_MIN: usize = 4;

    fn write(&self, to: &mut Vec<u8>) {
        write_length(self.len(), to);
        self.iter().for_each(|field| field.write(to));
    }

    fn read(from: &mut FieldReader<'_>) -> Result<Self, Malformed> {
        let length = from.length(F::BYTES_MIN)?;
        (0..length).map(|_| from.read()).collect()
    }
}
