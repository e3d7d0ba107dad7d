//! The bytes of a checkpoint, field by field: little-endian, fixed width, counts before lists.
//!
//! Reading is total: a count is believed only as far as the bytes that are there could hold it, so
//! that nothing larger than the input is ever allocated.

/// Where the bytes stop being a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed: {0}")]
pub struct Malformed(pub &'static str);

#[derive(Debug, Default)]
pub(crate) struct FieldWriter {
    bytes: Vec<u8>,
}

impl FieldWriter {
    pub(crate) fn with_capacity(bytes: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(bytes),
        }
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Lists here are bounded far below this by what an engine can hold.
    pub(crate) fn count(&mut self, count: usize) {
        self.u32(u32::try_from(count).unwrap_or(u32::MAX));
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub(crate) fn written(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
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

    pub(crate) fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or(Malformed("short"))?;
        self.rest = rest;
        Ok(bytes)
    }

    fn chunk<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (chunk, rest) = self.rest.split_first_chunk().ok_or(Malformed("short"))?;
        self.rest = rest;
        Ok(*chunk)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        self.chunk().map(u8::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.chunk().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.chunk().map(u64::from_le_bytes)
    }

    pub(crate) fn flag(&mut self) -> Result<bool, Malformed> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("a flag")),
        }
    }

    /// A list's length, each entry of which takes at least so many bytes.
    pub(crate) fn count(&mut self, entry_bytes_min: usize) -> Result<usize, Malformed> {
        let count = self.u32()? as usize;
        let needs = count.checked_mul(entry_bytes_min);
        if needs.is_none_or(|bytes| bytes > self.rest.len()) {
            return Err(Malformed("a count beyond the end"));
        }
        Ok(count)
    }
}
