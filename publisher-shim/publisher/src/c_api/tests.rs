//! The calls as C makes them, with all mixtures of good and bad arguments.

use std::ffi::CString;

use proptest::prelude::*;
use warmroute_mirror::wire::{Batch, CacheEvent, EngineHash};

use super::*;

const BLOCK: u32 = 2;

/// A publisher on a socket of its own in this process, and what it published last.
struct Fixture(*mut Publisher);

impl Fixture {
    fn new() -> Self {
        let endpoint = c"tcp://127.0.0.1:*";
        let options = WarmrouteOptions {
            events_endpoint: endpoint.as_ptr(),
            replay_endpoint: ptr::null(),
            dp_rank: 0,
            block_size: BLOCK,
        };
        let mut publisher = ptr::null_mut();
        // SAFETY: both are valid.
        let code = unsafe { warmroute_publisher_new(&raw const options, &raw mut publisher) };
        assert_eq!(code, 0);
        Self(publisher)
    }

    fn last(&self) -> (u64, Option<CacheEvent>) {
        // SAFETY: it is not freed.
        let (count, payload) = unsafe { &*self.0 }.last();
        let event = payload.map(|payload| Batch::decode(&payload).unwrap().events.remove(0));
        (count, event)
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // SAFETY: it is freed once.
        unsafe { warmroute_publisher_free(self.0) };
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pointer {
    Good,
    Null,
    Misaligned,
}

impl Pointer {
    fn to<T>(self, values: &[T]) -> *const T {
        match self {
            Self::Good => values.as_ptr(),
            Self::Null => ptr::null(),
            // Never read: the alignment is checked first.
            Self::Misaligned => ptr::without_provenance(align_of::<T>() + 1),
        }
    }

    /// Without values no pointer is looked at.
    fn is_bad<T>(self, values: &[T]) -> bool {
        self != Self::Good && !values.is_empty()
    }
}

fn pointer() -> impl Strategy<Value = Pointer> {
    prop_oneof![3 => Just(Pointer::Good), 1 => Just(Pointer::Null), 1 => Just(Pointer::Misaligned)]
}

fn name() -> impl Strategy<Value = Option<Vec<u8>>> {
    proptest::option::of(proptest::collection::vec(1_u8.., 0..6))
}

proptest! {
    /// A store is refused with the right code and without a batch, or its batch has what was given.
    #[test]
    fn a_store_is_refused_or_published_as_it_is(
        hashes in proptest::collection::vec(any::<u64>(), 0..4),
        tokens in prop_oneof![
            proptest::collection::vec(any::<u32>(), 0..8),
            (0_usize..4).prop_flat_map(|blocks| proptest::collection::vec(any::<u32>(), blocks * 2)),
        ],
        pointers in (pointer(), pointer()),
        parent in proptest::option::of(any::<u64>()),
        salt in name(),
    ) {
        let fixture = Fixture::new();
        let salt = salt.map(|bytes| CString::new(bytes).unwrap());
        let stored = WarmrouteStored {
            block_hashes: pointers.0.to(&hashes),
            block_count: hashes.len(),
            token_ids: pointers.1.to(&tokens),
            token_count: tokens.len(),
            parent_hash: parent.as_ref().map_or(ptr::null(), ptr::from_ref),
            lora_name: ptr::null(),
            cache_salt: salt.as_ref().map_or(ptr::null(), |salt| salt.as_ptr()),
        };
        // SAFETY: what is not good is null or misaligned.
        let code = unsafe { warmroute_publisher_stored(fixture.0, &raw const stored) };
        let salt = salt.as_ref().map(|salt| salt.to_str());
        let is_invalid = pointers.0.is_bad(&hashes) || pointers.1.is_bad(&tokens)
            || matches!(salt, Some(Err(_)));
        let expected = match is_invalid {
            true => 1,
            false if hashes.is_empty() || tokens.len() != hashes.len() * 2 => 2,
            false => 0,
        };
        prop_assert_eq!(code, expected);
        let (count, event) = fixture.last();
        prop_assert_eq!(count, u64::from(expected == 0));
        if let Some(CacheEvent::Stored(read)) = event {
            prop_assert_eq!(read.hashes, hashes.into_iter().map(EngineHash).collect::<Vec<_>>());
            prop_assert_eq!(read.tokens, tokens);
            prop_assert_eq!(read.parent, parent.map(EngineHash));
            let salt = salt.and_then(Result::ok).filter(|salt| !salt.is_empty());
            prop_assert_eq!(read.salt.as_deref(), salt);
        }
    }
}

#[test]
fn null_and_impossible_arguments_have_codes() {
    let fixture = Fixture::new();
    let hash = 1_u64;
    // SAFETY: what is not valid is null, and a count above the bound is refused before it is read.
    unsafe {
        assert_eq!(warmroute_publisher_new(ptr::null(), ptr::null_mut()), 1);
        assert_eq!(warmroute_publisher_stored(fixture.0, ptr::null()), 1);
        assert_eq!(warmroute_publisher_cleared(ptr::null()), 1);
        assert_eq!(
            warmroute_publisher_removed(ptr::null(), &raw const hash, 1),
            1
        );
        assert_eq!(warmroute_publisher_removed(fixture.0, ptr::null(), 1), 1);
        assert_eq!(warmroute_publisher_removed(fixture.0, ptr::null(), 0), 2);
        assert_eq!(
            warmroute_publisher_removed(fixture.0, &raw const hash, usize::MAX),
            3
        );
        warmroute_publisher_free(ptr::null_mut());
    }
    assert_eq!(fixture.last().0, 0);
}

#[test]
fn options_are_checked_before_a_socket_is_bound() {
    let check = |events: *const c_char, block_size: u32, expected: c_int| {
        let options = WarmrouteOptions {
            events_endpoint: events,
            replay_endpoint: ptr::null(),
            dp_rank: 0,
            block_size,
        };
        let mut publisher = ptr::null_mut();
        // SAFETY: both are valid.
        let code = unsafe { warmroute_publisher_new(&raw const options, &raw mut publisher) };
        assert_eq!((code, publisher.is_null()), (expected, true));
    };
    check(ptr::null(), 16, 1);
    check(c"".as_ptr(), 16, 1);
    check(c"tcp://127.0.0.1:*".as_ptr(), 0, 1);
    check(c"\xff".as_ptr(), 16, 1);
    check(c"no endpoint".as_ptr(), 16, 4);
}

#[test]
fn a_panic_does_not_reach_c() {
    assert_eq!(guarded(|| panic!("expected in this test")), 5);
}
