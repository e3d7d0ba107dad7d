//! Bytes of an allocation.

/// Bytes of an allocation with the allocator's header and rounding.
pub(super) const fn heap(bytes: usize) -> usize {
    match bytes {
        0 => 0,
        1..24 => 32,
        _ => (bytes + 8).next_multiple_of(16),
    }
}
