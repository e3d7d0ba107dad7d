//! The C ABI of [`Publisher`]: checks of arguments, and no panic across the boundary.
//!
//! What cannot be checked is the caller's promise: that a pointer which is not null points to what
//! its type says, and that a publisher is used between `new` and `free` only.
#![expect(unsafe_code, reason = "a C ABI: docs/adr/0024-publisher-library.md")]

use std::ffi::{CStr, c_char, c_int};
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use crate::payload::{CacheChange, PAYLOAD_BYTES_MAX, StoredRun};
use crate::publisher::{PublishError, Publisher, PublisherOptions};

/// The codes of the header. Stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
enum CallError {
    InvalidArgument = 1,
    WrongLength = 2,
    TooLarge = 3,
    Socket = 4,
    Internal = 5,
}

impl From<PublishError> for CallError {
    fn from(error: PublishError) -> Self {
        match error {
            PublishError::Length => Self::WrongLength,
            PublishError::TooLarge => Self::TooLarge,
            PublishError::Socket(_) => Self::Socket,
            PublishError::Encode(_) | PublishError::Thread(_) => Self::Internal,
        }
    }
}

/// `WarmrouteOptions` of the header.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WarmrouteOptions {
    pub events_endpoint: *const c_char,
    pub replay_endpoint: *const c_char,
    pub dp_rank: u32,
    pub block_size: u32,
}

/// `WarmrouteStored` of the header.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WarmrouteStored {
    pub block_hashes: *const u64,
    pub block_count: usize,
    pub token_ids: *const u32,
    pub token_count: usize,
    pub parent_hash: *const u64,
    pub lora_name: *const c_char,
    pub cache_salt: *const c_char,
}

/// Binds the sockets and sets `*publisher`.
///
/// # Safety
/// `options` is null or valid with its strings; `publisher` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warmroute_publisher_new(
    options: *const WarmrouteOptions,
    publisher: *mut *mut Publisher,
) -> c_int {
    guarded(|| {
        if publisher.is_null() || !publisher.is_aligned() {
            return Err(CallError::InvalidArgument);
        }
        // SAFETY: the caller's promise on `options`.
        let options = unsafe { value(options) }?.ok_or(CallError::InvalidArgument)?;
        // SAFETY: the caller's promise on its strings.
        let (events, replay) = unsafe {
            (
                text(options.events_endpoint)?,
                text(options.replay_endpoint)?,
            )
        };
        let made = Publisher::new(PublisherOptions {
            events_endpoint: events.ok_or(CallError::InvalidArgument)?,
            replay_endpoint: replay,
            dp_rank: options.dp_rank,
            block_size: NonZeroU32::new(options.block_size).ok_or(CallError::InvalidArgument)?,
        })?;
        // SAFETY: it is not null and aligned, and writable by the caller's promise.
        unsafe { publisher.write(Box::into_raw(Box::new(made))) };
        Ok(())
    })
}

/// Publishes that blocks are held once more.
///
/// # Safety
/// `publisher` is null or from `new` and not freed; `stored` is null or valid with what it points to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warmroute_publisher_stored(
    publisher: *const Publisher,
    stored: *const WarmrouteStored,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise on `stored`.
        let stored = unsafe { value(stored) }?.ok_or(CallError::InvalidArgument)?;
        // SAFETY: the caller's promise on what `stored` points to.
        let run = unsafe {
            StoredRun {
                hashes: slice(stored.block_hashes, stored.block_count)?,
                parent: value(stored.parent_hash)?.copied(),
                tokens: slice(stored.token_ids, stored.token_count)?,
                lora: text(stored.lora_name)?,
                salt: text(stored.cache_salt)?,
            }
        };
        // SAFETY: the caller's promise on `publisher`.
        unsafe { publish(publisher, CacheChange::Stored(run)) }
    })
}

/// Publishes that one copy of each block is gone.
///
/// # Safety
/// As for `stored`, with `block_count` hashes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warmroute_publisher_removed(
    publisher: *const Publisher,
    block_hashes: *const u64,
    block_count: usize,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise on the hashes.
        let hashes = unsafe { slice(block_hashes, block_count) }?;
        // SAFETY: the caller's promise on `publisher`.
        unsafe { publish(publisher, CacheChange::Removed(hashes)) }
    })
}

/// Publishes that the cache is empty.
///
/// # Safety
/// `publisher` is null or from `new` and not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warmroute_publisher_cleared(publisher: *const Publisher) -> c_int {
    // SAFETY: the caller's promise on `publisher`.
    guarded(|| unsafe { publish(publisher, CacheChange::Cleared) })
}

/// Closes the sockets and frees the publisher. Null is ignored.
///
/// # Safety
/// `publisher` is null or from `new`, not freed, and no other call uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warmroute_publisher_free(publisher: *mut Publisher) {
    let end = || {
        if !publisher.is_null() {
            // SAFETY: it came from `Box::into_raw` in `new`, and is not freed yet.
            drop(unsafe { Box::from_raw(publisher) });
        }
        Ok(())
    };
    guarded(end);
}

/// The text of a code; static.
#[unsafe(no_mangle)]
pub extern "C" fn warmroute_error_text(code: c_int) -> *const c_char {
    let text = match code {
        0 => c"no error",
        1 => c"an argument is null, misaligned, zero or no UTF-8",
        2 => c"there is no block, or the tokens are not those of whole blocks",
        3 => c"the event is longer than readers accept",
        4 => c"a socket cannot be bound or used",
        5 => c"internal error",
        _ => c"unknown code",
    };
    text.as_ptr()
}

/// 0, or the error's code. A panic is `Internal`: it must not reach C.
fn guarded(call: impl FnOnce() -> Result<(), CallError>) -> c_int {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => error as c_int,
        Err(_) => CallError::Internal as c_int,
    }
}

/// # Safety
/// `publisher` is null or from `new` and not freed.
unsafe fn publish(publisher: *const Publisher, change: CacheChange<'_>) -> Result<(), CallError> {
    // SAFETY: as promised to this function.
    let publisher = unsafe { value(publisher) }?.ok_or(CallError::InvalidArgument)?;
    Ok(publisher.publish(change)?)
}

/// `None` for null.
///
/// # Safety
/// `pointer` is null or points to a value that lives and does not change during the call.
unsafe fn value<'a, T>(pointer: *const T) -> Result<Option<&'a T>, CallError> {
    if !pointer.is_aligned() {
        return Err(CallError::InvalidArgument);
    }
    // SAFETY: it is null or aligned, and valid as promised to this function.
    Ok(unsafe { pointer.as_ref() })
}

/// # Safety
/// `first` is null or points to `count` values that live and do not change during the call.
unsafe fn slice<'a, T>(first: *const T, count: usize) -> Result<&'a [T], CallError> {
    if count == 0 {
        return Ok(&[]);
    }
    if first.is_null() || !first.is_aligned() {
        return Err(CallError::InvalidArgument);
    }
    // A value has a byte at least. The bound also keeps the slice below `isize::MAX` bytes.
    if count > PAYLOAD_BYTES_MAX {
        return Err(CallError::TooLarge);
    }
    // SAFETY: not null, aligned, bounded, and valid as promised to this function.
    Ok(unsafe { std::slice::from_raw_parts(first, count) })
}

/// `None` for null and for an empty text.
///
/// # Safety
/// `text` is null or ends with a zero byte and lives during the call.
unsafe fn text<'a>(text: *const c_char) -> Result<Option<&'a str>, CallError> {
    if ptr::eq(text, ptr::null()) {
        return Ok(None);
    }
    // SAFETY: not null, and valid as promised to this function.
    let text = unsafe { CStr::from_ptr(text) }.to_str();
    let text = text.map_err(|_| CallError::InvalidArgument)?;
    Ok((!text.is_empty()).then_some(text))
}

#[cfg(test)]
mod tests;
