#![no_main]
//! Any bytes into the decoder of engine payloads: no panic, no allocation beyond the input's size.

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    drop(warmroute_shim::wire::Batch::decode(bytes));
});
